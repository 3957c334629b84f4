"""``metrics.jsonl`` read back: curves of the last attempts, continuations, and what was given up."""

import json
import math
import resource

import attrs
import pytest

from nanotrain_core.builtin.configs import JsonlConfig
from nanotrain_core.contracts import EvaluationReport, MetricsReport, RollbackReport, StepReport
from nanotrain_core.metrics.core import CORE
from nanotrain_core.metrics.history import Continuation, Curve, last_attempt, read_metrics
from nanotrain_core.metrics.of_reports import CHECKPOINT, EVALUATION, STEP, of_evaluation, of_step
from nanotrain_core.metrics.report import Histogram
from nanotrain_core.monitors.jsonl import Jsonl


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a run's attempt with the monitor itself."""

    class Info:
        name, folder, steps, rank, world_size, device = "x", tmp_path, 9, 0, 1, "cpu"
        parameters, tokens_per_step, flops_per_token, first_step = 7, 8, 9.0, 0
        declared = ()

    def begin(first_step=0):
        info, monitor = Info(), Jsonl(JsonlConfig())
        info.first_step = first_step
        monitor.on_start(info)
        return monitor

    return begin


def step(number, loss, **more):
    given = {"losses": {"lm": loss}, "grad_norm": 1.0, "lr": 0.1, "tokens": 8 * number}
    return StepReport(step=number, loss=loss, tokens_per_second=1.0, seconds=0.5, **{**given, **more})


def curve(found, name="loss"):
    return dict(found.curves[name])


def test_the_file_has_every_number_that_sinks_are_told(written, tmp_path):
    monitor = written()
    reports = [step(1, 2.0), step(2, math.nan, expert_load=1.5, bubble=0.1, skipped=True, grad_norm=math.inf)]
    evaluation = EvaluationReport(2, -math.inf, 0.5, 8)
    histogram = Histogram((0.0, 1.0, math.inf), (1.0, 2.0), 0.0, 1.0, math.nan)
    for report in reports:
        monitor.on_step(report)
    told = {"plain": 1.0, "nan": math.nan, "low": -math.inf}
    published = frozenset([*told, "spread", "words"])
    monitor.on_metrics(MetricsReport(2, told, {"spread": histogram}, {"words": "NaN"}, published=published))
    monitor.on_evaluation(evaluation)
    found = read_metrics(tmp_path)
    expected = {(2, n): v for n, v in {**told, **of_evaluation(attrs.asdict(evaluation))}.items()}
    expected |= {(each.step, n): v for each in reports for n, v in of_step(attrs.asdict(each)).items()}
    got = {(at, name): value for name, each in found.curves.items() for at, value in each}
    assert repr(sorted(got.items())) == repr(sorted(expected.items()))
    assert repr(found.histograms) == repr({"spread": [(2, histogram)]})
    assert found.texts == {"words": [(2, "NaN")]}
    assert (found.attempt, found.step, found.torn, found.end) == (1, 2, 0, {})
    assert found.start["parameters"] == 7


def test_every_metric_of_the_core_is_read_from_reports_and_rows(written, tmp_path):
    terms = {"losses/{term}", "validation/losses/{term}"}
    assert {*STEP, *terms, *EVALUATION, *CHECKPOINT} == {metric.name for metric in CORE}
    monitor = written()
    monitor.on_step(step(1, 2.0, phase=3))
    assert curve(read_metrics(tmp_path), "phase") == {1: 3.0}


def test_every_line_is_json_as_its_standard_has_it(written, tmp_path):
    monitor = written()
    monitor.on_step(step(1, math.nan, grad_norm=-math.inf))

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    rows = [json.loads(x, parse_constant=refuse) for x in (tmp_path / "metrics.jsonl").open()]
    assert [rows[1][key] for key in ("loss", "losses", "grad_norm")] == ["NaN", {"lm": "NaN"}, "-Infinity"]


