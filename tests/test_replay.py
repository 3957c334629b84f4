"""The monitor ``replay``: a rank that computes wrongly is named, a sound run keeps its bits."""

import re

import pytest
from compositions import Composition, compiled, pairwise, to_compile
from replaying import Faulty, both, trained

from nanotrain_core.contracts import Monitor
from nanotrain_core.testing import run_ranks
from nanotrain_core.testing.checks.monitor import assert_same_run
from nanotrain_core.testing.compare import assert_bitwise
from nanotrain_core.testing.probe import make_engine
from nanotrain_core.testing.saving import named

PLAIN = {
    **{"tp": 1, "pp": 1, "dp": 1, "ep": 1, "etp": 1, "schedule": "accumulate", "sp": False, "tied": False},
    **{"microbatch": 6, "experts_first": False, "zero": 0},
}


def composed(model="transformer", **axes):
    return Composition(**{**PLAIN, "model": model, **axes})


def said(found):
    """Return what all ranks ended with, without the name of this machine."""
    assert len(set(found)) == 1, found
    return re.sub(r" \([^)]*\)", "", found[0])


@pytest.mark.full_cases("transformer-dp4-mb6--", "transformer-dp2-mb6--1", "transformer-tp2-dp3-sp-mb6--")
@pytest.mark.parametrize(
    ("found", "fault", "text"),
    [
        (
            composed(dp=4),
            Faulty(2, "layers.1.attn"),
            "of stage 0 of a replayed microbatch is wrong on rank 2: "
            "compared on 4 replicas; computed again, they are the same",
        ),
        pytest.param(
            composed(dp=4, zero=2),
            Faulty(1, "layers.1.attn", backward=True),
            "rank 1: compared on 4 replicas; computed again, they are the same",
            marks=pytest.mark.full,
        ),
        (
            composed(dp=2),
            Faulty(1, "layers.1.attn", calls=1),
            "is wrong on rank 1: compared on 2 replicas; computed again, its bits are others",
        ),
        (composed(dp=2), Faulty(1, "layers.1.attn"), "is wrong on one of ranks 0, 1: compared on 2"),
        (
            composed(),
            Faulty(0, "layers.1.attn", calls=1),
            "is wrong on rank 0: compared with itself; computed again, its bits are others",
        ),
        (
            composed(dp=3, pp=2, schedule="1f1b", zero=1),
            Faulty(1, "layers.0.attn"),
            "the output of stage 0 of a replayed microbatch is wrong on rank 1: compared on 3",
        ),
        pytest.param(
            composed(dp=3, pp=2, schedule="1f1b"),
            Faulty(4, "layers.2.attn", backward=True),
            "stage 1 of a replayed microbatch is wrong on rank 4: compared on 3",
            marks=pytest.mark.full,
        ),
        (
            composed(dp=3, tp=2, sp=True),
            Faulty(3, "layers.1.attn.q"),
            "is wrong on one of ranks 2, 3: compared on 3",
        ),
        pytest.param(
            composed("deepseek_v3", dp=4, ep=2),
            Faulty(0, "layers.2.attn", calls=1),
            "is wrong on rank 0: compared on 2 replicas; computed again, its bits are others",
            marks=pytest.mark.full,
        ),
    ],
    ids=lambda value: value.id if isinstance(value, Composition) else "",
)
def test_wrong_computation_is_named(found, fault, text):
    ended = said(run_ranks(trained, found.dp * found.tp * found.pp, found.case(), fault))
    assert ended.startswith("step 2: ")
    assert text in ended


def assert_left_alone(found, case):
    table = found.optimizers()["adamw"]
    alone, watched = zip(*run_ranks(both, found.ranks, case, table, timeout=480), strict=True)
    assert_same_run(watched, alone)
    for one, other in zip(watched, alone, strict=True):
        assert_bitwise(named(one.state), named(other.state), "optimizer state")
        assert one.meta == other.meta


@pytest.mark.full_cases("deepseek_v3-dp4-ep2-mb6", "deepseek_v3-pp2-dp2-dualpipe_v-tied-zero2-mb2")
@pytest.mark.parametrize(
    "found",
    [
        composed("deepseek_v3", dp=4, ep=2),
        composed("deepseek_v3", pp=2, dp=2, schedule="dualpipe_v", zero=2, tied=True, microbatch=2),
    ],
    ids=lambda found: found.id,
)
def test_a_sound_run_keeps_every_bit(found):
    assert_left_alone(found, found.case())


def figures(monitors):
    """Return what monitors report of the passes of two steps, on this rank."""
    seen = Reports()
    changes = {"monitor": monitors, "run": {"steps": 2}, "precision": {"use": "fp8_deepseek_v3"}}
    make_engine(composed("deepseek_v3", dp=2, ep=2).case(), changes, callbacks=[seen]).fit()
    prefixes = ("fp8/", "moe/all_to_all_bytes/")
    return [{n: x for n, x in each.items() if n.startswith(prefixes)} for each in seen.values]


class Reports(Monitor):
    """Keeps reduced metrics."""

    def __init__(self):
        self.values = []

    def on_metrics(self, report):
        self.values.append(dict(report.values))


@pytest.mark.full
def test_other_monitors_do_not_count_what_is_replayed():
    """Bytes sent to experts, and operands rounded to eight bits: counted from one update to the next."""
    others = [{"use": "fp8", "every": 1}, {"use": "moe"}]
    (alone, _), (beside, _) = (
        run_ranks(figures, 2, monitors) for monitors in (others, [*others, {"use": "replay", "every": 1}])
    )
    assert any(name.startswith("fp8/elements") for name in alone[1])
    assert any(name.startswith("moe/all_to_all_bytes") and x > 0 for name, x in alone[1].items())
    assert beside == alone


@pytest.mark.full
@pytest.mark.parametrize("found", pairwise(), ids=lambda found: found.id)
def test_a_sound_run_keeps_every_bit_on_every_layout(found):
    assert_left_alone(found, found.case())


@pytest.mark.full
@pytest.mark.parametrize("found", to_compile(), ids=lambda found: found.id)
def test_a_sound_run_keeps_every_bit_compiled(found):
    assert_left_alone(found, compiled(found.case()))
