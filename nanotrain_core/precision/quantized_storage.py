"""Quantized storage: weights in a precision's own format, in fewer bytes than their dtype takes.

A :class:`PackedWeight` is an ordinary parameter to autograd, optimizers and gradient syncs: it has a shape, a
dtype and a gradient. It has no dequantized values in memory. Code that computes with them calls
:func:`dequantize`, and releases the result afterwards; code that sends or compares them uses
:func:`storage_of`. A torch operation that only reads gets values that were dequantized for it, one that
writes in place has its result quantized again, and one that would reinterpret the memory as another shape is
rejected, since writes to such a view would be lost.

It is stored in rows, each with :data:`~nanotrain_core.layout.placement.RANGE` consecutive weights and the
values that they share, so that every range of a parameter that a rank may be given is a range of rows.

Shapes: n weights, U rows of W bytes.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_map_only

from nanotrain_core.layout.ranges import RANGE

aten = torch.ops.aten


@runtime_checkable
class Packing(Protocol):
    """A storage format of weights."""

    name: str
    """Formats with the same name store the same values in the same bytes."""
    width: int
    """Bytes W of a row."""

    def rounded(self, numbers: torch.Tensor) -> torch.Tensor:
        """Round flat values [n] to those of the format; already rounded values are unchanged."""
        ...

    def pack(self, numbers_n: torch.Tensor) -> torch.Tensor:
        """Return rows [U, W], uint8, for values of the format; the last row is padded."""
        ...

    def unpack(self, rows_UW: torch.Tensor) -> torch.Tensor:
        """Return the values [U * RANGE] stored in rows, in the dtype that a model computes in."""
        ...


class Original:
    """The values of a weight before packing, until its masters have been created."""

    def __init__(self, flat: torch.Tensor | None) -> None:
        self.flat = flat


class PackedWeight(torch.Tensor):
    """A weight in a precision's own format. Create one with :meth:`of`."""

    rows: torch.Tensor
    """[U, W], uint8, contiguous: the only storage."""
    packing: Packing
    original: Original
    """The original values of the whole parameter: its views share them."""
    first: int
    """Offset of this view in the parameter, in weights."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        rows: torch.Tensor,
        packing: Packing,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        original: Original,
        first: int = 0,
    ) -> PackedWeight:
        """Wrap ``rows``."""
        self: PackedWeight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=rows.device)
        self.rows, self.packing, self.original, self.first = rows, packing, original, first
        return self

    @classmethod
    def of(cls, numbers: torch.Tensor, packing: Packing, *, trained: bool = True) -> PackedWeight:
        """Round and pack ``numbers``; if ``trained``, they are kept until :func:`release_unquantized`, since
        masters may be wider."""
        self = cls.like(numbers, packing)
        self.fill(numbers, trained=trained)
        return self

    @classmethod
    def like(cls, weight: torch.Tensor, packing: Packing) -> PackedWeight:
        """Return a weight like ``weight``, without values so far."""
        rows = weight.new_empty(-(-weight.numel() // RANGE), packing.width, dtype=torch.uint8)
        return cls(rows, packing, tuple(weight.shape), weight.dtype, Original(None))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: ``__new__`` has done everything."""

    def fill(self, numbers: torch.Tensor, *, trained: bool) -> None:
        """Give it its first values, as :meth:`of` does."""
        requantize(self, numbers)
        self.original.flat = numbers.detach().reshape(-1) if trained else None

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return weights ``begin`` to ``end`` of the flattened tensor; ``begin`` is a multiple of RANGE."""
        return self.packing.unpack(self._rows(begin, end))[: end - begin]

    def write(self, begin: int, end: int, numbers: torch.Tensor) -> None:
        """Store values of the format as weights ``begin`` to ``end``: multiples of RANGE, or the end."""
        self._rows(begin, end).copy_(self.packing.pack(numbers))

    def part(self, begin: int, end: int) -> PackedWeight:
        """Return a flat range that shares the same rows; its ends are as in :meth:`write`."""
        return self._sharing(self._rows(begin, end), (end - begin,), self.first + begin)

    def stored_in(self, rows: torch.Tensor) -> PackedWeight:
        """Return a weight like this one with other rows, such as a copy on another device."""
        return PackedWeight(rows, self.packing, tuple(self.shape), self.dtype, Original(None), self.first)

    def _rows(self, begin: int, end: int) -> torch.Tensor:
        return self.rows[begin // RANGE : -(-end // RANGE)]

    def _sharing(self, rows: torch.Tensor, shape: tuple[int, ...], first: int) -> PackedWeight:
        """Return a view of these rows of this weight."""
        return type(self)(rows, self.packing, shape, self.dtype, self.original, first)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Dequantize what an operation reads; the module docstring describes writes."""
        first: Any = args[0] if args else None
        if func in (aten.detach.default, aten.alias.default):
            return first._sharing(first.rows, tuple(first.shape), first.first)
        if func is aten.copy_.default and isinstance(first, cls):  # which reads nothing of what it replaces
            numbers = torch.empty(first.shape, dtype=first.dtype, device=first.device)
            requantize(first, numbers.copy_(dequantize(args[1])))
            return first
        aliased = [
            (value, wanted.alias_info.is_write)
            for value, wanted in zip(args, func._schema.arguments, strict=False)
            if isinstance(value, cls) and wanted.alias_info is not None
        ]
        if any(not written for _, written in aliased) or len(aliased) > 1:
            raise NotImplementedError(
                f"{func} would look into the memory of a packed weight {tuple(first.shape)}, where its "
                "numbers are not: take dequantize(weight) of nanotrain_core.api.torch, or "
                "storage_of(weight) for its bytes"
            )
        plain_args, plain = tree_map_only(cls, dequantize, (args, kwargs or {}))
        result = func(*plain_args, **plain)
        if not aliased:
            return result
        requantize(aliased[0][0], plain_args[0])
        return aliased[0][0]

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Let ``torch.compile`` take it as an input of a graph, which reads its rows."""
        return ["rows"], (self.packing, self.dtype, self.first, type(self))

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: Any, size: torch.Size, stride: tuple[int, ...]
    ) -> PackedWeight:
        packing, dtype, first, kind = context
        found: PackedWeight = kind(inner["rows"], packing, tuple(size), dtype, Original(None), first)
        return found

    @classmethod
    def __metadata_guard__(cls, traced: Any, now: Any) -> bool:
        (packing, *rest), (other, *others) = traced, now
        return bool(packing.name == other.name and rest == others)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return a description without its values."""
        return f"PackedWeight(shape={tuple(self.shape)}, dtype={self.dtype}, in {self.rows.nbytes} bytes)"


