"""What narrow formats cost on a CPU: steps of one recipe in two precisions, in turns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import attrs

from benchmarks.cases import DEEPSEEK, RECIPE, Case
from benchmarks.ours import engine
from benchmarks.race import Side
from benchmarks.report import spread, verdict

#: An emulated step may take so many times as long as one in bfloat16.
LIMIT = 3.0
#: A step with packed weights, as long as one with the same weights in 2 bytes each.
PACKED_LIMIT = 1.5

FOLDER = Path(__file__).parent
CASES = (
    Case(name="deepseek_tiny, width 128", file=FOLDER / "fp8_deepseek.toml"),
    Case(name="DeepSeek, width 256", file=DEEPSEEK, microbatch=2, accumulate=4),
    Case(name="laptop's Llama, width 192", file=FOLDER / "fp8_llama.toml"),
    Case(name="Llama, width 256", file=RECIPE),
)


#: Four bits packed, and as bfloat16 numbers.
FOUR_BITS = tuple(f'{{ use = "fp4_master", packed = {packed} }}' for packed in ("true", "false"))


@attrs.define(frozen=True)
class Slowdown:
    """Milliseconds of a step, medians over rounds, and the ratio of each round."""

    KIND = "fp8"
    TITLE = "Milliseconds of a step in one thread, medians: FP8 emulated on a CPU, and bfloat16."
    HEADER = ("model", "fp8_deepseek_v3", "bf16", "ratio", "spread", "limit", "")

    name: str
    narrow: float
    wide: float
    ratios: tuple[float, ...]
    limit: float = LIMIT

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def passed(self) -> bool:
        return self.ratio <= self.limit

    def row(self) -> list[str]:
        times = [f"{self.narrow:.0f}", f"{self.wide:.0f}", f"{self.ratio:.2f}"]
        return [self.name, *times, spread(self.ratios, ".2f"), f"{self.limit:g}", verdict(self.passed)]

    def data(self) -> dict[str, Any]:
        return {**attrs.asdict(self), "ratio": self.ratio, "passed": self.passed}


@attrs.define(frozen=True)
class Unpacking(Slowdown):
    """The same of weights in four bits."""

    KIND = "fp4"
    TITLE = (
        "Milliseconds of a step in one thread, medians: NVFP4 weights held packed, and as bfloat16 numbers."
    )
    HEADER = ("model", "packed", "not packed", "ratio", "spread", "limit", "")

    limit: float = PACKED_LIMIT


def measure(*, rounds: int, steps: int, cases: Sequence[Case] = CASES) -> list[Slowdown]:
    """Time FP8 in every case."""
    precisions = ("fp8_deepseek_v3", "bf16")
    return [Slowdown(case.name, *raced(case, precisions, rounds, steps)) for case in cases]


def measure_packed(*, rounds: int, steps: int, cases: Sequence[Case] = CASES) -> list[Slowdown]:
    """Time four bits in every case."""
    return [Unpacking(case.name, *raced(case, FOUR_BITS, rounds, steps)) for case in cases]


def raced(
    case: Case, precisions: Sequence[str], rounds: int, steps: int
) -> tuple[float, float, tuple[float, ...]]:
    """Let both precisions take ``rounds`` turns of ``steps`` steps, after one to warm up.

    Returns:
        Milliseconds of a step in each, medians, and the ratio of each round.
    """
    seconds: list[list[float]] = [[], []]
    first, second = (attrs.evolve(case, precision=precision) for precision in precisions)
    with Side(engine, first) as narrow, Side(engine, second) as wide:
        order = [0, 1]
        for turn in range(rounds + 1):
            for number in order:
                taken = (narrow, wide)[number].turn(steps) / steps
                if turn:
                    seconds[number].append(taken)
            order.reverse()
    ratios = tuple(a / b for a, b in zip(*seconds, strict=True))
    mine, theirs = (1e3 * median(each) for each in seconds)
    return mine, theirs, ratios
