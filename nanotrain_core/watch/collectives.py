"""The last collectives of a hanging rank from NCCL's flight recorder, for ``torchfrtrace``."""

from __future__ import annotations

from pathlib import Path

from nanotrain_core.run.files import write_atomically

#: In the run folder: a file for each rank.
DUMPS = "collectives"


def keep_collectives(folder: Path, rank: int) -> None:
    """Write them where torch does when a collective times out; a no-op if the backend is not NCCL."""
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_nccl_trace", None)
    if dump is None or not dist.is_initialized() or dist.get_backend() != "nccl":
        return
    path = folder / DUMPS / f"rank-{rank}"
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, lambda temporary: temporary.write_bytes(dump()), flushed=False)
