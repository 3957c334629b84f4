"""One contender in a process of its own: it trains when asked to, and holds no more than it must between."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs

from benchmarks.gpu.contenders import Contender, Trainer, build
from benchmarks.gpu.process import context, end_with
from benchmarks.gpu.records import told


class SideFailed(Exception):
    """A contender's process ended, or said what went wrong."""


@attrs.define(frozen=True)
class Turn:
    """What one turn took."""

    seconds: float
    """Of a step."""
    peak: int
    """Bytes allocated at once, the most of the turn."""
    reserved: int
    """Bytes that torch had from the device."""


@attrs.define(frozen=True)
class Ready:
    """A side that has taken its first steps."""

    tokens_per_step: int
    parameters: int
    flops_per_token: float
    warm_up: float
    """Seconds to build, compile, and take two steps."""
    step: float
    """Seconds of a step, roughly."""


class Side:
    """The process of one contender."""

    def __init__(self, contender: Contender, device: str, start: str) -> None:
        how: Any = context(start)
        self.contender = contender
        self.pipe, theirs = how.Pipe()
        self.process = how.Process(target=serve, args=(theirs, contender, device, os.getpid()))
        self.process.start()
        theirs.close()  # so that its death is an EOFError here

    def ready(self, seconds: float) -> Ready:
        """Wait until it has taken its first steps."""
        return self._answer("its first steps", seconds)  # type: ignore[no-any-return]

    def turn(self, steps: int, seconds: float) -> Turn:
        """Train a step that is not timed, which asks for memory again, and ``steps`` that are."""
        return self._asked("a turn", partial(take_turn, steps=steps), seconds)  # type: ignore[no-any-return]

    def profile(self, name: str, folder: Path, seconds: float) -> None:
        """Write where the time of a few steps goes."""
        from benchmarks.gpu.profile import write

        self._asked("a profile", partial(write, folder=folder, name=name), seconds)

    def _asked(self, what: str, order: Callable[[Trainer, str], Any], seconds: float) -> Any:
        try:
            self.pipe.send(order)
        except BrokenPipeError:
            raise SideFailed(self._ended()) from None
        return self._answer(what, seconds)

    def _answer(self, what: str, seconds: float) -> Any:
        try:
            if not self.pipe.poll(max(0.0, seconds)):
                raise SideFailed(f"{what} took longer than the {seconds:.0f} s that were left")
            well, answer = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise SideFailed(self._ended()) from None
        if not well:
            raise SideFailed(answer)
        return answer

    def _ended(self) -> str:
        self.process.join(5)
        return f"its process ended with exit code {self.process.exitcode}"

    def close(self) -> None:
        """End it: its memory is free when this returns."""
        self.pipe.close()
        self.process.kill()  # to leave by itself it would take seconds: it ends CUDA, and those who compile
        self.process.join(10)


def serve(pipe: Connection, contender: Contender, device: str, parent: int) -> None:
    """Be a contender: build, warm up, then do what is asked for."""
    end_with(parent)
    try:
        began = time.perf_counter()
        trainer = build(contender, device)
        trainer.advance(2)
        wait(device)
        warm_up = time.perf_counter() - began
        began = time.perf_counter()
        trainer.advance(1)
        wait(device)
        step = time.perf_counter() - began
        rest(device)
        pipe.send(
            (True, Ready(trainer.tokens_per_step, trainer.parameters, trainer.flops_per_token, warm_up, step))
        )
        while True:
            order = pipe.recv()
            answer = order(trainer, device)
            rest(device)
            pipe.send((True, answer))
    except EOFError:
        return
    except BaseException as error:
        import traceback

        traceback.print_exc()
        pipe.send((False, told(error)))


def take_turn(trainer: Trainer, device: str, *, steps: int) -> Turn:
    """See :meth:`Side.turn`."""
    import torch

    trainer.advance(1)
    wait(device)
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    trainer.advance(steps)
    wait(device)
    seconds = time.perf_counter() - began
    peak, reserved = (
        (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if device != "cpu" else (1, 1)
    )
    return Turn(seconds / steps, peak, reserved)


def wait(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize()


def rest(device: str) -> None:
    """Give back what only a step needs."""
    gc.collect()
    if device != "cpu":
        import torch

        torch.cuda.empty_cache()
