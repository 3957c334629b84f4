"""Checks of the clocks of this host, and of the offsets between clocks of several hosts.

Timeouts in training use the monotonic clock. The wall clock dates logs, metrics and checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nanotrain_doctor.findings import Finding, bad, good, note, warning

if TYPE_CHECKING:
    from torch.distributed import Store

Clock = Callable[[], float]
#: Seconds by which the wall clock may deviate from the monotonic one during the checks.
STEP = 0.05
#: Seconds by which clocks of hosts may differ: logs of one step are then still in order.
APART = 1.0
#: Earliest plausible time, 2025-01-01, in seconds since 1970: this code is not older.
WRITTEN = 1735689600.0


class ClockWatch:
    """Compares the wall clock with the monotonic one, from when it is made until it is asked."""

    def __init__(self, wall: Clock = time.time, monotonic: Clock = time.monotonic) -> None:
        self.wall, self.monotonic = wall, monotonic
        self.began = (wall(), monotonic())

    def finding(self) -> Finding:
        """Judge how far they went apart, and whether the wall clock can be true at all."""
        now = (self.wall(), self.monotonic())
        seconds = now[1] - self.began[1]
        off = (now[0] - self.began[0]) - seconds
        values = {"seconds": seconds, "wall_minus_monotonic": off}
        remedy = "let chrony or ntpd keep it"
        if now[0] < WRITTEN:
            return bad(
                "clock", f"it is not {time.strftime('%Y-%m-%d', time.gmtime(now[0]))}", remedy, **values
            )
        if abs(off) > STEP:
            text = f"the wall clock went {off:+.2f} s in {seconds:.1f} s against the monotonic one"
            return warning("clock", text, f"{remedy}, and step it only at boot", **values)
        return good("clock", f"wall and monotonic clock agree over {seconds:.1f} s", **values)


def clock_source(root: Path = Path("/")) -> Finding:
    """Judge what the kernel reads the time from: some take a microsecond and more."""
    try:
        path = root / "sys/devices/system/clocksource/clocksource0/current_clocksource"
        source = path.read_text(encoding="utf-8").strip()
    except OSError:
        return note("clock source", "this system does not tell", source=None)
    if source in ("hpet", "acpi_pm", "jiffies"):
        text = f"{source}: reading the time is slow, and profiles are not exact"
        return warning(
            "clock source", text, "boot with clocksource=tsc, if the machine's is stable", source=source
        )
    return good("clock source", source, source=source)


def ask_offsets(
    store: Store, ranks: Sequence[int], *, wall: Clock = time.time, rounds: int = 5
) -> dict[int, tuple[float, float]]:
    """Return (seconds ahead of this clock, uncertainty) of the clocks of ``ranks``: on rank 0.

    As in NTP: each rank's time is read between two of this clock's, and the fastest of several rounds counts.
    """
    found = {}
    for rank in ranks:
        samples = []
        for number in range(rounds):
            before = wall()
            store.set(f"clock/ask/{rank}/{number}", "")
            theirs = float(store.get(f"clock/say/{rank}/{number}"))
            after = wall()
            samples.append((after - before, theirs - (before + after) / 2))
        width, offset = min(samples)
        found[rank] = (offset, width / 2)
    return found


def tell_time(store: Store, rank: int, *, wall: Clock = time.time, rounds: int = 5) -> None:
    """Answer rank 0's questions for the time: on each rank that it asks."""
    for number in range(rounds):
        store.get(f"clock/ask/{rank}/{number}")
        store.set(f"clock/say/{rank}/{number}", repr(wall()))


def judge_offsets(offsets: dict[str, tuple[float, float]]) -> Finding:
    """Judge by how many seconds, and with what uncertainty, hosts are ahead of rank 0's."""
    values = {host: {"ahead": ahead, "uncertain": width} for host, (ahead, width) in offsets.items()}
    host, (ahead, width) = max(offsets.items(), key=lambda item: abs(item[1][0]))
    text = f"{host} is {ahead:+.3f} s (within {width:.3f} s) from rank 0's host, the most of {len(offsets)}"
    if abs(ahead) - width > APART:
        return warning(
            "clocks of hosts", text, "let chrony or ntpd keep all of them: logs are out of order", **values
        )
    return good("clocks of hosts", text, **values)