def test_a_resume_and_a_rollback_replace_what_they_leave_behind(written, tmp_path):
    monitor = written()
    for number in (2, 4, 5, 6):
        monitor.on_step(step(number, number))
    monitor = written(first_step=4)  # the first was killed; the second logs other steps
    monitor.on_step(step(7, 70))
    monitor.on_step(step(8, 80))
    monitor.on_rollback(RollbackReport(8, 8, 7, (0, 1), 1, "a spike"))
    monitor.on_step(step(9, 90))
    found = read_metrics(tmp_path)
    assert curve(found) == {2: 2, 4: 4, 7: 70, 9: 90}
    assert [attrs.evolve(continuation, time=0) for continuation in found.continuations] == [
        Continuation(2, "resume", 4, 6, 0, "killed"),
        Continuation(3, "rollback", 7, 8, 0, "a spike"),
    ]
    left = {n: {name: dict(each) for name, each in each.items()} for n, each in found.abandoned.items()}
    assert {n: each["loss"] for n, each in left.items()} == {1: {5: 5, 6: 6}, 2: {8: 80}}
    assert found.attempt == 3
    assert {*dict(found.times)} == {*curve(found)}


def test_what_was_logged_only_in_abandoned_steps_is_no_empty_curve(written, tmp_path):
    """A reader takes the newest value of each: there is always one."""
    monitor = written()
    histogram = Histogram((0.0, 1.0), (1.0,), 0.0, 0.0, 0.0)
    names = frozenset({"old", "spread", "words"})
    monitor.on_step(step(1, 5.0))
    monitor.on_metrics(MetricsReport(1, {"old": 1.0}, {"spread": histogram}, {"words": "x"}, published=names))
    written(first_step=0)
    found = read_metrics(tmp_path)
    assert (found.curves, found.histograms, found.texts, found.step) == ({}, {}, {}, 0)
    assert dict(found.abandoned[1]["old"]) == {1: 1.0}


def test_what_is_published_before_the_first_step_has_its_step_too(written, tmp_path):
    written().on_metrics(MetricsReport(0, {"a": 1.0}, published=frozenset({"a"})))
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (row["event"], row["step"], row["values"]) == ("metrics", 0, {"a": 1.0})
    assert not {"histograms", "texts"} & row.keys()


@pytest.mark.parametrize("number", [2**70, 2**63, -(2**70)])
def test_a_step_beyond_64_bits_is_an_unreadable_row(written, tmp_path, number):
    written().on_step(step(1, 5.0))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        for event in ("evaluation", "metrics", "step", "checkpoint"):
            row = {"loss": 1.0, "bits_per_byte": None, "losses": {}, "values": {"a": 1.0}, "seconds": 1.0}
            file.write(json.dumps({"event": event, "step": number, "time": 9, "blocked": 0.0, **row}) + "\n")
    found = read_metrics(tmp_path)
    assert (curve(found), found.step, found.torn, len(found.events)) == ({1: 5.0}, 1, 4, 1)


def test_a_line_that_was_cut_short_costs_no_other(written, tmp_path):
    path = tmp_path / "metrics.jsonl"
    monitor = written()
    monitor.on_step(step(1, 1.0))
    monitor.on_step(step(2, 2.0))
    path.write_bytes(path.read_bytes()[:-20])  # killed while it wrote
    assert read_metrics(tmp_path).torn == 1
    monitor = written(first_step=1)
    monitor.on_step(step(2, 3.0))
    found = read_metrics(tmp_path)
    assert (curve(found), found.torn, found.attempt) == ({1: 1.0, 2: 3.0}, 1, 2)