def dequantize(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight's values, in its shape: a live view, or newly dequantized values of a packed one."""
    if not isinstance(weight, PackedWeight):
        return weight.detach()
    return weight.read(0, weight.numel()).view(weight.shape)


def bytes_at_start(weight: torch.Tensor) -> int:
    """Return the bytes of a weight when all have their first values: with those before packing, if it is
    packed and trained."""
    original = weight.nbytes if isinstance(weight, PackedWeight) and weight.requires_grad else 0
    return storage_of(weight).nbytes + original


def requantize(weight: torch.Tensor, numbers: torch.Tensor) -> None:
    """Store what was written to the tensor that :func:`dequantize` returned; a no-op for a live view.

    ``numbers`` have the weight's shape and dtype, and are on its device.
    """
    if isinstance(weight, PackedWeight):
        flat = numbers.detach().reshape(-1)
        weight.rows.copy_(weight.packing.pack(weight.packing.rounded(flat)))
        increment_version(weight.rows)  # torch counts no write from within an operation on the weight


def unquantized(weight: torch.Tensor) -> torch.Tensor:
    """Return the values that a master is created from: those before packing, if still available."""
    if isinstance(weight, PackedWeight) and weight.original.flat is not None:
        return weight.original.flat[weight.first : weight.first + weight.numel()].view(weight.shape)
    return dequantize(weight)


def release_unquantized(weight: torch.Tensor) -> None:
    """Release the original values of a packed weight: its masters have been created."""
    if isinstance(weight, PackedWeight):
        weight.original.flat = None


def storage_of(weight: torch.Tensor) -> torch.Tensor:
    """Return the live storage of a weight: itself, or the rows of a packed one."""
    return weight.rows if isinstance(weight, PackedWeight) else weight.detach()


def live_tensors(weight: torch.Tensor) -> list[torch.Tensor]:
    """Return the live storage of a weight, and the values before packing while they are kept."""
    original = [weight.original.flat] if isinstance(weight, PackedWeight) else []
    return [storage_of(weight), *(each for each in original if each is not None)]


def range_of(weight: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return a live view of elements `begin` to `end` of the flattened weight, as a `Piece` has."""
    return weight.part(begin, end) if isinstance(weight, PackedWeight) else weight.view(-1)[begin:end]


def read_range(weight: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return the values of a flat range; ``begin`` is a multiple of RANGE."""
    return weight.read(begin, end) if isinstance(weight, PackedWeight) else weight.reshape(-1)[begin:end]


def write_range(weight: torch.Tensor, begin: int, end: int, numbers: torch.Tensor) -> None:
    """Write flat values into a range; for a packed weight, already rounded to its format."""
    if isinstance(weight, PackedWeight):
        weight.write(begin, end, numbers)
    else:
        weight.view(-1)[begin:end] = numbers.to(weight.dtype)


def memory_like(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Return zeroed memory for rows of weights stored as this one is: [rows, W], or values [rows, RANGE]."""
    width, dtype = RANGE, weight.dtype
    if isinstance(weight, PackedWeight):
        width, dtype = weight.packing.width, torch.uint8
    return torch.zeros(rows, width, dtype=dtype, device=weight.device)


def move_into(parameter: torch.Tensor, memory: torch.Tensor) -> None:
    """Make ``parameter`` use the beginning of ``memory``, as returned by :func:`memory_like`, as storage."""
    if isinstance(parameter, PackedWeight):
        parameter.rows = memory[: len(parameter.rows)].copy_(parameter.rows)
        return
    storage = memory.view(-1)[: parameter.numel()]
    storage.copy_(parameter.detach().reshape(-1))
    parameter.data = storage.view(parameter.shape)


def storage_key(weight: torch.Tensor) -> str:
    """Return a key: only weights with equal keys can share one piece of memory."""
    return weight.packing.name if isinstance(weight, PackedWeight) else str(weight.dtype)
