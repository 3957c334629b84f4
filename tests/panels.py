"""A panel of a made-up run, and its lines."""

from nanotrain_core.contracts import StepReport
from nanotrain_core.monitors.lines import step_fields
from nanotrain_core.monitors.panel import Panel


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def report(step, loss, **more):
    given = {"losses": {"lm": loss}, "grad_norm": 1.25, "lr": 3e-4, "tokens": step, "seconds": 0.083}
    return StepReport(step=step, loss=loss, tokens_per_second=12345.6, **{**given, **more})


class Trained(Panel):
    """Half a second for a step."""

    def run(self, last, *, first=1, seconds=0.5, **more):
        for step in range(first, last + 1):
            self.clock.now += seconds
            self.step(one := report(step, 8.0 / step, **more), step_fields(one, 500, 0.42))


def shown(panel, width=80, height=25, **options):
    return [line.plain.rstrip() for line in panel.lines(width, height, **options)]
