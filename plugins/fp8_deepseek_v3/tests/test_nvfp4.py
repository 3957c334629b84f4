"""NVFP4's three GEMMs: of rounded operands, on tensor cores, in plans, and as the monitor counts them."""

import re

import pytest
import torch
from fp8_operands import RAGGED, assert_near, normal, outliers, products_of, values
from nanotrain_fp8_deepseek_v3.nvfp4.dry import DryNVFP4
from nanotrain_fp8_deepseek_v3.nvfp4.format import VALUES, quantize
from nanotrain_fp8_deepseek_v3.nvfp4.gemm import EmulatedNVFP4, NVFP4Recipe
from nanotrain_fp8_deepseek_v3.nvfp4.scaled import ScaledNVFP4
from nanotrain_fp8_deepseek_v3.watched import Watch, Watched
from torch.utils.flop_counter import FlopCounterMode

from nanotrain_core.errors import NanotrainError
from nanotrain_core.layout.roles import Role, tag
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.gemm import gemms_of, use_gemm
from nanotrain_core.testing import Case
from nanotrain_core.testing.checks.parallel import traces
from nanotrain_core.testing.probe import make_run

FULL, PLAIN = NVFP4Recipe(), NVFP4Recipe(hadamard=False, stochastic_rounding=False)
PUBLISHED, ROWS = NVFP4Recipe(tensor_scale="float32"), NVFP4Recipe(weight_blocks="1x16")
ALL = pytest.mark.parametrize(
    "recipe", [FULL, PLAIN, PUBLISHED, ROWS], ids=["full", "plain", "float32", "rows"]
)


def by_definition(x, w, d_y, recipe):
    """Return the three products in float64, each of operands rounded along what it sums over."""

    def rounded(operand, tile, *, gradient=False, of_dw=False):
        found = quantize(
            operand,
            tile,
            tensor_scale=recipe.tensor_scale,
            stochastically=gradient and recipe.stochastic_rounding,
            hadamard=of_dw and recipe.hadamard,
        ).values()
        return (found if of_dw else found[: len(operand), : operand.shape[1]]).double()

    row, column = (1, 16), (16, 1)
    of_y, of_dx = (row, column) if recipe.weight_blocks == "1x16" else ((16, 16), (16, 16))
    return (
        rounded(x, row) @ rounded(w, of_y).T,
        rounded(d_y, row, gradient=True) @ rounded(w, of_dx),
        rounded(d_y, column, gradient=True, of_dw=True).T @ rounded(x, column, of_dw=True),
    )


@ALL
@RAGGED
def test_the_emulation_multiplies_what_was_rounded_and_rounds_nothing_else(shape, recipe):
    M, K, N = shape
    x, w, d_y = outliers(M, K), normal(N, K, seed=1), outliers(M, N, seed=2)
    found = products_of(EmulatedNVFP4(recipe), x, w, d_y)
    assert [each.dtype for each in found] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert_near(found, by_definition(x, w, d_y, recipe))


@pytest.mark.parametrize(
    ("recipe", "errors"),
    [(PLAIN, (0.146, 0.146, 0.134)), (FULL, (0.146, 0.175, 0.165)), (PUBLISHED, (0.146, 0.175, 0.165))],
    ids=["plain", "full", "float32"],
)
def test_error_of_a_product_of_normal_numbers(recipe, errors):
    """FP8's is 3.7%. Stochastic rounding has a larger error than rounding to nearest."""
    x, w, d_y = normal(512, 512), normal(512, 512, seed=1), normal(512, 512, seed=2)
    exact = x.double() @ w.double().T, d_y.double() @ w.double(), d_y.double().T @ x.double()
    found = products_of(EmulatedNVFP4(recipe), x, w, d_y)
    for ours, theirs, error in zip(found, exact, errors, strict=True):
        assert ((ours - theirs).norm() / theirs.norm()).item() == pytest.approx(error, rel=0.03)


def test_forward_and_dgrad_multiply_the_same_weight_unless_its_blocks_are_rows():
    w = normal(96, 64)
    assert len(EmulatedNVFP4(FULL).of_weight(w)) == 1
    of_y, of_dx = EmulatedNVFP4(ROWS).of_weight(w)
    assert not torch.equal(of_y, of_dx)


def test_wgrads_that_are_rounded_stochastically_are_unbiased_and_others_are_not():
    """Gradients of one sign between two numbers of the format."""
    x = torch.full((4096, 16), 6.0).bfloat16()
    d_y = (torch.rand(4096, 32, generator=torch.Generator().manual_seed(0)) * 0.15 + 1.55).bfloat16()
    d_y[::16] = 6.0  # of the scale of its block
    exact = d_y.double().T @ x.double()
    for stochastic, low, high in ((True, 0, 0.002), (False, 0.05, 0.1)):
        products = EmulatedNVFP4(NVFP4Recipe(hadamard=False, stochastic_rounding=stochastic))
        found = products.wgrad(d_y, products.save_for_wgrad(x))
        assert low <= ((found.double() - exact).mean() / exact.mean()).abs().item() < high


def test_what_is_saved_of_an_input_takes_nine_bytes_for_sixteen_numbers():
    x = normal(256, 512)
    for products, rows in ((EmulatedNVFP4(FULL), x), (DryNVFP4(FULL), x.to("meta"))):
        kept = products.save_for_wgrad(rows)
        assert sum(tensor.nbytes for tensor in kept[:2]) == 256 * 512 * 0.5625
        assert all(tensor.nbytes <= 4 for tensor in kept[2:])


# --- a run ------------------------------------------------------------------------------------------


