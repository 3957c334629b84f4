"""Collectives of monitors: every rank enters one, or none does.

An exception may keep one rank's monitor out of a collective that the others have entered, and they would
hang. So before each collective all ranks agree in a *round*, a small all-reduce in a group of its own: a rank
announces that its monitor has arrived. A rank whose monitor has failed announces that in the next round,
without waiting for it, and continues training. Ranks that wait in that round receive the failure: if it
concerns the event that they are in, they leave it, too; otherwise they take part in a further round. Every
rank takes part in every round once, waiting or not, so that rounds stay in step.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from nanotrain_core.errors import PluginError
from nanotrain_core.layout.mesh import Mesh

P = ParamSpec("P")
T = TypeVar("T")

#: Timeout of a round. A failure may be announced long before the others' next one; the watchdog finds hangs.
PATIENCE = timedelta(days=30)

NOTHING = -(2**62)


class FailedElsewhere(Exception):
    """A monitor failed on another rank, so this rank leaves the event too."""


class MonitorCollectives:
    """One rank's view of the agreement between all ranks of a run."""

    def __init__(self, mesh: Mesh, monitors: int) -> None:
        """Create the group, if there are several ranks and any monitors. Collective."""
        self.rank, self.monitors = mesh.rank, monitors
        self._group = _group(mesh) if mesh.world_size > 1 and monitors else None
        self._waits = mesh.waits
        self.at: tuple[int, object] | None = None
        """The monitor being called, and the name of its event, which is unique in the run."""
        self._told: list[tuple[dist.Work, torch.Tensor]] = []
        """Rounds whose result this rank does not need, with their memory."""
        self.forbidden = ""
        """Why collectives are currently forbidden."""

    def close(self) -> None:
        """Destroy the group, after an end that all ranks have reached; otherwise it would stay forever.

        A failure that no rank has received may still be in flight: then the group stays, because a send
        that a rank has begun cannot be cancelled.
        """
        if self._group is not None and all(work.is_completed() for work, _ in self._told):
            self._told.clear()
            dist.destroy_process_group(self._group)
        self._group = None

    def enter(self) -> None:
        """Return when the monitor has arrived on all ranks.

        Raises:
            FailedElsewhere: it has failed in this event on one of them.
            PluginError: ranks are in different monitors or events, or collectives are currently forbidden.
        """
        self._check_allowed()
        if self._group is None or self.at is None:
            return
        monitor, event = self.at[0], _number(self.at[1])
        for failed, ranks in self._rounds(monitor, event):
            if failed[monitor] == event:
                raise FailedElsewhere(f"it failed on rank {ranks[monitor]}")

    def _check_allowed(self) -> None:
        if self.forbidden:
            raise PluginError(f"a monitor may call no collective {self.forbidden}")

    def drain(self) -> None:
        """Collect all reported failures: all ranks call this at the same point."""
        if self._group is not None:
            for _ in self._rounds(self.monitors, 0):
                pass

    def _rounds(self, monitor: int, event: int) -> Iterator[tuple[list[int], list[int]]]:
        """Take part in rounds until one has no failure; for each round before it, yield the failed events
        and their ranks, by monitor."""
        while True:
            work, round_ = self._round(here=(monitor, event))
            with self._waits.collectives:
                work.wait()
            at, failed, ranks = self._read(round_)
            if not any(failed):
                break
            yield failed, ranks
        if at[0] != -at[1] or at[2] != -at[3]:
            raise PluginError(
                "ranks are in collectives of different monitors or events: a monitor must call the "
                "same ones on all ranks"
            )
        self._told = [each for each in self._told if not each[0].is_completed()]

    def tell_failure(self) -> None:
        """Announce in the next round that the monitor being called has failed, without waiting for it."""
        if self._group is not None and self.at is not None:
            monitor, name = self.at
            self._told.append(self._round(failed=(monitor, _number(name))))

    def _round(
        self, *, here: tuple[int, int] | None = None, failed: tuple[int, int] | None = None
    ) -> tuple[dist.Work, torch.Tensor]:
        mine = torch.full((4 + 2 * self.monitors,), NOTHING, dtype=torch.int64)
        mine[4:] = 0
        if here is not None:
            mine[:4] = torch.tensor([here[0], -here[0], here[1], -here[1]])
        if failed is not None:
            mine[4 + failed[0]] = failed[1]
            mine[4 + self.monitors + failed[0]] = self.rank
        work = dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        return work, mine

    def _read(self, round_: torch.Tensor) -> tuple[list[int], list[int], list[int]]:
        numbers: list[int] = round_.tolist()
        return numbers[:4], numbers[4 : 4 + self.monitors], numbers[4 + self.monitors :]

    def before(self, collective: Callable[P, T], members: Callable[..., int] | None = None) -> Callable[P, T]:
        """Return ``collective`` preceded by an agreement, unless it has only one member.

        ``members`` returns how many it has, from its arguments; without it, all ranks.
        """

        def together(*args: P.args, **kwargs: P.kwargs) -> T:
            self._check_allowed()
            if members is None or members(*args, **kwargs) > 1:
                self.enter()
            return collective(*args, **kwargs)

        return together


class MonitorMesh(Mesh):
    """A mesh whose collectives every rank enters, or none."""

    def __init__(self, mesh: Mesh, collectives: MonitorCollectives) -> None:
        vars(self).update(vars(mesh))
        data = len(mesh.layout.members(mesh.rank, self._data))
        members = {"all_reduce": self._members, "gather": self._members, "all_reduce_data": lambda *_: data}
        for name in ("all_reduce", "all_reduce_data", "all_reduce_sum_and_max", "gather", "barrier"):
            setattr(self, name, collectives.before(getattr(mesh, name), members.get(name)))

    def _members(self, value: Any = None, *dims: str, **options: Any) -> int:
        return self.size(*dims) if dims else self.world_size


def _number(event: object) -> int:
    """Return a number that identifies an event on all ranks; few events need it."""
    return zlib.crc32(str(event).encode()) + 1


def _group(mesh: Mesh) -> Any:
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.OFF)  # at level DETAIL, torch would wait for all ranks in each call
    try:
        return dist.new_group(backend="gloo", timeout=PATIENCE, group_desc="monitors")
    finally:
        dist.set_debug_level(level)
