"""torch's elastic agent, with a decision before each restart whether it can help."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from nanotrain_core.launch.cause import Cause
from nanotrain_core.launch.cause_of_all_hosts import first_of_all
from nanotrain_core.run import log

#: Rank -> exit status of its process: negative for a signal.
ExitCodes = Mapping[int, int]


class Agent(LocalElasticAgent):
    """Starts the ranks of this host, and restarts all of them when one fails."""

    def __init__(
        self,
        ranks: WorkerSpec,
        before_start: Callable[[], None],
        start_again: Callable[[ExitCodes, int], bool],
        given_up: Callable[[ExitCodes], None],
        stopped: Callable[[], bool],
        left: Callable[[], bool] = lambda: False,
        restarted: int = 0,
    ) -> None:
        """Prepare the agent.

        Args:
            ranks: what to start, where, and the maximum number of restarts.
            before_start: called while no rank runs, before each start: the first, and every restart,
                including those caused by another host.
            start_again: called with exit codes and the number of the restart; returns whether to restart.
            given_up: called with exit codes when ranks have failed and are not restarted.
            stopped: returns whether a signal was received, which ends the wait for other hosts.
            left: returns whether this host has left the run to the others.
            restarted: how often an agent of this launch has restarted ranks.
        """
        self.before_start, self.start_again, self.stopped = before_start, start_again, stopped
        self.given_up, self.left = given_up, left
        super().__init__(ranks, DefaultLogsSpecs(), start_method="forkserver")
        self._remaining_restarts -= restarted
        self._failed = False

    def results(self) -> dict[int, Any]:
        """Run to the end and return what each local rank returned.

        Raises:
            ChildFailedError: a rank failed, and there were no restarts left or a restart would not help.
            RendezvousConnectionError: the host that serves the store of all launchers is gone.
        """
        try:
            try:
                result = self.run()
            except DistError as problem:
                raise RendezvousConnectionError(str(problem)) from problem
            if result.is_failed() and not self.left():  # reported while the hosts still have their store
                self.given_up({rank: failure.exitcode for rank, failure in result.failures.items()})
        finally:
            if not self.left():  # it would end the run on all hosts
                self._worker_group.spec.rdzv_handler.shutdown()
        if result.is_failed():
            raise ChildFailedError("nanotrain", result.failures)
        return dict(result.return_values)

    def first_of_all(self, mine: Cause) -> Cause:
        """Return the first cause of this attempt's failure on any host, given this host's cause ``mine``."""
        group = self._worker_group
        if self._store is None or group.group_rank is None or (group.group_world_size or 1) < 2:
            return mine
        assert group.group_world_size is not None
        return first_of_all(mine, self._store, group.group_rank, group.group_world_size)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Run the rendezvous with the other hosts until a signal is received: no rank exists to be signalled.

        Raises:
            RendezvousClosedError: a signal was received, here or on another host, or another host gave up.
        """
        met = threading.Event()
        threading.Thread(target=self._close_on_signal, args=(met,), daemon=True).start()
        try:
            super()._rendezvous(worker_group)
        finally:
            met.set()

    def _close_on_signal(self, met: threading.Event) -> None:
        while not met.wait(0.2):
            if self.stopped():
                self._worker_group.spec.rdzv_handler.shutdown()
                return

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks."""
        self.before_start()
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Restart the ranks: one failed, which was reported, or another host waits to join."""
        if not self._failed:
            log.say("another host has joined: all ranks are restarted")
        super()._restart_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return the state of the ranks; use up all restarts if another one would not help."""
        result: RunResult = super()._monitor_workers(worker_group)
        self._failed = bool(result.is_failed())
        if result.is_failed() and self._remaining_restarts:
            codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
            number = worker_group.spec.max_restarts - self._remaining_restarts + 1
            if not self.start_again(codes, number):
                self._remaining_restarts = 0
        return result
