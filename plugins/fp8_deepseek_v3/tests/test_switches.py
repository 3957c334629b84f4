"""The emulation's numbers are the same whatever torch's process-wide switches are."""

import sys
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from nanotrain_fp8_deepseek_v3 import exact
from nanotrain_fp8_deepseek_v3.formats import E5M2
from nanotrain_fp8_deepseek_v3.gemm import EmulatedFP8, FP8Recipe
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

ONEDNN = torch.backends.mkldnn.matmul
RECIPES = pytest.mark.parametrize(
    "recipe", [FP8Recipe(), FP8Recipe(tile=0, gradients=E5M2)], ids=["tile", "whole"]
)
GROUPS = pytest.mark.parametrize("counts", [None, [40, 0, 90]], ids=["one", "experts"])


@contextmanager
def matmul_precision(name):
    """``torch.set_float32_matmul_precision``; what is read of it afterwards is as before."""
    before = torch.get_float32_matmul_precision(), ONEDNN.fp32_precision
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        assert torch.get_float32_matmul_precision() == name  # nobody has left it otherwise
        torch.set_float32_matmul_precision(before[0])
        ONEDNN.fp32_precision = before[1]


@contextmanager
def onednn(owner, value):
    """A setting of ``torch.backends``, as torch 2.9 and later have it."""
    before = owner.fp32_precision
    owner.fp32_precision = value
    try:
        yield
    finally:
        assert owner.fp32_precision == value
        owner.fp32_precision = before


@contextmanager
def cuda(**switches):
    settings = torch.backends.cuda.matmul
    before = {name: getattr(settings, name) for name in switches}
    try:
        for name, value in switches.items():
            setattr(settings, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)


@contextmanager
def autocast(kind):
    """Autocast to bfloat16; ``torch.autocast`` itself refuses a CUDA that is not there."""
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, torch.bfloat16)
    try:
        yield
    finally:
        assert torch.is_autocast_enabled(kind)
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])
        torch.clear_autocast_cache()


SWITCHES = {
    "high": lambda: matmul_precision("high"),
    "medium": lambda: matmul_precision("medium"),
    "oneDNN bf16": lambda: onednn(ONEDNN, "bf16"),
    "oneDNN bf16, inherited": lambda: onednn(torch.backends.mkldnn, "bf16"),
    "TF32": lambda: cuda(allow_tf32=True),
    "reduced bf16 sums": lambda: cuda(allow_bf16_reduced_precision_reduction=True),
    "autocast": lambda: autocast("cpu"),
    "autocast of CUDA": lambda: autocast("cuda"),
}
EACH = pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)


def operands(counts, device="cpu"):
    draw = torch.Generator().manual_seed(0)
    M, stacked = (130, ()) if counts is None else (sum(counts), (len(counts),))
    shapes = (M, 200), (*stacked, 136, 200), (M, 136)
    return [torch.randn(shape, generator=draw).bfloat16().to(device) for shape in shapes]


def products(recipe, counts, x, weight, d_y):
    emulated = EmulatedFP8(recipe)
    if counts is not None:
        emulated = emulated.grouped(torch.tensor(counts))
    (y,), kept = emulated.forward(x, weight)
    return y, emulated.dgrad(d_y, weight), emulated.wgrad(d_y, kept)


@EACH
@RECIPES
@GROUPS
def test_results_are_bit_equal_under_each_switch(switch, recipe, counts):
    given = operands(counts)
    expected = products(recipe, counts, *given)
    with switch():
        found = products(recipe, counts, *given)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


class Products(TorchDispatchMode):
    """Notes each matrix product: the dtypes of its operands, and what oneDNN may do to them."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            self.seen.append(({each.dtype for each in args[:2]}, ONEDNN.fp32_precision))
        return func(*args, **(kwargs or {}))


@EACH
@GROUPS
def test_on_a_cpu_products_are_of_float32_that_onednn_leaves_as_they_are(switch, counts):
    """Also where the processor has no bfloat16, or TF32, that the test above could notice."""
    with switch(), Products() as products_made:
        products(FP8Recipe(), counts, *operands(counts))
    assert len(products_made.seen) == (3 if counts is None else 6)
    assert all(dtypes == {torch.float32} for dtypes, _ in products_made.seen)
    assert {precision for _, precision in products_made.seen} <= {"none", "ieee"}


@EACH
def test_on_cuda_products_are_of_float64(switch):
    """On fake tensors: dtypes and operations are those of a GPU. Nothing else of the emulation multiplies."""
    with FakeTensorMode(), switch(), Products() as products_made:
        a, b = (torch.empty(shape, device="cuda") for shape in ((96, 64), (64, 32)))
        y = exact.matmul(a, b)
    assert (y.dtype, y.device.type, y.shape) == (torch.float32, "cuda", (96, 32))
    assert [dtypes for dtypes, _ in products_made.seen] == [{torch.float64}]


def test_what_cuda_computes_is_what_a_cpu_does_but_for_float32_sums(monkeypatch):
    given = operands(None)
    found = products(FP8Recipe(), None, *given)
    monkeypatch.setattr(EmulatedFP8, "multiply", Sound.multiply)
    for ours, theirs, terms in zip(found, products(FP8Recipe(), None, *given), (200, 136, 130), strict=True):
        # Of normal numbers of sizes 1: rounded to bfloat16 but for dW, whose terms are of that size.
        bound = theirs.abs() * 2.0**-7 * (ours.dtype == torch.bfloat16) + terms * 2.0**-20
        assert ((ours.float() - theirs.float()).abs() <= bound).all()


# --- the check at first use -------------------------------------------------------------------


class Sound(EmulatedFP8):
    """A stand-in for kernels that are right: float64 products of the same operands."""

    def multiply(self, a_MK, b_KN, out=None):
        y = (a_MK.double() @ b_KN.double()).to(a_MK.dtype)
        return y if out is None else out.copy_(y)


@pytest.fixture
def disagreement(monkeypatch):
    """Return the check, of the stand-in: Triton is not needed for it."""
    stand_in = ModuleType("nanotrain_fp8_deepseek_v3.fused")
    stand_in.TritonFP8 = Sound
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.delitem(sys.modules, "nanotrain_fp8_deepseek_v3.first_use", raising=False)
    from nanotrain_fp8_deepseek_v3.first_use import disagreement

    yield lambda: disagreement.__wrapped__(torch.device("cpu"))
    sys.modules.pop("nanotrain_fp8_deepseek_v3.first_use", None)


@EACH
def test_the_check_at_first_use_passes_under_each_switch(switch, disagreement):
    with switch():
        assert disagreement() == ""


def test_the_check_at_first_use_sees_operands_of_tf32(disagreement, monkeypatch):
    """What happened on an H100 with ``allow_tf32``: the emulation itself had 11 bits of each operand."""

    def coarse(self, a_MK, b_KN, out=None):
        a, b = ((each.view(torch.int32) & ~0x1FFF).view(torch.float32) for each in (a_MK, b_KN.contiguous()))
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)

    monkeypatch.setattr(EmulatedFP8, "multiply", coarse)
    assert "is not that of the emulation on cpu" in disagreement()
