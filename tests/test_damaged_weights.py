"""Folders of Hugging Face and cached tokens that were damaged: refused by name, or read as what they say."""

import json
import shutil
import time
from contextlib import nullcontext
from random import Random

import numpy as np
import pytest
import torch
from damage import hurt, hurt_bytes, twice
from hf_models import gpt2, llama, recipe_from
from safetensors.torch import load_file, save_file

from nanotrain_core.data.token_cache import TokenCache
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.errors import NanotrainError
from nanotrain_core.hf.convert import convert
from nanotrain_core.registry.registry import load_plugins

REGISTRY = load_plugins()
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module", params=[llama, gpt2], ids=lambda each: each.__name__)
def folder(request, tmp_path_factory):
    """Return a folder of several files with an index, as transformers writes it."""
    path = tmp_path_factory.mktemp("hf")
    request.param().save_pretrained(path, max_shard_size="20KB")
    assert (path / INDEX).is_file()
    return path


@pytest.fixture
def copied(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "hf")
    return tmp_path / "hf"


def change(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refusal(path, **options):
    """Return why the folder is not converted, and see to it that nothing is left of that."""
    with pytest.raises(NanotrainError) as refused:
        convert(path, path.parent / "out", REGISTRY, **options)
    assert not (path.parent / "out").exists()
    return str(refused.value)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/secret.safetensors", "a/b.safetensors", "x.bin", 7]
)
def test_an_index_that_leaves_the_folder_is_refused(copied, name):
    weight_map = json.loads((copied / INDEX).read_text())["weight_map"]
    (copied.parent / "secret.safetensors").write_bytes(b"")
    change(copied / INDEX, weight_map={**weight_map, next(iter(weight_map)): name})
    assert refusal(copied).startswith(f"{copied / INDEX} ")


@pytest.mark.parametrize("count", [10_000, 10_000_000])
def test_a_config_of_far_more_layers_than_there_are_is_refused_at_once(copied, count):
    config = json.loads((copied / "config.json").read_text())
    key = next(key for key in ("num_hidden_layers", "n_layer") if key in config)
    began = time.monotonic()
    change(copied / "config.json", **{key: count})
    said = refusal(copied)
    assert "config.json describes more than" in said or f"got {count}" in said
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("file", ["config.json", INDEX])
def test_deep_nesting_is_refused(copied, file):
    (copied / file).write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    assert "nested too deeply" in refusal(copied)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_tensor_that_is_not_finite_is_named(copied, value):
    path = sorted(copied.glob("model-*"))[0]
    tensors = load_file(path)
    name = next(iter(tensors))
    save_file({**tensors, name: torch.full_like(tensors[name], value)}, path, {"format": "pt"})
    assert "is not finite" in refusal(copied)


@pytest.mark.parametrize("form", ["huggingface", "nanotrain"])
def test_a_weight_beyond_the_range_of_the_dtype_to_write_is_named(copied, form):
    path = sorted(copied.glob("model-*"))[0]
    tensors = load_file(path)
    name = next(iter(tensors))
    save_file({**tensors, name: torch.full_like(tensors[name], 1e5)}, path, {"format": "pt"})
    assert refusal(copied, form=form, dtype=torch.float16).endswith("is not finite in float16")
    convert(copied, copied.parent / "out", REGISTRY, form=form, dtype=torch.bfloat16)


