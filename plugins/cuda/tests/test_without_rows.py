"""Gradients of experts without rows; on a CPU, and in Triton's interpreter, as ``test_permutation.py``."""

import pytest
import torch
from nanotrain_cuda import CUDAKernelsConfig
from nanotrain_cuda.kernels import CUDAKernels
from nanotrain_cuda.without_rows import is_dense, zero_without_rows, zeroed

from nanotrain_core.models.ops import TORCH_OPS

COUNTS = torch.tensor([16, 0, 32, 0])
SIZES = pytest.mark.parametrize("sizes", [(16, 32), (1, 1), (100, 41), (700, 200)], ids=str)


@SIZES
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("left", [float("nan"), 7.0])
def test_whatever_a_kernel_leaves_of_an_expert_without_rows_is_zero_and_nothing_else_changes(
    sizes, transposed, left
):
    stacked = torch.randn(4, *sizes).bfloat16()
    stacked = stacked.mT.contiguous().mT if transposed else stacked
    expected = stacked.clone()
    stacked[COUNTS == 0] = left
    expected[COUNTS == 0] = 0.0
    assert is_dense(stacked)
    zero_without_rows(stacked, COUNTS)
    assert torch.equal(stacked, expected)


def test_matrices_that_are_no_blocks_of_memory():
    whole = torch.randn(4, 6, 8)
    part, rest = whole[:, :3, :5], whole[:, 3:].clone()
    assert not is_dense(part)
    zero_without_rows(part, COUNTS)
    assert torch.equal(part.abs().sum((1, 2)) == 0, COUNTS == 0)
    assert torch.equal(whole[:, 3:], rest)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_experts_are_those_of_plain_pytorch(compiled, monkeypatch):
    """torch has the grouped product of a GPU for a CPU as well."""
    for module in ("nanotrain_core.models.ops", "nanotrain_cuda.without_rows"):
        monkeypatch.setattr(f"{module}.has_one_kernel", lambda rows, *sizes: True)
    generator = torch.Generator().manual_seed(0)
    x, gate, up, down, d_y = (
        torch.randn(*shape, generator=generator).bfloat16()
        for shape in ((48, 32), (4, 16, 32), (4, 16, 32), (4, 32, 16), (48, 32))
    )
    kernels = CUDAKernels(CUDAKernelsConfig()).ops(torch.device("cpu"))
    found = []
    for experts in (TORCH_OPS.experts, kernels.experts):
        leaves = [each.clone().requires_grad_() for each in (x, gate, up, down)]
        call = torch.compile(experts, backend="aot_eager", fullgraph=True) if compiled else experts
        call(leaves[0], COUNTS, *leaves[1:]).backward(d_y)
        found.append([leaf.grad for leaf in leaves])
    for ours, plain in zip(*found, strict=True):
        assert torch.equal(ours, plain)
    for gradient in found[1][1:]:
        assert torch.equal(gradient.abs().sum((1, 2)) == 0, COUNTS == 0)


def test_a_gradient_that_is_not_finite_where_there_are_no_rows_never_reaches_a_weight():
    gradient = torch.ones(4, 2, 2)
    gradient[COUNTS == 0] = float("nan")
    assert torch.equal(zeroed(gradient, COUNTS).sum((1, 2)), torch.tensor([4.0, 0.0, 4.0, 0.0]))
