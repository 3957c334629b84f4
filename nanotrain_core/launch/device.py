"""Selects the device of a rank."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nanotrain_core.errors import NanotrainError
from nanotrain_core.launch.environment import Ranks

if TYPE_CHECKING:
    import torch


def choose_device(wanted: str, ranks: Ranks, *, shared: bool = False) -> torch.device:
    """Return this rank's device, ``shared`` with all others of its host.

    Raises:
        NanotrainError: CUDA was requested and is not available.
    """
    import torch

    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        if shared:
            raise NanotrainError(
                "run.share_device = true lets ranks share a GPU, and torch finds none here: leave it out"
            )
        return torch.device("cpu")
    count = torch.cuda.device_count()
    first = (shared and count > 0) or (count == 1 and _has_a_gpu_of_its_own())
    number = 0 if first else ranks.local_rank
    if count == 0:
        built: bool = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
        why = "no GPU is visible here" if built else "this torch is built without CUDA"
        raise NanotrainError(
            f'run.device = "{wanted}", but {why}; set run.device = "cpu" to train without one'
        )
    if number >= count:
        raise NanotrainError(
            f"rank {ranks.rank} is number {ranks.local_rank} on its host, which has "
            f'{count} GPUs: start fewer ranks, or set run.device = "cpu"'
        )
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def _has_a_gpu_of_its_own() -> bool:
    """Return whether Slurm shows each task only its own GPUs, as ``srun --gpus-per-task=1`` does."""
    per_task = os.environ.get("SLURM_TRES_PER_TASK", "")  # since Slurm 23.11
    return bool(os.environ.get("SLURM_GPUS_PER_TASK")) or "gres/gpu" in per_task
