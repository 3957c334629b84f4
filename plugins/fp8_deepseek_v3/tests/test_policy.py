"""Which module gets what, who makes its products, and what is refused."""

import re
import sys

import pytest
import torch
from nanotrain_fp8_deepseek_v3 import FP8DeepSeekV3Config, backends
from nanotrain_fp8_deepseek_v3.backends import choose
from nanotrain_fp8_deepseek_v3.formats import TILE, quantize
from nanotrain_fp8_deepseek_v3.gemm import EmulatedFP8, Float32GEMM, FP8Recipe
from nanotrain_fp8_deepseek_v3.policy import Row, format_of, rows_of
from nanotrain_fp8_deepseek_v3.precision import Codec

from nanotrain_core.cli import main
from nanotrain_core.errors import Exit, NanotrainError, RecipeError
from nanotrain_core.layout.roles import Role, tag, tagged
from nanotrain_core.precision.gemm import gemms_of
from nanotrain_core.recipe import write_resolved
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_run

ROUTED = {"model": {"use": "routed"}}


def run_of(*, overrides=None, **config):
    return make_run(Case("precision", use="fp8_deepseek_v3", config=config, overrides=overrides or {}), {})


def given(run):
    """Return what makes each linear layer's products, by name."""
    (part,) = run.stages.values()
    found = {name: gemms_of(module) for name, module, _ in tagged(part)}
    return {name: gemms and gemms.backends.get("weight") for name, gemms in found.items()}


def test_linear_layers_are_fp8_and_nothing_else_is():
    (part,) = (run := run_of()).stages.values()
    found = given(run)
    for name, _, mine in tagged(part):
        linear = mine.role in (Role.COLUMN, Role.ROW, Role.REPLICATED)
        assert isinstance(found[name], EmulatedFP8) == linear, name


def test_inputs_of_the_layer_after_attention_have_power_of_two_scales():
    powers = {name: p.recipe.input_power_of_two for name, p in given(run_of()).items() if p is not None}
    assert {name for name, power in powers.items() if power} == {"layers.0.attn.o", "layers.1.attn.o"}
    found = given(run_of(power_of_two=["layers.1.ffn.*"]))
    assert found["layers.1.ffn.up"].recipe.input_power_of_two
    assert not found["layers.1.attn.o"].recipe.input_power_of_two


def test_experts_that_make_products_of_their_own_are_left_alone_and_the_table_says_so():
    run = run_of(overrides=ROUTED)
    assert all(products is None for name, products in given(run).items() if name.endswith("experts"))
    assert any(re.search(r"experts +bf16 .*they make products of their own", line) for line in run.described)


