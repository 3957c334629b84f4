"""Options of NCCL process groups: high-priority streams and eager connection."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def options(timeout: timedelta) -> dict[str, Any]:
    """Return arguments of ``init_process_group`` and ``new_group`` for overlap with computation.

    Their kernels run as soon as there is room, not behind those of the layers they overlap with.
    """
    found = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    found._timeout = timeout  # torch warns if it differs from the argument
    return {"pg_options": found}


def of_subgroup(device: torch.device, timeout: timedelta) -> dict[str, Any]:
    """Return arguments of ``new_group``: none where the backend is not NCCL.

    ``device_id`` connects ranks in the call, not in their first collective. The world's group is created
    without it: torch would then split every other group from it (``ncclCommSplit``), in which all ranks of
    the world must take part, and a mesh creates a group on its members only. A barrier connects it instead.
    """
    if device.type != "cuda" or dist.get_backend() != "nccl":
        return {}
    index = torch.cuda.current_device() if device.index is None else device.index
    return {**options(timeout), "device_id": torch.device("cuda", index)}
