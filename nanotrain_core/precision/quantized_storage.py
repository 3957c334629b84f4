"""Quantized storage: weights in a precision's own form, in fewer bytes than their numbers take.

A :class:`PackedWeight` is a parameter like others to autograd, optimizers and gradient syncs: it has a shape,
a dtype and a gradient. What it does not have is numbers in memory. Whoever computes with them asks for
:func:`dequantize`, and forgets them afterwards; whoever sends or compares them takes :func:`storage_of`.
An operation of torch that only reads gets numbers that were dequantized for it, one that writes in place has
its result quantized again, and one that would look at the memory as another shape is refused, since
what is written to such a view would be lost.

It is held in rows, each of :data:`~nanotrain_core.layout.placement.RANGE` neighbouring weights with what they
share, so that every range a rank may be given of a parameter is a range of rows.

Shapes: n weights, U rows of W bytes.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from nanotrain_core.layout.ranges import RANGE

aten = torch.ops.aten


class Packing(Protocol):
    """A form that weights are held in."""

    name: str
    """Forms of one name hold the same numbers in the same bytes."""
    width: int
    """Bytes W of a row."""

    def rounded(self, numbers: torch.Tensor) -> torch.Tensor:
        """Round flat numbers [n] to those of the form; of some that are already, nothing changes."""
        ...

    def pack(self, numbers_n: torch.Tensor) -> torch.Tensor:
        """Return rows [U, W], uint8, of numbers of the form; the last row is filled up."""
        ...

    def unpack(self, rows_UW: torch.Tensor) -> torch.Tensor:
        """Return the numbers [U * RANGE] that rows hold, in the dtype that a model computes in."""
        ...


class Exact:
    """The numbers of a weight before they were packed, until masters have been made of them."""

    def __init__(self, flat: torch.Tensor | None) -> None:
        self.flat = flat


class PackedWeight(torch.Tensor):
    """A weight in a precision's own form. Make one with :meth:`of`."""

    rows: torch.Tensor
    """[U, W], uint8, contiguous: all there is of it."""
    packing: Packing
    exact: Exact
    """Of the parameter as a whole: its views share one."""
    first: int
    """Where in the parameter this begins, in weights."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        rows: torch.Tensor,
        packing: Packing,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        exact: Exact,
        first: int = 0,
    ) -> PackedWeight:
        """Hold ``rows``."""
        self: PackedWeight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=rows.device)
        self.rows, self.packing, self.exact, self.first = rows, packing, exact, first
        return self

    @classmethod
    def of(cls, numbers: torch.Tensor, packing: Packing) -> PackedWeight:
        """Round and pack ``numbers``, at hand until :func:`settle`: masters may keep more of them."""
        flat = numbers.detach().reshape(-1)
        rows = packing.pack(packing.rounded(flat))
        return cls(rows, packing, tuple(numbers.shape), numbers.dtype, Exact(flat))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """All is done in ``__new__``."""

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return weights ``begin`` to ``end`` of the flattened tensor; ``begin`` is a multiple of RANGE."""
        return self.packing.unpack(self._rows(begin, end))[: end - begin]

    def write(self, begin: int, end: int, numbers: torch.Tensor) -> None:
        """Keep numbers of the form as weights ``begin`` to ``end``: a multiple of RANGE each, or the end."""
        self._rows(begin, end).copy_(self.packing.pack(numbers))

    def part(self, begin: int, end: int) -> PackedWeight:
        """Return a flat range that is held in the same rows; ends as those of :meth:`write`."""
        return self._sharing(self._rows(begin, end), (end - begin,), self.first + begin)

    def _rows(self, begin: int, end: int) -> torch.Tensor:
        return self.rows[begin // RANGE : -(-end // RANGE)]

    def _sharing(self, rows: torch.Tensor, shape: tuple[int, ...], first: int) -> PackedWeight:
        """Return what holds these rows of this one."""
        return PackedWeight(rows, self.packing, shape, self.dtype, self.exact, first)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Unpack what an operation reads; see the module for what becomes of writing."""
        first: Any = args[0] if args else None
        if func in (aten.detach.default, aten.alias.default):
            return first._sharing(first.rows, tuple(first.shape), first.first)
        aliased = [
            (value, wanted.alias_info.is_write)
            for value, wanted in zip(args, func._schema.arguments, strict=False)
            if isinstance(value, cls) and wanted.alias_info is not None
        ]
        if any(not written for _, written in aliased) or len(aliased) > 1:
            raise NotImplementedError(
                f"{func} would look into the memory of a packed weight {tuple(first.shape)}, where its "
                "numbers are not: take dequantize(weight) of nanotrain_core.precision.quantized_storage, "
                "or storage_of(weight) for its bytes"
            )
        plain_args, plain = tree_map_only(cls, dequantize, (args, kwargs or {}))
        result = func(*plain_args, **plain)
        if not aliased:
            return result
        target: PackedWeight = aliased[0][0]
        target.rows.copy_(target.packing.pack(target.packing.rounded(plain_args[0].reshape(-1))))
        return target

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return what it is, without its numbers."""
        return f"PackedWeight(shape={tuple(self.shape)}, dtype={self.dtype}, in {self.rows.nbytes} bytes)"


def dequantize(weight: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a weight, in its shape: a live view, or of a packed one what is unpacked now."""
    if not isinstance(weight, PackedWeight):
        return weight.detach()
    return weight.read(0, weight.numel()).view(weight.shape)


def quantize_into(weight: torch.Tensor, numbers: torch.Tensor) -> None:
    """Hold what was written to the tensor that :func:`dequantize` returned; of a live view that is done."""
    if isinstance(weight, PackedWeight):
        with torch.no_grad():
            weight.copy_(numbers)


def unquantized(weight: torch.Tensor) -> torch.Tensor:
    """Return the numbers that a master is made of: before they were packed, if these are still at hand."""
    if isinstance(weight, PackedWeight) and weight.exact.flat is not None:
        return weight.exact.flat[weight.first : weight.first + weight.numel()].view(weight.shape)
    return dequantize(weight)


def settle(weight: torch.Tensor) -> None:
    """Forget what the numbers of a packed weight were before: its masters have been made."""
    if isinstance(weight, PackedWeight):
        weight.exact.flat = None


def storage_of(weight: torch.Tensor) -> torch.Tensor:
    """Return what is held of a weight, live: itself, or the rows of a packed one."""
    return weight.rows if isinstance(weight, PackedWeight) else weight.detach()


def range_of(weight: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return a flat range of a weight, live: see :class:`~nanotrain_core.layout.placement.Piece`."""
    if isinstance(weight, PackedWeight):
        return weight.part(begin, end)
    return weight.view(-1)[begin:end]


def read_range(weight: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return the numbers of a flat range; ``begin`` is a multiple of RANGE."""
    return weight.read(begin, end) if isinstance(weight, PackedWeight) else weight.reshape(-1)[begin:end]


def write_range(weight: torch.Tensor, begin: int, end: int, numbers: torch.Tensor) -> None:
    """Write flat numbers, of a packed weight's form, into a range: see :meth:`PackedWeight.write`."""
    if isinstance(weight, PackedWeight):
        weight.write(begin, end, numbers)
    else:
        weight.view(-1)[begin:end] = numbers.to(weight.dtype)


def memory_like(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Return zeroed memory for rows of weights held as this one is: [rows, W], or numbers [rows, RANGE]."""
    width, dtype = RANGE, weight.dtype
    if isinstance(weight, PackedWeight):
        width, dtype = weight.packing.width, torch.uint8
    return torch.zeros(rows, width, dtype=dtype, device=weight.device)


def move_into(parameter: torch.Tensor, memory: torch.Tensor) -> None:
    """Have ``parameter`` live at the beginning of ``memory``, which is as :func:`memory_like` returns it."""
    if isinstance(parameter, PackedWeight):
        parameter.rows = memory[: len(parameter.rows)].copy_(parameter.rows)
        return
    storage = memory.view(-1)[: parameter.numel()]
    storage.copy_(parameter.detach().reshape(-1))
    parameter.data = storage.view(parameter.shape)


def form_of(weight: torch.Tensor) -> str:
    """Return what tells weights apart that cannot be held in one piece of memory."""
    return weight.packing.name if isinstance(weight, PackedWeight) else str(weight.dtype)
