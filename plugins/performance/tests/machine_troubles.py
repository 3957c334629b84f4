"""Troubles of a machine to plant in a run: slow data, a slow rank, memory that grows.

Each takes an engine and how much of it: the more, the less a busy machine looks the same.
"""

import mmap
import time

import torch


def slow_data(engine, seconds):
    """Have each batch take ``seconds`` longer."""
    take = engine.run.feed.data.train_batch
    engine.run.feed.data.train_batch = lambda *args: (time.sleep(seconds), take(*args))[1]


def slow_rank(engine, seconds):
    """Have each forward pass of rank 1 take ``seconds`` longer."""
    if engine.run.mesh.rank == 1:
        for part in engine.run.stages.values():
            part.register_forward_pre_hook(lambda *_: time.sleep(seconds))


def growing_memory(engine, size):
    """Have rank 1 keep ``size`` bytes more after each forward pass."""
    kept = []
    if engine.run.mesh.rank == 1:
        for part in engine.run.stages.values():
            part.register_forward_hook(lambda *_: kept.append(fresh(size)))


def nothing(engine, amount):
    """Plant nothing."""


def fresh(size):
    """Return a tensor of memory that no allocator had before: each page of it is new to the process."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).fill_(1)
