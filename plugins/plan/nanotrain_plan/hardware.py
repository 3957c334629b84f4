"""What a device and its links do: TOML files, one for each device, shipped in ``hardware/`` or a user's own.

Torch-free.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import attrs

from nanotrain_core.api import NanotrainError, did_you_mean


class HardwareError(NanotrainError):
    """There is no such hardware, or its file is wrong: the text has file, key and what is expected."""


def _above_zero(instance: Any, field: Any, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{field.name}: expected a number above 0, got {value!r}")


def _not_below_zero(instance: Any, field: Any, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{field.name}: expected 0 or a number above it, got {value!r}")


def _fraction(instance: Any, field: Any, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{field.name}: expected a fraction from 0 to 1, got {value!r}")


def _positive() -> Any:
    return attrs.field(validator=_above_zero)


@attrs.define(frozen=True, kw_only=True)
class Achieved:
    """Fractions of the peak that a training step reaches."""

    gemm: float = attrs.field(validator=[_above_zero, _fraction])
    gemm_float8: float = attrs.field(validator=[_above_zero, _fraction])
    attention: float = attrs.field(validator=[_above_zero, _fraction])
    memory: float = attrs.field(validator=[_above_zero, _fraction])


@attrs.define(frozen=True, kw_only=True)
class MemoryTraffic:
    """Of the device's own memory."""

    bandwidth_gb_s: float = _positive()
    fusion: float = _positive()
    """By how much compiled layers move less than their operators one by one."""


@attrs.define(frozen=True, kw_only=True)
class Links:
    """Bandwidth, in each direction, and latency between devices: within a node and between nodes."""

    intra_gb_s: float = _positive()
    inter_gb_s: float = _positive()
    achieved: float = attrs.field(validator=[_above_zero, _fraction])
    latency_us: float = attrs.field(validator=_above_zero)


@attrs.define(frozen=True, kw_only=True)
class Overlap:
    """Shares of the time of collectives that computation hides, by mesh dimension."""

    dp: float = attrs.field(validator=_fraction)
    tp: float = attrs.field(validator=_fraction)
    ep: float = attrs.field(validator=_fraction)
    cp: float = attrs.field(validator=_fraction)
    pp: float = attrs.field(validator=_fraction)


@attrs.define(frozen=True, kw_only=True)
class Hardware:
    """One device, its node and its links."""

    name: str
    memory_gb: float = _positive()
    """10^9 bytes of one device, or of one rank on a CPU."""
    reserved_gb: float = attrs.field(default=0.0)
    """Of them, what a run's tensors cannot have."""
    devices_per_node: int = _positive()
    host_memory_gb: float = _positive()
    """Of one node."""
    disk_gb_s: float = _positive()
    """Written by one node."""
    launch_us: float = attrs.field(default=5.0, validator=_not_below_zero)
    """Microseconds in which the host launches an operator, Python and autograd included: a device that is
    faster than that waits for it."""
    gloo: bool = False
    """Whether ranks exchange tensors through gloo."""
    cores: int = attrs.field(default=0, validator=_not_below_zero)
    """Of a CPU that each rank has for itself, which its peaks are those of; 0 where ranks have a device."""
    peak_tflops: Mapping[str, float]
    achieved: Achieved
    memory: MemoryTraffic
    links: Links
    overlap: Overlap

    @property
    def usable(self) -> float:
        """Bytes that a run's tensors can have."""
        return (self.memory_gb - self.reserved_gb) * 1e9

    def rate(self, kind: str) -> float:
        """Return FLOP/s that are reached by a dtype's matrix products."""
        fraction = self.achieved.gemm_float8 if kind == "float8" else self.achieved.gemm
        return self.peak(kind) * fraction

    def attention_rate(self, dtype: str) -> float:
        """Return FLOP/s that are reached by attention whose queries have a dtype."""
        return self.peak(dtype) * self.achieved.attention

    def peak(self, kind: str) -> float:
        """Return FLOP/s on paper; of a dtype that the device has no units for, bfloat16's or float32's."""
        if kind in self.peak_tflops:
            return self.peak_tflops[kind] * 1e12
        return self.peak_tflops["bfloat16" if kind == "float8" else "float32"] * 1e12

    @property
    def traffic(self) -> float:
        """Bytes a second that operators other than matrix products move, as if each ran by itself."""
        return self.memory.bandwidth_gb_s * 1e9 * self.achieved.memory * self.memory.fusion


_TABLES = {"achieved": Achieved, "memory": MemoryTraffic, "links": Links, "overlap": Overlap}


def shipped() -> dict[str, Path]:
    """Return the files that come with this package, by name."""
    folder = Path(str(files("nanotrain_plan"))) / "hardware"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find_hardware(wanted: str) -> Hardware:
    """Return what a name, or the path of a TOML file, describes.

    Raises:
        HardwareError: there is none, or the file is wrong.
    """
    known = shipped()
    if wanted in known:
        return read_hardware(known[wanted])
    path = Path(wanted)
    if path.suffix == ".toml" or path.exists():
        return read_hardware(path)
    near = did_you_mean(wanted, list(known))
    raise HardwareError(
        f"--hardware: no hardware is named '{wanted}'{near}; expected one of {', '.join(known)}, "
        "or the path of a TOML file"
    )


def read_hardware(path: Path) -> Hardware:
    """Return what a file describes.

    Raises:
        HardwareError: naming the file, the key and what is expected there.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HardwareError(f"--hardware: there is no file {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise HardwareError(f"{path}: {error}") from None
    parts: dict[str, Any] = dict(table)
    for key, kind in _TABLES.items():
        if not isinstance(parts.get(key, {}), dict):
            raise HardwareError(f"{path}: {key}: expected a table [{key}], got {parts[key]!r}")
        parts[key] = _make(path, kind, parts.get(key, {}), f"{key}.")
    peaks = parts.get("peak_tflops", {})
    if not isinstance(peaks, dict):
        raise HardwareError(f"{path}: peak_tflops: expected a table [peak_tflops], got {peaks!r}")
    for key in {"bfloat16", "float32", *peaks}:
        if type(peaks.get(key)) not in (int, float) or peaks[key] <= 0:
            raise HardwareError(
                f"{path}: peak_tflops.{key}: expected a number above 0, got {peaks.get(key, 'nothing')!r}"
            )
    found: Hardware = _make(path, Hardware, parts, "")
    return found


def _make(path: Path, kind: type, table: Mapping[str, Any], prefix: str) -> Any:
    """Return an object of ``kind``, all of whose numbers are numbers."""
    fields = {field.name: field for field in attrs.fields(kind)}
    for key in table:
        if key not in fields:
            near = did_you_mean(key, list(fields))
            raise HardwareError(f"{path}: {prefix}{key}: no such key{near}; keys: {', '.join(fields)}")
    for name, field in fields.items():
        if name not in table:
            if field.default is attrs.NOTHING:
                raise HardwareError(f"{path}: {prefix}{name}: missing; expected {_expected(field)}")
        elif _expected(field) and type(table[name]) not in _TYPES[str(field.type)]:
            raise HardwareError(f"{path}: {prefix}{name}: expected {_expected(field)}, got {table[name]!r}")
    try:
        return kind(**table)
    except ValueError as error:
        raise HardwareError(f"{path}: {prefix}{error}") from None


_TYPES: dict[str, tuple[type, ...]] = {"float": (int, float), "int": (int,), "str": (str,), "bool": (bool,)}
_WORDS = {"float": "a number", "int": "a whole number", "str": "a text", "bool": "true or false"}


def _expected(field: Any) -> str:
    return _WORDS.get(str(field.type), "")
