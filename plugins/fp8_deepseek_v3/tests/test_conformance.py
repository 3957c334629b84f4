"""Both precisions pass the harness, alone and where ranks must agree on an overflow."""

from nanotrain_core.testing import Case, conformance

test_conformance = conformance(
    Case("precision", use="fp8_deepseek_v3", topology={"dp": 2}, overrides={"parallel": [{"use": "summed"}]}),
    Case("precision", use="fp8_hybrid"),
)
