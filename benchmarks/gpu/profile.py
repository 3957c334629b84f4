"""Where the time of a few steps goes: kernels, gaps between them, the host."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks.gpu.contenders import Trainer

STEPS = 3
#: Kernels that are listed.
TOP = 25

#: Calls in which the host waits for the device.
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")

#: Name, first and last microsecond of something that ran.
Ran = tuple[str, float, float]


@attrs.define(frozen=True)
class Summary:
    """Of the time between the first kernel and the end of the last."""

    span: float
    """Milliseconds."""
    busy: float
    """Share of it in which at least one kernel ran."""
    kernels: Sequence[tuple[str, float, int]]
    """Name, milliseconds and calls, the most milliseconds first."""


def summarize(ran: Iterable[Ran]) -> Summary:
    """Return what kernels took; those that overlap count once as busy time."""
    times: dict[str, list[float]] = {}
    busy, end, first, last = 0.0, float("-inf"), float("inf"), float("-inf")
    for name, begin, stop in sorted(ran, key=lambda each: each[1]):
        times.setdefault(name, []).append(stop - begin)
        busy += max(0.0, stop - max(begin, end))
        end = max(end, stop)
        first, last = min(first, begin), max(last, stop)
    span = last - first if times else 0.0
    kernels = sorted(
        ((name, sum(each) / 1e3, len(each)) for name, each in times.items()), key=lambda k: -k[1]
    )
    return Summary(span / 1e3, busy / span if span else 0.0, kernels)


def text(name: str, found: Summary, steps: int, host: float, wall: float) -> str:
    """Return the summary for people.

    Args:
        name: of the side.
        found: of all ``steps``.
        steps: that were profiled.
        host: seconds in which the host did not wait for the device.
        wall: seconds until the device had done them.
    """
    lines = [
        f"{name}, a mean step of {steps}, under the profiler",
        f"  wall time              {1e3 * wall / steps:10.2f} ms",
        f"  host                   {1e3 * host / steps:10.2f} ms ({host / wall:.0%} of wall time)",
        f"  first to last kernel   {found.span / steps:10.2f} ms, a kernel runs in {found.busy:.1%} of it, "
        f"gaps are {1 - found.busy:.1%}",
        "",
    ]
    total = sum(milliseconds for _, milliseconds, _ in found.kernels) or 1.0
    lines += [
        f"  {milliseconds / steps:9.3f} ms {milliseconds / total:6.1%} {calls / steps:8.1f} x  {kernel[:110]}"
        for kernel, milliseconds, calls in found.kernels[:TOP]
    ]
    return "\n".join([*lines, ""])


def write(trainer: Trainer, device: str, *, folder: Path, name: str) -> None:
    """Profile a few steps; write a text, and a trace for chrome://tracing or Perfetto, into ``folder``."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.gpu.side import wait

    trainer.advance(1)
    wait(device)
    cuda = device != "cpu"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        began = time.perf_counter()
        trainer.advance(STEPS)
        wait(device)
        wall = time.perf_counter() - began
    kind = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    events: Any = profiler.events()
    found, host = summarize(_ran(events, kind, leaves=not cuda)), wall - waited(events)
    folder.mkdir(parents=True, exist_ok=True)
    stem = "-".join("".join(letter if letter.isalnum() else " " for letter in name).split()).lower()
    (folder / f"{stem}.txt").write_text(text(name, found, STEPS, host, wall), encoding="utf-8")
    profiler.export_chrome_trace(str(folder / f"{stem}.json.gz"))


def waited(events: Iterable[Any]) -> float:
    """Return the seconds that the host waited: ``fit`` does, at its end, and so does who reads a loss."""
    waits = (float(event.time_range.elapsed_us()) for event in events if event.name in WAITS)
    return sum(waits) / 1e6


def _ran(events: Any, kind: Any, *, leaves: bool) -> Iterable[Ran]:
    """Yield what ran on a device; of a CPU what called nothing else."""
    for event in events:
        annotation = getattr(event, "is_user_annotation", False)
        if event.device_type == kind and not annotation and not (leaves and event.cpu_children):
            yield event.name, event.time_range.start, event.time_range.end
