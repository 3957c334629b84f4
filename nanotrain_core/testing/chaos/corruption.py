"""Rows of silent data corruption: a rank's memory or arithmetic is wrong, and nothing else says so."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any, ClassVar

from nanotrain_core.errors import Exit
from nanotrain_core.testing.chaos.bench import Bench, Trial
from nanotrain_core.testing.chaos.row import RESUME, Row, expect, some_rank


class Corruption(Row):
    """It is found before the next update, the rank is named, and the resumed run ends as if undisturbed."""

    monitor: ClassVar[str] = ""
    """The monitor that finds it, if the harness's runs do not have it anyway; it is set to every step."""
    order: ClassVar[Mapping[str, Any]]

    @classmethod
    def not_here(cls, bench: Bench) -> str:
        known = not cls.monitor or cls.monitor in bench.registry.names("monitor")
        return "" if known else f"the monitor {cls.monitor} is not installed"

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        settings, rank = trial.bench.settings, some_rank(trial, random)
        trial.monitors = [f'{{use="{self.monitor}", every=1}}'] if self.monitor else []
        step = self.when(trial, random)
        ended = trial.launch(order={**self.order, "step": step, "rank": rank, "amount": random.random()})
        yield from expect(ended, Exit.CORRUPTED)
        if not re.search(self.says(rank, settings.ranks), ended.err):
            yield f"rank {rank} was not named: {ended.err[-300:]}"
        last = max(trial.losses())
        if last != step:
            yield f"wrong after step {step} and found after step {last}, though compared in every step"
        yield from expect(trial.launch(words=RESUME), Exit.DONE)

    def says(self, rank: int, ranks: int) -> str:
        """Return a regular expression for what stderr says when this rank of so many is the wrong one."""
        raise NotImplementedError

    def when(self, trial: Trial, random: Random) -> int:
        """Return a random step, after which it is wrong: perhaps the last one."""
        return random.randrange(trial.bench.settings.every + 1, trial.bench.settings.steps + 1)


class FlipWeight(Corruption):
    """Any bit of replicated weights. Two replicas have no majority: both are named."""

    number, name = "16", "one bit of one replica's weights flips"
    order: ClassVar = {"act": "flip"}
    least_ranks = 2

    def says(self, rank: int, ranks: int) -> str:
        return f"has other bits on rank {rank} than on" if ranks > 2 else "has other bits on ranks 0, 1 each"


class FlipState(Corruption):
    """Any bit of optimizer state or master weights, of which there may be no second copy."""

    number, name, monitor = "38", "one bit of a rank's optimizer state flips", "bit_flips"
    order: ClassVar = {"act": "flip_state", "at": "end"}

    def says(self, rank: int, ranks: int) -> str:
        return f"has other bits on rank {rank} than the update of step"


class Miscompute(Corruption):
    """One matrix product of a rank is wrong from a step on."""

    number, name, monitor = "39", "a rank computes wrongly", "replay"
    order: ClassVar = {"act": "miscompute"}
    least_ranks = 2

    def says(self, rank: int, ranks: int) -> str:
        return rf"of a replayed microbatch is wrong on (rank|one of ranks)\b[^:]* {rank} \("

    @classmethod
    def not_here(cls, bench: Bench) -> str:
        layout = bench.registry.build(bench.recipe().topology).layout(bench.settings.ranks)
        if layout.degree("dp") == 1 or layout.degree("ep") > 1:
            return (
                "no rank computes the same as another: there is no data parallelism, or experts are over it"
            )
        return super().not_here(bench)

    def when(self, trial: Trial, random: Random) -> int:
        """Return a step before the last one."""
        return random.randrange(trial.bench.settings.every + 1, trial.bench.settings.steps)
