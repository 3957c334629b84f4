"""What a device should do: the hardware files of nanotrain-plan, where that is installed, or a user's own.

They are read as data, by their documented keys (docs/planning.md): no code of another plugin is called.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs

from nanotrain_core.api import (
    NanotrainError,
    RecipeError,
    TomlSource,
    did_you_mean,
    did_you_mean_path,
    peak_flops,
    read_toml,
)

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
        return _of_file(_open(_find(wanted)))
    peak, path = peak_flops(device), _file_of(device)
    if path is not None:
        # An `H100 PCIe` is no SXM, which the file describes, and a laptop's `RTX 4090` is another chip.
        file = _open(path)
        if peak is not None and abs(_peak(file) / peak - 1) < 0.01:
            return _of_file(file)
    return Peaks(source="data sheet" if peak else "", gemm=USUAL * peak if peak else None)


def _file_of(device: str) -> Path | None:
    """Return the shipped file all of whose name's words are in a device's name; the one of most words."""
    words = set(re.split(r"[^A-Z0-9]+", device.upper()))
    fitting = [name for name in shipped() if name != "cpu" and words >= set(name.upper().split("_"))]
    return shipped()[max(fitting, key=len)] if fitting else None


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
    path = Path(wanted)
    if path.is_file():
        return path
    names = f"one of {', '.join(known)}, or " if known else ""
    expected = f"expected {names}the path of a TOML file"
    near = did_you_mean(wanted, list(known)) or did_you_mean_path(path)
    what = f"no hardware is named '{wanted}'{near}"
    if path.suffix == ".toml":
        what = f"there is no file {path}{near}"
    if wanted and path.is_dir():
        what = f"{path} is a folder"
    raise NanotrainError(f"--hardware: {what}; {expected}")


def _open(path: Path) -> TomlSource:
    try:
        return read_toml(path)
    except RecipeError as problem:
        raise NanotrainError(f"--hardware: {problem}") from None


def _peak(file: TomlSource) -> float:
    """Return FLOP/s of bfloat16 on paper."""
    return _number(file, "peak_tflops.bfloat16") * 1e12


def _of_file(file: TomlSource) -> Peaks:
    intra, inter, achieved = (
        _number(file, f"links.{key}") for key in ("intra_gb_s", "inter_gb_s", "achieved")
    )
    return Peaks(
        source=str(_value(file, "name")),
        gemm=_peak(file) * _number(file, "achieved.gemm"),
        memory=_number(file, "memory.bandwidth_gb_s") * 1e9 * _number(file, "achieved.memory"),
        intra=intra * 1e9 * achieved,
        inter=inter * 1e9 * achieved,
    )


def _number(file: TomlSource, key: str) -> float:
    found = _value(file, key)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise _wrong(file, key, f"expected a number, got {found!r}")
    return float(found)


def _value(file: TomlSource, key: str) -> Any:
    found: Any = file.data
    for name in key.split("."):
        if not isinstance(found, dict) or name not in found:
            raise _wrong(file, key, "missing; docs/planning.md lists the keys of a hardware file")
        found = found[name]
    return found


def _wrong(file: TomlSource, key: str, problem: str) -> NanotrainError:
    return NanotrainError(f"--hardware: {file.place(key)}: {key}: {problem}")
