"""The chunked loss of the head against torch's plain cross-entropy."""

import pytest
import torch
import torch.nn.functional as F
from drawn import draw
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from nanotrain_core.batch import IGNORE
from nanotrain_core.builtin.configs import TorchKernelsConfig
from nanotrain_core.models import gpu_ops
from nanotrain_core.models.cross_entropy import Chunks, linear_cross_entropy, matmul, times
from nanotrain_core.models.kernels import TorchKernels
from nanotrain_core.models.ops import TORCH_OPS


@pytest.mark.parametrize("fewest", [1, 3, 4, 100])
def test_chunked_loss_and_gradients_equal_plain_cross_entropy(fewest):
    chunks = Chunks(logits=0, tokens=fewest)
    hidden = draw("hidden", (10, 6)).requires_grad_()
    weight = draw("weight", (13, 6)).requires_grad_()
    target = torch.tensor([3, IGNORE, 0, 12, 7, IGNORE, IGNORE, IGNORE, 1, 3])
    mine = linear_cross_entropy(hidden, weight, target, chunks=chunks)
    plain = F.cross_entropy(hidden @ weight.T, target, reduction="sum")
    torch.testing.assert_close(mine, plain, rtol=1e-13, atol=0)
    # A gradient of the loss other than 1: the loss weight, loss scale and token count come in there.
    for a, b in zip(
        torch.autograd.grad(mine * 0.37, (hidden, weight)),
        torch.autograd.grad(plain * 0.37, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(hidden, weight, target, chunks=chunks), mine)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_padded_columns_of_logits_change_neither_loss_nor_gradients(dtype):
    """A GPU's products have a multiple of 128 columns; the loss and what is saved have the vocabulary's."""
    hidden, weight = (draw(n, s).to(dtype).requires_grad_() for n, s in (("h", (10, 6)), ("w", (13, 6))))
    target = torch.tensor([3, IGNORE, 0, 12, 7, IGNORE, IGNORE, IGNORE, 1, 3])
    seen = []

    def multiply(left, right, total=None):
        seen.append(left.shape + right.shape)
        return matmul(left, right, total)

    found = []
    for multiple in (1, 8, 13, 128):
        seen.clear()
        loss = linear_cross_entropy(hidden, weight, target, matmul=multiply, multiple=multiple)
        with torch.no_grad():
            without = linear_cross_entropy(hidden, weight, target, multiple=multiple)
        found.append([loss, without, *torch.autograd.grad(loss * 0.37, (hidden, weight))])
        columns = -(-13 // multiple) * multiple
        assert seen == [(10, 6, 6, columns), (10, columns, columns, 6), (columns, 10, 10, 6)]
    for other in found[1:]:
        for ours, plain in zip(other, found[0], strict=True):
            torch.testing.assert_close(ours, plain, rtol=0, atol=1e-13 if dtype == torch.float64 else 0)


def test_only_a_gpus_loss_is_padded():
    kernels = TorchKernels(TorchKernelsConfig())
    assert kernels.ops(torch.device("cpu")) is TORCH_OPS
    padded = kernels.ops(torch.device("cuda")).linear_cross_entropy
    assert padded.keywords == {"multiple": 128, "matmul": gpu_ops.matmul}


def test_chunked_loss_survives_huge_logits():
    hidden = torch.tensor([[300.0, -300.0]], requires_grad=True)
    loss = linear_cross_entropy(hidden, torch.eye(2), torch.tensor([1]))
    assert loss.item() == 600.0


def test_bfloat16_loss_is_summed_in_float32():
    hidden, weight = draw("h", (300, 6)).bfloat16(), draw("w", (13, 6)).bfloat16()
    target = torch.arange(300) % 13
    exact = F.cross_entropy(F.linear(hidden, weight).double(), target, reduction="sum")
    loss = linear_cross_entropy(hidden, weight, target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_count_that_divides_a_loss_is_not_rounded(dtype):
    """1 / 5777 is 0.27% off in bfloat16, and every gradient below the head would be; 1 / 8192 is exact.

    Elements are rounded as well, but each another way.
    """
    weight, target = draw("w", (13, 6)).to(dtype), torch.arange(2500) % 13
    gradients = []
    for count in (5777, 8192):
        hidden = draw("h", (2500, 6)).to(dtype).requires_grad_()
        (linear_cross_entropy(hidden, weight, target) * (1024 / count)).backward()
        gradients.append(count * hidden.grad.double())
    found, exact = gradients
    assert abs((found * exact).sum() / exact.square().sum() - 1) < 5e-4


def test_the_heads_weight_gradient_is_not_rounded_on_its_way_to_a_wider_sum():
    """As in a bfloat16 run, which adds up the gradients of microbatches in float32."""
    hidden, target = draw("h", (40, 6)).bfloat16(), torch.arange(40) % 13
    weight = torch.nn.Parameter(draw("w", (13, 6)).bfloat16())
    weight.grad_dtype = torch.float32
    (linear_cross_entropy(hidden, weight, target) / 40).backward()
    wide = weight.detach().double().requires_grad_()
    logits = F.linear(hidden.double(), wide)
    (F.cross_entropy(logits, target, reduction="sum") / 40).backward()
    assert weight.grad.dtype == torch.float32
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())
    assert (weight.grad.double() - wide.grad).norm() < 2.0**-8 * wide.grad.norm()


class Computed(TorchDispatchMode):
    """Records operators that a GPU runs a kernel for, and runs none of them."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        written = (kwargs or {}).get("out")
        if written is None:
            return operator(*args, **(kwargs or {}))
        self.found.append(str(operator))
        return written


def test_on_a_gpu_a_product_is_added_to_a_wider_sum_where_that_is():
    """A product of its own, of the size of the head's weight in float32, would be written and read again."""
    with FakeTensorMode():
        left, right = (torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in ((8, 4), (4, 6)))
        total = torch.empty(8, 6, device="cuda")
        with Computed() as computed:
            assert gpu_ops.matmul(left, right, total) is total
    assert computed.found == ["aten.addmm.dtype_out"]


def test_on_a_gpu_a_gradient_is_scaled_in_one_kernel():
    with FakeTensorMode():
        gradient = torch.empty(5000, 6, dtype=torch.bfloat16, device="cuda")
        with Computed() as computed:
            found = times(gradient, torch.empty((), device="cuda"))
    assert (found.dtype, found.shape) == (torch.bfloat16, (5000, 6))
    assert computed.found == ["aten.mul.out"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gpu_adds_products_and_scales_gradients_without_rounding_in_between(dtype):
    left, right, total = (draw(n, s) for n, s in (("l", (96, 64)), ("r", (64, 40)), ("t", (96, 40))))
    left, right, total = left.cuda().to(dtype), right.cuda().to(dtype), total.cuda().float()
    expected = total.double() + left.double() @ right.double()
    torch.testing.assert_close(gpu_ops.matmul(left, right, total).double(), expected, rtol=1e-5, atol=1e-5)
    factor = torch.tensor(1 / 5777, device="cuda")
    assert torch.equal(times(left, factor), (left.float() * factor).to(dtype))
