"""Rows of experts, permuted and combined, against plain indexing; on a CPU, and in Triton's interpreter.

``test_triton.py`` runs this file once more with ``TRITON_INTERPRET=1``.
"""

from importlib.util import find_spec
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func
from nanotrain_cuda import CUDAKernelsConfig
from nanotrain_cuda.kernels import CUDAKernels
from nanotrain_cuda.permutation import add_up, permute, spread, unpermute, weigh, weigh_backward

from nanotrain_core.errors import NanotrainError
from nanotrain_core.models.gpu_ops import plain_ops
from nanotrain_core.models.ops import TORCH_OPS
from nanotrain_core.moe.routing import invert_permutation, sort_by_expert

#: Tokens, width, experts chosen, experts: V3's choice, V2's, a width that is no power of two, one token.
SIZES = pytest.mark.parametrize("sizes", [(33, 64, 8, 16), (10, 72, 6, 9), (7, 1000, 2, 4), (1, 1, 1, 1)])


def draw(T, D, C, E, dtype=torch.float64, seed=0):
    """Return tokens, outputs, weights, and the order with its inverse."""
    generator = torch.Generator().manual_seed(seed)
    x, outputs, weights = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((T, D), (T * C, D), (T, C))
    )
    order, _ = sort_by_expert(torch.rand(T, E, generator=generator).topk(C).indices, E)
    return x, outputs, weights, order, invert_permutation(order)


def there_and_back(permute, unpermute, x, outputs, weights, order, back):
    """Return rows, sums, and all gradients."""
    rows, y = permute(x, order, back, weights.shape[1]), unpermute(outputs, order, back, weights)
    generator = torch.Generator().manual_seed(9)
    d_rows, d_y = (torch.randn(each.shape, generator=generator).to(each.dtype) for each in (rows, y))
    gradients = torch.autograd.grad((rows, y), (x, outputs, weights), (d_rows, d_y))
    return [each.detach() for each in (rows, y, *gradients)]


@SIZES
def test_rows_sums_and_gradients_are_those_of_indexing(sizes):
    drawn = draw(*sizes)
    found = there_and_back(permute, unpermute, *drawn)
    expected = there_and_back(TORCH_OPS.permute, TORCH_OPS.unpermute, *drawn)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@SIZES
@pytest.mark.parametrize("weighed_in", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "ways", [(permute, unpermute), (TORCH_OPS.permute, TORCH_OPS.unpermute)], ids=["cuda", "torch"]
)
def test_bfloat16_is_added_up_in_float32_and_rounded_once(sizes, weighed_in, ways):
    """By these and by plain PyTorch, so that a run is the same with either.

    The bound is half a unit of the result in its dtype, and what float32 sums lose of their terms."""
    x, outputs, weights, order, back = draw(*sizes, dtype=torch.bfloat16)
    weights = weights.detach().to(weighed_in).requires_grad_()
    narrow = x, outputs, weights
    exact = [each.detach().double().requires_grad_() for each in narrow]
    sizes_of = [each.detach().abs().requires_grad_() for each in exact]
    results = []
    for operands, (there, back_again) in (
        (narrow, ways),
        (exact, (TORCH_OPS.permute, TORCH_OPS.unpermute)),
        (sizes_of, (TORCH_OPS.permute, TORCH_OPS.unpermute)),
    ):
        x_, outputs_, weights_ = operands
        rows, y = there(x_, order, back, weights.shape[1]), back_again(outputs_, order, back, weights_)
        upstream = torch.ones_like(rows), torch.ones_like(y)
        results.append([rows, y, *torch.autograd.grad((rows, y), operands, upstream)])
    for found, expected, magnitude in zip(*results, strict=True):
        bound = expected.abs() * (torch.finfo(found.dtype).eps / 2) + magnitude * 1100 * 2.0**-24
        assert ((found.double() - expected).abs() <= bound).all()


def test_rows_that_are_not_finite_spoil_their_own_tokens_and_no_others():
    _, outputs, weights, order, back = draw(12, 40, 3, 6)
    with torch.no_grad():
        outputs[5, 7], outputs[30, 2] = float("nan"), float("inf")
        y = unpermute(outputs, order, back, weights)
        expected = TORCH_OPS.unpermute(outputs, order, back, weights)
    assert torch.equal(y.isfinite(), expected.isfinite())
    assert (~y.isfinite()).sum() == 2


def test_torch_finds_no_fault_with_the_operators():
    """Its own check: schema, fake tensors, autograd, and forward with backward in a graph of any sizes."""
    x, outputs, weights, _, back = draw(5, 16, 2, 4, dtype=torch.float32)
    torch.library.opcheck(spread, (x, back, 2))
    torch.library.opcheck(add_up, (outputs, back, 2))
    torch.library.opcheck(weigh, (outputs, back, weights))
    torch.library.opcheck(weigh_backward, (x.detach(), outputs.detach(), back, weights.detach()))


def test_they_are_nodes_of_one_graph_forward_and_backward():
    nodes = []

    def seen(graph, example):
        nodes.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph)

    def both(x, outputs, weights, order, back):
        return permute(x, order, back, weights.shape[1]), unpermute(outputs, order, back, weights)

    drawn = draw(9, 32, 4, 8)
    torch._dynamo.reset()
    compiled = torch.compile(both, fullgraph=True, backend=torch._dynamo.backends.common.aot_autograd(
        fw_compiler=seen, bw_compiler=seen
    ))  # fmt: skip
    rows, y = compiled(*drawn)
    d_rows, d_y = rows.detach().cos(), y.detach().sin()
    found = rows, y, *torch.autograd.grad((rows, y), drawn[:3], (d_rows, d_y))
    rows, y = both(*drawn)
    expected = rows, y, *torch.autograd.grad((rows, y), drawn[:3], (d_rows, d_y))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for name in ("spread", "add_up", "weigh", "weigh_backward"):
        assert f"nanotrain_cuda.{name}.default" in nodes


def test_everything_else_is_plain_pytorch_of_the_device():
    kernels = CUDAKernels(CUDAKernelsConfig())
    with mock.patch("nanotrain_cuda.kernels.find_spec", return_value=object()):
        for device in map(torch.device, ("cpu", "cuda")):
            ours, plain = kernels.ops(device), plain_ops(device)
            assert (ours.permute, ours.unpermute) == (permute, unpermute)
            assert ours.attention is plain.attention
            assert type(ours.linear_cross_entropy) is type(plain.linear_cross_entropy)


def test_a_gpu_without_triton_is_refused_by_name():
    kernels = CUDAKernels(CUDAKernelsConfig())
    with (
        mock.patch("nanotrain_cuda.kernels.find_spec", return_value=None),
        pytest.raises(NanotrainError, match=r"kernels 'cuda': triton is not installed"),
    ):
        kernels.ops(torch.device("cuda"))
    assert find_spec("nanotrain_cuda")
