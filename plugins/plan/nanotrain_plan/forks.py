"""Calls that run at the same time, in processes that are forked from this one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

_calls: Sequence[Callable[[], Any]] = ()
"""What processes that are forked take over: the objects of plugins cannot be sent to them."""


def pool_of_forks(processes: int) -> ProcessPoolExecutor | None:
    """Return a pool of forked processes, or None where one process is to do all, or cannot be forked."""
    if processes < 2 or "fork" not in multiprocessing.get_all_start_methods():
        return None
    # One thread each: a fork has none of OpenMP's threads and would wait for them.
    context = multiprocessing.get_context("fork")
    return ProcessPoolExecutor(processes, context, initializer=torch.set_num_threads, initargs=(1,))


def call_in_forks(calls: Sequence[Callable[[], Any]], processes: int) -> list[Any]:
    """Return what each of ``calls`` returns, which must be picklable.

    Args:
        calls: that depend neither on one another nor on what another changes in this process.
        processes: to use at most; 1 makes the calls one after another in this process.
    """
    pool = pool_of_forks(min(processes, len(calls)))
    if pool is None:
        return [call() for call in calls]
    global _calls  # noqa: PLW0603 what is forked takes it over
    _calls = calls
    try:
        with pool:
            return list(pool.map(_call, range(len(calls))))
    except BrokenProcessPool:  # as by a system that is short of memory, or an error that cannot be pickled
        return [call() for call in calls]
    finally:
        _calls = ()


def _call(number: int) -> Any:
    return _calls[number]()
