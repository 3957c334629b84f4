"""NVFP4's three GEMMs: of rounded operands, on tensor cores, in plans, and as the monitor counts them."""

import re
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fp8_operands import normal, outliers
from nanotrain_fp8_deepseek_v3 import backends, first_use, scaled
from nanotrain_fp8_deepseek_v3.backends import choose
from nanotrain_fp8_deepseek_v3.nvfp4 import scaled as nvfp4_scaled
from nanotrain_fp8_deepseek_v3.nvfp4.dry import DryNVFP4
from nanotrain_fp8_deepseek_v3.nvfp4.format import VALUES, quantize, unpack
from nanotrain_fp8_deepseek_v3.nvfp4.gemm import EmulatedNVFP4, NVFP4Recipe
from nanotrain_fp8_deepseek_v3.nvfp4.scaled import ScaledNVFP4
from nanotrain_fp8_deepseek_v3.scaled_mx import swizzled
from nanotrain_fp8_deepseek_v3.watched import Watch, Watched
from torch._subclasses.fake_tensor import FakeTensorMode
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
SHAPES = pytest.mark.parametrize("shape", [(96, 128, 256), (70, 200, 72), (5, 32, 16)], ids=str)
COUNTS = pytest.mark.parametrize("counts", [None, [40, 0, 64, 1, 29], [0, 0]], ids=str)


def products_of(products, x, weight, d_y):
    (y,), kept = products.forward(x, weight)
    return y, products.dgrad(d_y, weight), products.wgrad(d_y, kept)


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


def assert_near(found, expected):
    """Compare by the size of the result: float32 sums in another order, and results rounded to bfloat16."""
    for ours, theirs in zip(found, expected, strict=True):
        rtol = 1e-5 if ours.dtype == torch.float32 else 2.0**-8
        atol = 1e-5 * theirs.abs().max().item()
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=rtol, atol=atol)


@ALL
@SHAPES
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


@ALL
def test_stacked_weights_are_multiplied_each_by_its_rows(recipe):
    """No block and no scale spans the rows of two."""
    counts = [40, 0, 130, 1, 29]
    x, weights, d_y = outliers(200, 130), normal(5, 48, 130, seed=1), outliers(200, 48, seed=2)
    one = EmulatedNVFP4(recipe)
    y, d_x, d_w = products_of(one.grouped(torch.tensor(counts)), x, weights, d_y)
    for e, (first, end) in enumerate(pairwise(np.cumsum([0, *counts]))):
        own = products_of(one, x[first:end], weights[e], d_y[first:end])
        assert all(
            torch.equal(*pair) for pair in zip((y[first:end], d_x[first:end], d_w[e]), own, strict=True)
        )


