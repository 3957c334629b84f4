"""Kernels compute what plain PyTorch does, for any shape, and modify nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import torch

from nanotrain_core.contracts import Kernels
from nanotrain_core.models.ops import TORCH_OPS, Ops
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check
from nanotrain_core.testing.kernel_inputs import Function, Sample, samples
from nanotrain_core.testing.strides import View, as_it_is, sliced, transposed

CPU = torch.device("cpu")
#: By how much a number in float64 may differ, in units of 1 plus the largest of its tensor.
TIGHT = 1e-11
#: How many times plain PyTorch's own error in bfloat16 is allowed, besides one unit in the last place.
TIMES = 2.0

Found = dict[str, torch.Tensor]


def kernels_of(case: Case) -> Kernels:
    """Build the kernels."""
    kernels: Kernels = case.build()
    return kernels


def functions(case: Case) -> Iterator[tuple[str, Function, Function]]:
    """Yield (name, the component's, plain PyTorch's) of every function in the table.

    Raises:
        AssertionError: a function cannot be called as plain PyTorch's can.
    """
    table = kernels_of(case).ops(CPU)
    for field in fields(Ops):
        function, plain = getattr(table, field.name), getattr(TORCH_OPS, field.name)
        assert_takes_the_arguments(field.name, function, plain)
        yield field.name, function, plain


def assert_takes_the_arguments(name: str, function: Function, plain: Function) -> None:
    """Reject a function that cannot be called with the arguments of ``plain``, optional ones by name.

    Raises:
        AssertionError: with both signatures.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a function in C, as ``apply`` of an autograd.Function: the calls will tell
        return
    expected = inspect.signature(plain).parameters
    optional = {key for key, parameter in expected.items() if parameter.default is not parameter.empty}
    try:
        signature.bind(*(None for key in expected if key not in optional), **dict.fromkeys(optional))
    except TypeError as error:
        listed = ", ".join(f"{key}=..." if key in optional else key for key in expected)
        mine = ", ".join(signature.parameters)
        raise AssertionError(f"{name}({mine}): {error}; models may call {name}({listed})") from None


def every_sample(case: Case) -> Iterator[tuple[str, Sample, Function, Function]]:
    """Yield (what it is, sample, the component's function, plain PyTorch's)."""
    for name, function, plain in functions(case):
        for sample in samples(name):
            yield f"{name}, {sample.name}", sample, function, plain


def results(
    function: Function,
    sample: Sample,
    dtype: torch.dtype,
    of: set[str] | None = None,
    *,
    inputs: View = as_it_is,
    upstream: View = as_it_is,
) -> Found:
    """Return the value of a call and its gradients, of all leaves or those named.

    Args:
        function: to call.
        sample: its arguments.
        dtype: of its floating-point leaves.
        of: names of the leaves.
        inputs: lays out each floating-point leaf in memory.
        upstream: lays out the gradient that backward is given.
    """
    leaves = {name: leaf.clone() for name, leaf in sample.cast(dtype).leaves.items()}
    leaves = {name: inputs(leaf) if leaf.is_floating_point() else leaf for name, leaf in leaves.items()}
    wanted = [name for name, leaf in leaves.items() if leaf.is_floating_point()]
    wanted = [name for name in wanted if of is None or name in of]
    for name in wanted:
        leaves[name].requires_grad_()
    value = sample.call(function, leaves)
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(value.shape, generator=generator).bfloat16().to(value.dtype)
    value.backward(upstream(given))  # type: ignore[no-untyped-call]
    nothing = {name: torch.zeros_like(leaves[name]) for name in wanted}
    gradients = {name: leaves[name].grad for name in wanted}
    found = {f"gradient of {name}": nothing[name] if g is None else g for name, g in gradients.items()}
    return {"value": value.detach(), **found}


