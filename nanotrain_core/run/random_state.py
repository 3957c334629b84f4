"""The random-number streams of one process: captured into a checkpoint, restored on resume."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping

import numpy as np
import torch


def seed_all(seed: int, rank: int) -> None:
    """Seed every stream of this process, differently on every rank."""
    own = stream_seed(seed, "rank", rank)
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)


def stream_seed(seed: int, name: str, index: int = 0) -> int:
    """Return a 63-bit seed from the run's seed, a name and a number."""
    digest = hashlib.sha256(f"{seed}/{name}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def capture(device: torch.device) -> dict[str, torch.Tensor]:
    """Return this process's streams as tensors: Python's, NumPy's global one, and torch's."""
    _, words, half = random.getstate()  # version 3
    _, key, place, there, other = np.random.get_state()
    streams = {"torch": torch.get_rng_state(), "python": torch.tensor(words, dtype=torch.int64)}
    streams["numpy"] = torch.tensor([*map(int, key), place], dtype=torch.int64)
    # The cached second Gaussian of Python's and of NumPy's generator: whether there is one, and its value.
    streams["halves"] = torch.tensor([half is not None, half or 0.0, there, other], dtype=torch.float64)
    if device.type == "cuda":
        streams["cuda"] = torch.cuda.get_rng_state(device)
    return streams


def restore(streams: Mapping[str, torch.Tensor]) -> None:
    """Restore captured streams; missing ones stay unchanged, as all do after a change of layout."""
    known, half, there, other = streams["halves"].tolist() if "halves" in streams else (0.0,) * 4
    if "torch" in streams:
        torch.set_rng_state(streams["torch"])
    if "python" in streams:
        random.setstate((3, tuple(streams["python"].tolist()), half if known else None))
    if "numpy" in streams:
        *key, place = streams["numpy"].tolist()
        np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), place, int(there), other))
    if "cuda" in streams:
        torch.cuda.set_rng_state(streams["cuda"])
