"""Run folders made up for tests: what monitors of any kind might leave, without training anything."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from nanotrain_core.api import CORE_METRICS, Bins, Metric, Rule
from nanotrain_core.metrics.declared import describe

RECIPE = """\
[run]
name = "made-up"
steps = {steps}
seed = 7
ranks = 4

[batch]
sequences = 16
microbatch = 4
length = 128

[topology]
use = "grid"
pp = 1
tp = 2

[model]
use = "transformer"
layers = 4
width = 64

[versions]
nanotrain-core = "0.1.0"
"""

#: What monitors that this package knows nothing of might declare.
DECLARED = (
    Metric(name="time/data", unit="s", group="time", summary="waiting for data"),
    Metric(name="time/forward_backward", unit="s", group="time", summary="forward and backward"),
    Metric(name="time/optimizer", unit="s", group="time", summary="the optimizer's step"),
    Metric(name="time/p95", unit="s", group="time", summary="95th percentile of a step"),
    Metric(
        name="memory/fraction",
        unit="1",
        group="memory",
        summary="peak over capacity, the fullest rank",
        rule=Rule(warn_above=0.9, bad_above=0.95, high="memory is nearly full: recompute more"),
    ),
    Metric(name="memory/peak/{rank}", unit="bytes", group="memory", summary="peak of a rank"),
    Metric(
        name="moe/load/{layer}/{expert}", unit="1", group="moe", summary="tokens of an expert over the mean"
    ),
    Metric(
        name="gradients/norm/{parameter}",
        unit="1",
        group="gradients",
        level="debug",
        summary="2-norm of a parameter's gradient",
    ),
    Metric(
        name="updates/ratio/{block}",
        unit="1",
        group="updates",
        summary="update over weight",
        rule=Rule(warn_above=0.1, bad_above=0.3, high="updates are large: lower lr"),
    ),
    Metric(name="health", unit="1", group="health", kind="text", summary="what is wrong"),
    Metric(name="weather/wind", unit="m/s", group="weather", summary="of a stranger's <b>plugin</b>"),
    Metric(
        name="weights/histogram",
        unit="1",
        group="weights",
        kind="histogram",
        bins=Bins(low=1e-6, high=10.0, count=32, log=True),
        summary="of all weights",
    ),
)

#: A metric with limits below which it is wrong.
CLIP = Metric(
    name="gradients/clip_coefficient",
    unit="1",
    group="gradients",
    summary="",
    rule=Rule(warn_below=0.1, bad_below=0.01, low="gradients are clipped to {value}", high="no number"),
)


class MadeUp:
    """Writes ``metrics.jsonl`` row by row, as a run would have."""

    def __init__(
        self, folder: Path, *, steps: int = 200, name: str = "made-up", declared: Any = DECLARED
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.steps, self.name, self.declared = folder, steps, name, declared
        self.attempt, self.now, self.rows = 0, 1_800_000_000.0, list[dict[str, Any]]()
        (folder / "recipe.toml").write_text(RECIPE.format(steps=steps), encoding="utf-8")
        self.random = np.random.default_rng(3)

    def row(self, event: str, **fields: Any) -> None:
        self.now += 0.5
        self.rows.append({"event": event, "time": self.now, "attempt": self.attempt, **fields})

    def start(self, first_step: int = 0) -> None:
        self.attempt += 1
        known = {"name": self.name, "steps": self.steps, "first_step": first_step, "world_size": 4}
        self.row(
            "start", **known, device="cpu", parameters=1234567, tokens_per_step=2048, flops_per_token=6e6
        )
        self.row("declared", metrics=[describe(metric) for metric in (*CORE_METRICS, *self.declared)])

    def step(self, step: int, **changed: Any) -> None:
        loss = 2.0 + 3.6 * math.exp(-6 * step / self.steps) + 0.05 * float(self.random.standard_normal())
        fields = {
            "loss": loss,
            "losses": {"lm": loss},
            "grad_norm": 1.0 + float(self.random.random()),
            "lr": 3e-3 * (1 - step / (self.steps + 1)),
            "tokens": 2048 * step,
            "tokens_per_second": 4096.0,
            "seconds": 0.5,
            "loss_scale": 1.0,
            "skipped": False,
            "expert_load": 1.2,
            "bubble": None,
        }
        self.row("step", step=step, **fields | changed)

    def rich(self, step: int, *, layers: int = 4, experts: int = 8, **values: float) -> None:
        """Add what monitors published in a step."""
        noise = self.random.random(200)
        found = {"time/data": 0.02, "time/forward_backward": 0.4, "time/optimizer": 0.05, "time/p95": 0.7}
        found["memory/fraction"] = 0.5
        found |= {f"memory/peak/rank{rank}": 1e9 + 2e8 * rank for rank in range(4)}
        for layer in range(layers):
            found |= {f"moe/load/layer{layer}/{e}": 0.5 + float(noise[8 * layer + e]) for e in range(experts)}
            for word in ("q", "k", "v", "o", "gate", "up", "down"):
                found[f"gradients/norm/layers.{layer}.{word}.weight"] = float(10 ** (noise[layer] - 2))
            found[f"updates/ratio/{layer}"] = 1e-3 * (1 + float(noise[layer]))
        found["weather/wind"] = 3 + float(noise[0])
        histograms = {}
        if step % 20 == 0:
            edges = DECLARED[-1].bins.edges  # type: ignore[union-attr]
            counts = np.exp(-((np.arange(32) - 20) ** 2) / 20).tolist()
            histograms["weights/histogram"] = {
                "edges": edges,
                "counts": counts,
                "below": 0,
                "above": 0,
                "nan": 0,
            }
        self.row("metrics", step=step, values=found | values, histograms=histograms, texts={})

    def write(self, torn: str = "") -> Path:
        lines = [json.dumps(row, default=str).replace(": NaN", ': "NaN"') for row in self.rows]
        (self.folder / "metrics.jsonl").write_text("\n".join(lines) + "\n" + torn, encoding="utf-8")
        return self.folder


def full_run(folder: Path, steps: int = 200, *, rich_every: int = 1) -> Path:
    """Return the folder of a run with everything: a kill, a rollback, NaN, a checkpoint that failed."""
    run = MadeUp(folder, steps=steps)
    run.start()
    cut, back, spike = int(0.4 * steps), int(0.6 * steps), int(0.7 * steps)
    run.row("evaluation", step=0, loss=5.6, bits_per_byte=8.1, tokens=100)

    def go(first: int, last: int) -> None:
        for step in range(first, last + 1):
            changed = {"grad_norm": 2000.0} if spike <= step < spike + 5 else {}
            run.step(step, **changed)
            if step % rich_every == 0:
                run.rich(step)
            if step % max(1, steps // 10) == 0:
                run.row(
                    "evaluation",
                    step=step,
                    loss=2.0 + 3.6 * math.exp(-6 * step / steps),
                    bits_per_byte=None,
                    tokens=9,
                )
                run.row("checkpoint", step=step, path=f"x/step-{step}", seconds=0.3, blocked=0.1)

    go(1, cut + 7)
    run.now += 30
    run.start(cut)
    go(cut + 1, back)
    run.step(back + 1, loss=float("nan"))
    run.attempt += 1
    run.row(
        "rollback",
        step=back + 1,
        onset=back + 1,
        restored=back - 3,
        skipped=[1, 2],
        count=1,
        reason="loss was NaN",
    )
    go(back - 2, steps)
    run.row("save_failed", step=steps, problem="no space left", in_a_row=1)
    run.row("metrics", step=steps, texts={"health": "gradients are fine; one rank is slow"}, values={})
    run.row("end", step=steps, reason="done", tokens=2048 * steps)
    said = {
        "level": "error",
        "event": "rank 2 was killed by SIGKILL",
        "rank": None,
        "time": "2027-01-15T08:00:00+00:00",
    }
    begin = {
        "level": "info",
        "event": "run begins",
        "rank": 0,
        "command": "nanotrain run <made-up>",
        "host": "here",
    }
    (folder / "run.log.jsonl").write_text(f"{json.dumps(begin)}\n{json.dumps(said)}\n", encoding="utf-8")
    text = {
        "step": steps,
        "prompt": "def ",
        "text": "def f(x):\n    return '</script><script>alert(1)</script>'",
    }
    (folder / "samples.jsonl").write_text(json.dumps(text) + "\n", encoding="utf-8")
    return run.write(torn='{"event": "step", "st')
