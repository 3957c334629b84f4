"""fp4_master passes the harness, which holds variants to what they promise."""

import pytest
from nanotrain_fp4_master import lowbit, precision

from nanotrain_core.component import Support
from nanotrain_core.testing import Case, conformance, trials
from nanotrain_core.testing.checks.precision import ADAMW
from nanotrain_core.testing.checks.precision_losses import MEAN_LOSS, loss_follows_float32
from nanotrain_core.testing.probe import train


def case(form, variant, **config):
    """Return a case: of four bits in one layer, which has all seven matrices there are."""
    table = {"format": form, "variant": variant, **config}
    overrides = {"optimizer": ADAMW} | ({} if form == "bf16" else {"model": {"layers": 1}})
    return Case("precision", use="fp4_master", config=table, overrides=overrides, name=f"{form}-{variant}")


class WideMaster(lowbit.Naive):
    """All of float32 beside the weight."""

    def __init__(self, weight, form, noise):
        self.wide = weight.float()
        super().__init__(weight, form, noise)

    def load(self):
        return self.wide.clone()

    def store(self, value):
        self.wide.copy_(value)
        self.store_nearest(value)


@pytest.mark.full
def test_four_bits_miss_the_band_of_the_harness_with_a_float32_master_too(monkeypatch):
    """So that the component declares follows_float32 in part is the format's, which no master mends."""
    monkeypatch.setitem(precision.LOW_BIT, "naive", WideMaster)
    changes = {"run": {"steps": 20}, "batch": {"microbatch": 4}}
    narrow = train(case("nvfp4", "naive"), changes)
    wide = train(case("nvfp4", "naive"), {**changes, "precision": {"use": "fp32"}})
    away = [got.loss / want.loss - 1 for got, want in zip(narrow.reports, wide.reports, strict=True)]
    assert sum(away) / len(away) > MEAN_LOSS


@pytest.mark.parametrize("variant", ["remainder", pytest.param("residual", marks=pytest.mark.full)])
def test_losses_of_bfloat16_follow_float32s(variant):
    """The component does not promise it for all its formats."""
    loss_follows_float32(case("bf16", variant))


@pytest.mark.parametrize(
    ("form", "variant", "word"),
    [
        ("bf16", "remainder", None),
        ("nvfp4", "residual", None),
        ("bf16", "eco", None),
        ("nvfp4", "eco", "rounds_to_nearest"),
        ("nf4", "eco", "rounds_to_nearest"),
        ("bf16", "naive", "keeps_small_updates"),
        ("nvfp4", "naive", "keeps_small_updates"),
    ],
)
def test_a_variant_says_what_it_does_not_promise(form, variant, word):
    words = {"keeps_small_updates", "rounds_to_nearest"}
    asked = case(form, variant)
    assert {each for each in words if asked.supported(each) is not Support.FULL} == {word} - {None}
    checks = {trial.check.name for trial in trials(asked)}
    lost = {"master_keeps_small_updates", "loss_falls_beside_float32s"}
    assert lost & checks == (set() if word == "keeps_small_updates" else lost)


test_bfloat16 = conformance(case("bf16", "remainder"))
test_bfloat16_with_residuals = pytest.mark.full(conformance(case("bf16", "residual")))
test_nvfp4 = conformance(
    case("nvfp4", "residual"),
    marks={"master_keeps_small_updates": pytest.mark.full},
)
test_nvfp4_in_the_momentum = conformance(
    case("nvfp4", "eco"),
    slow=pytest.mark.full,
    marks={"master_keeps_small_updates": pytest.mark.full},
)
test_bfloat16_in_the_momentum = pytest.mark.full(conformance(case("bf16", "eco")))
test_without_help = pytest.mark.full(conformance(case("bf16", "naive")))
test_four_bits_without_help = pytest.mark.full(conformance(case("nvfp4", "naive")))
test_nf4 = pytest.mark.full(conformance(case("nf4", "residual", block_size=16)))
test_nf4_in_the_momentum = pytest.mark.full(conformance(case("nf4", "eco", block_size=16)))