def test_a_run_refuses_weights_beyond_the_range_of_its_dtypes(tmp_path):
    llama().save_pretrained(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    tensors["model.norm.weight"][3] = 1e5
    save_file(tensors, tmp_path / "hf/model.safetensors", {"format": "pt"})
    convert(tmp_path / "hf", tmp_path / "ours", REGISTRY)
    for use, refused in (("bf16", False), ("fp16", True)):
        (tmp_path / "recipe.toml").write_text(recipe_from("hf") + f'precision = {{ use = "{use}" }}\n')
        expected = r"hf: norm.weight is not finite in float16$"
        with pytest.raises(NanotrainError, match=expected) if refused else nullcontext():
            RuntimeEngine.from_recipe(tmp_path / "recipe.toml", folder=tmp_path / use)


def test_two_sets_of_weights_in_a_folder_are_refused(copied):
    """Transformers reads the single file, and this project the index's: other weights, without a word."""
    shutil.copy(sorted(copied.glob("model-*"))[0], copied / "model.safetensors")
    assert "has both model.safetensors and model.safetensors.index.json" in refusal(copied)


def test_an_index_may_name_the_single_file(tmp_path):
    gpt2().save_pretrained(tmp_path / "hf")
    names = load_file(tmp_path / "hf/model.safetensors")
    (tmp_path / "hf" / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")})
    )
    convert(tmp_path / "hf", tmp_path / "out", REGISTRY)


def test_a_tensor_in_two_files_is_refused(copied):
    first, second = sorted(copied.glob("model-*"))[:2]
    save_file({**load_file(first), **load_file(second)}, second, {"format": "pt"})
    assert "which another file of the folder holds too" in refusal(copied)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tie_word_embeddings", "false"),
        ("initializer_range", [0.02]),
        ("initializer_range", float("inf")),
        ("vocab_size", "64"),
        ("model_type", ["llama"]),
        ("rope_parameters", 7),
        ("quantization_config", "fp8"),
    ],
)
def test_a_value_of_another_kind_is_refused_with_its_key(copied, key, value):
    if key == "rope_parameters" and (copied / "config.json").read_text().count("gpt2"):
        pytest.skip("a GPT-2 has none")
    change(copied / "config.json", **{key: value})
    said = refusal(copied)
    assert key.partition("_")[0] in said
    assert "Error" not in said


# --- seeded ----------------------------------------------------------------------------------


def damage(folder, random):
    """Damage a file; return in words what was done."""
    path = random.choice([path for path in sorted(folder.iterdir()) if path.name != "generation_config.json"])
    if path.suffix == ".json" and random.random() < 0.9:
        table = json.loads(path.read_text())
        said = hurt(table, random) if random.random() < 0.9 else "twice"
        path.write_text(json.dumps(table) if said != "twice" else twice(json.dumps(table), random))
        return f"{path.name}: {said}"
    if random.random() < 0.5:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        if path.suffix == ".safetensors":
            header = json.loads(data[8 : 8 + length])
            said = hurt(header, random)
            text = json.dumps(header).encode()
            path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
            return f"{path.name}: {said}"
    path.write_bytes(hurt_bytes(path.read_bytes(), random))
    return f"{path.name}: bytes"


@pytest.mark.parametrize("seeds", [range(15), pytest.param(range(15, 165), marks=pytest.mark.full)], ids=len)
def test_a_damaged_folder_is_refused_or_read(folder, tmp_path, monkeypatch, seeds):
    monkeypatch.chdir(tmp_path)
    refused = 0
    for seed in seeds:
        shutil.copytree(folder, tmp_path / "hf")
        said, began = damage(tmp_path / "hf", Random(seed)), time.monotonic()
        try:
            convert(tmp_path / "hf", tmp_path / "out", REGISTRY)
        except NanotrainError:
            refused += 1
            assert not (tmp_path / "out").exists(), f"seed {seed}: {said}"
        except Exception as problem:
            raise AssertionError(f"seed {seed}: {said}") from problem
        assert time.monotonic() - began < 10, f"seed {seed}: {said}"
        assert {path.name for path in tmp_path.iterdir()} <= {"hf", "out"}, f"seed {seed}: {said}"
        shutil.rmtree(tmp_path / "hf")
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert refused > len(seeds) / 3


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 330), marks=pytest.mark.full)], ids=len)
def test_damaged_tokens_are_never_read(tmp_path, monkeypatch, seeds):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tokens = np.arange(1000, dtype=np.uint16)
    for seed in seeds:
        cache = TokenCache("text", tokens.dtype)
        cache.write(tokens)
        (path,) = cache.folder.glob("*.tokens")
        whole, damaged = path.read_bytes(), b""
        while damaged in (b"", whole):
            damaged = hurt_bytes(whole, Random(seed))
            seed += 1000  # noqa: PLW2901
        path.write_bytes(damaged)
        assert cache.read() is None
        path.unlink()
