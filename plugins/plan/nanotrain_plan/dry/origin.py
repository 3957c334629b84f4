"""Which code asked for a collective: read from Python's stack, so that it is known of any plugin."""

from __future__ import annotations

import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import attrs
import torch
from torch.autograd.function import BackwardCFunction

from nanotrain_core.api.torch import AllReduceGradients, Mesh, TimeSpent

#: The core's folder of exchanges asks for nothing itself, but for one file.
_ASKS = inspect.getfile(AllReduceGradients)


def _folder(file: str) -> str:
    return str(Path(file).parent) + os.sep


#: What stands between a collective and who asks for it: exchanges, waits, torch, this package.
_BETWEEN = (
    _folder(inspect.getfile(Mesh)),
    _folder(inspect.getfile(TimeSpent)),
    _folder(torch.__file__),
    _folder(_folder(__file__)),
    "<",
)
_PYTHON = sysconfig.get_path("stdlib") + os.sep


@attrs.define(frozen=True)
class Origin:
    """A place in a source file, and what is written there about it."""

    file: str
    line: int
    name: str
    """Qualified name of the function, or of the autograd function that it is a pass of."""
    text: str
    """First sentence of its docstring, else of its class's or its module's; empty if nobody wrote one."""


def find_origin() -> Origin | None:
    """Return what asked for the collective that is being made.

    An autograd function, if one is running: its docstring tells what both passes exchange. Else the innermost
    function that is neither torch's nor an exchange's own.
    """
    innermost = None
    for frame in _frames(sys._getframe(1)):
        innermost = innermost or frame
        context = frame.f_locals.get("ctx")
        if isinstance(context, BackwardCFunction) and frame.f_code.co_name in ("forward", "backward"):
            return _of_function(frame, type(context)._forward_cls)  # type: ignore[attr-defined]
        if frame.f_code.co_name == "_execute":  # the executor's: beyond it is the engine
            break
    return None if innermost is None else _of_code(innermost)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of components and of the core, innermost first."""
    while frame is not None:
        file = frame.f_code.co_filename
        python = file.startswith(_PYTHON) and "-packages" not in file  # what is installed lies there too
        if file == _ASKS or not (python or file.startswith(_BETWEEN)):
            yield frame
        frame = frame.f_back


def _of_function(frame: FrameType, function: Any) -> Origin:
    own = (cls for cls in function.__mro__ if not cls.__module__.startswith(("torch", "builtins")))
    documented = [*own, sys.modules.get(function.__module__)]
    text = next((text for each in documented if (text := _sentence(vars(each).get("__doc__")))), "")
    name = f"{function.__qualname__}.{frame.f_code.co_name}"
    return Origin(frame.f_code.co_filename, frame.f_lineno, name, text)


def _of_code(frame: FrameType) -> Origin:
    code = frame.f_code
    return Origin(
        code.co_filename, frame.f_lineno, code.co_qualname, _text_of(code, frame.f_globals["__name__"])
    )


@cache
def _text_of(code: CodeType, module: str) -> str:
    """Return the first sentence about a function: its own docstring's, its class's or its module's."""
    found: Any = sys.modules.get(module)
    documented = [found]
    for part in code.co_qualname.split("."):
        found = getattr(found, part, None)
        documented.insert(0, found)
    return next((text for each in documented if (text := _sentence(getattr(each, "__doc__", None)))), "")


def _sentence(text: str | None) -> str:
    """Return the first sentence of a docstring, in one line and without markup.

    >>> _sentence("Sum over the ranks of a :class:`Mesh`. And more.")
    'Sum over the ranks of a Mesh.'
    """
    words = re.sub(r":\w+:(?=`)", "", " ".join((text or "").partition("\n\n")[0].split()))
    head, stop, _ = words.replace("`", "").partition(". ")
    return head + stop.strip()


def place_of(found: Any) -> Origin | None:
    """Return where a class or a function is defined; None of what is not written in Python."""
    found = found if isinstance(found, type) or inspect.isroutine(found) else type(found)
    found = inspect.unwrap(found)
    try:
        lines, first = inspect.getsourcelines(found)
        file = inspect.getsourcefile(found)
    except (OSError, TypeError):
        return None
    begins = (n for n, line in enumerate(lines) if re.match(r"\s*(class|(async )?def)\b", line))
    first += next(begins, 0)  # behind decorators
    return None if file is None else Origin(file, first, found.__qualname__, _sentence(found.__doc__))
