"""What a device and its links do: TOML files, one for each device, shipped in ``hardware/`` or a user's own.

Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import Any

import attrs

from nanotrain_core.api import (
    NanotrainError,
    RecipeError,
    TomlSource,
    did_you_mean,
    did_you_mean_path,
    read_toml,
)


class HardwareError(NanotrainError):
    """There is no such hardware, or its file is wrong: the text has file, key and what is expected."""


#: Formats of fewer than 16 bits: FP8, whose scales are applied after a product, and MXFP8 and NVFP4, whose
#: scales of blocks the tensor cores apply.
LOW_PRECISION = {"float8": "FP8", "mxfp8": "MXFP8", "nvfp4": "NVFP4"}

#: Dtypes that products are counted by; a device need not have units for all of them.
DTYPES = ("bfloat16", "float16", "float32", "float64", *LOW_PRECISION)

#: More than a device, a node or a link has of anything, in a file's units: products of them are finite.
MOST = 1e12

_AT_MOST = "expected a number of at most 1e12"


def _above_zero(instance: Any, field: Any, value: float) -> None:
    if not 0 < value < inf:
        raise ValueError(f"{field.name}: expected a number above 0, got {value!r}")
    if value > MOST:
        raise ValueError(f"{field.name}: {_AT_MOST}")


def _not_below_zero(instance: Any, field: Any, value: float) -> None:
    if not 0 <= value < inf:
        raise ValueError(f"{field.name}: expected 0 or a number above it, got {value!r}")
    if value > MOST:
        raise ValueError(f"{field.name}: {_AT_MOST}")


def _fraction(instance: Any, field: Any, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{field.name}: expected a fraction from 0 to 1, got {value!r}")


def _is_capability(instance: Any, field: Any, value: str) -> None:
    if value and not re.fullmatch(r"\d+\.\d+", value):
        raise ValueError(f'{field.name}: expected a text such as "9.0", got {value!r}')


def _positive() -> Any:
    return attrs.field(validator=_above_zero)


def _below_memory(instance: Any, field: Any, value: float) -> None:
    if value >= instance.memory_gb:
        raise ValueError(f"{field.name}: expected less than memory_gb = {instance.memory_gb}, got {value!r}")


@attrs.define(frozen=True, kw_only=True)
class Achieved:
    """Fractions of the peak that a training step reaches."""

    gemm: float = attrs.field(validator=[_above_zero, _fraction])
    gemm_float8: float = attrs.field(validator=[_above_zero, _fraction])
    gemm_nvfp4: float = attrs.field(validator=[_above_zero, _fraction])
    attention: float = attrs.field(validator=[_above_zero, _fraction])
    memory: float = attrs.field(validator=[_above_zero, _fraction])

    @gemm_nvfp4.default
    def _as_float8(self) -> float:
        return self.gemm_float8

    def of_gemm(self, kind: str) -> float:
        """Return the fraction of a dtype's peak that its matrix products reach."""
        if kind == "nvfp4":
            return self.gemm_nvfp4
        return self.gemm_float8 if kind in LOW_PRECISION else self.gemm


@attrs.define(frozen=True, kw_only=True)
class MemoryTraffic:
    """Of the device's own memory."""

    bandwidth_gb_s: float = _positive()
    fusion: float = _positive()
    """By how much compiled layers move less than their operators one by one."""


@attrs.define(frozen=True, kw_only=True)
class Links:
    """Bandwidth, in each direction, and latency between devices: within a node, or what else NVLink connects,
    and beyond."""

    intra_gb_s: float = _positive()
    inter_gb_s: float = _positive()
    achieved: float = attrs.field(validator=[_above_zero, _fraction])
    latency_us: float = attrs.field(validator=_above_zero)
    domain: int = attrs.field(default=0, validator=_not_below_zero)
    """Devices that ``intra_gb_s`` connects, of several nodes too, as in an NVL72 rack; 0: those of a node."""


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
    reserved_gb: float = attrs.field(default=0.0, validator=[_not_below_zero, _below_memory])
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
    compute_capability: str = attrs.field(default="", validator=_is_capability)
    """Of an NVIDIA GPU, ``9.0``: components may need one. Empty: not known, or no such GPU."""
    cores: int = attrs.field(default=0, validator=_not_below_zero)
    """Of a CPU that each rank has for itself, which its peaks are those of; 0 where ranks have a device."""
    peak_tflops: Mapping[str, float]
    achieved: Achieved
    memory: MemoryTraffic
    links: Links
    overlap: Overlap

    @property
    def capability(self) -> tuple[int, int] | None:
        """:attr:`compute_capability` as two numbers, None if it is not known."""
        major, _, minor = self.compute_capability.partition(".")
        return (int(major), int(minor)) if minor else None

    @property
    def domain(self) -> int:
        """Consecutive ranks that ``links.intra_gb_s`` connects: those of a node, or of a rack."""
        return self.links.domain or self.devices_per_node

    @property
    def usable(self) -> float:
        """Bytes that a run's tensors can have."""
        return (self.memory_gb - self.reserved_gb) * 1e9

    def rate(self, kind: str) -> float:
        """Return FLOP/s that are reached by matrix products of a dtype, or of what stands in for it."""
        return self.peak(kind) * self.achieved.of_gemm(self.kind_of(kind))

    def attention_rate(self, dtype: str) -> float:
        """Return FLOP/s that are reached by attention whose queries have a dtype."""
        return self.peak(dtype) * self.achieved.attention

    def peak(self, kind: str) -> float:
        """Return FLOP/s on paper; of a dtype that the device has no units for, bfloat16's or float32's."""
        return self.peak_tflops[self.kind_of(kind)] * 1e12

    def kind_of(self, kind: str) -> str:
        """Return the dtype whose units multiply a dtype: itself, or what stands in for it."""
        if kind in self.peak_tflops:
            return kind
        return "bfloat16" if kind in LOW_PRECISION else "float32"

    @property
    def traffic(self) -> float:
        """Bytes a second that operators other than matrix products move, as if each ran by itself."""
        return self.eager_traffic * self.memory.fusion

    @property
    def eager_traffic(self) -> float:
        """The same of operators that are not compiled."""
        return self.memory.bandwidth_gb_s * 1e9 * self.achieved.memory


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
    if wanted and (path.suffix == ".toml" or path.exists()):
        return read_hardware(path)
    near = did_you_mean(wanted, list(known))
    raise HardwareError(f"--hardware: no hardware is named '{wanted}'{near}; {_expected_hardware()}")


