"""Starts the ranks of a run on this host with torch's elastic agent, and reports how they ended.

It handles what torch leaves to its caller:

* Ranks come from a forkserver that has torch loaded: 8 of them reach their first collective in
  about 3 seconds, where spawning takes 8.
* The agent's store is not shared with the ranks (``TORCH_DISABLE_SHARE_RDZV_TCP_STORE``): with gloo
  the keys of a failed attempt would break every restart.
* On one host the rendezvous is a file in a private folder and gloo uses the loopback interface:
  nothing listens on the network.
* Cores are divided among the ranks.
* The agent runs in a thread, where it ignores signals: it would kill ranks that wait to return
  their result. Signals reach the ranks through a
  :class:`~nanotrain_core.launch.signal_forwarding.SignalForwarder`.
* The agent's own tracebacks are silenced; the first cause is printed instead, with its rank.
* Ranks are restarted only when that can help: not after a user error, nor after a signal.
* Ranks that hang are detected, named and killed (:mod:`nanotrain_core.watch.hang`).
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from nanotrain_core.errors import Exit
from nanotrain_core.launch import temporary
from nanotrain_core.launch.cause import Cause, first_cause
from nanotrain_core.launch.cuda import set_allocator
from nanotrain_core.launch.environment import Ranks, loopback
from nanotrain_core.launch.hosts import Nodes, rendezvous
from nanotrain_core.launch.rank_process import serve
from nanotrain_core.launch.rank_processes import RankProcesses
from nanotrain_core.launch.restarts import HOST_FAILURES, Restarts
from nanotrain_core.launch.signal_forwarding import SignalForwarder
from nanotrain_core.launch.worker import Job, recorded_folder
from nanotrain_core.monitors.terminal import restore_cursor
from nanotrain_core.recipe import Recipe
from nanotrain_core.run import log
from nanotrain_core.run.folder import RunFolder
from nanotrain_core.run.stop import EXITS, SIGNALS
from nanotrain_core.watch.hang import PATIENCE, Hang, HangWatch

#: The exit code of ``nanotrain run`` for each final status of a run.
EXIT_OF = {"done": Exit.DONE, "stopped": Exit.DONE, **EXITS}


def launch(job: Job, recipe: Recipe, nodes: Nodes) -> int:
    """Run ``recipe`` on this host's ranks and return the exit code.

    Raises:
        NanotrainError: a user error on a rank, or before any rank was started.
    """
    nodes.check()
    if nodes.count == 1:
        folder = job.folder or recipe.run.folder
        claim = RunFolder.claim(recipe.run.name, folder=folder, resume=job.resume is not None)
        job = attrs.evolve(job, claimed=str(claim.path))
    return start(job, recipe, nodes)


def start(job: Job, recipe: Recipe, nodes: Nodes) -> int:
    """Run ``job`` on this host's ranks, without claiming a run folder, and return the exit code.

    Raises:
        NanotrainError: as for :func:`launch`.
    """
    if nodes.count * nodes.nproc == 1 and not nodes.max_restarts:
        return EXIT_OF[job.run(Ranks())]
    with tempfile.TemporaryDirectory(prefix="nanotrain-") as scratch:
        job = attrs.evolve(
            job,
            scratch=scratch,
            one_host=nodes.count == 1,
            launcher_pid=os.getpid(),
            in_process_restart=recipe.run.in_process_restart and nodes.max_restarts > 0,
        )
        with log.kept_in(Path(job.claimed) if job.claimed else None, None):
            try:
                return _run_agent(job, recipe, nodes)
            finally:
                temporary.delete_named()
                restore_cursor()


def prepare(nproc: int) -> None:
    """Start the forkserver, which imports torch in parallel to this process: call it as early as possible."""
    temporary.begin()
    set_allocator()
    os.environ.setdefault("OMP_NUM_THREADS", str(Ranks(local_world_size=nproc).threads()))
    # Stores warn, with a C++ stack, whenever the host that serves them ends first.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # torch._dynamo too: otherwise every rank would import it, in over a second, to create its optimizer.
    preload = ["torch", "torch.distributed", "torch._dynamo", "nanotrain_core.engine"]
    multiprocessing.set_forkserver_preload(preload)
    # The forkserver and its processes inherit the blocked signals. Otherwise a SIGTERM or SIGHUP to all
    # processes would end it, and the launcher would lose track of ranks that are still saving. Ranks unblock
    # the signals once they can end in order. Ctrl-C would end its imports with a traceback.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        multiprocessing.resource_tracker.ensure_running()  # which unblocks SIGTERM and SIGINT
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_agent(job: Job, recipe: Recipe, nodes: Nodes) -> int:
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    interface = loopback()
    if nodes.count == 1 and interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    prepare(nodes.nproc)

    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousError

    from nanotrain_core.launch.agent import Agent

    _silence_torch()
    scratch = Path(job.scratch or "")
    forwarder = SignalForwarder(scratch, recipe.run.grace, saves=job.saves)
    watch = HangWatch(scratch, Path(job.claimed) if job.claimed else None, recipe.run.hang_timeout)
    agents: list[Agent] = []

    def look() -> None:
        """Watch; with several hosts rank 0 selects the run folder, so that it is known only now."""
        if watch.folder is None and (folder := recorded_folder(scratch)) is not None:
            watch.folder = Path(folder)
            stack.enter_context(log.kept_in(watch.folder, None))
        watch.look()

    def stopped() -> bool:
        return forwarder.received is not None

    def of_all_hosts(cause: Cause) -> Cause:
        return cause if stopped() else agents[-1].first_of_all(cause)

    def run() -> dict[int, Any]:
        agents.append(
            Agent(
                _what_to_start(job, nodes),
                RankProcesses(job, PATIENCE * recipe.run.hang_timeout),
                before_start=watch.forget,
                start_again=lambda codes, number: restarts.again(codes, number, watch.hang),
                given_up=lambda codes: of_all_hosts(first_cause(scratch, codes, watch.hang)),
                stopped=stopped,
                left=lambda: restarts.left is not None,
                restarted=restarts.number,
            )
        )
        return agents[-1].results()

    restarts = Restarts(
        scratch, nodes.max_restarts, stopped, of_all_hosts, may_leave=nodes.can_continue_without_this_host()
    )
    with ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as stack:
        while True:
            agent = thread.submit(run)
            try:
                ends = forwarder.wait(agent, meanwhile=look)
                return EXIT_OF[next(iter(ends.values()))]
            except ChildFailedError:
                if restarts.left is not None:
                    text = (
                        f"; this host's ranks were the first to fail {HOST_FAILURES} times: it leaves the run"
                    )
                    restarts.left.tell(f"{text}, which continues on the others")
                    return restarts.left.code
                cause = agents[-1].ended_by
                assert cause is not None
                if forwarder.received is not None and not (cause.mistake and cause.code != Exit.PREEMPTED):
                    return EXIT_OF[SIGNALS[forwarder.received]]
                # After a signal: for example a last checkpoint that could not be saved.
                return _end(cause, watch.hang)
            except RendezvousError as problem:
                if forwarder.received is not None:
                    return EXIT_OF[SIGNALS[forwarder.received]]
                gone = agents and isinstance(problem, RendezvousConnectionError)
                if gone and restarts.meet_again(nodes.endpoint):
                    continue
                if agents and agents[-1].ended_by is not None:
                    return _end(agents[-1].ended_by, watch.hang)
                text = "the hosts of the run do not meet, or one has ended it and its launcher says why"
                cause = Cause(f"{text}: {problem}", Exit.FAILED, echo=True)
                return _end(of_all_hosts(cause) if agents else cause, watch.hang)


def _silence_torch() -> None:
    """Silence torch's launcher: failures are printed here."""
    for name, logger in logging.root.manager.loggerDict.items():  # each has a level of its own
        if name.startswith(("torch.distributed", "torch.multiprocessing")) and isinstance(
            logger, logging.Logger
        ):
            logger.setLevel(logging.CRITICAL)


def _what_to_start(job: Job, nodes: Nodes) -> Any:
    """Return the agent's ``WorkerSpec``. With several hosts, this connects to their rendezvous.

    Raises:
        LaunchError: the rendezvous host does not answer.
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    return WorkerSpec(
        role="default",
        local_world_size=nodes.nproc,
        entrypoint=serve,
        rdzv_handler=rendezvous(nodes, Path(job.scratch or "")),
        max_restarts=nodes.max_restarts,
        monitor_interval=0.1,
        local_addr=nodes.local_address,
    )


def _end(cause: Cause, hang: Hang | None) -> int:
    """Report the first cause and return its exit code. A ``hang`` was reported when it was detected.

    Raises:
        NanotrainError: the user error that a rank raised.
    """
    if cause.mistake:
        raise cause.error()
    if hang is None or cause.text != hang.text:
        cause.tell()
    return cause.code
