"""Checkpoints on disk as commands see them: listed, described and verified. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

# The dtypes of stored tensors, by their safetensors code.
# Source: https://github.com/huggingface/safetensors, ``safetensors/src/tensor.rs``, ``Dtype``.

_DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
#: Code -> name of torch's dtype.
DTYPE_NAMES = {code: name for code, (name, _) in _DTYPES.items()}
#: Code -> bytes per element.
DTYPE_BYTES = {code: size for code, (_, size) in _DTYPES.items()}


#: Behind the path of a checkpoint, or of a run: the moving averages of its weights.
AVERAGED = "@ema"


def strip_ema(path: Path) -> tuple[Path, bool]:
    """Return a path without ``@ema``, and whether it had that."""
    averaged = path.name.endswith(AVERAGED) and not path.exists()
    return (path.with_name(path.name.removesuffix(AVERAGED)), True) if averaged else (path, False)


def unexpected_kinds(names: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """Return the kinds of saved tensors that ``wanted`` lacks: ``exp_avg``, "" for weights.

    A run that lacks a kind has another optimizer or precision.
    """
    kept, known = ({name.rpartition("/")[0] for name in each} for each in (names, wanted))
    return [f"it holds '{kind}' tensors, which this run has no place for" for kind in sorted(kept - known)]


@attrs.define(frozen=True, kw_only=True, eq=False)
class CheckpointInfo:
    """One checkpoint in a listing. ``Component.listing`` returns a list of these."""

    step: int
    """Optimizer steps done when it was saved."""
    path: Path
    """Of its file or folder."""
    nbytes: int
    """Total size of its files."""
    describe: Callable[[], Mapping[str, Any]]
    """Returns its description as JSON: ``meta`` (of ``TrainState``), ``world_size``, ``tensors`` (name ->
    ``dtype`` as safetensors calls it, and ``shape``), ``files`` (name -> ``sha256``, and whatever else is
    known of each), and anything else the format has: ``{"files": {"a.npz": {"sha256": "..."}}}``.

    Raises :class:`~nanotrain_core.errors.CheckpointError` if that cannot be read."""
    verify: Callable[[], Sequence[str]]
    """Reads everything and returns what is wrong: empty if it can be loaded."""
