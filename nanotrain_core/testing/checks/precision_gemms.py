"""A precision's GEMM backends make one wgrad, whether x was kept in the forward pass or is made anew."""

from __future__ import annotations

import torch

from nanotrain_core.layout.roles import tagged
from nanotrain_core.precision.gemm import GEMMBackend, gemms_of
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check
from nanotrain_core.testing.checks.precision import relative_error
from nanotrain_core.testing.probe import make_run

#: Rows of x: some blocks of 128, and a rest.
ROWS = 300
#: What wgrad of x made anew may be further from the exact product, as a multiple, and at all.
FURTHER, AT_ALL = 2.0, 1e-9


@check("precision", since="0.2")
def an_input_that_is_made_anew_is_kept_as_before(case: Case) -> None:
    """``wgrad`` of what ``save_for_wgrad(x)`` returns is as exact as of what ``forward`` kept."""
    parts = make_run(case.alone(), {}).stages.values()
    for name, module, _ in (found for part in parts for found in tagged(part)):
        gemms = gemms_of(module)
        for key, backend in gemms.backends.items() if gemms is not None else ():
            weight = module.get_parameter(key)
            if weight.dim() == 2:
                _assert_same_wgrad(f"{name}.{key}", backend, weight)


def _assert_same_wgrad(name: str, backend: GEMMBackend, like: torch.Tensor) -> None:
    draw = torch.Generator().manual_seed(11)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(like.dtype)

    n, k = like.shape
    x_MK, weight_NK, d_y_MN = drawn(ROWS, k), torch.nn.Parameter(drawn(n, k)), drawn(ROWS, n)
    with torch.no_grad():
        _, kept = backend.forward(x_MK, weight_NK)
        exact_NK = d_y_MN.double().T @ x_MK.double()
        first, again = (
            relative_error(backend.wgrad(d_y_MN, of_x).double(), exact_NK)
            for of_x in (kept, backend.save_for_wgrad(x_MK))
        )
    assert again <= FURTHER * first + AT_ALL, (
        f"{name}: wgrad of what save_for_wgrad(x) returns is {again:.3g} of it from the exact product, and "
        f"of what forward kept {first:.3g}"
    )
