"""Whole training steps in turns: ours against each peer, every side in a process and in memory of its own.

As many sides live at once as the device holds: of all but the one that is training only weights, masters,
moments and gradients are in memory. Where there is room for one alone, sides train one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import attrs

from benchmarks.gpu.contenders import Contender
from benchmarks.gpu.records import Recorder
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.side import Ready, Side, SideFailed, Turn
from benchmarks.report import spread
from nanotrain_core.run.throughput import peak_flops

#: Of the device's memory: what is left for contexts of CUDA and what allocators cannot use.
USABLE = 0.92
#: GB that a process takes beside its tensors.
CONTEXT = 0.6
#: Seconds that a turn should take.
TURN = 2.0
ROUNDS = 5


@attrs.define(frozen=True, kw_only=True)
class Race:
    """Ours, and those it is compared with, the most wanted first."""

    model: str
    ours: Contender
    others: Sequence[Contender] = ()
    resident: float = 0.0
    """GB of a side between its turns."""
    active: float = 0.0
    """GB of a side more while it trains."""

    def together(self, memory: float) -> int:
        """Return how many sides may live at once on a device of so many GB, one of them training."""
        return max(1, int((memory * USABLE - self.active) / (self.resident + CONTEXT)))

    def at_once(self, memory: float, alive: int) -> int:
        """Return how many sides may take their first steps at once beside so many that live."""
        left = memory * USABLE - alive * (self.resident + CONTEXT)
        return max(1, int(left / (self.resident + self.active + CONTEXT)))


@attrs.define
class Measured:
    """One side, its turns in the rounds of its group."""

    contender: Contender
    ready: Ready
    turns: list[Turn] = attrs.field(factory=list)
    ratios: list[float] = attrs.field(factory=list)
    """Ours over it in tokens/s, of each round; from medians where they were not alive together."""

    @property
    def rate(self) -> float:
        return self.ready.tokens_per_step / median(turn.seconds for turn in self.turns)

    @property
    def peak(self) -> int:
        return max(turn.peak for turn in self.turns)


def run(race: Race, settings: Settings) -> None:
    """Run the race; record a row for each side, its bars, and what failed."""
    Runner(race, settings).run()


class Runner:
    """Starts, asks and ends sides."""

    def __init__(self, race: Race, settings: Settings) -> None:
        self.race, self.settings = race, settings
        self.record = Recorder(settings.records)
        self.rounds = 1 if settings.smoke else ROUNDS
        self.reported: dict[str, Measured] = {}

    def run(self) -> None:
        """See :func:`run`."""
        race, together = self.race, self.race.together(self.settings.memory)
        if not self._is_here(race.ours):
            return
        others = [each for each in race.others if self._is_here(each)]
        if not others and not race.ours.bars:
            return
        group = others[: together - 1]
        started = self._start([race.ours, *group], alive=0)
        if not started or started[0][1].contender is not race.ours:
            for side, _ in started:
                side.close()
            for each in others:
                self.record.left_out(self._named(each), "our side did not run", *each.bars)
            return
        (ours, mine), theirs = started[0], started[1:]
        try:
            if not group:
                self._alone(ours, mine)
                ours.close()
                self._report(mine, None, "")
                for each in others:
                    self._one_after_the_other(each, mine)
                return
            self._group(ours, mine, theirs, first=True)
            for number in range(together - 1, len(others), together - 1):
                theirs = self._start(others[number : number + together - 1], alive=1)
                self._group(ours, mine, theirs, first=False)
            self._profile(ours, mine)
        finally:
            ours.close()

    def _named(self, contender: Contender) -> str:
        return f"{self.race.model}: {contender.name}"

    def _is_here(self, contender: Contender) -> bool:
        why = contender.missing(self.settings.device)
        if why:
            self.record.left_out(self._named(contender), why, *contender.bars)
        return not why

    def _start(self, contenders: Sequence[Contender], alive: int) -> list[tuple[Side, Measured]]:
        """Start these sides, so many at once as there is room for; return those that began to train."""
        started: list[tuple[Side, Measured]] = []
        waiting = list(contenders)
        while waiting:
            room = self.race.at_once(self.settings.memory, alive + len(started))
            wave, waiting = waiting[:room], waiting[room:]
            if self._time_to_begin(alive + len(started)) <= 0:
                for each in wave:
                    self.record.left_out(self._named(each), "no time was left", *each.bars)
                continue
            sides = [Side(each, self.settings.device, self.settings.start) for each in wave]
            for side in sides:
                try:
                    ready = side.ready(self._time_to_begin(alive + len(started)))
                    started.append((side, Measured(side.contender, ready)))
                except SideFailed as problem:
                    side.close()
                    each = side.contender
                    self.record.problem(self._named(each), str(problem), *each.bars)
        return started

    def _time_to_begin(self, others: int) -> float:
        """Return the seconds in which a side must have taken its first steps, beside so many others.

        What remains is enough for a round: one that compiles for too long must not cost the others theirs.
        """
        return self.settings.left - 3 * TURN * (others + 1)

    def _steps(self, ready: Ready) -> int:
        return 1 if self.settings.smoke else min(20, max(3, round(TURN / ready.step)))

    def _group(self, ours: Side, mine: Measured, theirs: list[tuple[Side, Measured]], *, first: bool) -> None:
        """Let ours and these take turns, round by round; end these."""
        try:
            self._rounds(ours, mine, theirs)
            if first:
                self._report(mine, None, "")
            for _, measured in theirs:
                self._report(measured, mine, "")
            self._report_versus()
            for side, measured in theirs:
                self._profile(side, measured)
        finally:
            for side, _ in theirs:
                side.close()

    def _rounds(self, ours: Side, mine: Measured, theirs: list[tuple[Side, Measured]]) -> None:
        steps, sides = self._steps(mine.ready), [(ours, mine), *theirs]
        for number in range(self.rounds):
            if number and self.settings.left < 3 * TURN * len(sides):
                break
            taken: dict[str, Turn] = {}
            for side, measured in sides[:: -1 if number % 2 else 1]:
                turn = self._turn(side, measured.contender, steps)
                if turn is not None:
                    measured.turns.append(turn)
                    taken[measured.contender.name] = turn
            own = taken.get(mine.contender.name)
            for _, measured in theirs:
                turn = taken.get(measured.contender.name)
                if own is not None and turn is not None:
                    measured.ratios.append(turn.seconds / own.seconds * self._scale(mine, measured))

    @staticmethod
    def _scale(mine: Measured, other: Measured) -> float:
        return mine.ready.tokens_per_step / other.ready.tokens_per_step

    def _turn(self, side: Side, contender: Contender, steps: int) -> Turn | None:
        if not side.process.is_alive():
            return None
        try:
            return side.turn(steps, self.settings.left)
        except SideFailed as problem:
            side.close()
            self.record.problem(self._named(contender), str(problem), *contender.bars)
            return None

    def _alone(self, side: Side, measured: Measured) -> None:
        steps = self._steps(measured.ready)
        for number in range(self.rounds):
            if number and self.settings.left < 3 * TURN:
                break
            turn = self._turn(side, measured.contender, steps)
            if turn is None:
                break
            measured.turns.append(turn)
        self._profile(side, measured)

    def _one_after_the_other(self, contender: Contender, mine: Measured) -> None:
        for side, measured in self._start([contender], alive=0):
            try:
                self._alone(side, measured)
            finally:
                side.close()
            if mine.turns and measured.turns:
                measured.ratios.append(mine.rate / measured.rate)
            self._report(measured, mine, " (one after the other)")

    def _profile(self, side: Side, measured: Measured) -> None:
        if not (measured.contender.profiled and self.settings.profile and measured.turns):
            return
        name = self._named(measured.contender)
        with self.record.attempt(f"profile of {name}"):
            side.profile(name, self.settings.profile, self.settings.left)

    def _report(self, found: Measured, mine: Measured | None, how: str) -> None:
        if not found.turns:
            return
        contender, ours = found.contender, mine or found
        flops = ours.ready.flops_per_token * found.rate
        peak = peak_flops(self.settings.device_name)
        cells: dict[str, Any] = {
            "model": self.race.model,
            "side": contender.name + how,
            "parameters": f"{found.ready.parameters / 1e9:.2f}B",
            "tokens/s": f"{found.rate:,.0f}",
            "spread": spread((found.ready.tokens_per_step / turn.seconds for turn in found.turns), ",.0f"),
            "ms a step": f"{1e3 * median(turn.seconds for turn in found.turns):.1f}",
            "MFU": f"{flops / peak:.1%}" if peak else "",
            "peak GB": f"{found.peak / 1e9:.1f}",
            "ours / it": f"{median(found.ratios):.2f}" if found.ratios else "",
            "spread of it": spread(found.ratios, ".2f") if found.ratios else "",
            "memory, ours / it": f"{mine.peak / found.peak:.2f}" if mine and mine.turns else "",
            "warm-up s": f"{found.ready.warm_up:.0f}",
        }
        self.record.row("training steps", **cells)
        self.record.data("steps", {"model": self.race.model, **_plain(found), "flops": flops, "peak": peak})
        if contender.mfu_bar and peak:
            self.record.bar(contender.mfu_bar, flops / peak)
        if mine is None or not found.ratios:
            return
        ratio = median(found.ratios)
        self.reported[contender.name] = found
        if contender.bar and not contender.versus:
            self.record.bar(contender.bar, 1 / ratio if contender.who == "ours" else ratio)
        if contender.memory_bar and mine.turns:
            self.record.bar(contender.memory_bar, mine.peak / found.peak)

    def _report_versus(self) -> None:
        """Record bars of peers against one another, by what ours was to each in every round."""
        for found in self.reported.values():
            other = self.reported.get(found.contender.versus)
            if other is not None:
                pairs = zip(other.ratios, found.ratios, strict=False)
                self.record.bar(found.contender.bar, median(theirs / own for theirs, own in pairs))


def _plain(found: Measured) -> dict[str, Any]:
    return {
        "side": found.contender.name,
        "ready": attrs.asdict(found.ready),
        "turns": [attrs.asdict(turn) for turn in found.turns],
        "ratios": found.ratios,
    }