def assert_near(actual: Found, plain: Found, truth: Found, what: str) -> None:
    """Compare the kernels' results with plain PyTorch in the same dtype, and both with float64.

    Raises:
        AssertionError: a dtype or shape differs; or an error is above the bound of the dtype.
    """
    for name, expected in plain.items():
        got, true = actual[name], truth[name]
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), (
            f"{what}: {name} is {tuple(got.shape)} of {got.dtype}; "
            f"plain PyTorch's is {tuple(expected.shape)} of {expected.dtype}"
        )
        if not got.numel():
            continue
        largest = float(true.abs().max())
        error, own = (float((x.double() - true).abs().nan_to_num(torch.inf).max()) for x in (got, expected))
        ulp = torch.finfo(got.dtype).eps * largest
        bound = TIGHT * (1 + largest) if got.dtype == torch.float64 else TIMES * own + ulp
        assert error <= bound, (
            f"{what}: {name} is {error:.3g} away from float64's, whose largest is {largest:.3g}; "
            f"plain PyTorch in {got.dtype}: {own:.3g}; allowed: {bound:.3g}"
        )


@check("kernels", since="0.2", variants=("float64", "bfloat16"))
def functions_equal_pytorch(case: Case, dtype: str) -> None:
    """Each function has PyTorch's values and gradients: to 1e-11 in float64, in bfloat16 to twice its error.

    Of odd sizes, of one token, of none, of experts without rows, of views that are not contiguous.
    """
    used = getattr(torch, dtype)
    for what, sample, function, plain in every_sample(case):
        truth = results(plain, sample, torch.float64)
        assert_near(results(function, sample, used), results(plain, sample, used), truth, f"{what}, {dtype}")


@check("kernels", since="0.2")
def inputs_stay_as_they_are(case: Case) -> None:
    """No function writes to its input tensors, in forward or in backward."""
    for what, sample, function, _ in every_sample(case):
        for dtype in (torch.float64, torch.bfloat16):
            leaves = dict(sample.cast(dtype).leaves)
            for name, leaf in leaves.items():
                leaves[name] = leaf.clone().requires_grad_(leaf.is_floating_point())
            before = {name: leaf.detach().clone() for name, leaf in leaves.items()}
            value = sample.call(function, leaves)
            upstream = torch.ones_like(value)
            value.backward(upstream)  # type: ignore[no-untyped-call]
            written = [name for name, leaf in leaves.items() if not torch.equal(leaf, before[name])]
            assert not written, f"{what}: writes to {', '.join(written)}"
            assert (upstream == 1).all(), f"{what}: writes to the gradient that its backward pass is given"


@check("kernels", since="0.2")
def two_calls_have_the_same_bits(case: Case) -> None:
    """Called again with the same numbers, each function returns the same bits, gradients too."""
    for what, sample, function, _ in every_sample(case):
        one, other = (results(function, sample, torch.bfloat16) for _ in range(2))
        differing = [name for name in one if not torch.equal(one[name], other[name])]
        assert not differing, f"{what}: a second call has another {', '.join(differing)}"


@check("kernels", since="0.2")
def gradients_may_not_be_wanted(case: Case) -> None:
    """With gradients of each input alone, of none, and without autograd, results are the same as with all."""
    modes: list[Callable[[], Any]] = [torch.no_grad, torch.inference_mode]
    for what, sample, function, plain in every_sample(case):
        expected = results(plain, sample, torch.float64)
        wanted = [name.removeprefix("gradient of ") for name in expected if name != "value"]
        for name in wanted:
            got = results(function, sample, torch.float64, {name})
            own = {key: expected[key] for key in got}
            assert_near(got, own, own, f"{what}, where {name} alone needs a gradient")
        leaves = sample.cast(torch.float64).leaves
        value = {"value": expected["value"]}
        got = {"value": sample.call(function, leaves)}
        assert not got["value"].requires_grad, f"{what}: needs a gradient, and none of its inputs does"
        assert_near(got, value, value, f"{what}, where no input needs a gradient")
        for mode in modes:
            with mode():
                learns = {k: v.clone().requires_grad_(v.is_floating_point()) for k, v in leaves.items()}
                got = {"value": sample.call(function, learns).clone()}
            assert_near(got, value, value, f"{what}, under torch.{mode.__name__}")


@check("kernels", since="0.2")
def table_is_the_same_each_time(case: Case) -> None:
    """``ops(device)`` returns an equal table of functions whenever it is asked."""
    kernels = kernels_of(case)
    one, other = kernels.ops(CPU), kernels.ops(CPU)
    assert isinstance(one, Ops), f"ops(device) returned a {type(one).__name__}; expected an Ops"
    names = [field.name for field in fields(Ops)]
    differing = [name for name in names if getattr(one, name) != getattr(other, name)]
    assert not differing, f"asked again, ops(device) has another {', '.join(differing)}"


