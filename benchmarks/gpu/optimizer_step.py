"""A step of AdamW on the device, clipping included: ours against torch's clipping and fused AdamW."""

from __future__ import annotations

from functools import partial
from statistics import median

from benchmarks import optimizer
from benchmarks.gpu.bars import BARS
from benchmarks.gpu.records import Recorder
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.turns import Raced

#: Tensors, and elements of each: one size is nothing but calls, the other has as many as GPT-2.
TENSORS = 196
ELEMENTS = (8, 632_000)


def run(settings: Settings) -> None:
    """Race both sizes in both precisions; the bar is of the calls alone, in bfloat16."""
    record = Recorder(settings.records)
    tensors, sizes = (6, (8, 32)) if settings.smoke else (TENSORS, ELEMENTS)
    rounds, steps = (1, 2) if settings.smoke else (7, 20)
    for number, elements in enumerate(sizes):
        for precision in optimizer.PRECISIONS:
            bars = ("optimizer",) if not number and precision == "bf16" else ()
            with record.attempt(f"optimizer, {elements} elements, {precision}", *bars):
                shape = optimizer.Shape(tensors, elements, settings.device)
                taken = optimizer.times(precision, shape, rounds, partial(optimizer.wall_time, steps=steps))
                raced = Raced(*taken)
                bar = BARS["optimizer"].wanted
                record.row(
                    "a step of AdamW with clipping, ms, the device waited for",
                    precision=precision,
                    tensors=f"{tensors} x {elements:,}",
                    **raced.cells(lambda milliseconds: milliseconds, ".2f"),
                    bar=bar if bars else "",
                    ok=settings.judged(raced.ratio >= bar) if bars else None,
                )
                for name in bars:
                    record.bar(name, median(raced.ratios))
