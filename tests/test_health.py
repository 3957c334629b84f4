"""What the health monitors publish is that of one process on every layout, and changes no bit of the run."""

import pytest
import series
from compositions import Composition, compiled
from definitions import matching
from test_looking import DDP, FOUR

from nanotrain_core.api import MetricNames, load_plugins
from nanotrain_core.contracts import Monitor
from nanotrain_core.layout.roles import Role, tagged
from nanotrain_core.testing import run_ranks
from nanotrain_core.testing.checks.parallel import assert_same_reports
from nanotrain_core.testing.compare import assert_bitwise
from nanotrain_core.testing.probe import make_engine, train

TOLERANCE = 1e-9
MONITORS = [
    {"use": "health", "level": "debug", "queries": 5},
    {"use": "moe", "loads_every": 1},
    {"use": "probes", "every": 2},
]
#: What two steps of these data do not have: a test of many steps has it, but for what one process has not.
LATER = {
    "data/drift",
    "data/masked",
    "data/mixture/{source}",
    "gradients/clip_mean",
    "gradients/clip_rate",
    "health",
    "loss/spike",
    "moe/all_to_all_bytes/{experts}",
    "moe/balance/{router}",
    "moe/starved/{router}",
    "optimizer/skip_rate",
    "probes/kl",
    "validation/masked",
}
#: By clocks of ranks, or what a layout has and one process has not.
OF_LAYOUT = ("tokens_per_second", "seconds", "validation/seconds", "bubble", "moe/all_to_all_bytes/")


class Told(Monitor):
    """Keeps what is told."""

    def __init__(self):
        self.reports = []

    def on_metrics(self, report):
        self.reports.append(report)


def watch(case, changes, plant):
    """Return values, histograms and texts of each report."""
    told = Told()
    engine = make_engine(case, changes, callbacks=[told])
    plant(engine)
    engine.fit()
    return [
        (
            report.step,
            {name: x for name, x in report.values.items() if not name.startswith(OF_LAYOUT)},
            {name: each.counts for name, each in report.histograms.items()},
            dict(report.texts),
        )
        for report in told.reports
    ]


def nothing(engine):
    """Plant nothing."""


def assert_watches_the_same(composition, steps, plant=nothing, monitors=MONITORS):
    optimizer = composition.optimizers()["adamw"]
    changes = {
        "optimizer": optimizer,
        "monitor": monitors,
        "evaluation": {"every": 2, "sequences": 8},
        **steps,
    }
    case = composition.case()
    plain = {**changes, "optimizer": {"use": "adamw", "lr": 0.01, "clip_norm": 0.5}}
    ranks = run_ranks(watch, composition.ranks, case, changes, plant, timeout=240)
    (alone,) = run_ranks(watch, 1, case.alone(), plain, plant)
    for rank, found in enumerate(ranks):
        assert [step for step, *_ in found] == [step for step, *_ in alone]
        for (step, seen, histograms, texts), (_, expected, counts, said) in zip(found, alone, strict=True):
            values, wanted = (comparable(each, composition) for each in (seen, expected))
            assert values.keys() == wanted.keys(), (rank, step)
            wrong = {
                name: (value, wanted[name])
                for name, value in values.items()
                if value != pytest.approx(wanted[name], rel=TOLERANCE, abs=TOLERANCE, nan_ok=True)
            }
            assert not wrong, f"rank {rank}, step {step}: {wrong}"
            assert (histograms.keys(), texts) == (counts.keys(), said)
            for name, mine in histograms.items():
                assert mine == pytest.approx(counts[name], abs=1e-6), name
    return alone


def comparable(values, composition):
    """Return all but attention's, whose calls see half of the queries with all-gather, and none in a ring."""
    if composition.communication == "all_to_all":
        return values
    return {name: value for name, value in values.items() if not name.startswith("attention/")}


