"""The steps that have a checkpoint, where a host's listing may lag behind what another host has saved."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import structlog

from nanotrain_core.api import CheckpointError
from nanotrain_core.api.torch import Mesh
from nanotrain_sharded_ckpt_v2 import folders, manifest
from nanotrain_sharded_ckpt_v2.object_collectives import broadcast_from_first

#: How often rank 0 lists a folder, and the seconds between: NFS caches listings for up to a minute.
LOOKS, BETWEEN = 32, 2.0


def once_saved(folder: Path, mesh: Mesh) -> list[int]:
    """Return :func:`folders.once_saved` of rank 0, once it lists the newest checkpoint that any host has.

    Raises:
        CheckpointError: it never does: an older checkpoint would be used, and the newest one replaced.
    """
    host = socket.gethostname()
    for look in range(LOOKS):
        listed = folders.once_saved(folder) if mesh.rank == 0 else []
        own = max(listed, default=-1) if mesh.rank == 0 else _newest(folder)
        newest = mesh.gather((own, host))
        rank = max(range(len(newest)), key=lambda rank: newest[rank][0])  # the first if several have it
        step, where = newest[rank]
        if rank == 0:
            there: list[int] = broadcast_from_first(listed, mesh)
            return there
        lacking = f"rank {rank} on {where} has the checkpoint of step {step} in {folder}, which rank 0 on "
        lacking += f"{newest[0][1]} does not list"
        if look == 0 and mesh.rank == 0:
            structlog.get_logger().warning(f"{lacking}: it looks again for {LOOKS * BETWEEN:g} seconds")
        time.sleep(BETWEEN)
    raise CheckpointError(f"{lacking}: all hosts need one shared folder; try again once both list the same")


def _newest(folder: Path) -> int:
    """Return the newest step whose manifest can be opened, -1 if there is none: for one rank of a host.

    To open a file asks the server. A listing may have checkpoints that another host has moved away.
    """
    local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID", "0")  # srun sets the latter
    if local_rank == "0":
        for step in reversed(folders.once_saved(folder)):
            try:
                with open(folders.step_folder(folder, step) / manifest.NAME, "rb"):
                    return step
            except OSError:
                continue
    return -1
