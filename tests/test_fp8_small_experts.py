"""``precision.min_size`` of FP8 and experts: one of them counts; rows of narrow ones are sent unquantized."""

from fp8_models import DEEPSEEK

from nanotrain_core.layout.roles import Role, tagged
from nanotrain_core.moe.routing import dispatch_codec
from nanotrain_core.precision.gemm import gemms_of
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_run


def test_experts_are_as_small_as_one_of_them_and_their_rows_are_sent_as_they_are():
    for min_size, narrow in ((64 * 128, True), (64 * 128 + 1, False)):
        config = {"min_size": min_size, "bf16": ["*.attn.*"]}
        case = Case(
            "precision",
            use="fp8_deepseek_v3",
            config=config,
            overrides={"model": DEEPSEEK | {"expert_ffn": 64}},
        )
        run = make_run(case, {})
        (part,) = run.stages.values()
        (experts,) = (module for _, module, tag in tagged(part) if tag.role is Role.EXPERTS)
        assert bool(gemms_of(experts)) is narrow
        assert (dispatch_codec(experts) is not None) is narrow
        line = next(line for line in run.described if "moe.experts" in line)
        assert (
            "64 x 128 is less than min_size" in line or "128 x 64 is less than min_size" in line
        ) is not narrow