@pytest.mark.full
def test_on_eight_ranks_every_metric_is_that_of_one_process():
    """DeepSeek-V3 over pp, tp with sequence parallelism, dp, ep and ZeRO, with recomputed layers."""
    alone = assert_watches_the_same(FOUR, {"run": {"steps": 2, "log_every": 2}})
    names = {name for _, values, histograms, texts in alone for name in (*values, *histograms, *texts)}
    monitors = [load_plugins().get("monitor", each["use"]) for each in MONITORS]
    declared = [metric for monitor in monitors for metric in monitor.metrics]
    found = {metric.name for name in names if (metric := MetricNames(declared).find(name)) is not None}
    assert {metric.name for metric in declared} - found == LATER
    for prefix in (
        "attention/entropy/mtp",
        "moe/bias_norm/layers",
        "norms/rms/layers.1.attn.kv_a_norm",
        "probes/leak",
    ):
        assert any(name.startswith(prefix) for name in names), prefix
    for _, values, *_ in alone:  # the last layer is not the block for multi-token prediction
        if "gradients/first_last" in values:
            first, last = (values[f"gradients/norm/layers.{n}"] for n in (0, FOUR.layers - 1))
            assert values["gradients/first_last"] == pytest.approx(first / last)


@pytest.mark.full
def test_on_eight_ranks_metrics_of_many_steps_are_those_of_one_process():
    """Windows are full, steps were skipped, targets ignored, and data mixed; there are no conversations."""
    steps = {"run": {"steps": series.STEPS}, "evaluation": {"every": 20, "sequences": 8}}
    alone = assert_watches_the_same(FOUR, steps, series.plant, series.MONITORS)
    names = {name for _, values, _, texts in alone for name in (*values, *texts)}
    later = {metric for metric in LATER if any(matching(metric, names))}
    assert LATER - later == {"moe/all_to_all_bytes/{experts}", "data/masked", "validation/masked"}


@pytest.mark.full
@pytest.mark.parametrize("case", [FOUR.case(), compiled(DDP)], ids=["4d", "compiled"])
def test_watching_changes_no_bit(case):
    changes = {"run": {**case.overrides.get("run", {}), "steps": 3, "log_every": 2}}
    watched, alone = (
        run_ranks(train, case.world_size, case, {**changes, "monitor": monitors})
        for monitors in (MONITORS, [])
    )
    for ours, theirs in zip(watched, alone, strict=True):
        assert_same_reports(ours, theirs, atol=0.0)
        assert_bitwise(ours.streams, theirs.streams, "random-number streams")
        assert_bitwise(
            {b.name: b.tensor for b in ours.weights}, {b.name: b.tensor for b in theirs.weights}, "weights"
        )


@pytest.mark.full
def test_ranks_count_the_bytes_that_they_send_to_experts():
    """Both ways, forward and backward: four times the rows that leave a rank, in float64.

    Those of training alone, not of evaluations and probes between the steps.
    """
    composition = Composition(
        model="deepseek_v3", tp=1, pp=1, dp=2, ep=2, etp=1, schedule="accumulate", sp=False, tied=False,
        microbatch=4, experts_first=False, zero=0, recompute=False,
    )  # fmt: skip
    case = composition.case()
    passes = {
        "evaluation": {"every": 1, "sequences": 4},
        "monitor": [{"use": "moe"}, {"use": "probes", "every": 1}],
    }
    found = run_ranks(sent, 2, case, passes | {"run": {"steps": 2}})
    (told, rows), (other, more) = found
    assert told == other
    width = case.recipe().model.config.width
    for name, total in told.items():
        assert total == 4 * 8 * width * (rows[name] + more[name])


def sent(case, changes):
    """Return the bytes told, and how many of this rank's rows were for experts of the other, by module."""
    told, rows = Told(), {}
    engine = make_engine(case, changes, callbacks=[told])
    for name, module, tag in tagged(engine.run.stages[0]):
        if tag.role is Role.EXPERTS:

            def count(module, args, output, name=name):
                experts, half = args[1].experts, case.recipe().model.config.experts // 2
                mine = (experts // half) == engine.run.mesh.coordinate("ep")
                rows[name] = rows.get(name, 0) + int((~mine).sum()) * module.training

            module.register_forward_hook(count)
    engine.fit()
    prefix = "moe/all_to_all_bytes/"
    total = {}
    for name, x in (pair for report in told.reports for pair in report.values.items()):
        if name.startswith(prefix):
            total[name.removeprefix(prefix)] = total.get(name.removeprefix(prefix), 0) + x
    return total, rows
