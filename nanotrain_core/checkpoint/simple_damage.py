"""Reads the header of a ``simple`` checkpoint file, and verifies that it is intact."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nanotrain_core.checkpoint.raw_bytes import raw_bytes
from nanotrain_core.checkpoint.run_state import is_run_state, load_json, state_problems, streams_problem
from nanotrain_core.checkpoint.simple_names import named_step

FORMAT = "nanotrain-simple-1"


def digest(tensors: Any, state: str) -> str:
    """Return a SHA-256 over names, dtypes, shapes, bytes and the JSON state."""
    total = hashlib.sha256(state.encode())
    for name, tensor in sorted(tensors):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(raw_bytes(tensor).numpy().data)
    return total.hexdigest()


def damage(path: Path) -> list[str]:
    """Return why ``path`` must not be loaded: empty if it is intact."""
    try:
        with safe_open(path, framework="pt") as file:
            header = read_header(file)
            if header.get("format") != FORMAT:
                return [f"{path} is not a {FORMAT} checkpoint (its format is {header.get('format')!r})"]
            found = digest(((name, file.get_tensor(name)) for name in names_in(file)), header["state"])
            if found != header["sha256"]:
                return [f"{path} is damaged: its bytes do not match its SHA-256"]
            state = load_json(header["state"])
            problems = state_problems(state, named_step(path))
            problems += [f"its state lacks '{key}'" for key in ("world_size", "degrees") if key not in state]
            if not problems and is_run_state(state):
                problems = [text for text in (_streams_problem(file),) if text]
            if problems:
                return [f"{path}: {problem}" for problem in problems]
            weights = (name for name in names_in(file) if "/" not in name)
            odd = [name for name in weights if not is_finite(file.get_tensor(name))]
            return [f"{path}: {name} is not finite" for name in odd]
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as problem:
        return [f"{path} is damaged: {problem}"]


def _streams_problem(file: Any) -> str:
    ranks: dict[str, dict[str, Any]] = defaultdict(dict)
    for name in names_in(file):
        if name.startswith("rng/"):
            _, rank, stream = name.split("/", 2)
            ranks[rank][stream] = file.get_tensor(name).numpy()
    return next(filter(None, map(streams_problem, ranks.values())), "")


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether there is neither a NaN nor an infinity; integers and eight-bit floats have none."""
    return tensor.dtype.itemsize == 1 or not tensor.is_floating_point() or bool(tensor.isfinite().all())


def read_header(file: Any) -> dict[str, str]:
    """Return format, JSON state and SHA-256 of an open file; empty if it has another format.

    Raises:
        ValueError: it cannot be read.
    """
    header = load_json((file.metadata() or {}).get("nanotrain", "{}"))
    if not isinstance(header, dict) or not all(isinstance(value, str) for value in header.values()):
        raise ValueError("its header is not a table of strings")
    return header


def names_in(file: Any) -> list[str]:
    """Return the names of a safetensors file, which cannot be iterated itself."""
    return list(file.keys())
