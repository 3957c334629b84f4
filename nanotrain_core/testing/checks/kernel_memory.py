"""Functions of kernels compute the same from tensors of any strides, and whatever calls are pending."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check
from nanotrain_core.testing.checks.kernels import assert_near, every_sample, results
from nanotrain_core.testing.kernel_inputs import Function, Sample
from nanotrain_core.testing.strides import LAYOUTS, expanded, repeated

#: Numbers of the largest input of a sample that is called again for each memory layout.
FEW = 4096
#: By how much two calls with the same numbers may differ, in units of 1 plus the largest of a tensor.
SLACK = {torch.float64: 1e-11, torch.bfloat16: 0.03}


@check("kernels", since="0.3", variants=("float64", "bfloat16"))
def strides_change_nothing(case: Case, dtype: str) -> None:
    """Values and gradients are PyTorch's for inputs, and for gradients given to backward, of any strides.

    For slices, transposed and expanded ones. Of inputs and of the gradient separately: a function that
    leaves inputs of some strides to PyTorch has its own backward pass for others.
    """
    used = getattr(torch, dtype)
    for what, sample, function, plain in small_samples(case):
        expected = results(plain, sample, used)
        truth = expected if used == torch.float64 else results(plain, sample, torch.float64)
        most = max(leaf.dim() for leaf in sample.leaves.values() if leaf.is_floating_point())
        for layout, (view, least) in LAYOUTS.items():
            if expected["value"].dim() >= least:
                got = results(function, sample, used, upstream=view)
                assert_near(got, expected, truth, f"{what}, {dtype}, given a gradient that is {layout}")
            if most >= least:
                got = results(function, sample, used, inputs=view)
                assert_near(got, expected, truth, f"{what}, {dtype}, each input {layout}")
        if expected["value"].dim():
            expected = results(plain, sample, used, upstream=repeated)
            truth = (
                expected
                if used == torch.float64
                else results(plain, sample, torch.float64, upstream=repeated)
            )
            got = results(function, sample, used, upstream=expanded)
            assert_near(got, expected, truth, f"{what}, {dtype}, given a gradient that is expanded")


@check("kernels", since="0.3", variants=("float64", "bfloat16"))
def calls_do_not_share_memory(case: Case, dtype: str) -> None:
    """Several calls may come before the first backward pass, and backward passes in any order.

    As in pipelines, and in models that call the head for several losses.
    """
    used = getattr(torch, dtype)
    for what, sample, function, _ in small_samples(case):
        alone = [gradients(leaves, sample.call(function, leaves)) for leaves in several(sample, used)]
        inputs = several(sample, used)
        values = [sample.call(function, leaves) for leaves in inputs]
        # Neither the order of the calls nor the opposite one.
        for call in (1, 0, 2):
            got = gradients(inputs[call], values[call])
            for name, expected in alone[call].items():
                away = float((got[name].double() - expected.double()).abs().nan_to_num(torch.inf).max())
                bound = SLACK[used] * (1 + float(expected.abs().max()))
                assert away <= bound, (
                    f"{what}, {dtype}: {name} of call {call + 1}, with backward passes after all 3 calls, is "
                    f"{away:.3g} away from that with each right after its call: do calls share a buffer?"
                )


def several(sample: Sample, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """Return arguments of three calls of one shape: the sample's, others, and another input for its weights.

    The weights of the third are the tensors of the first, as a layer's are in each microbatch.
    """
    leaves = {name: leaf.clone() for name, leaf in sample.cast(dtype).leaves.items()}
    learns = [name for name, leaf in leaves.items() if leaf.is_floating_point()]
    for name in learns:
        leaves[name].requires_grad_()
    others = {name: (-0.5 * leaves[name]).detach().requires_grad_() for name in learns}
    return [leaves, leaves | others, leaves | {learns[0]: (2 * leaves[learns[0]]).detach().requires_grad_()}]


def gradients(leaves: dict[str, torch.Tensor], value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a call's value and its gradients of all leaves, after its backward pass."""
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    given = torch.linspace(0.5, 2, value.numel(), dtype=value.dtype).view(value.shape)
    found = torch.autograd.grad(value, [*wanted.values()], given, allow_unused=True)
    each = {f"gradient of {name}": x for name, x in zip(wanted, found, strict=True) if x is not None}
    return {name: x.detach().clone() for name, x in {"value": value, **each}.items() if x.numel()}


def small_samples(case: Case) -> Iterator[tuple[str, Sample, Function, Function]]:
    """Yield those of :func:`every_sample` without the longest."""
    for found in every_sample(case):
        if all(leaf.numel() <= FEW for leaf in found[1].leaves.values()):
            yield found
