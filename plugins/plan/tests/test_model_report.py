"""``nanotrain inspect RECIPE`` on models of the core: sizes, roofline and sensitivity against arithmetic."""

import json

import attrs
import pytest
import torch
from nanotrain_plan.hardware import find_hardware
from nanotrain_plan.model import count_parameters
from nanotrain_plan.model_report.report import report
from nanotrain_plan.model_report.sensitivity import size_of

from nanotrain_core.api import cached_token_of, resolve_recipe
from nanotrain_core.builtin.transformer_config import TransformerConfig

LLAMA = """
[run]
name = "llama"
steps = 10
[batch]
sequences = 8
microbatch = 2
length = 512
[model]
use = "transformer"
layers = 4
width = 256
heads = 8
kv_heads = 2
ffn = 768
vocab = 1024
tied = {tied}
[precision]
use = "bf16"
[data]
use = "synthetic"
vocab = 256
"""


@pytest.fixture(scope="module")
def resolved(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipes") / "llama.toml"
    path.write_text(LLAMA.format(tied="false"))
    return resolve_recipe(path)


@pytest.fixture(scope="module")
def found(resolved):
    hardware = find_hardware("h100")
    return report(resolved.recipe, resolved.registry, resolved.layout, hardware, batch=4)


def test_layers_add_up_to_the_model(found):
    assert sum(each.number * each.parameters for each in found.layers) == found.parameters.total
    forward = sum(each.number * each.flops for each in found.layers)
    assert 3 * forward == pytest.approx(found.flops.causal, rel=1e-12)
    kept = sum(each.number * each.kept for each in found.layers) * 2 * 512
    assert kept == pytest.approx(found.size.activations)


@pytest.mark.parametrize("tied", ["true", "false"])
def test_parameters_are_counted_once(tmp_path, tied):
    path = tmp_path / "llama.toml"
    path.write_text(LLAMA.format(tied=tied))
    r = resolve_recipe(path)
    size = size_of(r.recipe.model, r.registry, r.recipe, torch.bfloat16)
    assert size.parameters == count_parameters(r.recipe, r.registry).total


def test_a_product_is_bound_by_the_side_of_the_roofline_that_it_is_on(found):
    """M rows by [N, K] are 2MNK FLOPs, and in bfloat16 2 (MN + MK + NK) bytes."""
    N, K, L, peak, bandwidth = 768, 256, 4, 989.4e12, 3.35e12
    for regime, M, passes in zip(found.regimes, (2 * 512, 512, 4), (3, 1, 1), strict=True):
        (gate,) = [each for each in regime.work if each.module == "layers.*.ffn.gate" and each.kind == "gemm"]
        flops, moved = 2 * M * N * K * L * passes, 2 * (M * N + M * K + N * K) * L * passes
        assert (gate.flops, gate.bytes) == (flops, moved)
        assert gate.intensity == pytest.approx(flops / moved)
        assert gate.seconds == pytest.approx(max(flops / peak, moved / bandwidth), rel=1e-3)
        assert gate.bound == ("compute" if flops / moved > peak / bandwidth else "memory")


def test_a_decoded_token_reads_the_weights_and_the_cache(found):
    training, prefill, decode = found.regimes
    elements = 2 * 4 * 2 * 32  # keys and values of 4 layers, 2 heads of 32
    (cache,) = [each for each in decode.work if each.kind == "cache"]
    assert cache.bytes == 4 * 512 * elements * 2
    assert cache.flops == 4 * 512 * (4 * 4 * 8 * 32)
    weights = sum(each.bytes for each in decode.work if each.kind == "gemm")
    matrices = found.parameters.total - found.parameters.by_kind["embedding"] - 9 * 256
    assert weights == pytest.approx(2 * matrices, rel=0.05)  # and four rows of each activation
    assert decode.intensity < prefill.intensity < training.intensity
    assert decode.by_memory == pytest.approx(1.0)
    assert decode.tokens_per_second == pytest.approx(4 / decode.seconds)
    (embedding,) = [each for each in decode.work if each.piece == "embedding"]
    assert embedding.bytes < 0.01 * 1024 * 256 * 2  # four rows of the table


def test_windows_count_in_what_layers_compute_and_decoding_reads(tmp_path, found):
    """512 tokens, of which every second layer sees 100: 100 - 100 ** 2 / 1024 on average."""
    path = tmp_path / "windows.toml"
    kinds = 'window = 100\nlayer_types = ["sliding_attention", "full_attention"]\ntied = false'
    path.write_text(LLAMA.format(tied="false").replace("tied = false", kinds))
    r = resolve_recipe(path)
    windows = report(r.recipe, r.registry, r.layout, find_hardware("h100"), batch=4)
    scores = 3 * 2 * 2 * 256 * 4
    assert found.flops.attention == scores * 256
    assert windows.flops.attention == pytest.approx(scores * (256 + 100 - 100**2 / 1024) / 2)
    assert windows.flops.non_causal == found.flops.non_causal
    forward = sum(each.number * each.flops for each in windows.layers)
    assert 3 * forward == pytest.approx(windows.flops.causal, rel=1e-6)
    assert {"2 of layers 0 to 2", "2 of layers 1 to 3"} < {each.piece for each in windows.layers}
    read, less = (
        next(each.bytes for each in one.regimes[2].work if each.kind == "cache") for one in (found, windows)
    )
    assert less / read == (512 + 100) / 2 / 512


@pytest.mark.parametrize(
    ("name", "layers", "width", "heads", "bytes_"),
    [("Qwen-2.5 72B", 80, 8192, 64, 327_680), ("LLaMA-3.1 405B", 126, 16384, 128, 516_096)],
)
def test_published_caches(name, layers, width, heads, bytes_):
    """Of a token in bfloat16: arXiv 2505.09343, table 1. Both have 8 key and value heads of 128."""
    config = TransformerConfig(layers=layers, width=width, heads=heads, kv_heads=8, vocab=1000)
    assert 2 * cached_token_of(config).elements == bytes_


def test_sensitivity_is_what_the_raised_model_takes(resolved, found):
    base = found.parameters.total
    moved = {each.key: each for each in found.moved}
    for key, after in {"layers": 5, "ffn": 845, "width": 288, "kv_heads": 4}.items():
        each = moved[f"model.{key}"]
        assert each.after == after
        config = attrs.evolve(resolved.recipe.model.config, **{key: after})
        recipe = attrs.evolve(resolved.recipe, model=attrs.evolve(resolved.recipe.model, config=config))
        total = count_parameters(recipe, resolved.registry).total
        assert each.parameters == pytest.approx(total / base - 1)
    ranked = [abs(each.elasticity("memory")) for each in found.moved]
    assert ranked == sorted(ranked, reverse=True)


def test_the_command_prints_tables_json_and_a_page(tmp_path, capsys):
    pytest.importorskip("nanotrain_inspect")
    from nanotrain_core.cli import main

    path, page = tmp_path / "llama.toml", tmp_path / "llama.html"
    path.write_text(LLAMA.format(tied="false"))
    assert main(["inspect", str(path), "--html", str(page)]) == 0
    out = capsys.readouterr().out
    for heading in ("The KV cache", "Roofline on NVIDIA H100", "What moves it"):
        assert heading in out
        assert heading in page.read_text()
    assert main(["inspect", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kv_cache"]["bytes_bfloat16"] == 2 * 2 * 4 * 2 * 32
    for words, text in (
        ([str(path), "runs/mine"], "is a recipe: weights are compared with weights"),
        ([str(path), "--hardware", "h1000"], "no hardware is named 'h1000'"),
    ):
        assert main(["inspect", *words]) == 2
        assert text in capsys.readouterr().err
    for batch in ("0", "x"):
        with pytest.raises(SystemExit, match="2"):
            main(["inspect", str(path), "--batch", batch])
        assert f"--batch: expected a whole number above 0, got '{batch}'" in capsys.readouterr().err
