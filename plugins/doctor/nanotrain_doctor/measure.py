"""What one rank measures: its device alone, then together with the others."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nanotrain_doctor.processor import processor

#: Seconds that a measurement lasts, at least three rounds of it.
LASTS = 0.3
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Reduce = Callable[[torch.Tensor], Any]


def measure_device(device: torch.device, ranks: int = 1) -> dict[str, Any]:
    """Return the rates of a device by plain names: FLOP/s, bytes a second.

    Args:
        device: a GPU, or the CPU.
        ranks: of this host, which divide the cores of a CPU.
    """
    gpu = device.type == "cuda"
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(device) if gpu else "cpu",
        "number": device.index if gpu else None,
        "threads": torch.get_num_threads(),
    }
    if gpu:
        found["free"], found["total"] = torch.cuda.mem_get_info(device)
    else:
        found |= processor(ranks, found["threads"])
        found["vectors"] = torch.backends.cpu.get_cpu_capability()
    side = 8192 if gpu else 1024
    for dtype in (torch.bfloat16, torch.float32):
        if dtype == torch.float32 and gpu:
            continue  # runs compute in bfloat16 there
        rate, same = matrix_product(device, dtype, side)
        found[f"gemm_{str(dtype).removeprefix('torch.')}"] = rate
        found["repeats"] = found.get("repeats", True) and same
    found["copy"] = copy_rate(device, 2**30 if gpu else 2**26)
    return found


def matrix_product(
    device: torch.device, dtype: torch.dtype, side: int, product: Product = torch.matmul
) -> tuple[float, bool]:
    """Return FLOP/s of a product of square matrices, and whether it has the same bits each time."""
    a, b = (torch.randn(side, side, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    first = product(a, b)
    same = torch.equal(first, product(a, b))
    seconds = _seconds(lambda: product(a, b), device)
    return 2 * side**3 / seconds, same


def copy_rate(device: torch.device, count: int) -> float:
    """Return bytes a second, read and written together, of a copy within the device's memory."""
    source = torch.ones(count, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * count / _seconds(lambda: target.copy_(source), device)


def measure_all_reduce(device: torch.device, rank: int, world: int) -> dict[str, Any]:
    """Return whether sums over all ranks are right, and what they cost."""
    count = 2**26 if device.type == "cuda" else 2**22  # floats: 256 and 16 MiB
    buffer = torch.ones(count, device=device)
    tiny = torch.ones(1, device=device)
    return {
        "wrong": wrong_sums(dist.all_reduce, device, rank, world),
        "bytes": 4 * count,
        "seconds": _seconds(lambda: dist.all_reduce(buffer), device, rounds=5),
        "latency": _seconds(lambda: dist.all_reduce(tiny), device, rounds=20),
    }


def wrong_sums(all_reduce: Reduce, device: torch.device, rank: int, world: int, count: int = 2**20) -> int:
    """Return how many of ``count`` elements are not the sum of all ranks', which is exact: of integers."""
    index = torch.arange(count, device=device, dtype=torch.float32) % 251
    tensor = index * (rank % 7 + 1) + rank % 16
    factors = sum(each % 7 + 1 for each in range(world))
    expected = index * factors + sum(each % 16 for each in range(world))
    all_reduce(tensor)
    return int((tensor != expected).sum())


def _seconds(act: Callable[[], Any], device: torch.device, rounds: int | None = None) -> float:
    """Return the median of the seconds of a call: of so many, or of as many as fit."""
    act()
    times: list[float] = []
    _wait(device)
    while len(times) < (rounds or 3) or (rounds is None and sum(times) < LASTS):
        began = time.perf_counter()
        act()
        _wait(device)
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
