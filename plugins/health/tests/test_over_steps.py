"""Averages over steps of which one has no loss, and percentiles of many layers."""

import math
from types import SimpleNamespace

import pytest
import torch
from nanotrain_health import HealthConfig
from nanotrain_health.catalogue.training import GRADIENTS, OPTIMIZER
from nanotrain_health.diagnosis import Diagnosis
from nanotrain_health.losses import Losses
from nanotrain_health.ratios import Ratios

from nanotrain_core.api.torch import MetricsReport
from nanotrain_core.testing import Case


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


def clipping(ratios, norms):
    """Return what is warned of in the given order of gradient norms, clipped at 1."""
    diagnosis, metrics = Diagnosis(patience=5), {each.name: each for each in (*GRADIENTS, *OPTIMIZER)}
    for number, norm in enumerate(norms, 1):
        found = ratios.derive(step(number, grad_norm=norm))
        report = MetricsReport(number, found, metrics={name: metrics[name] for name in found})
        yield from (each.text for each in diagnosis.judge(report))


def test_steps_that_are_clipped_a_little_are_no_trouble_and_those_to_a_third_are():
    assert [*clipping(Ratios(scene()), [1.1, 1.5, 0.9] * 70)] == []
    (said,) = clipping(Ratios(scene()), [3.0] * 210)
    assert said.startswith("step 104: over the last 100 logged steps gradients were clipped to 0.333 of")


def test_the_window_of_clipping_survives_a_resume():
    first, second = Ratios(scene()), Ratios(scene())
    assert [*clipping(first, [3.0] * 99)] == []
    second.load_meta(first.meta())
    assert second.derive(step(100, grad_norm=1.5))["gradients/clip_mean"] == pytest.approx(0.99 / 3 + 1 / 150)


def test_percentiles_of_the_layers_proxies():
    layers = tuple(f"layers.{n}" for n in range(40))
    gradients = {f"gradients/norm/{name}": float((7 * n) % 40 + 1) for n, name in enumerate(layers)}
    weights = {f"weights/norm/{name}": 2.0 for name in layers}
    found = Ratios(scene(layers=layers, clip_norm=0.0)).derive(step(1, **gradients, **weights))
    ratios = sorted(0.1 * x / 2.0 for x in gradients.values())
    assert found["updates/proxy_max"] == pytest.approx(ratios[-1])
    assert found["updates/proxy_p95"] == pytest.approx(ratios[37])  # of 40, 38 are at most as large
    assert found["updates/proxy_median"] == pytest.approx((ratios[19] + ratios[20]) / 2)


def test_updates_are_scaled_to_the_highest_rate_of_all_phases():
    phases = [
        {"until_tokens": 10_000, "optimizer": {"lr": 0.02}},
        {"until_tokens": 20_000, "optimizer": {"lr": {"end": 0.05, "shape": "linear"}}},
        {"optimizer": {"lr": 0.01}},
    ]
    seen = scene(layers=("layers.0",))
    seen.run.recipe = Case("topology", use="grid").recipe(phase=phases)
    values = {"updates/norm/layers.0": 1.0, "weights/norm/layers.0": 4.0}
    found = Ratios(seen).derive(step(1, **values))
    assert found["updates/ratio_at_full_lr"] == pytest.approx(1 / 4 * 0.05 / 0.1)
