"""What Transformer Engine is handed, by a stand-in that knows how it lays out operands.

The stand-in rounds with this plugin's own formats, so products must be those of the emulation; but x by
columns is rounded from x itself.
"""

import importlib
import sys
from types import ModuleType

import pytest
import torch
from nanotrain_fp8_deepseek_v3.formats import quantize
from nanotrain_fp8_deepseek_v3.gemm import EmulatedFP8, FP8Recipe

from nanotrain_core.errors import NanotrainError

E4M3_OF_THEIRS = object()
NAME = "nanotrain_fp8_deepseek_v3.te"


class Operand(torch.Tensor):
    """Has the values by rows and by columns that were asked for."""

    def update_usage(self, *, rowwise_usage, columnwise_usage):
        self.by_rows = self.by_rows if rowwise_usage else None
        self.by_columns = self.by_columns if columnwise_usage else None


class Quantizer:
    def __init__(self, dtype, *, rowwise, columnwise, amax_epsilon=0.0, force_pow_2_scales=True,
                 block_scaling_dim=2):  # fmt: skip
        assert dtype is E4M3_OF_THEIRS
        assert amax_epsilon == 0.0
        self.rowwise, self.columnwise = rowwise, columnwise
        self.power_of_two, self.dim = force_pow_2_scales, block_scaling_dim

    def __call__(self, x):
        assert x.is_contiguous()
        assert not any(size % 16 for size in x.shape)
        tiles = [(1, 128), (128, 1)] if self.dim == 1 else [(128, 128)] * 2
        rows, columns = (quantize(x, tile, power_of_two=self.power_of_two).values() for tile in tiles)
        found = x.detach().clone().as_subclass(Operand)
        found.by_rows, found.by_columns = rows if self.rowwise else None, columns if self.columnwise else None
        return found


def gemm(A, B, out_dtype=None, layout="TN", use_split_accumulator=False, grad=False):
    assert use_split_accumulator
    assert grad == (layout != "TN")
    y = {
        "TN": lambda: B.by_rows @ A.by_rows.T,
        "NN": lambda: B.by_rows @ A.by_columns,
        "NT": lambda: B.by_columns.T @ A.by_columns,
    }[layout]()
    return y.to(out_dtype), None, None, None


def gemm_of_before(A, B, workspace, out_dtype=None, layout="TN", use_split_accumulator=False, grad=False):
    assert workspace == "workspace"
    return gemm(A, B, out_dtype, layout, use_split_accumulator, grad)


@pytest.fixture(params=[gemm, gemm_of_before], ids=["now", "with a workspace"])
def backend(request, monkeypatch):
    """Return the backend's class, made with the stand-in."""
    beneath = {
        "": {},
        ".pytorch": {},
        ".pytorch.constants": {"TE_DType": {torch.float8_e4m3fn: E4M3_OF_THEIRS}},
        ".pytorch.cpp_extensions": {"general_gemm": request.param},
        ".pytorch.module": {},
        ".pytorch.module.base": {"get_workspace": lambda: "workspace"},
        ".pytorch.tensor": {},
        ".pytorch.tensor.float8_blockwise_tensor": {"Float8BlockQuantizer": Quantizer},
    }
    for name, contents in beneath.items():
        module = ModuleType(f"transformer_engine{name}")
        vars(module).update(contents, __path__=[])
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME).TransformerEngineFP8
    sys.modules.pop(NAME, None)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


RECIPES = [FP8Recipe(), FP8Recipe(input_power_of_two=True), FP8Recipe(gradient_power_of_two=True)]


@pytest.mark.parametrize("recipe", RECIPES, ids=["float32", "inputs", "gradients"])
@pytest.mark.parametrize("counts", [None, [40, 0, 90]], ids=["one", "grouped"])
@pytest.mark.parametrize(("K", "N"), [(128, 256), (208, 80)])
def test_products_are_the_emulations(backend, recipe, counts, K, N):
    M, leading = 130, () if counts is None else (3,)
    x, w, d_y = normal(M, K), normal(*leading, N, K, seed=1), normal(M, N, seed=2)
    ours, theirs = backend(recipe), EmulatedFP8(recipe)
    if counts is not None:
        ours, theirs = (each.grouped(torch.tensor(counts)) for each in (ours, theirs))
    (y,), kept = ours.forward(x, w)
    (expected,), _ = theirs.forward(x, w)
    assert all(each.by_rows is None for each in kept if len(each))
    torch.testing.assert_close(y, expected, rtol=2.0**-7, atol=1e-3)
    d_x, wanted = (each.dgrad(d_y, w) for each in (ours, theirs))
    torch.testing.assert_close(d_x, wanted, rtol=2.0**-7, atol=1e-3)

    d_w = ours.wgrad(d_y, kept)
    assert torch.equal(d_w, ours.wgrad(d_y, ours.save_for_wgrad(x)))
    later = ours.defer_wgrad(d_y.clone(), kept)
    assert torch.equal(later(), d_w)
    exact = once_rounded(x, d_y, counts or [M], recipe)
    torch.testing.assert_close(d_w, exact.view_as(d_w), rtol=1e-5, atol=1e-5)


def test_a_width_that_it_cannot_multiply_is_refused(backend):
    with pytest.raises(NanotrainError, match="multiples of 16, this width is 200"):
        backend(FP8Recipe()).forward(normal(16, 200), normal(32, 200))


def once_rounded(x, d_y, counts, recipe):
    """Return the weight's gradient of operands rounded by columns, each once."""
    found = []
    for own_x, own_d_y in zip(x.split(counts), d_y.split(counts), strict=True):
        a = quantize(own_d_y, (128, 1), power_of_two=recipe.gradient_power_of_two).values()
        b = quantize(own_x, (128, 1), power_of_two=recipe.input_power_of_two).values()
        found.append(a.T @ b)
    return torch.stack(found)
