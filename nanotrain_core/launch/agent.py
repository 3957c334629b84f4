"""torch's elastic agent, with a decision before each restart whether it can help."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server import SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.api import RunResult, Worker
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError

from nanotrain_core.launch.cause import Cause
from nanotrain_core.launch.cause_of_all_hosts import (
    announce_end,
    announced_end,
    another_has_failed,
    first_of_all,
)
from nanotrain_core.launch.rank_processes import RankProcesses
from nanotrain_core.run import log

if TYPE_CHECKING:
    from torch.distributed import Store

#: What NCCL does to a process when a collective fails; torch's own agent sets 1, to end it.
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
#: Variables whose values ranks get as they are now: the forkserver may have been started with others.
INHERITED = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
#: Seconds for ranks to end after those of another host have failed.
HOPELESS = 3.0
#: Rank -> exit status of its process: negative for a signal.
ExitCodes = Mapping[int, int]


class Agent(SimpleElasticAgent):
    """Starts the ranks of this host, and restarts all of them when one fails."""

    def __init__(
        self,
        ranks: WorkerSpec,
        processes: RankProcesses,
        before_start: Callable[[], None],
        start_again: Callable[[ExitCodes, int], bool],
        given_up: Callable[[ExitCodes], Cause],
        stopped: Callable[[], bool],
        left: Callable[[], bool] = lambda: False,
        restarted: int = 0,
    ) -> None:
        """Prepare the agent.

        Args:
            ranks: how many to start, where, and the maximum number of restarts.
            processes: theirs.
            before_start: called while no rank runs, before each start: the first, and every restart,
                including those caused by another host.
            start_again: called with exit codes and the number of the restart; returns whether to restart.
            given_up: called with exit codes when ranks have failed and are not restarted; returns the cause.
            stopped: returns whether a signal was received, which ends the wait for other hosts.
            left: returns whether this host has left the run to the others.
            restarted: how often an agent of this launch has restarted ranks.
        """
        self.before_start, self.start_again, self.stopped = before_start, start_again, stopped
        self.given_up, self.left = given_up, left
        self.processes = processes
        super().__init__(ranks)
        self._remaining_restarts -= restarted
        self._failed = False
        self.ended_by: Cause | None = None
        """Why the run has ended: this launcher or another one has given it up; None if none has."""

    def results(self) -> dict[int, Any]:
        """Run to the end and return what each local rank returned.

        Raises:
            ChildFailedError: a rank failed, and there were no restarts left or a restart would not help.
            RendezvousClosedError: another launcher has ended the run, :attr:`ended_by` says why; or a signal
                was received while the hosts met.
            RendezvousConnectionError: the host that serves the store of all launchers is gone.
        """
        try:
            try:
                result = self.run()
            except RendezvousClosedError:
                self._is_over()
                raise
            except DistError as problem:
                raise RendezvousConnectionError(str(problem)) from problem
            if result.is_failed() and not self.left():  # reported while the hosts still have their store
                self.ended_by = self.given_up({rank: end.exitcode for rank, end in result.failures.items()})
        finally:
            if not self.left():  # it would end the run on all hosts
                self._worker_group.spec.rdzv_handler.shutdown()
        if result.is_failed():
            if self.ended_by is not None and (among := self._among_hosts()):
                # With the rendezvous closed: a launcher may be waiting there already.
                announce_end(self.ended_by, *among)
            raise ChildFailedError("nanotrain", result.failures)
        return dict(result.return_values)

    def first_of_all(self, mine: Cause) -> Cause:
        """Return the first cause of this attempt's failure on any host, given this host's cause ``mine``."""
        among = self._among_hosts()
        return first_of_all(mine, *among) if among else mine

    def _among_hosts(self) -> tuple[Store, int, int] | None:
        """Return the launchers' store of this attempt, this host's index and their number; None if alone."""
        group = self._worker_group
        if self._store is None or group.group_rank is None or (hosts := group.group_world_size or 1) < 2:
            return None
        return self._store, group.group_rank, hosts

    def _is_over(self) -> bool:
        """Return whether another launcher has ended the run, and keep why."""
        if self.ended_by is None and (among := self._among_hosts()):
            self.ended_by = announced_end(*among[:2])
        return self.ended_by is not None

    def _another_has_failed(self) -> bool:
        among = self._among_hosts()
        return among is not None and another_has_failed(*among)

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
        return self.processes.begin(
            {worker.local_rank: self._environment(worker) for worker in worker_group.workers}
        )

    def _environment(self, worker: Worker) -> dict[str, str]:
        """Return what torchrun sets for a rank."""
        group = self._worker_group
        spec, most = group.spec, group.spec.max_restarts
        values = {
            "RANK": worker.global_rank,
            "LOCAL_RANK": worker.local_rank,
            "ROLE_RANK": worker.role_rank,
            "GROUP_RANK": group.group_rank,
            "WORLD_SIZE": worker.world_size,
            "LOCAL_WORLD_SIZE": spec.local_world_size,
            "ROLE_WORLD_SIZE": worker.role_world_size,
            "GROUP_WORLD_SIZE": group.group_world_size,
            "ROLE_NAME": spec.role,
            "MASTER_ADDR": group.master_addr,
            "MASTER_PORT": group.master_port,
            "TORCHELASTIC_RESTART_COUNT": most - self._remaining_restarts,
            "TORCHELASTIC_MAX_RESTARTS": most,
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": spec.rdzv_handler.use_agent_store,
            ERROR_HANDLING: os.environ.get(
                ERROR_HANDLING, "0" if self.processes.job.in_process_restart else "1"
            ),
        }
        values |= {name: os.environ[name] for name in INHERITED if name in os.environ}
        return {name: str(value) for name, value in values.items()}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the ranks for another host. After a failure those that are left are to be used again.

        If another host's ranks have failed, these cannot take another step: they may wait for a rank that is
        gone, which gloo does not always notice.
        """
        if self._failed:  # which was reported
            return
        hopeless = self._another_has_failed()
        why = "ranks of another host have failed" if hopeless else "another host has joined"
        log.say(f"{why}: all ranks are restarted")
        if hopeless:
            self.processes.end_after_failure(HOPELESS)
        else:
            self.processes.stop()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Stop the ranks that are left."""
        self.processes.stop(death_sig, timeout)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return the state of the ranks; use up all restarts if another one would not help.

        Raises:
            RendezvousClosedError: the launcher of another host has ended the run, while these ranks wait.
        """
        ends, codes = self.processes.poll()
        self._failed = bool(codes)
        if not codes:
            if len(ends) < len(worker_group.workers):
                if self._is_over():
                    self.processes.end_after_failure(HOPELESS)
                    raise RendezvousClosedError
                return RunResult(WorkerState.HEALTHY)
            self.processes.end()
            return RunResult(
                WorkerState.SUCCEEDED, {w.global_rank: ends[w.local_rank] for w in worker_group.workers}
            )
        failed = [worker for worker in worker_group.workers if worker.local_rank in codes]
        by_rank = {worker.global_rank: codes[worker.local_rank] for worker in failed}
        # The others end first, as they may have the cause: one that noticed it may be seen before.
        kept: Collection[int] = ()
        if self._remaining_restarts and self.processes.job.in_process_restart:
            kept = self.processes.keep_survivors()
        else:
            self.processes.end_after_failure()
        if self._remaining_restarts:
            number = worker_group.spec.max_restarts - self._remaining_restarts + 1
            if not self.start_again(by_rank, number):
                self._remaining_restarts = 0
            elif kept:
                ranks = ", ".join(str(w.global_rank) for w in worker_group.workers if w.local_rank in kept)
                log.say(f"these ranks keep their processes: {ranks}", level="warning")
        failures = {
            w.global_rank: ProcessFailure(w.local_rank, w.id, codes[w.local_rank], error_file="")
            for w in failed
        }
        return RunResult(WorkerState.FAILED, failures=failures)
