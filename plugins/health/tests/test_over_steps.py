"""What is over several logged steps, or of many layers: averages, rates and percentiles."""

import math
from types import SimpleNamespace

import pytest
import torch
from nanotrain_health import HealthConfig
from nanotrain_health.data import DataWatcher
from nanotrain_health.losses import Losses
from nanotrain_health.ratios import Ratios

from nanotrain_core.api.torch import MetricsReport


def scene(config=None, *, layers=(), data=None, clip_norm=1.0):
    metrics = SimpleNamespace(published={})
    metrics.scalar = metrics.published.__setitem__
    optimizer = SimpleNamespace(config=SimpleNamespace(clip_norm=clip_norm, lr=1.0))
    run = SimpleNamespace(
        recipe=SimpleNamespace(optimizer=optimizer),
        device=torch.device("cpu"),
        data=data,
    )
    return SimpleNamespace(
        run=run, config=config or HealthConfig(), metrics=metrics, layers=layers, depth=layers
    )


def step(number, **values):
    return MetricsReport(number, {"grad_norm": 1.0, "lr": 0.1, **values})


def test_the_loss_over_its_average_before():
    decay, average = 0.9, None
    watcher = Losses(scene(HealthConfig(ema=decay)))
    for number, loss in enumerate([4.0, 3.0, math.nan, 9.0, 2.5], start=1):
        found = watcher.derive(step(number, loss=loss))
        assert found["loss/nonfinite"] == float(math.isnan(loss))
        if math.isnan(loss) or average is None:
            assert "loss/spike" not in found
        else:
            assert found["loss/spike"] == pytest.approx(loss / average)
        if not math.isnan(loss):
            steps = 1 if number != 4 else 2  # the step without a number counts in the decay
            kept = decay**steps
            average = loss if average is None else kept * average + (1 - kept) * loss
        assert found["loss/ema"] == pytest.approx(average)


def test_the_share_of_clipped_and_of_skipped_steps():
    watcher, clipped, skipped = Ratios(scene(clip_norm=1.0)), [], []
    for number in range(1, 131):
        skips, norm = number % 4 == 0, 3.0 if number % 5 == 0 else 0.5
        found = watcher.derive(step(number, skipped=float(skips), grad_norm=norm))
        skipped.append(skips)
        if len(skipped) >= 10:
            assert found["optimizer/skip_rate"] == pytest.approx(sum(skipped[-20:]) / len(skipped[-20:]))
        else:
            assert "optimizer/skip_rate" not in found
        if skips:
            assert "gradients/clip_rate" not in found
            continue
        clipped.append(norm > 1)
        assert ("gradients/clip_rate" in found) == (len(clipped) >= 100)
        if len(clipped) == 100:
            assert found["gradients/clip_rate"] == sum(clipped) / 100 > 0


def test_percentiles_of_the_layers_proxies():
    layers = tuple(f"layers.{n}" for n in range(40))
    gradients = {f"gradients/norm/{name}": float((7 * n) % 40 + 1) for n, name in enumerate(layers)}
    weights = {f"weights/norm/{name}": 2.0 for name in layers}
    found = Ratios(scene(layers=layers, clip_norm=0.0)).derive(step(1, **gradients, **weights))
    ratios = sorted(0.1 * x / 2.0 for x in gradients.values())
    assert found["updates/proxy_max"] == pytest.approx(ratios[-1])
    assert found["updates/proxy_p95"] == pytest.approx(ratios[37])  # of 40, 38 are at most as large
    assert found["updates/proxy_median"] == pytest.approx((ratios[19] + ratios[20]) / 2)


class Mixed:
    """Data of two sources."""

    def tokens_by_source(self):
        return {"web": 300, "code": 100}


def test_tokens_that_teach_and_where_they_come_from():
    watched = scene(HealthConfig(ema=0.5), data=Mixed())
    watcher = DataWatcher(watched)
    for number, effective in enumerate((80, 80, 60), start=1):
        counts = {"lm": torch.tensor(float(effective), dtype=torch.float64)}
        watcher.before_update(SimpleNamespace(step=number, tokens=100, counts=counts, logged=True))
        published = {name: float(value) for name, value in watched.metrics.published.items()}
        found = watcher.derive(step(number, loss=1.0, **published))
    assert published["data/effective_tokens"] == 220
    assert (published["data/mixture/web"], published["data/mixture/code"]) == (0.75, 0.25)
    assert found == {
        "data/tokens_per_update": 100.0,
        "data/ignored": pytest.approx(0.4),
        "data/drift": pytest.approx(0.25),  # from 80 on average to 60
    }
