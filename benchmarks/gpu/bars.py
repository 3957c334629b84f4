"""What one H100 or H200 is to reach, each bar by a name that parts report a figure under."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import ge, le

import attrs

from benchmarks.gpu.records import Record
from benchmarks.report import verdict

HEADER = ("bar", "wanted", "measured", "")


@attrs.define(frozen=True)
class Bar:
    """One row of the table of bars."""

    name: str
    """What is measured, in words."""
    wanted: float
    part: str
    """Which part measures it."""
    at_most: bool = False
    percent: bool = False

    def passed(self, value: float) -> bool:
        return (le if self.at_most else ge)(value, self.wanted)

    def shown(self, value: float) -> str:
        return f"{value:.1%}" if self.percent else f"{value:.2f}"


BARS: Mapping[str, Bar] = {
    "llama": Bar("Llama 0.96B bf16 / plain PyTorch, compiled whole", 1.05, "llama"),
    "wide": Bar("Llama 1.5B wide bf16 / plain PyTorch, compiled", 1.05, "wide"),
    "gpt2": Bar("GPT-2 124M / compiled nanoGPT", 1.0, "gpt2"),
    "gpt2-graphs": Bar("GPT-2 124M with CUDA graphs / compiled nanoGPT", 1.15, "gpt2"),
    "deepseek": Bar("DeepSeek 2.3B slice, MFU", 0.40, "deepseek", percent=True),
    "fp8-wide": Bar("FP8 blockwise, wide / our compiled bf16", 1.15, "wide"),
    "fp8-experts": Bar("FP8 experts / bf16", 1.2, "fp8"),
    "rounding": Bar("rounding kernels / copy, the slowest of them", 0.8, "fp8"),
    "optimizer": Bar("optimizer step, 196 tensors / torch clip and fused AdamW", 0.9, "optimizer"),
    "memory": Bar("peak memory, Llama 0.96B / plain PyTorch, compiled whole", 1.0, "llama", at_most=True),
}


def rows(records: Iterable[Record], parts: Mapping[str, str]) -> list[tuple[list[str], bool | None]]:
    """Return every bar's row, and whether it was passed; None: it has no figure.

    Args:
        records: of all parts.
        parts: those that were asked for, and why each did not come to its end; empty: it did.
    """
    found, missing = {}, {}
    for record in records:
        if record["kind"] == "bar":
            found[record["bar"]] = record["value"]
        for bar in record.get("bars", ()):
            missing[bar] = record.get("why") or f"{record['name']}: {record['text']}".splitlines()[0]
    table: list[tuple[list[str], bool | None]] = []
    for key, bar in BARS.items():
        wanted = f"{'at most ' if bar.at_most else ''}{bar.wanted:.0%}" if bar.percent else ""
        wanted = wanted or f"{'at most ' if bar.at_most else ''}{bar.wanted:g}"
        if key in found:
            passed = bar.passed(found[key])
            table.append(([bar.name, wanted, bar.shown(found[key]), verdict(passed)], passed))
        else:
            own = parts.get(bar.part, f"part {bar.part} was not asked for")
            why = missing.get(key) or own or f"part {bar.part} came to no figure"
            table.append(([bar.name, wanted, f"not run: {why}", ""], None))
    return table