class Halved(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


def test_a_linear_layer_with_its_own_forward_is_left_alone_and_the_table_says_so():
    part = torch.nn.ModuleDict({"own": tag(Halved(256, 256), Role.REPLICATED)})
    assert list(rows_of(part, FP8DeepSeekV3Config())) == [
        Row("own", "replicated", "bf16", "it has its own forward")
    ]


def test_the_widest_format_that_matches_holds():
    config = FP8DeepSeekV3Config(bf16=("layers.*", "head"), fp32=("*.attn.o",))
    assert [format_of(name, config) for name in ("layers.0.attn.o", "layers.0.attn.q", "mtp.0.proj")] == [
        "fp32",
        "bf16",
        "fp8",
    ]
    assert format_of("mtp.0.proj", FP8DeepSeekV3Config(fp8=("layers.*",))) == "bf16"


def test_patterns_choose_module_by_module_and_the_table_shows_it():
    run = run_of(bf16=["layers.0.*"], fp32=["*.ffn.down"])
    found = given(run)
    assert found["layers.0.attn.q"] is None
    assert isinstance(found["layers.0.ffn.down"], Float32GEMM)
    assert isinstance(found["layers.1.attn.q"], EmulatedFP8)
    table = "\n".join(run.described)
    assert re.search(r"layers\.\*\.attn\.q +bf16 +1 x column\n", table)
    assert re.search(r"layers\.\*\.attn\.q +fp8 emulated +1 x column\n", table)
    assert re.search(r"layers\.\*\.ffn\.down +fp32 +2 x row\n", table)
    assert re.search(r"layers\.\*\.ffn_norm +bf16 +2 x norm \(never narrower\)", table)


@pytest.mark.parametrize("use", ["fp8_deepseek_v3", "fp8_hybrid"])
@pytest.mark.parametrize(
    ("min_size", "wide"),
    [(0, {"attn", "ffn"}), (32 * 32, {"attn", "ffn"}), (32 * 32 + 1, {"ffn"}), (10**9, set())],
)
def test_layers_with_fewer_numbers_than_min_size_stay_in_bf16_and_the_table_says_why(use, min_size, wide):
    """q, k, v and o have 32 x 32 numbers, gate and up 96 x 32, down 32 x 96."""
    case = Case("precision", use=use, config={"min_size": min_size}, overrides={"model": {"ffn": 96}})
    run = make_run(case, {})
    found = {name: products for name, products in given(run).items() if ".attn." in name or ".ffn." in name}
    assert len(found) == 2 * 7
    for name, products in found.items():
        assert (products is not None) == (name.split(".")[2] in wide), name
    table = "\n".join(run.described)
    for name, shape in (("attn.q", "32 x 32"), ("ffn.up", "96 x 32"), ("ffn.down", "32 x 96")):
        line = next(line for line in run.described if f"layers.*.{name} " in line)
        assert ("fp8 emulated" in line) == (name[:3] in {each[:3] for each in wide})
        assert (f"({shape} is less than min_size)" in line) == ("fp8 emulated" not in line)
    assert ("less than min_size" in table) == (len(wide) < 2)


def test_min_size_leaves_what_is_wider_by_a_pattern_and_patterns_still_match():
    """A pattern of small layers is no mistake: they are linear layers of the model."""
    found = given(
        run := run_of(min_size=10**9, fp8=["layers.*"], fp32=["*.ffn.down"], bf16=["layers.0.attn.q"])
    )
    assert isinstance(found["layers.0.ffn.down"], Float32GEMM)
    assert found["layers.1.attn.q"] is None
    lines = [line for line in run.described if "attn.q" in line]
    assert len(lines) == 2  # one by the pattern, one by its size
    assert sum("less than min_size" in line for line in lines) == 1


@pytest.mark.parametrize("wrong", [-1, 1.5, "many"])
def test_a_min_size_that_is_no_number_of_numbers_is_refused(wrong):
    with pytest.raises(RecipeError, match=r"precision\.min_size"):
        run_of(min_size=wrong)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"bf16": ["layers.0.atn.q"]}, "precision.bf16.0: 'layers.0.atn.q' matches no linear layer of the "
         "model (did you mean 'layers.0.attn.q'?)"),
        ({"fp32": ["norm"]}, "precision.fp32.0: 'norm' matches no linear layer"),
        ({"power_of_two": ["*.moe.*"]}, "precision.power_of_two.0: '*.moe.*' matches no linear layer of the "
         "model; they are layers.N.attn.k, layers.N.attn.o"),
        ({"fp8": ["head"]}, "precision.fp8.0: 'head' matches no linear layer"),
    ],
    ids=["misspelt", "norm", "none", "head"],
)  # fmt: skip
def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_name(config, text):
    with pytest.raises(NanotrainError, match=re.escape(text)):
        run_of(**config)


@pytest.mark.parametrize("key", ["fp8", "bf16", "fp32", "power_of_two"])
def test_such_a_pattern_is_refused_before_ranks_start(key, tmp_path, capsys):
    found = Case("precision", use="fp8_deepseek_v3", config={key: ["*.attn.o", "layers.0.atn.q"]})
    (tmp_path / "recipe.toml").write_text(write_resolved(found.recipe()))
    assert main(["check", str(tmp_path / "recipe.toml")]) == Exit.USER
    wrong = f"precision.{key}.1: the model has no module or parameter 'layers.0.atn.q' (did you mean "
    assert wrong in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("layers.0.attn", "no linear layer of the model; for those inside write 'layers.0.attn.*'"),
        ("layers.*.ffn", "no linear layer of the model; for those inside write 'layers.*.ffn.*'"),
        ("*.attn_norm", "no linear layer of the model; they are layers.N.attn.k, layers.N.attn.o"),
        ("head", "no linear layer of the model"),
    ],
)
@pytest.mark.parametrize("use", ["fp8_hybrid", "nvfp4"])
def test_a_pattern_of_a_module_that_is_no_linear_layer_is_refused_before_ranks_start(
    use, pattern, text, tmp_path, capsys
):
    """It would have changed nothing: patterns are matched with the whole names of linear layers."""
    found = Case("precision", use=use, config={"bf16": ["*.attn.o", pattern]})
    (tmp_path / "recipe.toml").write_text(write_resolved(found.recipe()))
    assert main(["check", str(tmp_path / "recipe.toml")]) == Exit.USER
    assert f"precision.bf16.1: '{pattern}' matches {text}" in capsys.readouterr().err
    fits = Case("precision", use=use, config={"bf16": ["*.attn.o", "layers.0.attn.*", "layers.*"]})
    (tmp_path / "recipe.toml").write_text(write_resolved(fits.recipe()))
    assert main(["check", str(tmp_path / "recipe.toml")]) == Exit.DONE


@pytest.mark.parametrize("wanted", ["torch", "triton", "te"])
def test_a_backend_that_cannot_run_is_refused_and_never_replaced(wanted):
    with pytest.raises(NanotrainError, match=f"precision.backend: '{wanted}' cannot run: it needs a CUDA"):
        run_of(backend=wanted)


