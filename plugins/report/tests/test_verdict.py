"""The four questions, answered from runs of which the answer is known."""

import json
from functools import partial

import pytest
from made_up import MadeUp
from nanotrain_report.families import OVER
from nanotrain_report.folder import open_run
from nanotrain_report.parts import memory_of_ranks
from nanotrain_report.verdict import answers

from nanotrain_core.api import Metric, Rule


def asked(folder, number, losses=(4.0, 3.0, 2.0, 1.0), held=None, more=None, declared=(), **fields):
    """Return the answer to a question about a run with these losses."""
    run = MadeUp(folder, steps=len(losses), declared=declared)
    run.start()
    for step, loss in enumerate(losses, start=1):
        run.step(step, loss=loss, **fields)
        if more:
            run.row("metrics", step=step, values=more)
        if held:
            run.row("evaluation", step=step, loss=held[step - 1], bits_per_byte=None, tokens=1)
    return answers(open_run(run.write()))[number]


FALLING = [5.0 - 0.1 * n for n in range(40)]


@pytest.mark.parametrize(
    ("losses", "held", "status", "says"),
    [
        (FALLING, None, "good", "Yes"),
        (FALLING[:20] + [FALLING[20]] * 40, None, "good", "levelled off"),
        (FALLING[::-1], None, "bad", "risen"),
        (FALLING[:30] + [FALLING[29] + 0.05 * n for n in range(30)], None, "warn", "worse since step"),
        (FALLING, [3.0 - 0.1 * n for n in range(20)] + [1.0 + 0.05 * n for n in range(20)], "warn", "worse"),
        ([*FALLING, float("nan"), float("nan")], None, "bad", "not a number"),
        ([float("nan")] * 3, None, "bad", "no loss"),
    ],
    ids=["falls", "flat", "rises", "turned", "overfits", "broken", "never"],
)
def test_is_it_learning(tmp_path, losses, held, status, says):
    found = asked(tmp_path, 0, losses, held)
    assert found.status == status
    assert says.lower() in found.headline.lower()
    if says == "not a number":
        assert "step 41" in found.detail


def test_a_loss_of_terms_is_called_a_sum_and_few_evaluations_are_told_beside_it(tmp_path):
    """Multi-token prediction adds to the training loss, and not to validation: they do not compare."""
    run = MadeUp(tmp_path, steps=20)
    run.start()
    for step in range(1, 21):
        run.step(step, loss=6.0 - 0.1 * step, losses={"lm": 4.0, "mtp": 1.0})
        if step in (1, 20):
            run.row("evaluation", step=step, loss=4.5 - 0.1 * step, bits_per_byte=None, tokens=1)
    found = answers(open_run(run.write()))[0]
    assert found.headline == "Yes"
    assert found.detail.startswith("Training loss (lm + mtp, weighted) went from 5.")
    assert found.detail.endswith("Validation loss went from 4.4 to 2.5.")


@pytest.mark.parametrize(
    ("last", "says"),
    [(3.1, "rose by 0.1"), (2.9999, "fell by only 0.0001"), (3.0, "stood still")],
    ids=["rose", "fell", "stood"],
)
def test_a_loss_that_has_levelled_off_is_said_to_rise_or_to_fall(tmp_path, last, says):
    held = [5.0] * 10 + [3.0] * 75 + [last] * 15
    found = asked(tmp_path, 0, FALLING * 2 + FALLING[:20], held)
    assert found.headline == "Yes, but it has levelled off"
    assert f"; in the last fifth it {says}." in found.detail


@pytest.mark.parametrize(
    ("device", "cores", "said"), [("cpu", 2, True), ("cpu", 4, False), ("cuda", 2, False)]
)
def test_ranks_that_share_cores_are_why_a_step_is_slow(tmp_path, device, cores, said):
    run = MadeUp(tmp_path, steps=4, declared=[Metric(name="time/own", unit="s", group="time", summary="x")])
    run.start()
    run.rows[0]["device"] = device
    for step in range(1, 5):
        run.step(step)
        run.row("metrics", step=step, values={"time/own": 0.4})
    begins = {"event": "run begins", "rank": 0, "level": "info", "cpus": cores, "local_ranks": 4}
    (tmp_path / "run.log.jsonl").write_text(json.dumps(begins) + "\n", encoding="utf-8")
    found = answers(open_run(run.write()))[1]
    assert ("4 ranks share 2 cores: " in found.detail) == said


def test_a_gradient_that_is_no_number_teaches_nothing(tmp_path):
    run = MadeUp(tmp_path)
    run.start()
    for step in range(1, 9):
        run.step(step, loss=9.0 - step, grad_norm=float("nan") if step > 6 else 1.0)
    found = answers(open_run(run.write()))[0]
    assert (found.status, found.headline) == ("bad", "No: the gradient is not a number")
    assert "Since step 7" in found.detail


def test_what_is_slow(tmp_path):
    declared = [Metric(name="time/own_{what}", unit="s", group="time", summary="waiting for the loader")]
    found = asked(tmp_path, 1, declared=declared, more={"time/own_data": 0.3, "time/own_optimizer": 0.1})
    assert found.headline == "Own data takes 60% of a step"
    assert found.status == "warn"
    assert "Own data: seconds of waiting for the loader" in found.detail
    assert "other 20%" in found.detail
    rule = Rule(warn_above=0.3, bad_above=0.5, high="training waits for data: use more loader threads")
    more = Metric(name="time/data_fraction", unit="1", group="time", summary="", rule=rule)
    values = {"time/own_data": 0.3, "time/data_fraction": 0.6}
    found = asked(tmp_path / "2", 1, declared=[*declared, more], more=values)
    assert found.status == "bad"
    assert "Training waits for data" in found.detail
    found = asked(tmp_path / "3", 1, bubble=0.4)
    assert found.status == "warn"
    assert found.headline == "Ranks wait 40% of a step for other stages"
    found = asked(tmp_path / "4", 1)
    assert found.status == "unknown"
    assert found.headline == "500 ms a step"


