"""Starts ranks on this host, or is one that torchrun or srun started, and has all of them measure."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanotrain_core.api import write_text_atomically
from nanotrain_core.api.ranks import Ranks, ending_process_groups, loopback, rendezvous_store

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

#: Seconds that ranks wait for one another.
TIMEOUT = 120.0
Measured = dict[str, Any]


def prepare() -> None:
    """Start the server of ranks, which loads torch meanwhile, as `nanotrain run` does."""
    from multiprocessing import forkserver

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    multiprocessing.set_forkserver_preload(["torch", "torch.distributed", "nanotrain_doctor.measure"])
    forkserver.ensure_running()


def measure_here(count: int, timeout: float = TIMEOUT) -> list[Measured]:
    """Return what each of ``count`` ranks of this host measured, or why it did not.

    As under `nanotrain run`, they are forked from a server that has torch, meet in a file, talk over loopback
    and divide the cores.
    """
    interface = loopback()
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    with tempfile.TemporaryDirectory(prefix="nanotrain-") as scratch:
        context = multiprocessing.get_context("forkserver")
        processes = [
            context.Process(target=_be_rank, args=(Ranks(rank, count, rank, count), scratch), daemon=True)
            for rank in range(count)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        found = [_result(Path(scratch), rank, process, timeout) for rank, process in enumerate(processes)]
        for process in processes:
            process.kill()
            process.join()
    return found


def measure_joined(
    ranks: Ranks, act: Callable[[Store], Measured], *, quick: bool = False, timeout: float = TIMEOUT
) -> tuple[Store, list[Measured]]:
    """Meet the ranks that torchrun or srun started, and measure.

    Args:
        ranks: this rank's place.
        act: called with what ranks tell each other by, before they measure; what it returns is added.
        quick: measure nothing.
        timeout: seconds to wait for other ranks.

    Returns:
        The store, and on rank 0 what each rank measured; on others what they did.

    Raises:
        LaunchError: nothing says where ranks meet, or rank 0 has not been found in time.
        Exception: whatever torch raises when ranks do not meet.
    """
    import torch.distributed as dist

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"doctor/{attempt}", rendezvous_store(ranks, timeout))
    mine = {"rank": ranks.rank, "local_rank": ranks.local_rank, "host": socket.gethostname(), **act(store)}
    if not quick:
        try:
            mine.update(measure(ranks, store, timeout))
        except Exception as problem:  # rank 0 tells it for all
            mine["failed"] = first_line(problem)
    store.set(f"report/{ranks.rank}", json.dumps(mine))
    if ranks.rank:
        return store, [mine]
    return store, [json.loads(store.get(f"report/{rank}")) for rank in range(ranks.world_size)]


def first_line(problem: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}".strip(": ")


def measure(ranks: Ranks, store: Store, timeout: float = TIMEOUT) -> Measured:
    """Measure as one rank, alone and then with the others."""
    import torch
    import torch.distributed as dist

    from nanotrain_doctor.measure import measure_all_reduce, measure_device

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(ranks.threads())
    device = _device(ranks)
    backend = "nccl" if device.type == "cuda" else "gloo"
    with ending_process_groups():
        if ranks.world_size > 1:
            limit = timedelta(seconds=timeout)
            sizes: dict[str, Any] = {"rank": ranks.rank, "world_size": ranks.world_size}
            dist.init_process_group(backend, store=dist.PrefixStore("world", store), timeout=limit, **sizes)
            dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
        found = {
            "rank": ranks.rank,
            "local_rank": ranks.local_rank,
            **measure_device(device, ranks.local_world_size),
        }
        if ranks.world_size > 1:
            dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
            found["all_reduce"] = measure_all_reduce(device, ranks.rank, ranks.world_size)
            found["backend"] = backend
        return found


def _device(ranks: Ranks) -> torch.device:
    """Return this rank's GPU where every rank of the host has one of its own, else the CPU."""
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count() >= ranks.local_world_size:
        torch.cuda.set_device(ranks.local_rank)
        return torch.device("cuda", ranks.local_rank)
    return torch.device("cpu")


def _be_rank(ranks: Ranks, scratch: str) -> None:
    import torch.distributed as dist

    try:
        found = measure(ranks, dist.FileStore(str(Path(scratch, "store")), ranks.world_size))
    except Exception as problem:
        found = {"rank": ranks.rank, "failed": first_line(problem), "trace": traceback.format_exc()}
    write_text_atomically(Path(scratch, f"rank-{ranks.rank}.json"), json.dumps(found))


def _result(scratch: Path, rank: int, process: Any, timeout: float) -> Measured:
    path = scratch / f"rank-{rank}.json"
    if path.exists():
        found: Measured = json.loads(path.read_text(encoding="utf-8"))
        return found
    code = process.exitcode
    ended = f"no answer within {timeout:g} s" if code is None else f"ended with code {code}"
    return {"rank": rank, "failed": ended}
