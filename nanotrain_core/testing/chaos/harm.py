"""Damages the memory snapshots of a rank that is about to die."""

from __future__ import annotations

import shutil
from pathlib import Path


def harm_snapshots(memory: str, rank: int, harm: str) -> None:
    """Damage the snapshots that a rank has in the folder ``memory``, from within that rank."""
    (folder,) = Path(memory).glob(f"*-{rank:05d}")
    if harm == "gone":
        shutil.rmtree(folder)
        return
    sealed = max(folder.glob("own-*.json"), key=lambda path: path.stat().st_mtime_ns)
    with sealed.with_suffix(".bin").open("r+b") as file:
        file.seek(-1, 2)  # padding, perhaps, which is sealed as well
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
