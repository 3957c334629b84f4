"""Judges what ranks have measured against what their device should do, and against one another.

A rank's measurements are a table, see :mod:`nanotrain_doctor.measure`; a rank that failed has ``failed``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from nanotrain_doctor.findings import Finding, bad, good, note, size, warning
from nanotrain_doctor.peaks import Peaks
from nanotrain_doctor.processor import SLOW_CPU, judge_products

#: Of what is expected: from here on it is good, and below that it is bad.
ENOUGH, TOO_LITTLE = 0.85, 0.5
Measured = Mapping[str, Any]

#: What to look at if a GPU is slow.
SLOW_GPU = "nvidia-smi: other processes, power cap, clocks, temperature; nvidia-smi topo -m for links"


def judge_ranks(ranks: Sequence[Measured], peaks: Peaks) -> list[Finding]:
    """Judge the measurements of all ranks of a world."""
    lost = [each for each in ranks if "failed" in each]
    found = [
        bad(
            "ranks",
            f"rank {each['rank']}: {each['failed']}",
            "fix this first: `nanotrain run` would fail in the same way",
        )
        for each in lost
    ]
    if lost:
        return found
    found += [judge_gemm(ranks, peaks), judge_memory(ranks, peaks)]
    found += [*_repeats(ranks), *_others(ranks), *slow_ranks(ranks), *judge_all_reduce(ranks, peaks)]
    return found


def judge_gemm(ranks: Sequence[Measured], peaks: Peaks) -> Finding:
    """Judge the slowest rank's matrix products."""
    rates = {key: min(each[key] for each in ranks) for key in ranks[0] if key.startswith("gemm_")}
    text = ", ".join(f"{rate / 1e12:.3g} TFLOP/s in {key[5:]}" for key, rate in rates.items()) + _each(ranks)
    if peaks.gemm is None and ranks[0]["device"] == "cpu":
        return judge_products(ranks, text)
    return _against("GEMM", text, rates["gemm_bfloat16"], peaks.gemm, peaks, 1e12, "TFLOP/s", slow(ranks))


def judge_memory(ranks: Sequence[Measured], peaks: Peaks) -> Finding:
    """Judge the slowest rank's copies in its memory."""
    rate = min(each["copy"] for each in ranks)
    text = f"copies {rate / 1e9:.3g} GB/s, read and written{_each(ranks)}"
    if peaks.memory is None and ranks[0]["device"] == "cpu":
        return note(
            "memory bandwidth", f"{text}; no expectation: which memory there is is unknown", rate=rate
        )
    return _against("memory bandwidth", text, rate, peaks.memory, peaks, 1e9, "GB/s", slow(ranks))


def judge_all_reduce(ranks: Sequence[Measured], peaks: Peaks) -> Iterator[Finding]:
    """Judge sums over ranks: whether they are right, and how fast."""
    sums = [each["all_reduce"] for each in ranks if each.get("all_reduce")]
    if not sums:
        return
    wrong = {each["rank"]: each["all_reduce"]["wrong"] for each in ranks if each["all_reduce"]["wrong"]}
    if wrong:
        told = ", ".join(f"{count} elements on rank {rank}" for rank, count in wrong.items())
        remedy = "train nothing here: try other hosts"
        if ranks[0]["device"] != "cpu":
            remedy = "train nothing here: unset NCCL_PROTO and NCCL_ALGO, try other hosts, then other cards"
        yield bad("all-reduce", f"wrong sums: {told}", remedy, wrong=wrong)
        return
    world, seconds = len(ranks), max(each["seconds"] for each in sums)
    bus = 2 * (world - 1) / world * sums[0]["bytes"] / seconds
    hosts = len({each["host"] for each in ranks})
    latency = max(each["latency"] for each in sums)
    text = f"right on all {world} ranks; {size(sums[0]['bytes'])} at {bus / 1e9:.3g} GB/s on the bus, "
    text += f"{latency * 1e6:.0f} us for one number"
    expected = peaks.inter if hosts > 1 else peaks.intra
    gpus = ranks[0]["device"] != "cpu"
    yield _against("all-reduce", text, bus, expected if gpus else None, peaks, 1e9, "GB/s", slow(ranks))


def slow_ranks(ranks: Sequence[Measured]) -> Iterator[Finding]:
    """Yield GPUs that are slower than the others of a world: all wait for them."""
    if len(ranks) < 3 or ranks[0]["device"] == "cpu":  # ranks on CPUs share cores, and two have no majority
        return
    for key, what in (("gemm_bfloat16", "matrix products"), ("copy", "copies")):
        usual = median(each[key] for each in ranks)
        for each in ranks:
            if each[key] < ENOUGH * usual:
                text = f"rank {each['rank']}, GPU {each['number']} of {each['host']}: {what} at "
                text += f"{each[key] / usual:.0%} of the others' rate"
                remedy = (
                    "nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE there; leave the host out if it stays"
                )
                yield warning("slow rank", text, remedy, rank=each["rank"], share=each[key] / usual)


def judge_versions(hosts: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """Yield what of torch and plugins is not the same on every host as on the first."""
    first, *others = hosts
    for host in others:
        mine, theirs = hosts[first], hosts[host]
        unlike = sorted(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name))
        for name in unlike:
            here, there = mine.get(name, "missing"), theirs.get(name, "missing")
            text = f"{name} is {there} on {host} and {here} on {first}"
            yield bad("versions", text, "install the same on all hosts: a run refuses to start")


def slow(ranks: Sequence[Measured]) -> str:
    """Return what to look at if the device of these ranks is slow."""
    return SLOW_CPU if ranks[0]["device"] == "cpu" else SLOW_GPU


def _against(
    check: str,
    text: str,
    rate: float,
    expected: float | None,
    peaks: Peaks,
    unit: float,
    name: str,
    remedy: str,
) -> Finding:
    """Judge a rate; there is no verdict where nothing is known."""
    if expected is None:
        return note(check, text, rate=rate)
    values = {"rate": rate, "expected": expected, "source": peaks.source}
    text = f"{text}; expected of {peaks.source}: {expected / unit:.3g} {name}"
    if rate >= ENOUGH * expected:
        return good(check, text, **values)
    return (bad if rate < TOO_LITTLE * expected else warning)(check, text, remedy, **values)


def _each(ranks: Sequence[Measured]) -> str:
    return f", the slowest of {len(ranks)} ranks at a time" if len(ranks) > 1 else ""


def _repeats(ranks: Sequence[Measured]) -> Iterator[Finding]:
    for each in ranks:
        if not each["repeats"]:
            text = f"rank {each['rank']} on {each['host']}: the same product has other bits the second time"
            yield bad("GEMM", text, "take this device out: it computes wrongly", rank=each["rank"])


def _others(ranks: Sequence[Measured]) -> Iterator[Finding]:
    """Yield GPUs whose memory is taken already: a context of our own is some 0.5 GB."""
    for each in ranks:
        taken = each.get("total", 0) - each.get("free", 0)
        if taken > max(2**30, 0.02 * each.get("total", 0)):
            text = f"GPU {each['number']} of {each['host']}: {size(taken)} are taken by other processes"
            yield warning(
                "GPU memory", text, "nvidia-smi names them: end them", rank=each["rank"], taken=taken
            )