@pytest.mark.parametrize("worst", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_its_own_sums_alone(worst):
    x, d_y, weights = normal(60, 128), normal(60, 16, seed=2), normal(3, 16, 128, seed=1)
    x[25, 3] = d_y[25, 3] = worst
    y, d_x, d_w = products_of(EmulatedNVFP4(FULL).grouped(torch.tensor([20, 10, 30])), x, weights, d_y)
    for rows in (y, d_x):
        assert rows[25].isnan().all()
        assert not rows[:25].isnan().any()
        assert not rows[26:].isnan().any()
    assert [each.isnan().any().item() for each in d_w] == [False, True, False]


@ALL
@COUNTS
@pytest.mark.parametrize("backend", [EmulatedNVFP4, ScaledNVFP4])
def test_a_wgrad_that_waited_has_the_same_bits(backend, counts, recipe, monkeypatch):
    monkeypatch.setattr(scaled.F, "scaled_mm", checked_product)
    M, products = 70, backend(recipe)
    if counts is not None:
        M, products = sum(counts), products.grouped(torch.tensor(counts))
    x, d_y = normal(M, 200), normal(M, 72, seed=2)
    at_once = products.wgrad(d_y, products.save_for_wgrad(x))
    later = products.defer_wgrad(d_y, products.save_for_wgrad(x))
    d_y.zero_()  # whoever made it may use its memory again
    assert torch.equal(later(), at_once)
    assert at_once.any() or not M


def test_what_is_saved_of_an_input_takes_nine_bytes_for_sixteen_numbers():
    x = normal(256, 512)
    for products, rows in ((EmulatedNVFP4(FULL), x), (DryNVFP4(FULL), x.to("meta"))):
        kept = products.save_for_wgrad(rows)
        assert sum(tensor.nbytes for tensor in kept[:2]) == 256 * 512 * 0.5625
        assert all(tensor.nbytes <= 4 for tensor in kept[2:])


@pytest.mark.parametrize("backend", [EmulatedNVFP4, ScaledNVFP4])
def test_a_weight_is_rounded_once_a_step(backend, monkeypatch):
    monkeypatch.setattr(scaled.F, "scaled_mm", checked_product)
    torch.manual_seed(0)
    passes, made, products = Passes(), [], backend(FULL)
    layer = tag(torch.nn.Linear(64, 96, bias=False, dtype=torch.bfloat16), Role.COLUMN)
    products.cache.passes = products.read_weight.passes = passes
    make, products.read_weight.make = products.read_weight.make, lambda w: made.append(w) or make(w)
    use_gemm(layer, {"weight": products}, passes)
    with passes.weights_unchanged():
        for seed in range(3):
            layer(normal(5, 64, seed=seed).requires_grad_()).sum().backward()
    assert len(made) == 1
    assert layer.weight.grad.any()


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
    with pytest.raises(NanotrainError, match=re.escape("precision.fp4: 'head' matches no linear layer")):
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

MULTIPLY = F.scaled_mm


def checked_product(
    left, right, scales_left, kinds_left, scales_right, kinds_right, swizzle_a, swizzle_b, output_dtype
):
    """Have torch check the operands as those of a CUDA device, then multiply them here."""
    with FakeTensorMode():
        as_cuda = [
            [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in given]
            for given in ((left, right), scales_left, scales_right)
        ]
        (a, b), of_a, of_b = as_cuda
        how = {"swizzle_a": swizzle_a, "swizzle_b": swizzle_b, "output_dtype": output_dtype}
        MULTIPLY(a, b, of_a, kinds_left, of_b, kinds_right, **how)
    values = [
        unpack(codes.view(torch.uint8), -1) * unswizzled(blocks, len(codes), codes.shape[1] * 2) * whole
        for codes, (blocks, whole) in ((left, scales_left), (right.T, scales_right))
    ]
    return (values[0] @ values[1].T).to(output_dtype)


def unswizzled(scales, R, C):
    """Return a scale for every element [R, C]: see ``test_mx.py`` for their order."""
    row, column = torch.arange(R)[:, None], torch.arange(C // 16)
    tile = row // 128 * -(-len(column) // 4) + column // 4
    index = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    return scales.view(torch.uint8)[index].view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)


@ALL
@SHAPES
@COUNTS
def test_what_tensor_cores_are_given_is_what_torch_asks_for_and_means_the_same(
    counts, shape, recipe, monkeypatch
):
    monkeypatch.setattr(scaled.F, "scaled_mm", checked_product)
    (M, K, N), ours, theirs = shape, ScaledNVFP4(recipe), EmulatedNVFP4(recipe)
    weight = normal(N, K, seed=1)
    if counts is not None:
        M, weight = sum(counts), normal(len(counts), N, K, seed=1)
        ours, theirs = (each.grouped(torch.tensor(counts)) for each in (ours, theirs))
    x, d_y = normal(M, K), normal(M, N, seed=2)
    found, expected = (products_of(products, x, weight, d_y) for products in (ours, theirs))
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    if M:
        assert_near(found, expected)


def blackwell(monkeypatch, capability=(10, 0), cuda="12.8"):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)


@pytest.mark.parametrize(
    ("capability", "cuda", "text"),
    [
        ((9, 0), "13.0", "NVFP4 needs compute capability 10.0 (B200), this is 9.0"),
        ((10, 0), "12.6", "NVFP4 needs CUDA 12.8, this torch was built with 12.6"),
    ],
)
def test_a_gpu_without_four_bits_is_refused(capability, cuda, text, monkeypatch):
    blackwell(monkeypatch, capability, cuda)
    refusal = f"'torch', which auto chooses on cuda, cannot run: {text}; 'emulated' runs everywhere"
    with pytest.raises(NanotrainError, match=re.escape(refusal)):
        choose("auto", torch.device("cuda"), FULL)
    assert choose("emulated", torch.device("cuda"), FULL).name == "emulated"


def test_a_blackwell_is_used_if_its_products_are_those_of_the_emulation(monkeypatch):
    blackwell(monkeypatch)
    monkeypatch.setattr(backends, "_disagreement", lambda device, recipe: "")
    assert choose("auto", torch.device("cuda"), FULL).name == "torch"
    monkeypatch.setattr(backends, "_disagreement", lambda device, recipe: "its y of a weight is another")
    with pytest.raises(NanotrainError, match="cannot run: its y of a weight is another; 'emulated' runs"):
        choose("auto", torch.device("cuda"), FULL)


@ALL
def test_products_of_a_device_are_compared_with_the_emulation(recipe, monkeypatch):
    """Here one that orders scales otherwise than tensor cores read them."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(scaled.F, "scaled_mm", checked_product)
    assert first_use.disagreement_of_torch.__wrapped__(cpu, recipe) == ""
    monkeypatch.setattr(nvfp4_scaled, "swizzled", lambda scales: swizzled(scales).flip(0))
    found = first_use.disagreement_of_torch.__wrapped__(cpu, recipe)
    assert found == "its y of a weight is not that of the emulation on cpu"


def test_the_scales_of_a_weight_turned_are_those_of_the_weight():
    """Of 16 x 16: both directions have the same values."""
    w = normal(96, 64)
    for_y, for_dx = ScaledNVFP4(FULL)._of_one_weight(w)
    values = [
        (unpack(each.codes, -1) * unswizzled(each.scales, len(each.codes), each.codes.shape[1] * 2))
        for each in (for_y, for_dx)
    ]
    assert torch.equal(values[0], values[1].T)
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
