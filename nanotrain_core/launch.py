"""Starts the ranks of a run on this host with torch's elastic agent, and tells how they ended.

What torch leaves to its caller is done here, once:

* Ranks come from a forkserver that has torch loaded: 8 of them reach their first collective in
  about 3 seconds, where spawning takes 8.
* The agent's store is not shared with the ranks (``TORCH_DISABLE_SHARE_RDZV_TCP_STORE``): with gloo
  the keys of a failed attempt would break every restart.
* On one host the rendezvous is a file in a private folder and gloo uses the loopback interface:
  nothing listens on the network.
* Cores are divided among the ranks.
* The agent runs in a thread, where it leaves signals alone: it would kill ranks that wait to hand
  over their result. Signals go to the ranks through :class:`~nanotrain_core.forward.SignalForwarder`.
* The agent's own tracebacks are silenced; the first cause is told instead, with its rank.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from nanotrain_core.environment import Ranks, loopback
from nanotrain_core.errors import Exit, LaunchError, NanotrainError
from nanotrain_core.folder import RunFolder
from nanotrain_core.forward import SignalForwarder
from nanotrain_core.recipe import Recipe
from nanotrain_core.stop import SIGNALS
from nanotrain_core.worker import Job, run_rank, train

EXIT_OF = {
    "done": Exit.DONE,
    "stopped": Exit.DONE,
    "preempted": Exit.PREEMPTED,
    "interrupted": Exit.INTERRUPTED,
}


@attrs.define(frozen=True, kw_only=True)
class Nodes:
    """The hosts of a run."""

    count: int = 1
    nproc: int = 1
    """Ranks on each."""
    endpoint: str = ""
    """``host:port`` where the hosts meet."""
    run_id: str = "nanotrain"
    max_restarts: int = 0


def launch(job: Job, recipe: Recipe, nodes: Nodes) -> int:
    """Run ``recipe`` on this host's ranks and return the exit code.

    Raises:
        NanotrainError: something the user can mend went wrong on a rank, or before there were any.
    """
    if nodes.count > 1 and not nodes.endpoint:
        raise LaunchError("--nnodes above 1 needs --rdzv-endpoint HOST:PORT, the same on every node")
    if nodes.count == 1:
        folder = job.folder or recipe.run.folder
        claim = RunFolder.claim(recipe.run.name, folder=folder, resume=job.resume is not None)
        job = attrs.evolve(job, claimed=str(claim.path))
    if nodes.count * nodes.nproc == 1:
        return EXIT_OF[train(job, Ranks())]
    with tempfile.TemporaryDirectory(prefix="nanotrain-") as scratch:
        job = attrs.evolve(job, scratch=scratch, one_host=nodes.count == 1, launcher_pid=os.getpid())
        return _run_agent(job, nodes)


def prepare(nproc: int) -> None:
    """Start the forkserver, which loads torch while this process does: call it as early as possible."""
    os.environ.setdefault("OMP_NUM_THREADS", str(Ranks(local_world_size=nproc).threads()))
    multiprocessing.set_forkserver_preload(["torch", "torch.distributed", "nanotrain_core.engine"])
    multiprocessing.forkserver.ensure_running()


def _run_agent(job: Job, nodes: Nodes) -> int:
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    interface = loopback()
    if nodes.count == 1 and interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    prepare(nodes.nproc)

    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    for name, logger in logging.root.manager.loggerDict.items():  # each has a level of its own
        if name.startswith(("torch.distributed", "torch.multiprocessing")) and isinstance(
            logger, logging.Logger
        ):
            logger.setLevel(logging.CRITICAL)
    forwarder = SignalForwarder(Path(job.scratch or ""))
    with ThreadPoolExecutor(1) as thread:
        agent = thread.submit(elastic_launch(_agent_config(job, nodes), run_rank), job)
        try:
            ends = forwarder.wait(agent)
        except ChildFailedError as failed:
            if forwarder.received is not None:
                return EXIT_OF[SIGNALS[forwarder.received]]
            _tell_failure(job, failed)
            return Exit.FAILED
    return EXIT_OF[next(iter(ends.values()))]


def _agent_config(job: Job, nodes: Nodes) -> Any:
    from torch.distributed.launcher.api import LaunchConfig

    single = nodes.count == 1
    return LaunchConfig(
        min_nodes=nodes.count,
        max_nodes=nodes.count,
        nproc_per_node=nodes.nproc,
        run_id=nodes.run_id,
        rdzv_backend="c10d",
        rdzv_endpoint=str(Path(job.scratch or "", "rendezvous")) if single else nodes.endpoint,
        rdzv_configs={"store_type": "file"} if single else {},
        local_addr="127.0.0.1" if single else None,
        start_method="forkserver",
        max_restarts=nodes.max_restarts,
        monitor_interval=0.1,
    )


def _tell_failure(job: Job, failed: Any) -> None:
    """Tell the first cause: a mistake of the user's, a crash, a death; an echo of these only if alone.

    Raises:
        NanotrainError: the user's mistake, as a rank met it.
    """
    reports = [json.loads(path.read_text()) for path in Path(job.scratch or "").glob("failure-*.json")]
    reports.sort(key=lambda report: (report["trace"] is not None, report["echo"], report["time"]))
    first = reports[0] if reports else None
    if first and first["trace"] is None:
        error = NanotrainError(first["text"])
        error.exit_code = first["code"]
        raise error
    killed = {rank: failure.exitcode for rank, failure in failed.failures.items() if failure.exitcode < 0}
    if first and (not first["echo"] or not killed):
        print(f"{first['trace']}nanotrain: rank {first['rank']} failed: {first['text']}", file=sys.stderr)
    for rank, code in sorted(killed.items()) if not first or first["echo"] else ():
        print(f"nanotrain: rank {rank} was killed by {signal.Signals(-code).name}", file=sys.stderr)
