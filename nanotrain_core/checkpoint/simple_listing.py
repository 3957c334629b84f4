"""The ``simple`` checkpoints of a folder, listed and described without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nanotrain_core.checkpoint.info import CheckpointInfo
from nanotrain_core.checkpoint.run_state import load_json, state_problems
from nanotrain_core.checkpoint.simple_names import own, step_of
from nanotrain_core.errors import CheckpointError

#: Maximum size of a header that is read, as in safetensors itself.
_LARGEST_HEADER = 100 * 2**20


def list_checkpoints(path: Path) -> list[CheckpointInfo]:
    """Return the checkpoints in a run folder or its subfolder, or the one at ``path``; oldest first."""
    return sorted((_saved(file) for file in _files(path)), key=lambda saved: saved.step)


def _files(path: Path) -> Iterator[Path]:
    return own([path] if path.is_file() else [*path.glob("step-*"), *path.glob("checkpoints/step-*")])


def _saved(path: Path) -> CheckpointInfo:
    step, nbytes = step_of(path), path.stat().st_size
    describe, verify = partial(_describe, path), partial(_verify, path)
    return CheckpointInfo(step=step, path=path, nbytes=nbytes, describe=describe, verify=verify)


def _describe(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LARGEST_HEADER:
                raise ValueError(f"its header claims {length} bytes")
            table = load_json(file.read(length))
        ours = load_json(table.pop("__metadata__")["nanotrain"])
        meta = load_json(ours["state"])
        if problems := state_problems(meta, step_of(path)):
            raise CheckpointError(f"{path}: {'; '.join(problems)}")
        tensors = {name: {"dtype": entry["dtype"], "shape": entry["shape"]} for name, entry in table.items()}
        return {
            "format": ours["format"],
            "step": meta["step"],
            "world_size": meta.pop("world_size"),
            "meta": meta,
            "tensors": {name: each for name, each in sorted(tensors.items()) if not name.startswith("rng/")},
            "files": {path.name: {"sha256": ours["sha256"]}},
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise CheckpointError(f"{path} is damaged: {problem!r}") from None


def _verify(path: Path) -> Sequence[str]:
    from nanotrain_core.checkpoint.simple_damage import damage  # needs torch

    return damage(path)