def test_a_row_that_found_no_space_costs_no_other(written, tmp_path):
    path, before = tmp_path / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    monitor = written()
    for number in (1, 2, 3):
        monitor.on_step(step(number, number))
    large = MetricsReport(3, {}, {}, {"text": "x" * 20_000}, published=frozenset(["text"]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5000, before[1]))
    with pytest.raises(OSError, match="File too large"):
        monitor.on_metrics(large)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    monitor.on_rollback(RollbackReport(3, 3, 1, (0, 1), 1, "a spike"))
    monitor.on_step(step(2, 20))
    found = read_metrics(tmp_path)
    assert (curve(found), found.torn, found.attempt) == ({1: 1, 2: 20}, 1, 2)
    assert [attrs.evolve(continuation, time=0) for continuation in found.continuations] == [
        Continuation(2, "rollback", 1, 3, 0, "a spike")
    ]


@pytest.mark.parametrize("again", [4, 9])
def test_an_attempt_whose_first_row_is_unreadable_replaces_what_it_leaves_behind(written, tmp_path, again):
    monitor = written()
    for number in (1, 2, 4, 5, 6):
        monitor.on_step(step(number, number))
    monitor = written(first_step=3)
    monitor.on_step(step(again, 40))
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    (row,) = (number for number, line in enumerate(lines) if b'"first_step": 3' in line)
    path.write_bytes(b"".join([*lines[:row], b"?" + lines[row], *lines[row + 1 :]]))
    found, kept = read_metrics(tmp_path), {1: 1, 2: 2} if again == 4 else {1: 1, 2: 2, 4: 4, 5: 5, 6: 6}
    assert (curve(found), found.torn, found.attempt) == (kept | {again: 40}, 1, 2)
    assert [attrs.evolve(continuation, time=0) for continuation in found.continuations] == [
        Continuation(2, "resume", 3 if again == 4 else 6, 6, 0, "killed")
    ]


def test_an_attempt_whose_first_row_is_unreadable_may_evaluate_first(tmp_path):
    """It had cut the curves behind the step before, of which it goes on."""
    rows = [{"event": "start", "attempt": 1, "first_step": 0, "time": 1}]
    rows += [{"event": "step", "attempt": 1, "step": n, "time": n, "losses": {"lm": n}} for n in (1, 2, 3, 4)]
    rows.append({"event": "evaluation", "attempt": 2, "step": 3, "time": 6, "loss": 1.5})
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join([*map(json.dumps, rows[:5]), '{"event": "start", "ti', json.dumps(rows[5])]))
    found = read_metrics(tmp_path)
    assert dict(found.curves["losses/lm"]) == {1: 1, 2: 2, 3: 3}
    assert [(continuation.step, continuation.came_to) for continuation in found.continuations] == [(3, 4)]


def test_files_of_before_rows_had_their_attempt_are_read(tmp_path):
    rows = [{"event": "start", "first_step": 0, "time": 1}, {"event": "start", "first_step": 0, "time": 2}]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"event": "x", "v": NaN}', "[]", ""]))
    found = read_metrics(tmp_path)
    assert (found.attempt, found.torn) == (2, 1)
    assert last_attempt(tmp_path / "metrics.jsonl") == 2


def test_the_last_attempt_is_found_from_the_end_whatever_its_rows_length(tmp_path, monkeypatch):
    monkeypatch.setattr("nanotrain_core.metrics.history._TAIL", 8)
    path = tmp_path / "metrics.jsonl"
    rows = [{"event": "step", "attempt": n, "text": "x" * 100} for n in (1, 2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"event": "st')
    assert last_attempt(path) == 2
    assert last_attempt(tmp_path / "none") == 0


def test_only_the_metrics_that_are_asked_for_are_kept(written, tmp_path):
    written().on_step(step(1, 1.0))
    assert {*read_metrics(tmp_path, ["lo*", "lr"]).curves} == {"loss", "losses/lm", "loss_scale", "lr"}
    assert read_metrics(tmp_path / "nothing").curves == {}


def test_a_curve_is_cut_behind_a_step():
    whole = Curve()
    for number in (1, 2, 2, 4):
        whole.add(number, number / 2)
    rest = whole.cut(2)
    assert ([*whole], [*rest], whole.last) == ([(1, 0.5), (2, 1.0)], [(4, 2.0)], 1.0)
