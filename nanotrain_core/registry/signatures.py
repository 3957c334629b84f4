"""Compares the methods of a plugin's class with those of its contract: the core's arguments must fit."""

from __future__ import annotations

import inspect
from functools import cached_property, lru_cache
from types import FunctionType, MethodType
from typing import Any

from nanotrain_core.errors import PluginError

#: Packages whose decorators, such as ``torch.no_grad()``, pass all arguments on as they are.
PASS_ON = ("torch", "contextlib")


class _Anything:
    """Stands for a default in a signature that is shown: its own text may be long."""

    def __repr__(self) -> str:
        return "..."


def expect_signatures(label: str, page: str, contract: type, built: Any) -> None:
    """Reject a method that the core could not call, before the run reaches the call.

    Args:
        label: what the object is, for the error.
        page: the page in ``docs/kinds`` that shows the contract.
        contract: the class that declares the methods; what ``built`` lacks is not its subject.
        built: an object with these methods, or a class.

    Raises:
        PluginError: with the signature that is expected and the one that was found.
    """
    owner = built if isinstance(built, type) else type(built)
    for name, wanted in vars(contract).items():
        if name.startswith("_") or not isinstance(wanted, FunctionType | property):
            continue
        found = inspect.getattr_static(built, name, None)
        if found is wanted or (found is None and not hasattr(built, name)):
            continue
        problem = _problem(built, name, wanted, found)
        if problem:
            raise PluginError(f"{label}: {owner.__name__}.{problem}; see docs/kinds/{page}.md")


def _problem(built: Any, name: str, wanted: Any, found: Any) -> str | None:
    """Return what is wrong with a member of ``built``, ``found`` without evaluating properties."""
    if isinstance(wanted, property):
        method = isinstance(found, FunctionType)
        return f"{name} is a method; expected a property: write @property above it" if method else None
    if isinstance(found, property | cached_property):  # may return a callable, which the call will tell
        return None
    member = getattr(built, name)
    if not callable(member):
        return f"{name} is a {type(member).__name__}; {_expected(name, wanted)}"
    bound = isinstance(member, MethodType)
    function = _behind(member.__func__ if bound else member)
    has_self = bound or (isinstance(built, type) and isinstance(found, FunctionType))
    compare = _mismatch if isinstance(function, FunctionType) else _mismatch.__wrapped__  # may have no hash
    return compare(name, wanted, function, has_self)


@lru_cache(maxsize=4096)
def _mismatch(name: str, wanted: FunctionType, function: Any, has_self: bool) -> str | None:
    """Return why ``function`` cannot be called as ``wanted`` is. Every run asks about the same functions."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # of a function in C: the call will tell
        return None
    parameters = [*inspect.signature(wanted).parameters.values()][1:]
    # Callers may leave out what has a default in the contract itself; that of a helper's class is its own.
    calls = [parameters]
    if wanted.__module__.startswith("nanotrain_core.contracts."):
        calls.append([each for each in parameters if each.default is each.empty])
    for call in calls:
        by_place = [None for each in call if each.kind is each.POSITIONAL_OR_KEYWORD]
        by_name = {each.name: None for each in call if each.kind is each.KEYWORD_ONLY}
        try:
            signature.bind(*[None] * has_self, *by_place, **by_name)
        except TypeError as error:
            found, place = _shown(name, signature), _place(function)
            return f"{found} cannot be called: {error}{place}; {_expected(name, wanted)}"
    return None


def _behind(function: Any) -> Any:
    """Return what a decorator calls, if it is known to pass all arguments on; others declare their own."""
    while hasattr(function, "__wrapped__"):
        module = getattr(function, "__globals__", {}).get("__name__", "")
        if module.partition(".")[0] not in PASS_ON:
            break
        function = function.__wrapped__
    return function


def _expected(name: str, wanted: FunctionType) -> str:
    return f"expected {_shown(name, inspect.signature(wanted))}"


def _shown(name: str, signature: inspect.Signature) -> str:
    """Return a signature without types and values of defaults: ``build(self, part, ops=...)``."""
    return name + str(
        signature.replace(
            parameters=[
                each.replace(
                    annotation=each.empty, default=each.empty if each.default is each.empty else _Anything()
                )
                for each in signature.parameters.values()
            ],
            return_annotation=signature.empty,
        )
    )


def _place(function: Any) -> str:
    """Return where a function is written; nothing for other callables."""
    code = getattr(function, "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
