"""Selective activation checkpointing stores the products of eight-bit floats in compiled layers."""

from unittest import mock

import pytest
import torch
from nanotrain_fp8_deepseek_v3.gemm import Float32GEMM

from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import train

MODEL = {"use": "transformer", "layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 33}
CASE = Case(
    "precision",
    use="fp8_deepseek_v3",
    overrides={
        "model": MODEL,
        "kernels": {"use": "torch"},
        "data": {"vocab": 33},
        "batch": {"sequences": 2, "microbatch": 2, "length": 8},
    },
)


@pytest.mark.full  # tests/test_activation_checkpointing.py has eager layers and other precisions
def test_no_product_is_repeated():
    """In a graph they are operators of the plugin, which the core's list of matrix products does not have."""
    counts, losses = {}, []
    multiply = Float32GEMM.rows_times
    for granularity in ("", "selective", "full"):
        torch._dynamo.reset()
        wrapper = [{"use": "recompute", "granularity": granularity}] if granularity else []
        run = {"steps": 2, "compile": True, "compile_backend": "aot_eager"}
        with mock.patch.object(Float32GEMM, "rows_times", autospec=True, side_effect=multiply) as products:
            trace = train(CASE, {"parallel": wrapper, "run": run})
        counts[granularity] = products.call_count
        losses.append([report.loss for report in trace.reports])
    assert counts["selective"] == counts[""] > 0
    assert counts["full"] > 1.3 * counts[""]
    assert losses[0] == losses[1] == losses[2]
