"""In which steps tensors are read."""

import pytest
from health_runs import Told, run
from health_troubles import sharpen

from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine


def readings(told):
    return [report.step for report in told.reports if "weights/norm" in report.values]


def test_tensors_are_read_in_the_first_steps_and_then_now_and_then():
    case = Case("monitor", use="health", config={"every": 3})
    told = Told()
    make_engine(case, {"run": {"steps": 27}}, callbacks=[told]).fit()
    assert readings(told) == [*range(1, 21), 23, 26]
    for report in told.reports:
        assert ("residual/rms/layers.0" in report.values) == (report.step in readings(told))
    assert all("loss/ema" in report.values for report in told.reports)


def collapse(engine, begin, end):
    """Have attention collapse after one step, and undo it after another."""
    run, kept = engine.executor.run, {}

    def planted(*args):
        weights = [layer.attn.q.weight for layer in engine.run.stages[0].layers.values()]
        if engine.step == begin:
            kept.update(enumerate([weight.detach().clone() for weight in weights]))
            sharpen(engine)
        elif engine.step == end:
            for number, weight in enumerate(weights):
                weight.data.copy_(kept[number])
        return run(*args)

    engine.executor.run = planted


@pytest.mark.full
def test_what_a_reading_finds_is_read_in_each_step_until_it_is_reported():
    """Two bad values are reported, in 1 step and not in 10; and so are five good ones, which end it."""
    told = run({}, lambda engine: collapse(engine, 22, 43), steps=60, every=10)
    assert readings(told)[20:] == [30, 31, 41, 51, 52, 53, 54, 55]
    told_of = " ".join(told.sentences)
    assert "step 31: attention of layers.0 (and 2 more) has collapsed" in told_of
    assert "step 55: this is over: attention of layers.0 (and 2 more) has collapsed" in told_of
