"""The random-number streams of one process: captured into a checkpoint, restored on resume."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping

import torch


def seed_all(seed: int, rank: int) -> None:
    """Seed every stream of this process, differently on every rank."""
    own = stream_seed(seed, "rank", rank)
    random.seed(own)
    torch.manual_seed(own)


def stream_seed(seed: int, name: str, index: int = 0) -> int:
    """Return a 63-bit seed from the run's seed, a name and a number."""
    digest = hashlib.sha256(f"{seed}/{name}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def capture(device: torch.device) -> dict[str, torch.Tensor]:
    """Return this process's streams as integer tensors."""
    _, words, _ = random.getstate()  # version 3; the third is half a pair of Gaussians
    streams = {"torch": torch.get_rng_state(), "python": torch.tensor(words, dtype=torch.int64)}
    if device.type == "cuda":
        streams["cuda"] = torch.cuda.get_rng_state(device)
    return streams


def restore(streams: Mapping[str, torch.Tensor]) -> None:
    """Go back to captured streams; nothing for an empty mapping, as after a change of world size."""
    if "torch" in streams:
        torch.set_rng_state(streams["torch"])
    if "python" in streams:
        random.setstate((3, tuple(streams["python"].tolist()), None))
    if "cuda" in streams:
        torch.cuda.set_rng_state(streams["cuda"])