def test_patterns_choose_module_by_module_and_the_table_shows_it():
    run = make_run(Case("precision", use="nvfp4", config={"bf16": ["layers.1.*"]}), {})
    (part,) = run.stages.values()
    of = {name: gemms_of(module) for name, module in part.named_modules() if name.endswith("attn.q")}
    assert isinstance(of["layers.0.attn.q"].backends["weight"], EmulatedNVFP4)
    assert of["layers.1.attn.q"] is None
    table = "\n".join(run.described)
    assert re.search(r"layers\.\*\.attn\.q +bf16 +1 x column\n", table)
    assert re.search(r"layers\.\*\.attn\.q +fp4 emulated +1 x column\n", table)
    with pytest.raises(NanotrainError, match=re.escape("precision.fp4.0: 'head' matches no linear layer")):
        make_run(Case("precision", use="nvfp4", config={"fp4": ["head"]}), {})


def test_keys_reach_the_recipe():
    config = {
        "tensor_scale": "float32",
        "weight_blocks": "1x16",
        "hadamard": False,
        "stochastic_rounding": False,
    }
    run = make_run(Case("precision", use="nvfp4", config=config), {})
    (part,) = run.stages.values()
    found = {g.backends["weight"].recipe for module in part.modules() if (g := gemms_of(module))}
    assert found == {NVFP4Recipe("float32", "1x16", False, False)}
    for recipe in (FULL, PLAIN, PUBLISHED, ROWS, *found):
        assert NVFP4Recipe.of_key(recipe.key) == recipe


@pytest.mark.parametrize(
    "around",
    [{"parallel": [{"use": "recompute"}]}, {"batch": {"sequences": 4, "microbatch": 2}}],
    ids=["recomputed", "microbatches"],
)
def test_noise_has_no_state(around):
    """Two runs, and one whose layers are recomputed, have the same bits in every step."""
    losses = [
        [r.loss for r in traces(Case("precision", use="nvfp4", overrides=over))[0].reports]
        for over in ({k: v for k, v in around.items() if k == "batch"}, around)
    ]
    assert losses[0] == losses[1]


# --- the monitor ------------------------------------------------------------------------------------


def test_the_monitor_counts_every_rounding():
    """Of whole blocks, and for dW of what the transform made of them."""
    layer = tag(torch.nn.Linear(64, 96, bias=False, dtype=torch.bfloat16), Role.COLUMN)
    passes, watch = Passes(), Watch()
    products = Watched(EmulatedNVFP4(FULL), watch, "layer", layer)
    use_gemm(layer, {"weight": products}, passes)
    watch.begin(on=True)
    x = outliers(40, 64)
    y = layer(x.requires_grad_())
    with passes.backward():
        y.backward(normal(40, 96))
    elements = {operand: tally.elements for (_, operand), tally in watch.tallies.items()}
    assert elements == {"x": 40 * 64, "W": 96 * 64, "dy": 40 * 96, "x of dW": 48 * 64, "dy of dW": 48 * 96}
    blocks = quantize(x.detach(), (16, 1), hadamard=True)
    whole, values = blocks.whole(), blocks.values()
    tally = watch.tallies["layer", "x of dW"]
    expected = [((values == 0) & (whole != 0)).sum(), 0, (blocks.grid.abs() == 6).sum()]
    assert tally.counts.tolist() == [int(count) for count in expected]
    assert tally.amax == whole.abs().max()


# --- tensor cores -----------------------------------------------------------------------------------


def test_the_scales_of_a_weight_turned_are_those_of_the_weight():
    """Of 16 x 16: both directions have the same values."""
    w = normal(96, 64)
    for_y, for_dx = ScaledNVFP4(FULL)._of_one_weight(w)
    of_y, of_dx = (
        values(each.codes, (each.scales.view(torch.float8_e4m3fn), each.of_tensor), [each.recipe])
        for each in (for_y, for_dx)
    )
    assert torch.equal(of_y, of_dx.T)
    assert len(VALUES) == 16


# --- plans ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [0, 3])
def test_a_plan_counts_flops_of_all_numbers_and_bytes_of_what_is_stored(experts):
    """As many FLOPs as products in bfloat16; operands of half a byte; scales of E4M3 follow them."""
    M, K, N = 96, 128, 256
    x, d_y = (torch.empty(M, width, device="meta", dtype=torch.bfloat16) for width in (K, N))
    weight = torch.empty(*([experts] * bool(experts)), N, K, device="meta", dtype=torch.bfloat16)
    dry = DryNVFP4(FULL)
    if experts:
        dry = dry.grouped(torch.empty(experts, device="meta"))
    with FlopCounterMode(display=False) as counter:
        y, d_x, d_w = products_of(dry, x, weight, d_y)
    assert counter.get_total_flops() == 3 * 2 * M * K * N
    assert [each.dtype for each in (y, d_x, d_w)] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert (y.shape, d_x.shape, d_w.shape) == ((M, N), (M, K), weight.shape)
    each = weight.numel() * 0.5625
    assert sum(form.nbytes for form in dry.prepare(weight)) == 2 * each


def test_the_scales_of_a_product_in_a_plan_are_recognisable(monkeypatch):
    from nanotrain_fp8_deepseek_v3.nvfp4 import dry as module

    given = []
    plain = module.nvfp4_scaled_mm
    monkeypatch.setattr(module, "nvfp4_scaled_mm", lambda *tensors: given.append(tensors) or plain(*tensors))
    dry = DryNVFP4(FULL)
    products_of(
        dry, *(torch.empty(s, device="meta", dtype=torch.bfloat16) for s in ((32, 64), (48, 64), (32, 48)))
    )
    assert len(given) == 3
    for left, right, of_left, of_right, *_ in given:
        assert left.element_size() == right.element_size() == 1
        assert of_left.dtype == of_right.dtype == torch.float8_e4m3fn