@pytest.mark.parametrize(
    ("capability", "cuda", "refusal"),
    [
        ((9, 0), "12.9", None),
        ((9, 0), "12.8", "'triton', which auto chooses on cuda, cannot run: tiles of 128 need CUDA 12.9"),
        ((8, 0), "13.0", "tiles of 128 need compute capability 9.0 (H100, H200), this is 8.0"),
        ((10, 0), "13.0", "tiles of 128 need compute capability 9.0 (H100, H200), this is 10.0"),
    ],
)
def test_auto_takes_the_tensor_cores_of_a_gpu_or_refuses(capability, cuda, refusal, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr(backends, "_disagreement", lambda device, recipe: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    if refusal is None:
        assert choose("auto", torch.device("cuda"), FP8Recipe()).name == "triton"
        assert choose("auto", torch.device("cuda"), FP8Recipe(tile=0)).name == "torch"
        return
    with pytest.raises(NanotrainError, match=re.escape(refusal)):
        choose("auto", torch.device("cuda"), FP8Recipe())
    assert choose("emulated", torch.device("cuda"), FP8Recipe()).name == "emulated"


@pytest.mark.parametrize(
    ("wanted", "text"),
    [("te", "transformer-engine[pytorch] is not installed"), ("triton", "triton is not installed")],
)
def test_a_package_that_is_not_installed_is_named(wanted, text, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        NanotrainError, match=re.escape(f"'{wanted}' cannot run: {text}; 'torch' can, 'emulated' runs")
    ):
        choose(wanted, torch.device("cuda"), FP8Recipe())


OF_ANOTHER_VERSION = {
    "tensor/__init__.py": "",
    "constants.py": "TE_DType = {}",
    "cpp_extensions.py": "def general_gemm(): ...",
}
WITHOUT_BLOCKS = (
    "2.1.0 cannot be used: No module named 'transformer_engine.pytorch.tensor.float8_blockwise_tensor'"
)
RENAMED = "2.1.0 cannot be used: cannot import name 'Float8BlockQuantizer'"
OTHER_TORCH = "2.1.0 cannot be used: undefined symbol"


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, WITHOUT_BLOCKS),
        ({"tensor/float8_blockwise_tensor.py": ""}, RENAMED),
        ({"constants.py": "raise OSError('undefined symbol')"}, OTHER_TORCH),
    ],
    ids=["without blocks", "renamed", "another torch"],
)
def test_a_version_of_transformer_engine_that_cannot_be_used_is_refused(changed, text, tmp_path, monkeypatch):
    """A stand-in of files: it is found, and does not have what is imported from it."""
    folder = tmp_path / "transformer_engine"
    files = {f"pytorch/{name}": content for name, content in (OF_ANOTHER_VERSION | changed).items()}
    for name, content in {"__init__.py": "__version__ = '2.1.0'", "pytorch/__init__.py": "", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    monkeypatch.delitem(sys.modules, "nanotrain_fp8_deepseek_v3.te", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(backends, "_disagreement", lambda device, recipe: "")
    refusal = f"'te' cannot run: it needs Transformer Engine 2.3 or later, and {text}"
    try:
        with pytest.raises(NanotrainError, match=re.escape(refusal) + ".*; 'torch'.* can, 'emulated' runs"):
            choose("te", torch.device("cuda"), FP8Recipe())
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
            del sys.modules[name]


@pytest.mark.parametrize("wanted", ["te", "triton"])
def test_one_scale_for_a_tensor_is_refused_by_what_rounds_tiles(wanted, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(
        NanotrainError, match="'torch' has one scale for a whole tensor; 'torch' can, 'emulated'"
    ):
        choose(wanted, torch.device("cuda"), FP8Recipe(tile=0))


def test_kernels_that_do_otherwise_on_a_device_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr(backends, "_disagreement", lambda device, recipe: "its y of experts is another")
    text = "'triton', which auto chooses on cuda, cannot run: its y of experts is another; 'torch' can"
    with pytest.raises(NanotrainError, match=re.escape(text)):
        choose("auto", torch.device("cuda"), FP8Recipe())


@pytest.mark.parametrize("width", [32, 128, 200])
def test_rows_that_travel_in_fp8_arrive_as_their_experts_would_have_rounded_them(width):
    rows = torch.randn(17, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows[3], rows[5] = 0.0, rows[5] * 1e-30
    coded = Codec().encode(rows)
    assert coded.dtype == torch.uint8
    assert coded.shape == (17, width + 2 * -(-width // TILE))
    there = Codec().decode(coded, width, torch.bfloat16)
    expected = quantize(rows, (1, TILE), power_of_two=True).values()
    assert torch.equal(there.float(), expected)
    assert torch.equal(quantize(there, (1, TILE), power_of_two=True).values(), expected)
