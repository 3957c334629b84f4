"""A run in phases equals runs of each phase's recipe, one after the other, and resumes anywhere."""

from itertools import pairwise

import attrs
import pytest
from compositions import Composition
from structlog.testing import capture_logs

from nanotrain_core.optim.master_optimizer import MasterOptimizer
from nanotrain_core.phases.timeline import PhaseTimeline
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.compare import assert_numbers, assert_same, whole
from nanotrain_core.testing.probe import make_engine, train

#: Of 7 tokens each. Nine steps: three of 5 sequences, then of 5, 5, 7, 9, and then of 11 and 11.
PHASES = [
    {"name": "small", "until_tokens": 100, "batch": {"sequences": 5}},
    {
        "name": "growing",
        "until_tokens": 250,
        "batch": {"sequences": {"end": 11, "by": 2}},
        "optimizer": {"lr": {"end": 0.002, "shape": "cosine"}},
        "model": {"mtp_weight": 0.1},
    },
    {"name": "fixed", "model": {"bias_update_rate": 0.0}},
]
SIZES = [5, 5, 5, 5, 5, 7, 9, 11, 11]
CHANGES = {
    "run": {"steps": len(SIZES), "deterministic": True},
    "optimizer": {"use": "adamw", "lr": 0.01, "clip_norm": 0.5, "lr_schedule": {"warmup_steps": 2}},
}


def layout(**choices):
    defaults = {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "etp": 1, "schedule": "accumulate", "sp": False}
    more = {"model": "deepseek_v3", "tied": True, "microbatch": 2, "experts_first": False, "zero": 0}
    return Composition(**(defaults | more | choices))


ALONE = layout()
WIDE = layout(pp=2, dp=2, ep=2, schedule="1f1b")
FIRST, *MORE = LAYOUTS = {
    "pp2-dp2-ep2": WIDE,
    "zb_h1-tp2-pp2-dp2": layout(tp=2, pp=2, dp=2, ep=2, schedule="zb_h1", sp=True),
    "interleaved-pp2-dp2": layout(pp=2, dp=2, schedule="interleaved_1f1b"),
    "zero2-dp4-ep2-etp2": layout(dp=4, ep=2, etp=2, zero=2),
}


def run(composition, changes=None, **options):
    """Train in phases, or with ``changes`` instead; return every rank's trace."""
    changes = {**CHANGES, "phase": PHASES} if changes is None else changes
    if composition.zero:
        zero = {"use": "zero12", "stage": composition.zero}
        changes = changes | {"optimizer": changes["optimizer"] | zero}
    return run_ranks(train, composition.ranks, composition.case(), changes, **options)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Return the folder and traces of a run in one process, saved in the middle of the ramp."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, run(ALONE, folder=folder, save_at=6)


def assert_equal(found, wanted, atol):
    for part in ("weights", "state"):
        got, want = (whole([getattr(t, part) for t in traces], atol=atol) for traces in (found, wanted))
        assert_same(got, want, part, atol=atol)
    steps = len(found[0].reports)
    for trace in found:
        for field in ("loss", "grad_norm", "lr"):
            both = trace.reports, wanted[0].reports
            got, want = ([getattr(r, field) for r in reports][-steps:] for reports in both)
            assert_numbers(got, want, field, atol=atol)


