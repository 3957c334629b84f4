"""What MXFP8 and NVFP4 have in common: blocks of a weight's own rows, W passes, tensor cores of Blackwell."""

import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from fp8_operands import RAGGED, assert_near, checked_product, normal, outliers, products_of
from nanotrain_fp8_deepseek_v3 import backends, first_use, scaled, scaled_mx
from nanotrain_fp8_deepseek_v3.backends import choose
from nanotrain_fp8_deepseek_v3.families import SCALED
from nanotrain_fp8_deepseek_v3.mx import MXRecipe
from nanotrain_fp8_deepseek_v3.nvfp4 import scaled as scaled_nvfp4
from nanotrain_fp8_deepseek_v3.nvfp4.gemm import NVFP4Recipe
from nanotrain_fp8_deepseek_v3.scaled_mx import swizzled

from nanotrain_core.errors import NanotrainError
from nanotrain_core.layout.roles import Role, tag
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.gemm import use_gemm

RECIPES = {
    "ceil": MXRecipe(rounding="ceil"),
    "floor": MXRecipe(rounding="floor"),
    "full": NVFP4Recipe(),
    "plain": NVFP4Recipe(hadamard=False, stochastic_rounding=False),
    "float32": NVFP4Recipe(tensor_scale="float32"),
    "rows": NVFP4Recipe(weight_blocks="1x16"),
}
ALL = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
BOTH = pytest.mark.parametrize(
    "make", [lambda r: r.emulated(), lambda r: SCALED[type(r)](r)], ids=["emulated", "scaled"]
)
COUNTS = pytest.mark.parametrize("counts", [None, [40, 0, 64, 1, 29], [0, 0]], ids=str)


@pytest.fixture(autouse=True)
def tensor_cores(monkeypatch):
    monkeypatch.setattr(scaled.F, "scaled_mm", checked_product)


@ALL
def test_stacked_weights_are_multiplied_each_by_its_rows(recipe):
    """No block and no scale spans the rows of two."""
    counts = [40, 0, 130, 1, 29]
    x, weights, d_y = outliers(200, 130), normal(5, 48, 130, seed=1), outliers(200, 48, seed=2)
    one = recipe.emulated()
    y, d_x, d_w = products_of(one.grouped(torch.tensor(counts)), x, weights, d_y)
    for e, (first, end) in enumerate(pairwise(np.cumsum([0, *counts]))):
        own = products_of(one, x[first:end], weights[e], d_y[first:end])
        assert all(
            torch.equal(*pair) for pair in zip((y[first:end], d_x[first:end], d_w[e]), own, strict=True)
        )


@ALL
@pytest.mark.parametrize("worst", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_its_own_sums_alone(worst, recipe):
    x, d_y, weights = normal(60, 128), normal(60, 16, seed=2), normal(3, 16, 128, seed=1)
    x[25, 3] = d_y[25, 3] = worst
    y, d_x, d_w = products_of(recipe.emulated().grouped(torch.tensor([20, 10, 30])), x, weights, d_y)
    for rows in (y, d_x):
        assert rows[25].isnan().all()
        assert not rows[:25].isnan().any()
        assert not rows[26:].isnan().any()
    assert [each.isnan().any().item() for each in d_w] == [False, True, False]


@ALL
@COUNTS
@BOTH
def test_a_wgrad_that_waited_has_the_same_bits(make, counts, recipe):
    M, products = 70, make(recipe)
    if counts is not None:
        M, products = sum(counts), products.grouped(torch.tensor(counts))
    x, d_y = normal(M, 200), normal(M, 72, seed=2)
    at_once = products.wgrad(d_y, products.save_for_wgrad(x))
    later = products.defer_wgrad(d_y, products.save_for_wgrad(x))
    d_y.zero_()  # whoever made it may use its memory again
    assert torch.equal(later(), at_once)
    assert at_once.any() or not M


@ALL
@BOTH
def test_a_weight_is_rounded_once_a_step(make, recipe):
    torch.manual_seed(0)
    passes, made, products = Passes(), [], make(recipe)
    layer = tag(torch.nn.Linear(64, 96, bias=False, dtype=torch.bfloat16), Role.COLUMN)
    products.cache.passes = products.read_weight.passes = passes
    of_weight, products.read_weight.make = products.read_weight.make, lambda w: made.append(w) or of_weight(w)
    use_gemm(layer, {"weight": products}, passes)
    with passes.weights_unchanged():
        for seed in range(3):
            layer(normal(5, 64, seed=seed).requires_grad_()).sum().backward()
    assert len(made) == 1
    assert layer.weight.grad.any()


# --- tensor cores -----------------------------------------------------------------------------------


@ALL
@RAGGED
@COUNTS
def test_what_tensor_cores_are_given_is_what_torch_asks_for_and_means_the_same(counts, shape, recipe):
    (M, K, N), ours, theirs = shape, SCALED[type(recipe)](recipe), recipe.emulated()
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


@ALL
@pytest.mark.parametrize(
    ("capability", "cuda", "lacks"),
    [
        ((9, 0), "13.0", "compute capability 10.0 (B200), this is 9.0"),
        ((10, 0), "12.6", "CUDA 12.8, this torch was built with 12.6"),
    ],
)
def test_another_gpu_is_refused(capability, cuda, lacks, recipe, monkeypatch):
    blackwell(monkeypatch, capability, cuda)
    what = "blocks of 32 need" if isinstance(recipe, MXRecipe) else "NVFP4 needs"
    text = f"{what} {lacks}"
    refusal = f"'torch', which auto chooses on cuda, cannot run: {text}; 'emulated' runs everywhere"
    with pytest.raises(NanotrainError, match=re.escape(refusal)):
        choose("auto", torch.device("cuda"), recipe)
    assert choose("emulated", torch.device("cuda"), recipe).name == "emulated"


@ALL
def test_a_blackwell_is_used_if_its_products_are_those_of_the_emulation(recipe, monkeypatch):
    blackwell(monkeypatch)
    monkeypatch.setattr(backends, "_disagreement", lambda device, recipe: "")
    assert choose("auto", torch.device("cuda"), recipe).name == "torch"
    monkeypatch.setattr(backends, "_disagreement", lambda device, recipe: "its y of a weight is another")
    with pytest.raises(NanotrainError, match="cannot run: its y of a weight is another; 'emulated' runs"):
        choose("auto", torch.device("cuda"), recipe)


@ALL
def test_products_of_a_device_are_compared_with_the_emulation(recipe, monkeypatch):
    """Here one that orders scales otherwise than tensor cores read them."""
    cpu = torch.device("cpu")
    assert first_use.disagreement_of_torch.__wrapped__(cpu, recipe) == ""
    for module in (scaled_mx, scaled_nvfp4):
        monkeypatch.setattr(module, "swizzled", lambda scales: swizzled(scales).flip(0))
    found = first_use.disagreement_of_torch.__wrapped__(cpu, recipe)
    assert found == "its y of a weight is not that of the emulation on cpu"
