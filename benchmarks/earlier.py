"""Race this checkout against an earlier one: has a change made training on a CPU slower?

    python -m benchmarks earlier --checkout ../before --python ../before/.venv/bin/python

``--python`` is that of an environment in which the earlier checkout is installed. Both sides take turns; a
ratio above 1 is a gain. The bar is on processor time: other work on the machine moves it less than the clock,
which is shown beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

import attrs

from benchmarks.cases import ALONE, CASES, SHARDED, Case
from benchmarks.report import markdown, spread, verdict
from nanotrain_core.launch.environment import loopback

ROOT = Path(__file__).parents[1]
BAR = 0.97

#: One cell for each kind of layout, of dense layers and of experts, in float32 and in bfloat16.
NAMES = (
    "fp32-1-thread",
    "bf16-1-thread",
    "ddp-2-ranks",
    "tp-2-ranks",
    "1f1b-2-ranks",
    "zero2-small-2-ranks",
    "deepseek-1-rank",
)


def cells() -> dict[str, Case]:
    """Return the cases by name, each also in bfloat16."""
    found: dict[str, Case] = {}
    for case in (*CASES, *SHARDED, *ALONE):
        found[case.name] = case
        if case.name in NAMES and case.precision == "fp32" and "thread" not in case.name:
            name = f"{case.name}-bf16"
            found[name] = attrs.evolve(case, name=name, precision="bf16")
    return found


@attrs.define(frozen=True)
class Ratio:
    """The earlier checkout's milliseconds of a step over this one's, in each round."""

    KIND = "earlier"
    TITLE = "An earlier checkout against this one, milliseconds of a step; ratio: earlier over now."
    HEADER = ("case", "processor, earlier", "now", "ratio", "quartiles", "clock, ratio", "bar", "")

    case: str
    earlier: float
    now: float
    ratios: tuple[float, ...]
    """Of processor time, summed over ranks."""
    clock_ratios: tuple[float, ...]

    @property
    def passed(self) -> bool:
        return median(self.ratios) >= BAR

    def row(self) -> list[str]:
        ordered = sorted(self.ratios)
        quartiles = spread((ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]), ".3f")
        numbers = [f"{self.earlier:.0f}", f"{self.now:.0f}", f"{median(self.ratios):.3f}", quartiles]
        return [self.case, *numbers, f"{median(self.clock_ratios):.3f}", str(BAR), verdict(self.passed)]

    def data(self) -> dict[str, Any]:
        return {**attrs.asdict(self), "ratio": median(self.ratios), "bar": BAR}


class Side:
    """The ranks of one checkout."""

    def __init__(self, case: Case, checkout: Path, python: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        told: dict[str, Any] = {
            "file": str(checkout / case.file.relative_to(ROOT)),
            "overrides": case.overrides(),
            "threads": case.threads,
            "ranks": case.ranks,
            "store": f"{self._folder.name}/store",
        }
        script = str(Path(__file__).with_name("earlier_rank.py"))
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.ranks = [
            subprocess.Popen([python, script, json.dumps({**told, "rank": rank})], cwd=checkout, **pipes)
            for rank in range(case.ranks)
        ]

    def turn(self, steps: int) -> tuple[float, float]:
        """Train ``steps`` steps; return all ranks' seconds of processor time, and the slowest's by the clock.

        Raises:
            RuntimeError: a rank died; it has told why on stderr.
        """
        for process in self.ranks:
            assert process.stdin is not None
            print(steps, file=process.stdin, flush=True)
        lines = [process.stdout.readline() for process in self.ranks if process.stdout is not None]
        if not all(lines):
            raise RuntimeError("a rank of the benchmark died: see its traceback above")
        seconds = [json.loads(line) for line in lines]
        return sum(each["processor"] for each in seconds), max(each["clock"] for each in seconds)

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()
        self._folder.cleanup()


def measure(case: Case, checkout: Path, python: str, *, rounds: int, steps: int, pairs: int = 1) -> Ratio:
    """Race the two checkouts.

    Args:
        pairs: of new processes: where memory comes to lie differs by process, and moves a step by 1 or 2%.
    """
    taken: dict[str, list[tuple[float, float]]] = {"earlier": [], "now": []}
    for _ in range(pairs):
        with Side(case, checkout, python) as earlier, Side(case, ROOT, sys.executable) as now:
            order = [("earlier", earlier), ("now", now)]
            for _, side in order:
                side.turn(steps)
            for _ in range(rounds):
                for name, side in order:
                    taken[name].append(side.turn(steps))
                order.reverse()
    both = list(zip(taken["earlier"], taken["now"], strict=True))
    milliseconds = [1000 * median(processor for processor, _ in side) / steps for side in taken.values()]
    ratios = tuple(before[0] / after[0] for before, after in both)
    return Ratio(case.name, *milliseconds, ratios, tuple(before[1] / after[1] for before, after in both))


def main(arguments: Sequence[str]) -> int:
    """Race what is named, print a table, and return 0 if every bar was passed, else 1."""
    known = cells()
    usual = [*NAMES, *(name for name in known if name.endswith("-bf16"))]
    parser = argparse.ArgumentParser(prog="python -m benchmarks earlier", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"cases (default: {', '.join(usual)})")
    parser.add_argument("--checkout", type=Path, required=True, help="folder of the earlier commit")
    parser.add_argument("--python", required=True, help="Python of an environment in which it is installed")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each side and pair (default: 9)")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps in a turn (default: 3)")
    parser.add_argument("--pairs", type=int, default=2, help="pairs of new processes (default: 2)")
    args = parser.parse_args(arguments)
    unknown = sorted(set(args.names) - set(known))
    if unknown:
        parser.error(f"no case named {', '.join(unknown)}; there are {', '.join(known)}")
    if not (args.checkout / "nanotrain_core").is_dir():
        parser.error(f"{args.checkout} is no checkout: it has no folder nanotrain_core")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback() or "")
    found = []
    for name in args.names or usual:
        print(f"{name}: {args.pairs} x {args.rounds} rounds", file=sys.stderr, flush=True)
        sizes = {"rounds": args.rounds, "steps": args.steps, "pairs": args.pairs}
        found.append(measure(known[name], args.checkout.resolve(), args.python, **sizes))
        print(" ", " | ".join(found[-1].row()), file=sys.stderr, flush=True)
    print(markdown(found))
    return 0 if all(each.passed for each in found) else 1
