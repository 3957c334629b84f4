"""Two sides that train in turns, so that whatever else the machine does slows both alike.

Each side's ranks are processes of their own that stay alive and idle between turns. A round is one
turn of each side, one directly after the other, and gives one ratio; who goes first alternates.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from statistics import median
from types import TracebackType
from typing import Any

import attrs

from benchmarks.cases import Case
from benchmarks.report import spread, verdict

#: Builds one rank of a side; returns what trains for so many steps more.
Build = Callable[[Any, int], Callable[[int], object]]


@attrs.define(frozen=True)
class Result:
    """Medians over rounds, and the spread of the ratio."""

    KIND = "races"
    TITLE = "Tokens/s, medians over rounds; the ratio is the median of each round's."
    HEADER = (
        "case",
        "peer",
        "ranks",
        "threads",
        "ours",
        "peer's",
        "ratio",
        "spread",
        "bar",
        "MB",
        "peer's",
        "",
    )

    case: Case
    ours: float
    """Tokens/s over all ranks."""
    peer: float
    ratios: tuple[float, ...]
    memory: int = 0
    """Largest resident memory of any of our ranks, in MB, libraries included."""
    peer_memory: int = 0

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def passed(self) -> bool:
        return self.ratio >= self.case.bar and not (self.case.lean and self.memory > self.peer_memory)

    def row(self) -> list[str]:
        case = self.case
        speeds = [f"{self.ours:,.0f}", f"{self.peer:,.0f}"]
        numbers = [*speeds, f"{self.ratio:.2f}", spread(self.ratios, ".2f"), f"{case.bar:g}"]
        numbers += [f"{self.memory:,}", f"{self.peer_memory:,}"]
        return [case.name, case.peer, str(case.ranks), str(case.threads), *numbers, verdict(self.passed)]

    def data(self) -> dict[str, Any]:
        case = self.case
        return {
            "case": case.name,
            "peer": case.peer,
            "ranks": case.ranks,
            "threads": case.threads,
            "precision": case.precision,
            "tokens_per_second": self.ours,
            "peer_tokens_per_second": self.peer,
            "ratios": self.ratios,
            "ratio": self.ratio,
            "bar": case.bar,
            "memory_mb": self.memory,
            "peer_memory_mb": self.peer_memory,
            "passed": self.passed,
        }


@attrs.define(frozen=True)
class Speed:
    """Tokens/s over all ranks of a side that races nobody, in each round."""

    KIND = "alone"
    TITLE = "Tokens/s alone."
    HEADER = ("case", "ranks", "threads", "median", "spread")
    passed = True

    case: Case
    rounds: tuple[float, ...]

    def row(self) -> list[str]:
        case, speed = self.case, f"{median(self.rounds):,.0f}"
        return [case.name, str(case.ranks), str(case.threads), speed, spread(self.rounds, ",.0f")]

    def data(self) -> dict[str, Any]:
        return {"case": self.case.name, "ranks": self.case.ranks, "tokens_per_second": self.rounds}


class Side:
    """The ranks of one contender."""

    def __init__(self, build: Build, case: Case) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self.memory = 0
        self.ranks: list[tuple[Any, Connection]] = []
        for rank in range(case.ranks):
            ours, theirs = context.Pipe()
            arguments = (theirs, build, case, rank, f"{self._folder.name}/store")
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that a rank's death is an EOFError here
            self.ranks.append((process, ours))

    def turn(self, steps: int) -> float:
        """Train ``steps`` steps and return the seconds that the slowest rank took.

        Raises:
            RuntimeError: a rank died; it has told why on stderr.
        """
        try:
            for _, connection in self.ranks:
                connection.send(steps)
            replies = [connection.recv() for _, connection in self.ranks]
        except (BrokenPipeError, EOFError):
            raise RuntimeError("a rank of the benchmark died: see its traceback above") from None
        self.memory = max(memory for _, memory in replies)
        return max(seconds for seconds, _ in replies)

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, connection in self.ranks:
            with contextlib.suppress(BrokenPipeError):
                connection.send(0)
            process.join(timeout=10)
            process.kill()
        self._folder.cleanup()


def serve(connection: Connection, build: Build, case: Case, rank: int, store: str) -> None:
    """Be one rank of a side: train as many steps as asked for, again and again, until asked for none."""
    import torch

    torch.set_num_threads(case.threads)
    with process_group(case, rank, store):
        advance = build(case.recipe(), rank)
        while steps := connection.recv():
            began = time.perf_counter()
            advance(steps)
            seconds = time.perf_counter() - began
            connection.send((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024))


@contextlib.contextmanager
def process_group(case: Case, rank: int, store: str) -> Iterator[None]:
    """Join the side's ranks over gloo on the loopback interface."""
    import torch.distributed as dist

    if case.ranks > 1:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, case.ranks), rank=rank, world_size=case.ranks
        )
    yield
    if case.ranks > 1:
        dist.destroy_process_group()


def alone(case: Case, ours: Build, *, rounds: int, steps: int) -> Speed:
    """Let one side take ``rounds`` turns of ``steps`` optimizer steps, after one to warm up."""
    tokens = tokens_of(case, steps)
    with Side(ours, case) as side:
        side.turn(steps)
        return Speed(case, tuple(tokens / side.turn(steps) for _ in range(rounds)))


def tokens_of(case: Case, steps: int) -> int:
    """Return the tokens of so many steps."""
    batch = case.recipe().batch
    return batch.sequences * batch.length * steps


def race(case: Case, ours: Build, peer: Build, *, rounds: int, steps: int) -> Result:
    """Let both sides take ``rounds`` turns of ``steps`` optimizer steps, after one to warm up."""
    tokens = tokens_of(case, steps)
    speeds: dict[Side, list[float]] = {}
    with Side(ours, case) as first, Side(peer, case) as second:
        order = [first, second]
        for side in order:
            side.turn(steps)
            speeds[side] = []
        for _ in range(rounds):
            for side in order:
                speeds[side].append(tokens / side.turn(steps))
            order.reverse()
        ratios = tuple(a / b for a, b in zip(speeds[first], speeds[second], strict=True))
        middles = median(speeds[first]), median(speeds[second])
        return Result(case, *middles, ratios, first.memory, second.memory)