def test_a_part_of_the_slowest_rank_is_left_out_of_a_stack_that_it_does_not_fit_in(tmp_path):
    """The others are means of ranks; half a second is a step."""
    part = partial(Metric, unit="s", group="time", summary="a part")
    declared = [part(name="time/own_data", reduce="max"), part(name="time/own_optimizer")]
    for data, headline in ((0.05, "Own optimizer takes 80%"), (0.45, "Own optimizer takes 80%")):
        more = {"time/own_data": data, "time/own_optimizer": 0.4}
        found = asked(tmp_path / str(data), 1, declared=declared, more=more)
        assert found.headline.startswith(headline)
        assert ("own data" in found.detail.lower()) == (data < 0.1)


def test_each_rank_has_its_memory_where_a_histogram_counts_ranks(tmp_path):
    peak = [Metric(name=f"memory/peak/{over}", unit="MiB", group="memory", summary="") for over in OVER]
    each = Metric(name="memory/ranks", unit="MiB", group="memory", kind="histogram", summary="")
    made = MadeUp(tmp_path, declared=[*peak, each])
    made.start()
    for step, held in ((1, [5.0, 7.0, 6.0, 4.0]), (2, [5.0, 9.0, 6.0, 8.0]), (3, [5.0, 9.0, 6.0, 3.0])):
        values = dict(zip((metric.name for metric in peak), (max(held), 6.0, 6.0, 1.0), strict=True))
        counted = {"edges": [0.0, 1.0, 2.0, 3.0, 4.0], "counts": held, "below": 0, "above": 0, "nan": 0}
        made.row("metrics", step=step, values=values, histograms={"memory/ranks": counted})
    found = memory_of_ranks(open_run(made.write()))
    assert found.ranks == [("0", 5.0, 5.0), ("1", 9.0, 9.0), ("2", 6.0, 6.0), ("3", 3.0, 8.0)]
    assert (found.fullest, found.peak) == ("1", 9.0)


def test_which_rank_is_full(tmp_path):
    assert asked(tmp_path, 2).status == "unknown"
    rank = Metric(name="memory/peak/{rank}", unit="bytes", group="memory", summary="")
    values = {f"memory/peak/{n}": 1e9 * (3 if n == 2 else 1) for n in range(4)}
    found = asked(tmp_path / "2", 2, declared=[rank], more=values)
    assert found.headline == "Rank 2 holds most: 3 GB"
    assert "mean of ranks is 1.5 GB" in found.detail
    over = [
        Metric(name=f"memory/host_peak/{over}", unit="MiB", group="memory", summary="")
        for over in ("max", "mean", "rank")
    ]
    over.append(Metric(name="memory/host_fraction", unit="1", group="memory", summary=""))
    told = {"memory/host_peak/max": 2048.0, "memory/host_peak/mean": 1024.0, "memory/host_peak/rank": 7.0}
    told["memory/host_fraction"] = 0.25
    found = asked(tmp_path / "over", 2, declared=over, more=told)
    assert found.headline == "None: rank 7 holds most"
    assert "The most so far is 2 GiB; the mean of ranks is 1 GiB" in found.detail
    assert "25% is in use" in found.detail
    rule = Rule(warn_above=0.9, bad_above=0.95, high="memory is nearly full")
    share = Metric(name="memory/fraction", unit="1", group="memory", summary="", rule=rule)
    found = asked(tmp_path / "3", 2, declared=[rank, share], more={**values, "memory/fraction": 0.97})
    assert (found.status, found.headline) == ("bad", "Rank 2, at 97%")
    found = asked(tmp_path / "4", 2, declared=[rank, share], more={**values, "memory/fraction": 0.5})
    assert (found.status, found.headline) == ("good", "None: rank 2 comes closest, at 50%")


@pytest.mark.parametrize(("load", "status"), [(None, "none"), (2.5, "good"), (12.0, "warn"), (31.0, "bad")])
def test_are_experts_balanced_by_the_declared_rule(tmp_path, load, status):
    rule = Rule(warn_above=10, bad_above=30)
    busiest = Metric(name="moe/max_load/{router}", unit="1", group="moe", summary="", rule=rule)
    assert asked(tmp_path, 3, expert_load=load, declared=[busiest]).status == status


def test_routing_that_has_collapsed_is_not_balanced(tmp_path):
    rule = Rule(warn_below=0.3, bad_below=0.15, low="routing has collapsed")
    balance = Metric(name="moe/balance/{router}", unit="1", group="moe", summary="", rule=rule)
    found = asked(tmp_path, 3, expert_load=2.0, declared=[balance], more={"moe/balance/a": 0.1})
    assert (found.status, found.headline) == ("bad", "No")
    assert "0.1 of an even one's" in found.detail


def test_a_run_that_has_not_begun_has_four_answers(tmp_path):
    (tmp_path / "recipe.toml").write_text("")
    assert [each.status for each in answers(open_run(tmp_path))] == ["unknown", "unknown", "unknown", "none"]
