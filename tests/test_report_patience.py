"""The report lists as wrong what the monitor ``health`` reports, however values come and go."""

import math

import numpy as np
from made_up import CLIP
from nanotrain_health.diagnosis import Diagnosis
from nanotrain_report.families import families
from nanotrain_report.health import Judging, stretches

from nanotrain_core.api import Curve
from nanotrain_core.api.torch import MetricsReport


def test_stretches_are_those_that_the_monitor_reports():
    for seed in range(60):
        random = np.random.default_rng(seed)
        levels = random.choice([0.9, 0.05, 0.001, math.nan], p=[0.5, 0.44, 0.05, 0.01], size=12)
        values = np.repeat(levels, random.integers(1, 6, size=12)).tolist()
        diagnosis, curve, said = Diagnosis(patience=3), Curve(), False
        for step, value in enumerate(values, start=1):
            report = MetricsReport(step, {CLIP.name: value}, metrics={CLIP.name: CLIP})
            said |= any(not each.over for each in diagnosis.judge(report))
            curve.add(step, value)
        (family,) = families({CLIP.name: curve}, [CLIP])
        assert bool(stretches(family, Judging(patience=3))) == said, values
