"""The main function of a process that runs checks for ``nanotrain conformance``: it may hang, or be killed.

It loads the plugin, lists what is to be checked, and runs one check after another, each on pools of ranks of
its own that it keeps. The command itself never imports the plugin.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs

from nanotrain_core.errors import NanotrainError

_CORE = Path(__file__).resolve().parent.parent


@attrs.define(frozen=True)
class Listed:
    """A check of a case, in the form sent to another process."""

    number: int
    """Its place in the list, which every process makes alike."""
    id: str
    label: str
    invariant: str
    since: str
    ranks: int


@attrs.define(frozen=True)
class Listing:
    """All checks, and what is skipped."""

    trials: Sequence[Listed]
    skipped: Sequence[tuple[str, str]]
    """(variant, why)."""


@attrs.define(frozen=True)
class Refusal:
    """There is nothing to check, and the reason."""

    text: str
    mistake: bool
    """Whether the command was called wrongly, or the plugin cannot be loaded."""


@attrs.define(frozen=True)
class Outcome:
    """The outcome of a check."""

    number: int
    error: str | None
    seconds: float


class TrialProcess:
    """One process's list of trials."""

    def __init__(self, arguments: Mapping[str, Any], quick: bool) -> None:
        self.arguments, self.quick = arguments, quick
        self.trials: Sequence[Any] = ()

    def listing(self) -> Listing | Refusal:
        """Make the list."""
        from nanotrain_core.testing.case import Case
        from nanotrain_core.testing.conformance import planned
        from nanotrain_core.testing.variants import filled

        try:
            case = Case(**self.arguments)
            filled(case).settings()
            self.trials, skipped = planned(case, quick=self.quick)
        except NanotrainError as error:
            return Refusal(str(error), mistake=True)
        listed = [
            Listed(n, t.id, t.label, t.check.invariant, t.check.since, t.case.world_size)
            for n, t in enumerate(self.trials)
        ]
        return Listing(listed, [(f"{case.name or case.use}-{each.name}", each.reason) for each in skipped])

    def run(self, number: int) -> Outcome:
        """Run one."""
        began, trial = time.monotonic(), self.trials[number]
        try:
            trial.run()
        except Exception as error:
            return Outcome(number, described(error), time.monotonic() - began)
        except SystemExit as error:
            text = f"sys.exit({error.code!r}) was called"
            return Outcome(number, text, time.monotonic() - began)
        return Outcome(number, None, time.monotonic() - began)


def described(error: Exception) -> str:
    """Return what went wrong; for an error not raised by the core, its type and location, too.

    Where is the innermost line of code that is neither the core's nor installed: most likely the component's.
    """
    text, frames = str(error), traceback.extract_tb(error.__traceback__)
    told = isinstance(error, NanotrainError) or (frames and _is_ours(frames[-1].filename))
    if text and told:
        return text
    named = f"{type(error).__name__}: {text}" if text else type(error).__name__
    theirs = [frame for frame in frames if not (_is_ours(frame.filename) or _is_installed(frame.filename))]
    if not frames:
        return named
    frame = (theirs or frames)[-1]
    return f"{named} ({frame.filename}:{frame.lineno}, in {frame.name})"


def _is_ours(filename: str) -> bool:
    return Path(filename).is_relative_to(_CORE)


def _is_installed(filename: str) -> bool:
    path = Path(filename)
    return "site-packages" in path.parts or path.is_relative_to(sysconfig.get_path("stdlib"))


def serve(
    connection: Connection,
    arguments: Mapping[str, Any],
    quick: bool,
    environment: Mapping[str, str],
    path: Sequence[str],
) -> None:
    """Answer with a listing, then with the outcome of each requested index.

    What the component, its ranks or the log print goes to standard error: the command's own output is its
    results alone, which ``--json`` has others read.
    """
    import torch

    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.join,), daemon=True).start()
    os.environ.update(environment)
    sys.path[:] = path
    # As ranks do: threads that wait for each other on busy cores make a tiny model ten times slower.
    torch.set_num_threads(1)
    process = TrialProcess(arguments, quick)
    try:
        connection.send(process.listing())
    except SystemExit as error:
        who = f"{arguments.get('kind')} '{arguments.get('use')}'"
        text = f"{who}: its code called sys.exit({error.code!r}) when it was loaded"
        connection.send(Refusal(text, mistake=True))
        return
    while True:
        try:
            number = connection.recv()
        except EOFError:
            break
        connection.send(process.run(number))
    sys.stdout.flush()


def _end_after(wait: Callable[[], Any]) -> None:
    wait()
    os._exit(1)
