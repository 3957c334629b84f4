"""Environment variables that torch reads on GPUs, set where the user has not set them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import MutableMapping
from pathlib import Path

from nanotrain_core.watch.collectives import DUMPS

Environment = MutableMapping[str, str]

#: Number of collectives in each rank's NCCL flight recorder.
REMEMBERED = "2000"
#: Names of one setting, the current one first.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
BUFFER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
DUMP_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def set_allocator(environment: Environment = os.environ) -> None:
    """Make torch's allocator use expandable segments against fragmentation. Before CUDA is first used."""
    _default(environment, ALLOCATOR, "expandable_segments:True")


def record_collectives(folder: Path | None, environment: Environment = os.environ) -> None:
    """Make NCCL's flight recorder dump its last collectives to ``folder`` when one of them times out."""
    _default(environment, BUFFER, REMEMBERED)
    _default(environment, ("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1")
    if folder is not None:
        with contextlib.suppress(OSError):  # a debugging aid must not end a run
            (folder / DUMPS).mkdir(exist_ok=True)
        _default(environment, DUMP_FILE, str(folder / DUMPS / "rank-"))  # torch appends the rank


def survive_aborts(environment: Environment = os.environ) -> None:
    """Keep torch from ending a process whose communicators are aborted. Before NCCL's groups are created.

    Without NVLS (multicast over NVLink), as its memory is not freed by an abort. NVIDIA's Resiliency
    Extension requires both for its in-process restart.
    """
    _default(environment, ("TORCH_NCCL_RETHROW_CUDA_ERRORS",), "0")
    _default(environment, ("NCCL_NVLS_ENABLE",), "0")


def _default(environment: Environment, names: tuple[str, ...], value: str) -> None:
    if not any(name in environment for name in names):
        environment[names[0]] = value
