"""Errors that the user can fix: shown as plain text, without a traceback, with an exit code."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self, TypeVar

import attrs

T = TypeVar("T")


class Exit:
    """Exit codes of ``nanotrain``; the table in docs/recipes.md is tested against these."""

    DONE = 0
    FAILED = 1  # a rank crashed, and the first cause and its rank were printed; or another host ended the run
    USER = 2  # the recipe, a plugin, the data or the command line is wrong: nearly always nothing was started
    DIVERGED = 3  # training diverged and was stopped
    LOCKED = 4  # another run owns the run folder
    HUNG = 5  # no progress for run.hang_timeout seconds: the rank was named, stacks are in the run folder
    CORRUPTED = 6  # ranks that hold the same weights hold different bits: parameter and rank were named
    UNSAVED = 7  # the run could not be saved: its last checkpoint, or several in a row
    PREEMPTED = 75  # stopped by SIGTERM, SIGHUP or SIGUSR1: run again with --resume auto
    INTERRUPTED = 130  # stopped by Ctrl-C


class NanotrainError(Exception):
    """An error the user can fix. Its text is all the user sees."""

    exit_code = Exit.USER
    restart_helps = False
    """Whether the unchanged run may succeed when its ranks are restarted; otherwise they are not."""

    def __str__(self) -> str:
        """Return the text :func:`shortened`: it may quote a value of any length."""
        return shortened(super().__str__())

    def with_code(self, code: int) -> Self:
        """Return this error with an exit code other than its class's."""
        self.exit_code = code
        return self


class PluginError(NanotrainError):
    """A plugin is missing, broken, too old or conflicts with another."""


class DataError(NanotrainError):
    """The training data is missing, unreadable, too small or not what the model expects."""


class FolderError(NanotrainError):
    """The run folder cannot be written or already holds a run."""


class CheckpointError(NanotrainError):
    """A checkpoint is missing, damaged or does not fit the model."""


class UnfitCheckpoint(CheckpointError):
    """A whole checkpoint has tensors of other names, shapes or dtypes than the run: of another recipe."""


class SaveFailed(CheckpointError):
    """A run was ended because it could not be saved."""

    exit_code = Exit.UNSAVED


class LaunchError(NanotrainError):
    """The ranks could not be started or disagree about what to run."""


class FolderLocked(FolderError):
    """Another live run owns the run folder."""

    exit_code = Exit.LOCKED


class Diverged(NanotrainError):
    """Training diverged numerically and was stopped."""

    exit_code = Exit.DIVERGED


class Corrupted(NanotrainError):
    """Ranks that hold the same weights hold different bits: a processor, memory or plugin error."""

    exit_code = Exit.CORRUPTED


class Preempted(NanotrainError):
    """A signal to end (SIGTERM, SIGHUP, SIGUSR1) arrived while there was no step to finish."""

    exit_code = Exit.PREEMPTED


@attrs.define(frozen=True)
class Problem:
    """One error in a recipe."""

    key: str = attrs.field(validator=attrs.validators.instance_of(str))
    """Dotted path in the recipe, list items by index: ``parallel.0.sequence_parallel``."""
    message: str = attrs.field(validator=attrs.validators.instance_of(str))
    """What is wrong, what was expected, and the nearest valid choice."""


class RecipeError(NanotrainError):
    """One or more errors in a recipe, each with its location."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = tuple(lines)
        super().__init__("\n".join(lines))


def expect_result(who: str, method: str, found: T, wanted: type[Any]) -> T:
    """Return what a method of a component returned.

    Raises:
        PluginError: it is of another type, such as None for lack of a ``return``, or text where a list of
            texts is expected.
    """
    if isinstance(found, wanted) and not isinstance(found, str):
        return found
    what = "None" if found is None else f"a {type(found).__name__}"
    raise PluginError(f"{who}: its {method} returned {what}; expected {wanted.__name__}")


@contextmanager
def as_plugin_error(what: str) -> Iterator[None]:
    """Raise any exception of a plugin's code as ``WHAT raised ValueError: ...``; those for users pass.

    Raises:
        PluginError: the exception is its ``__cause__``.
    """
    try:
        yield
    except NanotrainError:
        raise
    except Exception as error:
        raise PluginError(f"{what} raised {describe(error)}") from error


def shortened(text: str) -> str:
    """Return ``text`` without the middle of words of over 300 characters, and of lines of over 3,000.

    >>> shortened(f"no file {'x' * 400}").replace("x" * 75, "-")
    'no file --[... 400 characters ...]-'
    """
    for long in (r"\S{301,}", r".{3001,}"):
        text = re.sub(long, lambda m: f"{m[0][:150]}[... {len(m[0]):,} characters ...]{m[0][-75:]}", text)
    return text


def describe(error: BaseException) -> str:
    """Describe an error in a plugin's code, for its author: ``ValueError: text (file.py:12)``.

    The line is the last one outside of torch and the core, which a plugin may have called wrongly.
    """
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith("<")]  # importlib's frames are frozen
    loaded = [module for name in ("nanotrain_core", "torch") if (module := sys.modules.get(name))]
    called = tuple(f"{module.__path__[0]}/" for module in loaded)
    last = [frame for frame in own if not frame.filename.startswith(called)] or own
    place = f" ({last[-1].filename}:{last[-1].lineno})" if last else ""
    return f"{type(error).__name__}: {error}{place}"


def in_one_line(error: BaseException, most: int = 600) -> str:
    """Return at most so many characters of another library's error, which may have many lines."""
    return " ".join(str(error).split())[:most]


def did_you_mean(word: str, choices: Sequence[str], *, cutoff: float = 0.5) -> str:
    """Return `` (did you mean 'x'?)`` for the nearest of ``choices``, or an empty string.

    A choice that begins with the word is nearer than any other. Others must have a similarity, as of
    :func:`difflib.get_close_matches`, of at least ``cutoff``.
    """
    longer = [choice for choice in choices if choice.startswith(word)] if len(word) > 2 else []
    near = get_close_matches(word, longer or choices, n=1, cutoff=0.0 if longer else cutoff)
    return f" (did you mean '{near[0]}'?)" if near else ""


def did_you_mean_path(path: Path, others: Sequence[str] = ()) -> str:
    """Return `` (did you mean 'x'?)`` for the nearest sibling of a missing path, or an empty string.

    ``others``: names of what else may be meant, such as recipes.
    """
    siblings = alike(path, sorted(other.name for other in path.parent.glob("*")))
    return did_you_mean(path.name, [*siblings, *others])


def alike(path: Path, choices: Sequence[str]) -> list[str]:
    """Return the choices that resemble ``path`` by more than the suffix: ``.py`` makes no files similar."""
    return [choice for choice in choices if did_you_mean(path.stem, [Path(choice).stem])]
