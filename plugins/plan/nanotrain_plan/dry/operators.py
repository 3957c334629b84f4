"""What operators on ``meta`` return, remembered by the form of their arguments.

A tensor on ``meta`` is a dtype, sizes and strides, so an operator that makes new tensors makes the same ones
whenever its arguments look the same. Microbatches and layers that are alike ask for each a dozen times, and
many of torch's operators find out in Python, which takes a hundred times as long as making the tensors.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from nanotrain_core.api.torch import PackedWeight
from nanotrain_plan.dry.cost import Cost

#: Calls that are remembered; of a model of 671B parameters a sweep makes some ten thousand.
MOST = 200_000

_SCALARS = frozenset((int, float, bool, torch.dtype, torch.device, torch.layout, torch.memory_format))

#: Operators that change what a tensor is, not only its numbers.
_RESHAPED = ("resize", "set_", "_set", "swap", "as_strided_")


@attrs.define(frozen=True)
class Made:
    """What a call returns, and what is noted of it."""

    forms: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]
    """Of new tensors: sizes, strides, dtype. Empty of an operator that works in place."""
    several: type | None
    """The sequence that they are returned as; None of a single one."""
    cost: Cost | None

    def again(self, args: Any) -> Any:
        """Return the tensors of another call; in place, the one that it works on."""
        if not self.forms:
            return args[0]
        if self.several is None:
            size, stride, dtype = self.forms[0]
            return torch.empty_strided(size, stride, dtype=dtype, device="meta")
        found = [
            torch.empty_strided(size, stride, dtype=dtype, device="meta")
            for size, stride, dtype in self.forms
        ]
        return self.several(found)


@attrs.define(frozen=True)
class Traits:
    """What an operator's schema says of it."""

    name: str
    collective: bool
    view: bool
    """Whether it returns views of its arguments and changes nothing."""
    in_place: bool
    """Whether it changes the numbers of its first argument alone, and returns it."""
    remembered: bool
    """Whether arguments of one form always make the same."""
    func: Any
    """The operator, which keeps its ``id``: that is its key here, since torch hashes operators in Python."""


class Operators:
    """Calls that were made."""

    def __init__(self) -> None:
        self._traits: dict[int, Traits] = {}
        self._made: dict[Any, Made] = {}

    def traits(self, func: Any) -> Traits:
        """Return what is known of an operator."""
        found = self._traits.get(id(func))
        if found is None:
            found = self._traits[id(func)] = _read_schema(func)
        return found

    def get(self, key: Any) -> Made | None:
        """Return what a call of that key makes."""
        return self._made.get(key)

    def keep(self, key: Any, traits: Traits, out: Any, cost: Cost | None, *, new: bool) -> None:
        """Remember a call; ``new``: whether each tensor that it returned is one of its own."""
        tensors = [out] if isinstance(out, torch.Tensor) else out
        if len(self._made) >= MOST or not isinstance(tensors, (list, tuple)):
            return
        if traits.in_place:
            self._made[key] = Made((), None, cost)
        elif new and tensors and all(map(_is_plain, tensors)):
            forms = tuple((t.shape, t.stride(), t.dtype) for t in tensors)
            several = None if isinstance(out, torch.Tensor) else type(out)
            self._made[key] = Made(forms, several, cost)


def _is_plain(tensor: Any) -> bool:
    """Return whether a tensor is what :func:`torch.empty_strided` makes."""
    if type(tensor) is not torch.Tensor or not tensor.is_meta or tensor.storage_offset():
        return False
    again = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return again.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()


def _read_schema(func: Any) -> Traits:
    schema = func._schema
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    aliased = [r.alias_info for r in schema.returns]
    view = bool(aliased) and all(a is not None and not a.is_write for a in aliased) and not any(written)
    in_place = (
        written[:1] == [True]
        and not any(written[1:])
        and [a is not None and a.is_write for a in aliased] == [True]
        and not any(word in schema.name for word in _RESHAPED)
    )
    makes = not any(written) and all(a is None for a in aliased)
    return Traits(schema.name, schema.name.startswith("c10d::"), view, in_place, in_place or makes, func)


def form_of(value: Any) -> Any:
    """Return what an argument is but for its numbers; None of a tensor elsewhere than on ``meta``.

    What cannot be told apart by ``==`` alone, as 1 and 1.0, has its type beside it.
    """
    if type(value) in _SCALARS:  # most arguments
        return type(value), value
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            return None
        # Operators may make something else of a packed weight than of a plain one, such as packed memory.
        kind = type(value) if isinstance(value, PackedWeight) else torch.Tensor
        return kind, value.dtype, value.shape, value.stride()
    if isinstance(value, (tuple, list)):
        found = tuple(map(form_of, value))
        return None if None in found else found
    if isinstance(value, dict):
        found = tuple((name, form_of(each)) for name, each in value.items())
        return None if any(form is None for _, form in found) else found
    return type(value), value


def key_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the key of a call, None if it depends on numbers; its traits were asked for before."""
    own = form_of(args)
    if own is None:
        return None
    default = torch.get_default_dtype()  # that of what an operator makes of Python's numbers
    if not kwargs:
        return id(func), default, own
    named = form_of(kwargs)
    return None if named is None else (id(func), default, own, named)


#: Of this process: forms say nothing of the run that asked first.
OPERATORS = Operators()