def test_steps_take_the_batches_rates_and_phases_of_their_first_token(straight):
    _, (trace,) = straight
    reports = trace.reports
    tokens = [0, *(report.tokens for report in reports)]
    assert [(after - before) // 7 for before, after in pairwise(tokens)] == SIZES
    assert [report.phase for report in reports] == [0] * 3 + [1] * 4 + [2] * 2
    assert [report.lr for report in reports[:3]] == [0.005, 0.01, 0.01]  # two steps of warm-up
    assert reports[3].lr > reports[4].lr > reports[5].lr > reports[6].lr > reports[7].lr == 0.002
    for number, weight in ((2, 0.3), (3, 0.1)):
        terms = reports[number].losses
        rest = reports[number].loss - terms["lm"] - weight * terms["mtp"]
        assert rest == pytest.approx(0.1 * 4 * terms["seq_balance"], abs=1e-12)  # of four layers
    assert trace.meta["data"]["position"] == trace.meta["data"]["taken"] == sum(SIZES)


@pytest.mark.full
def test_it_equals_runs_of_each_steps_own_recipe_resumed(tmp_path, straight):
    """Recipes without phases, each for one or more steps, as a person would edit them between two runs."""
    whole_recipe = ALONE.case().recipe(**CHANGES, phase=PHASES)
    tokens, done, resume = 0, 0, None
    while done < len(SIZES):
        now = PhaseTimeline(whole_recipe).at(tokens).values
        moving = 100 <= tokens < 250
        steps = 1 if moving else 3 if tokens < 100 else 2
        table = {name: {} for name in ("batch", "model", "optimizer")}
        for key, value in now.items():
            section, _, name = key.partition(".")
            table[section][name] = value
        changes = {
            "run": {"steps": done + steps, "deterministic": True},
            "batch": table["batch"],
            "model": table["model"],
            "optimizer": CHANGES["optimizer"] | table["optimizer"],
        }
        found = run(ALONE, changes, folder=tmp_path, resume=resume)
        resume, done = "latest", done + steps
        tokens += steps * now["batch.sequences"] * 7
    assert_equal(found, straight[1], atol=0.0)


@pytest.mark.parametrize("name", [FIRST, *(pytest.param(n, marks=pytest.mark.full) for n in MORE)])
def test_every_layout_trains_as_one_process(straight, name):
    assert_equal(run(LAYOUTS[name]), straight[1], atol=1e-9)


@pytest.mark.parametrize(
    ("target", "atol"),
    [(ALONE, 0.0), pytest.param(WIDE, 1e-9, marks=pytest.mark.full)],
    ids=["same", "other"],
)
def test_it_goes_on_in_the_middle_of_a_ramp(straight, target, atol):
    folder, wanted = straight
    assert_equal(run(target, folder=folder, resume="6"), wanted, atol=atol)


def test_who_goes_back_takes_the_values_of_then(straight):
    folder, _ = straight
    changes = {**CHANGES, "phase": PHASES}
    engine = make_engine(ALONE.case(), changes, folder=folder, resume=str(len(SIZES)))
    engine.run.checkpoint.open(folder / "checkpoints", engine.run.mesh)
    assert engine.load(str(len(SIZES)))
    phases, (part,) = engine.run.phases, engine.run.stages.values()
    with capture_logs() as told:
        now = phases.advance(engine.run)
    (line,) = told
    assert (line["event"], line["phase"], line["name"], line["since_tokens"]) == ("in phase", 2, "fixed", 250)
    assert (now.feed.batch.sequences, now.loss_weights["mtp"], phases.number) == (11, 0.1, 2)
    assert {m.bias_update_rate for m in part.modules() if hasattr(m, "bias_update_rate")} == {0.0}
    assert engine.load("6")
    now = phases.advance(engine.run)
    assert (now.feed.batch.sequences, phases.number) == (9, 1)
    assert {m.bias_update_rate for m in part.modules() if hasattr(m, "bias_update_rate")} == {0.01}
    assert len(now.actions) == 2 * now.feed.batch.microbatches(1)
    assert attrs.asdict(now.feed.batch) == {"sequences": 9, "microbatch": 2, "length": 7}


def reported_rates(case):
    """Return the reported rates of a run whose optimizer gives embedding and head others than the rest."""
    plain = MasterOptimizer.options

    def options(self, shard):
        factor = {"embed": 0.1, "head": 0.5}.get(shard.placement.name.partition(".")[0], 1.0)
        return {**plain(self, shard), "lr": self.config.lr * factor}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MasterOptimizer, "options", options)
        return [report.lr for report in train(case, {}).reports]


def test_the_reported_rate_is_the_schedules_and_not_that_of_a_ranks_first_group():
    """A rank's first group is that of the ranges it happens to update."""
    phases = [{"until_tokens": 256, "optimizer": {"lr": 0.02}}, {"optimizer": {"lr": 0.005}}]
    changes = {
        "model": {"tied": False},
        "optimizer": {"use": "zero12", "lr": 0.01, "lr_schedule": {"warmup_steps": 2}},
        "run": {"steps": 3},
    }
    for overrides, expected in (
        ({**changes, "phase": phases}, [0.01, 0.02, 0.005]),
        (changes, [0.005, 0.01, 0.01]),
    ):
        case = Case("topology", use="grid", topology={"dp": 2}, overrides=overrides)
        assert run_ranks(reported_rates, 2, case) == [expected] * 2
