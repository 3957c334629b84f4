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
    _, words, half = random.getstate()  # version 3; Gaussians are made in pairs, of which half may be left
    streams = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_half": torch.tensor([half is not None, half or 0.0], dtype=torch.float64),
        **_numpy(),
    }
    if device.type == "cuda":
        streams["cuda"] = torch.cuda.get_rng_state(device)
    return streams


def _numpy() -> dict[str, torch.Tensor]:
    state = np.random.get_state(legacy=False)
    words = [*state["state"]["key"].tolist(), state["state"]["pos"], state["has_gauss"]]
    half = torch.tensor([state["gauss"]], dtype=torch.float64)
    return {"numpy": torch.tensor(words, dtype=torch.int64), "numpy_half": half}


def restore(streams: Mapping[str, torch.Tensor]) -> None:
    """Go back to captured streams; to none that is missing, as all are after a change of layout."""
    if "torch" in streams:
        torch.set_rng_state(streams["torch"])
    if "python" in streams:
        there, half = streams["python_half"].tolist() if "python_half" in streams else (0.0, 0.0)
        random.setstate((3, tuple(streams["python"].tolist()), half if there else None))
    if "numpy" in streams:
        *key, position, has_half = streams["numpy"].tolist()
        inner = {"key": np.array(key, dtype=np.uint32), "pos": position}
        rest = {"has_gauss": has_half, "gauss": streams["numpy_half"].item()}
        np.random.set_state({"bit_generator": "MT19937", "state": inner, **rest})
    if "cuda" in streams:
        torch.cuda.set_rng_state(streams["cuda"])
