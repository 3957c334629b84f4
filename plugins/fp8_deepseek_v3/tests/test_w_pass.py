"""Weight gradients that wait for a W pass: the same bits, of operands in eight bits."""

from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType

import pytest
import torch
from fp8_operands import RECIPES, SHAPES, checked_product, normal, outliers
from nanotrain_fp8_deepseek_v3 import scaled
from nanotrain_fp8_deepseek_v3.gemm import EmulatedFP8, FP8Recipe
from nanotrain_fp8_deepseek_v3.scaled import ScaledFP8
from nanotrain_fp8_deepseek_v3.watched import Watch, Watched
from torch import nn

from nanotrain_core.layout.roles import Role, tag
from nanotrain_core.models.ops import TORCH_OPS
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.pipeline.weight_gradients import DeferredGradients
from nanotrain_core.precision.gemm import TorchGEMM, use_gemm

COUNTS = pytest.mark.parametrize("counts", [None, [40, 0, 130, 1, 29], [0, 0]], ids=str)


@RECIPES
@SHAPES
@COUNTS
@pytest.mark.parametrize("backend", [EmulatedFP8, ScaledFP8])
def test_a_wgrad_that_waited_has_the_same_bits(backend, counts, shape, recipe, monkeypatch):
    monkeypatch.setattr(scaled.F, "scaled_mm", checked_product)
    M, K, N = shape
    products = backend(recipe)
    if counts is not None:
        M, products = sum(counts), products.grouped(torch.tensor(counts))
    x, d_y = outliers(max(M, 4), K)[:M], outliers(max(M, 4), N, seed=2)[:M]
    at_once = products.wgrad(d_y, products.save_for_wgrad(x))
    later = products.defer_wgrad(d_y, products.save_for_wgrad(x))
    d_y.zero_()  # whoever made it may use its memory again
    assert torch.equal(later(), at_once)
    assert at_once.any() or not M


@pytest.mark.parametrize("worst", [float("nan"), float("inf")])
@pytest.mark.parametrize("tile", [128, 0], ids=["tiled", "whole"])
def test_what_is_not_finite_shows_after_waiting_too(worst, tile):
    x, d_y, products = normal(200, 128), normal(200, 16, seed=2), EmulatedFP8(FP8Recipe(tile=tile))
    d_y[25, 3] = worst
    at_once = products.wgrad(d_y, products.save_for_wgrad(x))
    assert at_once[3].isnan().all()
    torch.testing.assert_close(
        products.defer_wgrad(d_y, products.save_for_wgrad(x))(), at_once, rtol=0, atol=0, equal_nan=True
    )


def held(found: object) -> Iterator[torch.Tensor]:
    """Yield the tensors that waiting products hold, parameters aside."""
    match found:
        case nn.Parameter():
            return
        case torch.Tensor():
            yield found
        case DeferredGradients():
            yield from held([*found.waiting.values()])
        case partial():
            yield from held([found.func, *found.args, *found.keywords.values()])
        case FunctionType():
            yield from held([cell.cell_contents for cell in found.__closure__ or ()])
        case MethodType():
            return  # of a backend, which is not this pass's alone
        case list() | tuple() | dict() | set() | range() | str() | int() | torch.Size() | None:
            for each in found if isinstance(found, list | tuple) else ():
                yield from held(each)
        case _ if hasattr(found, "__iter__"):
            yield from held([*found])
        case _:
            return


def bytes_held(found: object) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held(found)}
    return sum(storages.values())


def coded(rows: int, columns: int) -> int:
    """Return the bytes of codes, and of scales of whole tiles along the rows."""
    assert rows % 128 == 0
    return rows * columns + 4 * rows // 128 * columns


def waiting(backend, M, K, N):
    """Return what a backward pass of a layer leaves to its W pass."""
    torch.manual_seed(0)
    passes, later = Passes(), DeferredGradients()
    layer = tag(nn.Linear(K, N, bias=False, dtype=torch.bfloat16), Role.COLUMN)
    use_gemm(layer, {"weight": backend}, passes)
    y = layer(normal(M, K).requires_grad_())
    with passes.backward(later):
        y.backward(normal(M, N, seed=2))
    return later


def test_a_layer_that_waits_holds_a_byte_for_each_number_and_its_scales():
    """Both operands are in tiles of 128: 1 x 128 of x, as it was kept, and 128 x 1 of dy."""
    M, K, N = 256, 384, 512
    later = waiting(EmulatedFP8(FP8Recipe()), M, K, N)
    assert bytes_held(later) == coded(M, N) + coded(K, M)
    later.compute()
    assert bytes_held(later) == 0


class Experts(nn.Module):
    """SwiGLU experts with weights [E, F, D], [E, F, D] and [E, D, F]."""

    def __init__(self, E, D, F):
        super().__init__()
        torch.manual_seed(0)
        names = {"gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}
        for name, shape in names.items():
            setattr(self, name, nn.Parameter(0.1 * torch.randn(shape, dtype=torch.bfloat16)))
        self.ops = TORCH_OPS
        tag(self, Role.EXPERTS, gemm_weights=tuple(names))

    def forward(self, x, counts):
        return self.ops.experts(x, counts, self.gate, self.up, self.down)


@pytest.mark.parametrize("watched", [False, True])
def test_experts_that_wait_hold_a_byte_for_each_number_and_make_the_same_gradients(watched):
    """Of the input of ``down``, which the backward pass makes again, and of three gradients; x is shared."""
    counts, D, F = torch.tensor([128, 256]), 128, 384
    M, passes, later = 384, Passes(), DeferredGradients()
    experts, backend = Experts(2, D, F), EmulatedFP8(FP8Recipe(quantize_swiglu=True))
    if watched:
        watch = Watch()
        watch.begin(on=True)
        backend = Watched(backend, watch, "experts", experts)
    use_gemm(experts, dict.fromkeys(("gate", "up", "down"), backend), passes)
    x, d_y, gradients = normal(M, D).requires_grad_(), normal(M, D, seed=2), []
    for waits in (False, True):
        y = experts(x, counts)
        with passes.backward(later if waits else None):
            y.backward(d_y)
        del y
        if waits:
            assert bytes_held(later) == coded(D, M) + coded(F, M) + 2 * coded(M, F) + coded(M, D)
            assert not any(weight.grad is not None for weight in experts.parameters())
        later.compute()
        gradients.append({name: weight.grad for name, weight in experts.named_parameters()})
        experts.zero_grad()
    assert all(torch.equal(gradients[1][name], at_once) for name, at_once in gradients[0].items())


def test_layers_that_multiply_in_bfloat16_hold_what_they_did():
    """A backend that quantizes nothing has its operands wait as they are."""
    M, K, N = 128, 200, 72
    assert bytes_held(waiting(TorchGEMM(), M, K, N)) == 2 * M * (K + N)