def _expected_hardware() -> str:
    return f"expected one of {', '.join(shipped())}, or the path of a TOML file"


def read_hardware(path: Path) -> Hardware:
    """Return what a file describes.

    Raises:
        HardwareError: naming the file, the key and what is expected there.
    """
    source = _read(path)
    parts: dict[str, Any] = dict(source.data)
    _check_keys(source, parts, [field.name for field in attrs.fields(Hardware)], "")  # or none looks missing
    for key, kind in _TABLES.items():
        parts[key] = _make(source, kind, _table(source, key), f"{key}.")
    peaks = _table(source, "peak_tflops")
    _check_keys(source, peaks, DTYPES, "peak_tflops.")
    for key in ("bfloat16", "float32", *peaks):
        if type(peaks.get(key)) not in (int, float) or not 0 < peaks[key] < inf:
            given = repr(peaks[key]) if key in peaks else "nothing"
            raise _wrong(source, f"peak_tflops.{key}", f"expected a number above 0, got {given}")
        if peaks[key] > MOST:
            raise _wrong(source, f"peak_tflops.{key}", _AT_MOST)
    found: Hardware = _make(source, Hardware, parts, "")
    return found


def _read(path: Path) -> TomlSource:
    """Return the tables of a file that may describe hardware.

    Raises:
        HardwareError: it cannot be read, is not TOML, or is a recipe.
    """
    if not path.is_file():
        near = "" if path.is_dir() else did_you_mean_path(path) or did_you_mean(path.stem, list(shipped()))
        what = f"{path} is a folder" if path.is_dir() else f"there is no file {path}{near}"
        raise HardwareError(f"--hardware: {what}; {_expected_hardware()}")
    try:
        source = read_toml(path)
    except RecipeError as error:
        raise HardwareError(f"--hardware: {error}") from None
    if {"run", "model", "extends"} & set(source.data):
        raise HardwareError(f"--hardware: {path} is a recipe; {_expected_hardware()} that describes a device")
    return source


def _table(source: TomlSource, key: str) -> dict[str, Any]:
    """Return one table of a file, an empty one if it is missing."""
    found = source.data.get(key, {})
    if not isinstance(found, dict):
        raise _wrong(source, key, f"expected a table [{key}], got {found!r}")
    return found


def _wrong(source: TomlSource, key: str, problem: str) -> HardwareError:
    """Return the error of a key, with the line it is in, or that of its table if it is missing."""
    return HardwareError(f"--hardware: {source.place(key)}: {key}: {problem}")


def _check_keys(source: TomlSource, table: Mapping[str, Any], known: Sequence[str], prefix: str) -> None:
    """Refuse a key, or a table, that is not known.

    Raises:
        HardwareError: there is one; the nearest that is known is named.
    """
    for key in table:
        if key not in known:
            what = "table" if isinstance(table[key], dict) else "key"
            near = did_you_mean(key, known)
            raise _wrong(source, f"{prefix}{key}", f"no such {what}{near}; keys: {', '.join(known)}")


def _make(source: TomlSource, kind: type, table: Mapping[str, Any], prefix: str) -> Any:
    """Return an object of ``kind``, all of whose numbers are numbers."""
    fields = {field.name: field for field in attrs.fields(kind)}
    _check_keys(source, table, list(fields), prefix)
    for name, field in fields.items():
        if name not in table:
            if field.default is attrs.NOTHING:
                raise _wrong(source, f"{prefix}{name}", f"missing; expected {_expected(field)}")
        elif _expected(field) and type(table[name]) not in _TYPES[str(field.type)]:
            raise _wrong(source, f"{prefix}{name}", f"expected {_expected(field)}, got {table[name]!r}")
    try:
        return kind(**table)
    except ValueError as error:
        name, _, problem = str(error).partition(": ")
        raise _wrong(source, f"{prefix}{name}", problem) from None


_TYPES: dict[str, tuple[type, ...]] = {"float": (int, float), "int": (int,), "str": (str,), "bool": (bool,)}
_WORDS = {"float": "a number", "int": "a whole number", "str": "a text", "bool": "true or false"}


def _expected(field: Any) -> str:
    return _WORDS.get(str(field.type), "")
