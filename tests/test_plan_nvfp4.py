"""What a plan counts of the three GEMMs in NVFP4, against numbers computed by hand."""

import pytest
import torch

pytest.importorskip("nanotrain_fp8_deepseek_v3")
pytest.importorskip("nanotrain_plan")

from nanotrain_fp8_deepseek_v3.nvfp4.dry import DryNVFP4
from nanotrain_fp8_deepseek_v3.nvfp4.gemm import NVFP4Recipe
from nanotrain_plan.dry.recorder import Recorder
from nanotrain_plan.dry.values import Values

M, N, K = 64, 256, 128
PRODUCT = 2 * M * N * K
#: Bytes of rounding a bfloat16 number: read for the largest magnitude, read again, and written packed.
ROUNDED = 2 + 2 + 0.5


def test_gemms_are_counted_in_nvfp4_and_each_operand_is_read_twice_to_be_rounded():
    """Each is rounded for both GEMMs that read it. Weights are rounded both ways at once, here, where no
    optimizer step prepares them, in each pass."""
    x, w, d_y = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((M, K), (N, K), (M, N))
    )
    backend = DryNVFP4(NVFP4Recipe())
    with torch.no_grad(), Recorder("meta", Values()) as recorder:
        (y,), kept = backend.forward(x, w)
        forward = recorder.phase.moved
        d_x, d_w = backend.dgrad(d_y, w), backend.wgrad(d_y, kept)
    assert (y.shape, d_x.shape, d_w.shape) == ((M, N), (M, K), (N, K))
    assert recorder.phase.gemm_flops == {"nvfp4": 3 * PRODUCT}
    assert forward == pytest.approx(2 * ROUNDED * (M * K + N * K), rel=1e-3)
    assert recorder.phase.moved - forward == pytest.approx(2 * ROUNDED * (M * N + N * K), rel=1e-3)
