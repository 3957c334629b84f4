"""What a device should do: the hardware files of nanotrain-plan, where that is installed, or a user's own.

They are read as data, by their documented keys (docs/planning.md): no code of another plugin is called.
"""

from __future__ import annotations

import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs

from nanotrain_core.api import NanotrainError, did_you_mean, peak_flops

#: Of the peak, what one large matrix product should reach where no file says it.
USUAL = 0.7


@attrs.define(frozen=True, kw_only=True)
class Peaks:
    """What is to be expected of one device; None: not known."""

    source: str
    gemm: float | None = None
    """FLOP/s of a large bfloat16 product."""
    memory: float | None = None
    """Bytes a second, read and written together."""
    intra: float | None = None
    """Bytes a second that a device sends to others of its host."""
    inter: float | None = None
    """To those of other hosts."""


def peaks_of(device: str, wanted: str | None = None) -> Peaks:
    """Return what a device of this name should do.

    Args:
        device: as torch calls it; of ``cpu`` :mod:`nanotrain_doctor.processor` tells what to expect.
        wanted: the name of a hardware file, or its path.

    Raises:
        NanotrainError: there is no such file, or it lacks a key.
    """
    if wanted is not None:
        return _read(_find(wanted))
    known = [
        (name, path) for name, path in shipped().items() if name.upper() in device.upper() and name != "cpu"
    ]
    if known:
        return _read(known[0][1])
    peak = peak_flops(device)
    return Peaks(source="data sheet" if peak else "", gemm=USUAL * peak if peak else None)


def shipped() -> dict[str, Path]:
    """Return the hardware files of nanotrain-plan by name; none if it is not installed."""
    spec = find_spec("nanotrain_plan")
    places = spec.submodule_search_locations if spec else None
    return {
        path.stem: path for place in places or () for path in sorted(Path(place, "hardware").glob("*.toml"))
    }


def _find(wanted: str) -> Path:
    known = shipped()
    if wanted in known:
        return known[wanted]
    if Path(wanted).is_file():
        return Path(wanted)
    near = did_you_mean(wanted, list(known))
    expected = f"one of {', '.join(known)}, or " if known else ""
    raise NanotrainError(f"--hardware: no hardware is named '{wanted}'{near}; expected {expected}a TOML file")


def _read(path: Path) -> Peaks:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        achieved, links = table["achieved"], table["links"]
        return Peaks(
            source=str(table["name"]),
            gemm=_number(table["peak_tflops"]["bfloat16"]) * 1e12 * _number(achieved["gemm"]),
            memory=_number(table["memory"]["bandwidth_gb_s"]) * 1e9 * _number(achieved["memory"]),
            intra=_number(links["intra_gb_s"]) * 1e9 * _number(links["achieved"]),
            inter=_number(links["inter_gb_s"]) * 1e9 * _number(links["achieved"]),
        )
    except KeyError as key:
        raise NanotrainError(f"{path}: {key.args[0]}: missing; docs/planning.md lists the keys") from None
    except (OSError, TypeError, ValueError) as problem:
        raise NanotrainError(f"{path}: {problem}") from None


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"expected a number, got {value!r}")
    return float(value)