# --- products --------------------------------------------------------------------------------------


#: How the operands are laid out in memory.
OPERANDS: dict[str, View] = {"": as_it_is, ", transposed": transposed, ", sliced": sliced}

#: Rows M (or of each weight), inputs K, outputs N. A square weight hides a transposed one from its shape.
PRODUCTS: list[tuple[int | list[int], int, int]] = [
    (12, 16, 8),
    (7, 5, 11),
    (9, 6, 6),
    (1, 8, 4),
    (0, 8, 4),
    ([4, 0, 3, 1], 6, 5),
    ([0, 0, 7], 5, 5),
    ([0, 0], 4, 3),
]


@check("kernels", since="0.2", variants=("float64", "bfloat16"))
def gemms_equal_pytorch(case: Case, dtype: str) -> None:
    """``gemm()`` computes PyTorch's forward, dgrad and wgrad: of some rows, none, and stacked weights."""
    used = getattr(torch, dtype)
    for rows, inputs, outputs in PRODUCTS:
        for layout, view in OPERANDS.items():
            torch.manual_seed(0)
            count = rows if isinstance(rows, int) else sum(rows)
            stack = () if isinstance(rows, int) else (len(rows),)
            x, d_y = torch.randn(count, inputs), torch.randn(count, outputs)
            weights = [torch.randn(*stack, outputs, inputs) for _ in range(2)]
            operands = [view(t.to(torch.bfloat16).to(used)) for t in (x, d_y, *weights)]
            before = [t.clone() for t in operands]
            what = f"M = {rows}, K = {inputs}, N = {outputs}{layout}, {dtype}"
            got = _products(case, rows, *operands)
            written = [t for t, old in zip(operands, before, strict=True) if not torch.equal(t, old)]
            assert not written, f"{what}: writes to an operand"
            wide = [t.double() for t in operands]
            assert_near(got, _plain_products(rows, *operands), _plain_products(rows, *wide), what)


def _products(
    case: Case, rows: int | list[int], x: torch.Tensor, d_y: torch.Tensor, *weights: torch.Tensor
) -> Found:
    gemm = kernels_of(case).gemm()
    gemm = gemm if isinstance(rows, int) else gemm.grouped(torch.tensor(rows))
    (one, other), kept = gemm.forward(x, *weights)
    (alone,), _ = gemm.forward(x, weights[0])
    gemm.forward(-x, weights[0])  # what is kept of one forward pass outlasts others
    wgrads = {
        "wgrad": gemm.wgrad(d_y, kept),
        "wgrad of what save_for_wgrad(x) returns": gemm.wgrad(d_y, gemm.save_for_wgrad(x)),
    }
    for name, found in wgrads.items():
        wanted = (x.dtype, torch.float32)
        assert found.dtype in wanted, f"{name} is {found.dtype}; expected {x.dtype} or float32"
    products = {
        "forward": one,
        "forward of one alone": alone,
        "forward of the second": other,
        "dgrad": gemm.dgrad(d_y, weights[0]),
    }
    return {**products, **{name: found.to(x.dtype) for name, found in wgrads.items()}}


def _plain_products(
    rows: int | list[int], x: torch.Tensor, d_y: torch.Tensor, *weights: torch.Tensor
) -> Found:
    if isinstance(rows, int):
        y, second = (x @ weight.T for weight in weights)
        d_x, d_weight = d_y @ weights[0], d_y.T @ x
    else:
        xs, d_ys = torch.split(x, rows), torch.split(d_y, rows)
        y, second = (torch.cat([own @ w.T for own, w in zip(xs, stack, strict=True)]) for stack in weights)
        d_x = torch.cat([own @ w for own, w in zip(d_ys, weights[0], strict=True)])
        d_weight = torch.stack([d.T @ own for d, own in zip(d_ys, xs, strict=True)])
    products = {"forward": y, "forward of one alone": y, "forward of the second": second, "dgrad": d_x}
    return {**products, "wgrad": d_weight, "wgrad of what save_for_wgrad(x) returns": d_weight}
