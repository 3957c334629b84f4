"""Functions of kernels compute the same from tensors of any strides."""

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


def small_samples(case: Case) -> Iterator[tuple[str, Sample, Function, Function]]:
    """Yield those of :func:`every_sample` without the longest."""
    for found in every_sample(case):
        if all(leaf.numel() <= FEW for leaf in found[1].leaves.values()):
            yield found
