"""The ranks of this host under torch's elastic agent, until the run ends or this host leaves it.

Imports torch's agent: import it after the forkserver has been started.
"""

from __future__ import annotations

import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousError

from nanotrain_core.errors import Exit
from nanotrain_core.launch.agent import Agent, ExitCodes
from nanotrain_core.launch.cause import Cause, first_cause
from nanotrain_core.launch.hosts import Nodes, rendezvous
from nanotrain_core.launch.rank_process import serve
from nanotrain_core.launch.rank_processes import RankProcesses
from nanotrain_core.launch.restarts import HOST_FAILURES, Restarts
from nanotrain_core.launch.resume_point import recorded_folder
from nanotrain_core.launch.signal_forwarding import SignalForwarder
from nanotrain_core.launch.worker import Job
from nanotrain_core.recipe import Recipe
from nanotrain_core.run import log
from nanotrain_core.run.stop import EXIT_OF, SIGNALS
from nanotrain_core.watch.hang import PATIENCE, Hang, HangWatch


class HostRun:
    """Runs the ranks in a thread and restarts them, while this one receives signals and watches."""

    def __init__(self, job: Job, recipe: Recipe, nodes: Nodes) -> None:
        self.job, self.nodes, self.scratch = job, nodes, Path(job.scratch or "")
        self.patience = PATIENCE * recipe.run.hang_timeout
        self.forwarder = SignalForwarder(self.scratch, recipe.run.grace, saves=job.saves)
        claimed = Path(job.claimed) if job.claimed else None
        self.watch = HangWatch(self.scratch, claimed, recipe.run.hang_timeout)
        self.restarts = Restarts(
            self.scratch,
            nodes.max_restarts,
            self.stopped,
            self.first_cause_of_all_hosts,
            may_leave=nodes.can_continue_without_this_host(),
        )
        self.agent: Agent | None = None
        """The current one, or the last: another takes its place when the host of the rendezvous was lost."""
        self._logs = contextlib.ExitStack()

    def run(self) -> int:
        """Run to the end, and return the exit code.

        Raises:
            NanotrainError: the user error that a rank raised.
        """
        with ThreadPoolExecutor(1) as thread, self._logs:
            while True:
                results = thread.submit(self._results)
                try:
                    ends = self.forwarder.wait(results, meanwhile=self._poll)
                    return EXIT_OF[next(iter(ends.values()))]
                except ChildFailedError:
                    return self._after_failure()
                except RendezvousError as problem:
                    code = self._after_lost_hosts(problem)
                    if code is not None:
                        return code

    def stopped(self) -> bool:
        """Return whether a signal was received."""
        return self.forwarder.received is not None

    def first_cause_of_all_hosts(self, cause: Cause) -> Cause:
        """Return the first cause of all hosts, given that of this one; after a signal, only that."""
        return cause if self.agent is None or self.stopped() else self.agent.first_of_all(cause)

    def _results(self) -> dict[int, Any]:
        """Start an agent, and return what its ranks returned. Runs in the thread."""
        self.agent = Agent(
            _worker_spec(self.job, self.nodes),
            RankProcesses(self.job, self.patience),
            before_start=self.watch.forget,
            start_again=lambda codes, number: self.restarts.again(codes, number, self.watch.hang),
            given_up=self._given_up,
            stopped=self.stopped,
            left=lambda: self.restarts.left is not None,
            restarted=self.restarts.number,
        )
        return self.agent.results()

    def _given_up(self, codes: ExitCodes) -> Cause:
        return self.first_cause_of_all_hosts(first_cause(self.scratch, codes, self.watch.hang))

    def _poll(self) -> None:
        """Watch; with several hosts rank 0 selects the run folder, so that it is known only now."""
        if self.watch.folder is None and (folder := recorded_folder(self.scratch)) is not None:
            self.watch.folder = Path(folder)
            self._logs.enter_context(log.kept_in(self.watch.folder, None))
        self.watch.look()

    def _after_failure(self) -> int:
        """Report why ranks failed and were not restarted, and return the exit code."""
        if self.restarts.left is not None:
            text = f"; this host's ranks were the first to fail {HOST_FAILURES} times: it leaves the run"
            self.restarts.left.tell(f"{text}, which continues on the others")
            return self.restarts.left.code
        assert self.agent is not None
        cause = self.agent.ended_by
        assert cause is not None
        received = self.forwarder.received
        if received is not None and not (cause.mistake and cause.code != Exit.PREEMPTED):
            if self.job.saves:  # before training began, or killed during the last step or checkpoint
                log.say(f"ended by {received.name} without a last checkpoint: complete ones remain")
            return EXIT_OF[SIGNALS[received]]
        # After a signal: for example a last checkpoint that could not be saved.
        return end(cause, self.watch.hang)

    def _after_lost_hosts(self, problem: RendezvousError) -> int | None:
        """Return the exit code when this host does not meet the others (any more), None to meet again."""
        if self.forwarder.received is not None:
            return EXIT_OF[SIGNALS[self.forwarder.received]]
        gone = self.agent is not None and isinstance(problem, RendezvousConnectionError)
        if gone and self.restarts.meet_again(self.nodes.endpoint):
            return None
        if self.agent is not None and self.agent.ended_by is not None:
            return end(self.agent.ended_by, self.watch.hang)
        where = f"at {self.nodes.endpoint} under --rdzv-id {self.nodes.run_id}"
        text = f"the hosts of the run do not meet {where}, or one has ended it and its launcher says why"
        return end(
            self.first_cause_of_all_hosts(Cause(f"{text}: {problem}", Exit.FAILED, echo=True)),
            self.watch.hang,
        )


def silence_torch() -> None:
    """Silence torch's launcher: failures are printed here."""
    for name, logger in logging.root.manager.loggerDict.items():  # each has a level of its own
        if name.startswith(("torch.distributed", "torch.multiprocessing")) and isinstance(
            logger, logging.Logger
        ):
            logger.setLevel(logging.CRITICAL)


def _worker_spec(job: Job, nodes: Nodes) -> WorkerSpec:
    """Return what the agent starts. With several hosts, this connects to their rendezvous.

    Raises:
        LaunchError: the rendezvous host does not answer.
    """
    return WorkerSpec(
        role="default",
        local_world_size=nodes.nproc,
        entrypoint=serve,
        rdzv_handler=rendezvous(nodes, Path(job.scratch or "")),
        max_restarts=nodes.max_restarts,
        monitor_interval=0.1,
        local_addr=nodes.local_address,
    )


def end(cause: Cause, hang: Hang | None) -> int:
    """Report the first cause and return its exit code. A ``hang`` was reported when it was detected.

    Raises:
        NanotrainError: the user error that a rank raised.
    """
    if cause.mistake:
        raise cause.error()
    if hang is None or cause.text != hang.text:
        cause.tell()
    return cause.code
