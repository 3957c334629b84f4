"""A pool of ranks on this machine, for testing distributed code from an ordinary test function.

``run_ranks(function, 4, *args)`` runs an importable function on four ranks of a new gloo group and
returns their results, which the caller asserts on: a plain ``assert`` in a worker lacks pytest's
explanations. Workers are forked from a server that has torch loaded, and kept between calls, so a
call costs about 0.1 s. Whatever goes wrong, the pool is killed and the next call gets a new one.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import attrs

from nanotrain_core.testing.worker import Failure, Job, Target, ask_for_stack, serve, signal_name

#: Seconds the other ranks get to report after the first failure.
GRACE = 1.0

#: The environment variable with the seconds after which ranks that have not returned count as hung.
RANK_TIMEOUT = "NANOTRAIN_RANK_TIMEOUT"

#: Another: ``off`` has torch not compare collectives between ranks where a call does not ask for it.
COLLECTIVE_CHECKS = "NANOTRAIN_COLLECTIVE_CHECKS"

#: Frames below the function that was called.
HARNESS = ("/testing/worker.py", "/multiprocessing/", "<string>")

#: Imported once by the server that workers are forked from; what is missing there is left out.
PRELOAD = [
    "numpy",
    "torch",
    "torch.distributed",
    "torch._dynamo",  # else every worker's first optimizer step imports it, in 1.5 s
    "nanotrain_core.testing.worker",
    "nanotrain_core.testing.probe",  # brings the core with it
    "nanotrain_core.launch.launch_monitors",
    "nanotrain_core.testing.preload",  # and this what plugins announce and build
    "pytest",  # which the modules of most tests import
]


class RankFailure(Exception):
    """One or more ranks raised, died or hung. The text begins with the first cause."""

    def __init__(self, world_size: int, failures: Sequence[Failure]) -> None:
        self.failures = sorted(failures, key=_causes_first)
        super().__init__(_report(world_size, self.failures))


def _causes_first(failure: Failure) -> tuple[bool, int, int]:
    return failure.consequence, ("raised", "died", "hung").index(failure.kind), failure.rank


def _report(world_size: int, failures: Sequence[Failure]) -> str:
    """Print the first cause in full (for a hang: every rank's stack) and one line for each other rank."""
    first = failures[0]
    lines = []
    for failure in failures:
        if failure is first or failure.kind == first.kind == "hung":
            lines += [f"rank {failure.rank} of {world_size} {failure.summary}", failure.detail.rstrip()]
        else:
            summary = failure.summary.splitlines()[0]
            lines.append(f"rank {failure.rank} of {world_size} also: {summary[:200]}")
    return "\n".join(line for line in lines if line)


@attrs.define(frozen=True, eq=False)
class Worker:
    """One rank's process, from the pool's side."""

    rank: int
    process: Any
    connection: Connection
    stack_file: Path

    def receive(self) -> Any:
        """Return what the rank sent, or a :class:`Failure` if it is gone."""
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join()
            return Failure(self.rank, "died", signal_name(self.process.exitcode), self.stack())

    def stack(self) -> str:
        """Return the Python stack the worker wrote, without the frames of the harness."""
        written = self.stack_file.exists()  # else it has not begun to serve
        lines = self.stack_file.read_text().splitlines() if written else []
        frames = [line for line in lines if line.startswith("  File") and not any(h in line for h in HARNESS)]
        return "\n".join(["Most recent call first:", *frames]) if frames else ""


class Pool:
    """``world_size`` ranks that run one function after another."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.workers: list[Worker] = []
        self.folder = Path()

    def start(self) -> None:
        """Fork the workers."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.folder = Path(tempfile.mkdtemp(prefix="nanotrain-pool-"))
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            stack_file = self.folder / f"stack-{rank}"
            process = context.Process(
                target=serve, args=(theirs, rank, self.world_size, str(stack_file)), daemon=True
            )
            process.start()
            theirs.close()  # so that the worker's death closes the pipe
            self.workers.append(Worker(rank, process, ours, stack_file))

    def close(self) -> None:
        """Kill every worker. The next call starts new ones."""
        for worker in self.workers:
            worker.process.kill()
            worker.process.join()
            worker.connection.close()
        if self.workers:
            shutil.rmtree(self.folder)
        self.workers.clear()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float | None = None,
        backend: str | None = "gloo",
        check_collectives: bool | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on every rank and return the results, by rank.

        Args:
            function: at the top level of a module; arguments and results travel by pickle.
            timeout: seconds until ranks that have not returned count as hung: 60, or what pytest's
                ``--rank-timeout`` says.
            backend: of the new default process group; None makes no group.
            check_collectives: have torch compare every collective's kind, shape and dtype across
                ranks, so that a mismatch is an error and not a hang. About 3 ms per collective.
                None: do, unless pytest's ``--collective-checks`` says ``off``.

        Raises:
            RankFailure: a rank raised, died or hung; the pool was replaced.
        """
        target = Target.of(function)
        if check_collectives is None:
            check_collectives = os.environ.get(COLLECTIVE_CHECKS) != "off"
        if not self.workers:
            self.start()
        with tempfile.TemporaryDirectory(dir=self.folder, ignore_cleanup_errors=True) as folder:
            arguments = pickle.dumps((args, kwargs))
            store = f"{folder}/store"
            job = Job(tuple(sys.path), target, arguments, store, backend, check_collectives)
            message = pickle.dumps(job)
            try:
                for worker in self.workers:
                    with contextlib.suppress(BrokenPipeError):  # a dead worker shows when it is read
                        worker.connection.send_bytes(message)
                return self._collect(timeout or float(os.environ.get(RANK_TIMEOUT, "60")))
            except BaseException:
                self.close()
                raise

    def _collect(self, timeout: float) -> list[Any]:
        waiting: dict[Any, Worker] = {worker.connection: worker for worker in self.workers}
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                worker = waiting.pop(connection)
                results[worker.rank] = reply = worker.receive()
                if isinstance(reply, Failure):
                    failures.append(reply)
                    deadline = min(deadline, time.monotonic() + GRACE)
        limit = f"{GRACE:g} s after the first failure" if failures else f"within {timeout:g} s"
        failures += self._hung(list(waiting.values()), limit)
        if failures:
            raise RankFailure(self.world_size, failures)
        return [results[rank] for rank in range(self.world_size)]

    def _hung(self, workers: Sequence[Worker], limit: str) -> list[Failure]:
        """Request the stacks of ranks that do not answer."""
        for worker in workers:
            ask_for_stack(worker.process.pid)
        if workers:
            time.sleep(0.3)  # a signal handler writes the stack; nothing announces its end
        summary = f"did not return {limit}"
        return [Failure(worker.rank, "hung", summary, worker.stack()) for worker in workers]


_pools: dict[int, Pool] = {}


@atexit.register
def close_pools() -> None:
    """Kill the session's pools."""
    for pool in _pools.values():
        pool.close()
    _pools.clear()


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
    """Run ``function`` on the session's pool of ``world_size`` ranks. See :meth:`Pool.run`."""
    return _pools.setdefault(world_size, Pool(world_size)).run(function, *args, **kwargs)
