"""Damages memory snapshots of a rank that is about to die, bits of tensors, and what a layer computes."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch


def harm_snapshots(memory: str, rank: int, harm: str) -> None:
    """Damage the snapshots that a rank has in the folder ``memory``, from within that rank."""
    (folder,) = Path(memory).glob(f"*-{rank:05d}")
    if harm == "gone":
        while folder.exists():  # the rank's own thread may be writing into it
            shutil.rmtree(folder, ignore_errors=True)
        return
    sealed = max(folder.glob("own-*.json"), key=lambda path: path.stat().st_mtime_ns)
    with sealed.with_suffix(".bin").open("r+b") as file:
        file.seek(-1, 2)  # padding, perhaps, which is sealed as well
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))


def flip_bit(tensors: Iterable[torch.Tensor], place: float) -> None:
    """Flip one bit, ``place`` (0 to 1) of the way through the tensors."""
    parts = [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    byte, bit = divmod(int(place * 8 * sum(map(len, parts))), 8)
    for part in parts:
        if 0 <= byte < len(part):
            part[byte] ^= 1 << bit
        byte -= len(part)


def miscomputed(layer: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor | None:
    """Return the output [..., O] of a layer with 1 added to half of its last row: a forward hook."""
    if not torch.is_grad_enabled() or not output.numel():
        return None
    error = torch.zeros_like(output)
    error.view(-1, output.shape[-1])[-1, : (output.shape[-1] + 1) // 2] = 1
    return output + error
