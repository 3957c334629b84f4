"""What a CPU should reach in matrix products: its cores times their clock times the width of their vectors.

No table of processor models: the number of cores, the clock and the vector instructions are as the system
tells them. A virtual machine may count half a core (one of two hardware threads) as a whole one, and the
highest clock is that of one busy core, so that only a small part of the peak is a reason for concern.

There is no expected memory bandwidth: memory modules and channels can be read only by root, and not at all
in a virtual machine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanotrain_core.api import allowed_processors, cpu_quota
from nanotrain_doctor.container import text_of
from nanotrain_doctor.findings import Finding, good, note, warning

#: Float32 FLOPs of a core in a cycle, by the vector instructions that torch found: with AVX2 two units for
#: fused multiply-adds (FMA) of 8 numbers; with AVX-512 at least one of 16, and in some processors two.
PER_CYCLE = {"AVX2": 2 * 2 * 8, "AVX512": 2 * 16}

#: Fractions of the peak: from the first on a rate is good, and below the second something is wrong. A rate in
#: between may also be due to a processor that shares its cores.
ENOUGH, TOO_LITTLE = 0.5, 0.2


def processor(
    ranks: int, threads: int, root: Path = Path("/"), allowed: Collection[int] | None = None
) -> dict[str, Any]:
    """Return what a rank has of its host's processor.

    Args:
        ranks: of this host, which divide its cores.
        threads: of this rank.
        root: where ``/sys`` and ``/proc`` are.
        allowed: numbers of the processors that this process may run on.

    Returns:
        ``cores``, at most as many as the rank has threads, and ``clock`` in Hz, None if nothing tells it.
    """
    if allowed is None:
        allowed = allowed_processors()
    cores = min(float(_cores(root, allowed)), cpu_quota(root) or float("inf")) / ranks
    return {"cores": min(float(threads), cores), "clock": _clock(root, allowed)}


def _cores(root: Path, allowed: Collection[int]) -> int:
    """Return the number of cores behind processors, of which two may be threads of one."""
    folder = root / "sys/devices/system/cpu"
    return len({text_of(folder / f"cpu{n}/topology/thread_siblings_list") or str(n) for n in allowed})


def _clock(root: Path, allowed: Collection[int]) -> float | None:
    """Return the highest clock of the slowest core, or if the system keeps none the highest of just now."""
    folder = root / "sys/devices/system/cpu"
    highest = [text_of(folder / f"cpu{n}/cpufreq/cpuinfo_max_freq") for n in allowed]
    if kilohertz := [int(each) for each in highest if each.isdecimal()]:
        return min(kilohertz) * 1e3
    lines = text_of(root / "proc/cpuinfo").splitlines()
    now = [line.partition(":")[2].strip() for line in lines if line.startswith("cpu MHz")]
    found = [float(each) * 1e6 for each in now if each.replace(".", "", 1).isdecimal()]
    return max(found, default=None)


#: What to look at if cores do less than they should.
SLOW_CPU = "top: other processes; vmstat: time stolen from this machine (st); a quota of CPU time"


def judge_products(ranks: Sequence[Mapping[str, Any]], text: str) -> Finding:
    """Judge the float32 products of the rank that reaches least of what its cores should do.

    Args:
        ranks: what each measured, with ``cores``, ``clock`` and ``vectors``.
        text: the rates, in words.
    """
    rate = min(each["gemm_float32"] for each in ranks)
    unknown = next((reason for each in ranks if (reason := _unknown(each))), "")
    if unknown:
        return note("GEMM", f"{text}; no expectation: {unknown}", rate=rate)
    slowest = min(ranks, key=lambda each: each["gemm_float32"] / _peak(each))
    rate, peak = slowest["gemm_float32"], _peak(slowest)
    cores, clock, vectors = slowest["cores"], slowest["clock"], slowest["vectors"]
    units = "two FMA units" if vectors == "AVX2" else "one FMA unit; some processors have two"
    text += f"; {rate / peak:.0%} of {peak / 1e12:.3g} TFLOP/s in float32: {cores:.3g} "
    text += f"{'cores' if cores > 1 else 'core'} x {clock / 1e9:.3g} GHz x {PER_CYCLE[vectors]} FLOPs "
    text += f"({vectors}, {units})"
    values = {"rate": rate, "expected": peak, "source": "cores x clock x vectors"}
    if rate >= ENOUGH * peak:
        return good("GEMM", text, **values)
    if rate >= TOO_LITTLE * peak:
        return note("GEMM", f"{text}; virtual machines and busy hosts do not give whole cores", **values)
    return warning("GEMM", text, f"{SLOW_CPU}; torch.__config__.show(): a BLAS library", **values)


def _unknown(each: Mapping[str, Any]) -> str:
    if each["vectors"] not in PER_CYCLE:
        return f"how wide this processor's vectors are is not known (torch says {each['vectors']})"
    return "" if each["clock"] else "this system does not tell the processor's clock"


def _peak(each: Mapping[str, Any]) -> float:
    return float(each["cores"] * each["clock"] * PER_CYCLE[each["vectors"]])
