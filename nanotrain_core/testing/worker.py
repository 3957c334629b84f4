"""The worker side of :mod:`nanotrain_core.testing.pool`: one rank that runs functions sent to it.

Torch is imported inside functions only; the pool's fork server has it loaded before a worker starts.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, Literal

import attrs

#: What the other ranks' errors say when one rank has gone: a consequence, never the cause.
CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Application timeout caused pair closure",
    "Broken pipe",
    "monitoredBarrier",
)


@attrs.define(frozen=True)
class Target:
    """A reference to a function: by module name, or by file where the name is not importable."""

    module: str
    file: str | None
    name: str

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Target:
        """Describe ``function``.

        Raises:
            TypeError: it is not at the top level of a module, so no other process can find it.
        """
        module = sys.modules.get(function.__module__)
        name = getattr(function, "__qualname__", repr(function))
        if module is None or not name.isidentifier() or not hasattr(module, name):
            raise TypeError(f"a rank can only run a function at the top level of a module, not {name}")
        return cls(function.__module__, getattr(module, "__file__", None), name)

    def resolve(self) -> Callable[..., Any]:
        """Import the module in this process and return the function."""
        function: Callable[..., Any] = getattr(self._module(), self.name)
        return function

    def _module(self) -> ModuleType:
        loaded = sys.modules.get(self.module)
        if loaded is None:
            with contextlib.suppress(ImportError):
                loaded = import_module(self.module)
        if loaded is not None and (self.file is None or getattr(loaded, "__file__", None) == self.file):
            return loaded
        return self._load_file()

    def _load_file(self) -> ModuleType:
        """Execute the file under the same name: test modules are often in no package."""
        # A script's file must not run as a script again: the name is multiprocessing's for that.
        name = "__mp_main__" if self.module == "__main__" else self.module
        spec = spec_from_file_location(name, self.file or "")
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot import {self.module} from {self.file}")
        module = module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module


@attrs.define(frozen=True)
class Job:
    """One call, the same for every rank. Arguments are pickled apart, to be read once ``path`` is set."""

    path: tuple[str, ...]
    target: Target
    arguments: bytes
    store: str
    backend: str | None
    check_collectives: bool


@attrs.define(frozen=True)
class Failure:
    """The failure of a rank that did not return."""

    rank: int
    kind: Literal["raised", "died", "hung"]
    summary: str
    """One line."""
    detail: str = ""
    """Traceback or stack, most recent call last for exceptions and first for stacks."""

    @property
    def consequence(self) -> bool:
        """Whether the rank only noticed that another was gone."""
        return any(text in self.summary for text in CONSEQUENCES)


def serve(connection: Connection, rank: int, world_size: int, stack_file: str) -> None:
    """Answer jobs until the pool closes the connection."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    gc.freeze()  # torch's objects, several hundred thousand, stay: no collection need look at them
    with open(stack_file, "w") as stacks:
        faulthandler.enable(stacks)  # a crash in C code leaves its Python stack
        faulthandler.register(signal.SIGUSR1, stacks)  # and so does a hang, when the pool asks
        while True:
            try:
                job: Job = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            connection.send_bytes(answer(job, rank, world_size))


def _end_with_parent() -> None:
    """End this rank when the pool's process is gone, for whatever reason."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()  # of a pool: until the end of a pipe that the parent alone holds is closed
        os._exit(1)


def answer(job: Job, rank: int, world_size: int) -> bytes:
    """Run the job and return its pickled result or :class:`Failure`."""
    try:
        sys.path[:] = job.path
        function = job.target.resolve()
        args, kwargs = pickle.loads(job.arguments)
        reset(check_collectives=job.check_collectives and job.backend is not None)
        with process_group(job, rank, world_size):
            return dumps(function(*args, **kwargs))
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this frame
        lines = traceback.format_exception(error)
        summary = f"{type(error).__name__}: {error}".strip()
        return pickle.dumps(Failure(rank, "raised", summary, "".join(lines)))


def reset(*, check_collectives: bool) -> None:
    """Undo what an earlier function may have left set in this process."""
    import numpy as np
    import torch
    import torch.distributed as dist

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    if torch.are_deterministic_algorithms_enabled():  # the setter imports the compiler: 1.4 s
        torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    level = dist.DebugLevel.DETAIL if check_collectives else dist.DebugLevel.OFF
    dist.set_debug_level(level)


@contextlib.contextmanager
def process_group(job: Job, rank: int, world_size: int) -> Iterator[None]:
    """Give the function a new default group, which no earlier function's messages can reach.

    The group's own timeout is long: it is the pool that notices a hang, and asks for the stacks.
    """
    if job.backend is None:
        yield
        return
    import torch.distributed as dist

    dist.init_process_group(
        job.backend,
        store=dist.FileStore(job.store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(hours=1),
    )
    yield  # after an exception the pool kills this process: it needs no clean group
    gc.collect()  # a run is full of cycles; what is left of it would hold on to its groups and their threads
    dist.barrier()  # a collective that some ranks forgot is noticed here
    dist.destroy_process_group()


def signal_name(exit_code: int | None) -> str:
    """Return how a process ended: ``died of SIGKILL``, ``exited with code 3``."""
    if exit_code is not None and exit_code < 0:
        return f"died of {signal.Signals(-exit_code).name}"
    return f"exited with code {exit_code}"


def ask_for_stack(pid: int) -> None:
    """Make the worker ``pid`` write its stack to its stack file."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)


class TensorPickler(pickle.Pickler):
    """Pickles tensors by copying their values in bulk: torch's own pickling writes a small file for each.

    The multiprocessing pickler would send a handle of shared memory, gone when this process is killed.
    """

    def reducer_override(self, value: Any) -> Any:
        import torch

        if type(value) is not torch.Tensor or value.is_meta:
            return NotImplemented
        plain = value.detach().cpu().contiguous()
        return rebuild, (plain.flatten().view(torch.uint8).numpy().tobytes(), plain.dtype, plain.shape)


def rebuild(data: bytes, dtype: Any, shape: Any) -> Any:
    """Return the tensor that :class:`TensorPickler` took apart."""
    import torch

    return (
        torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
        if data
        else torch.empty(shape, dtype=dtype)
    )


def dumps(value: Any) -> bytes:
    """Pickle ``value``."""
    buffer = io.BytesIO()
    TensorPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()
