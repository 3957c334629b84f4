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

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import tempfile
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit

import attrs

from nanotrain_core.errors import LaunchError
from nanotrain_core.launch import temporary
from nanotrain_core.launch.code_digests import used_code
from nanotrain_core.launch.cuda import set_allocator
from nanotrain_core.launch.environment import Ranks, loopback
from nanotrain_core.launch.hosts import Nodes
from nanotrain_core.launch.worker import Job
from nanotrain_core.monitors.terminal import restore_cursor
from nanotrain_core.recipe import Recipe
from nanotrain_core.registry.registry import load_plugins
from nanotrain_core.run import log
from nanotrain_core.run.folder import RunFolder
from nanotrain_core.run.stop import EXIT_OF, SIGNALS

#: Open files without which ranks do not start: their pipes, sockets to peers, and libraries.
FEWEST_FILES = 64


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
    return start_ranks(job, recipe, nodes)


def start_ranks(job: Job, recipe: Recipe, nodes: Nodes) -> int:
    """Run ``job`` on this host's ranks, without claiming a run folder, and return the exit code.

    Raises:
        NanotrainError: as for :func:`launch`.
    """
    if nodes.count * nodes.nproc == 1 and not nodes.max_restarts:
        return EXIT_OF[job.run(Ranks())]
    registry = load_plugins(block=job.plugins.blocked, local=job.plugins.local)
    with tempfile.TemporaryDirectory(prefix="nanotrain-") as scratch:
        job = attrs.evolve(
            job,
            scratch=scratch,
            one_host=nodes.count == 1,
            launcher_pid=os.getpid(),
            in_process_restart=recipe.run.in_process_restart and nodes.max_restarts > 0,
            code=used_code(registry, recipe),
        )
        with log.kept_in(Path(job.claimed) if job.claimed else None, None):
            try:
                return _run_agent(job, recipe, nodes)
            finally:
                temporary.delete_named()
                restore_cursor()


def start_forkserver(nproc: int) -> None:
    """Start the forkserver, which imports torch in parallel to this process: call it as early as possible.

    Raises:
        LaunchError: so few files may be open that it, or a rank, would end with a traceback.
    """
    if (files := getrlimit(RLIMIT_NOFILE)[0]) < FEWEST_FILES:
        raise LaunchError(
            f"`ulimit -n` allows {files} open files: expected {FEWEST_FILES} or more to start ranks"
        )
    temporary.begin()
    set_allocator()
    os.environ.setdefault("OMP_NUM_THREADS", str(Ranks(local_world_size=nproc).threads()))
    # Stores warn, with a C++ stack, whenever the host that serves them ends first.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # torch._dynamo too: otherwise every rank would import it, in over a second, to create its optimizer. A
    # rank's own module, so that it can say what has changed, whatever code it would find later.
    preload = ["torch", "torch.distributed", "torch._dynamo", "nanotrain_core.engine"]
    preload += ["nanotrain_core.launch.rank_process"]
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
    start_forkserver(nodes.nproc)

    from nanotrain_core.launch.host_run import HostRun, silence_torch

    silence_torch()
    return HostRun(job, recipe, nodes).run()
