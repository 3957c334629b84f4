"""Reads another library's weights as ours, and assembles ours in its format, one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce

import attrs
import torch

from nanotrain_core.checkpoint.safetensors_files import Entry, Tensors
from nanotrain_core.checkpoint.tensor_boxes import Shape
from nanotrain_core.contracts import WeightReader
from nanotrain_core.errors import CheckpointError, PluginError
from nanotrain_core.hf.mapping import HFTensor, ParameterMapping

Index = tuple[slice, ...]


def whole(shape: Iterable[int]) -> Index:
    """Return the index of a whole tensor."""
    return tuple(slice(0, size) for size in shape)


def not_finite(stored: torch.Tensor, rounded: torch.Tensor) -> str:
    """Return what is wrong with a tensor after it was rounded to another dtype; empty if all is finite."""
    if bool(rounded.isfinite().all()):
        return ""
    beyond = bool(stored.isfinite().all())
    return "is not finite" + (f" in {rounded.dtype}".replace("torch.", "") if beyond else "")


def in_dtype(stored: torch.Tensor, dtype: torch.dtype, what: str) -> torch.Tensor:
    """Return a tensor in the dtype in which it is written, whose range may be smaller than its own.

    Raises:
        CheckpointError: it has a NaN or an infinity; the message begins with ``what`` it is.
    """
    written = stored.to(dtype)
    if problem := not_finite(stored, written):
        raise CheckpointError(f"{what} {problem}")
    return written


@attrs.define(frozen=True, eq=False)
class Piece:
    """A block of one of our parameters, and the corresponding part of a Hugging Face tensor."""

    name: str
    index: Index
    hf: HFTensor
    single: bool
    """Whether the block is one index of axis 0, an axis that the Hugging Face tensor lacks."""

    @property
    def shape(self) -> Shape:
        """Its shape in the Hugging Face tensor, before transposition."""
        index = self.index[1:] if self.single else self.index
        return tuple(part.stop - part.start for part in index)


class Atlas:
    """The mapping of every tensor of one model in both directions.

    Raises:
        PluginError: the mappings do not match the model's parameters, or omit rows.
    """

    def __init__(self, mappings: Iterable[ParameterMapping], ours: Mapping[str, Shape]) -> None:
        self.ours = ours
        self.mappings = {mapping.name: mapping for mapping in mappings}
        unknown = sorted({*self.mappings} ^ {*ours})
        if unknown:
            where = "the model has no such parameter" if unknown[0] in self.mappings else "it is left out"
            raise PluginError(f"the model's Hugging Face names do not fit it: {unknown[0]}: {where}")
        self.pieces: dict[str, list[Piece]] = {}
        for mapping in self.mappings.values():
            for piece in _pieces(mapping, ours[mapping.name]):
                self.pieces.setdefault(piece.hf.name, []).append(piece)
        self.upright = {name: _upright(name, pieces) for name, pieces in self.pieces.items()}
        """Name of a Hugging Face tensor -> shape before transposition."""

    @property
    def theirs(self) -> dict[str, Shape]:
        """Name of a Hugging Face tensor -> shape as stored."""
        exchanged = {name for name, pieces in self.pieces.items() if pieces[0].hf.transposed}
        return {name: shape[::-1] if name in exchanged else shape for name, shape in self.upright.items()}

    def entries(self, source: WeightReader, dtypes: Mapping[str, torch.dtype]) -> Iterator[Entry]:
        """Yield every Hugging Face tensor, to be assembled from ``source`` when it is written.

        ``dtypes``: the dtype in which to write each of our parameters.
        """
        for name, shape in self.theirs.items():
            pieces = self.pieces[name]
            assemble = partial(_assemble, source, pieces, self.upright[name])
            yield Entry(name, shape, _widest(dtypes[piece.name] for piece in pieces), assemble)


def _widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype that represents the values of all of them, so that none is rounded."""
    return reduce(torch.promote_types, dtypes)


def _pieces(mapping: ParameterMapping, shape: Shape) -> list[Piece]:
    if isinstance(mapping.hf, HFTensor):
        return [Piece(mapping.name, whole(shape), mapping.hf, single=False)]
    if len(mapping.hf) != shape[0]:
        count = len(mapping.hf)
        raise PluginError(f"Hugging Face names of {mapping.name}: {count} tensors for {shape[0]} on axis 0")
    return [
        Piece(mapping.name, (slice(number, number + 1), *whole(shape[1:])), hf, single=True)
        for number, hf in enumerate(mapping.hf)
    ]


def _upright(name: str, pieces: Sequence[Piece]) -> Shape:
    """Return the shape that all pieces of a Hugging Face tensor make up together."""
    orders = [(piece.hf.rows, piece.hf.columns) for piece in pieces]
    if orders == [(None, None)]:
        return pieces[0].shape
    axis = 1 if all(rows is None and columns is not None for rows, columns in orders) else 0
    for piece in pieces:
        columns = piece.hf.columns
        whole = axis == 0 or len(pieces) == 1
        if whole and columns is not None and sorted(columns) != list(range(piece.shape[1])):
            raise PluginError(
                f"Hugging Face names of {piece.name}: columns are no permutation of {piece.shape[1]}"
            )
    used = [number for piece in pieces for number in _order(piece, axis)]
    rests = {piece.shape[:axis] + piece.shape[axis + 1 :] for piece in pieces}
    if sorted(used) != list(range(len(used))) or len(rests) > 1:
        raise PluginError(
            f"Hugging Face names: the {_AXES[axis]} of {name} are not each used once: {len(used)} are given"
        )
    shape = pieces[0].shape
    return (*shape[:axis], len(used), *shape[axis + 1 :])


_AXES = ("rows", "columns")


def _order(piece: Piece, axis: int) -> Sequence[int]:
    order, size = (piece.hf.rows, piece.hf.columns)[axis], piece.shape[axis]
    if order is not None and len(order) != size:
        raise PluginError(f"Hugging Face names of {piece.name}: {len(order)} {_AXES[axis]} for {size}")
    return range(size) if order is None else order


def _assemble(source: WeightReader, pieces: Sequence[Piece], shape: Shape) -> torch.Tensor:
    """Return a Hugging Face tensor as it is stored."""
    result: torch.Tensor | None = None
    dtype = _widest(source.dtypes[piece.name] for piece in pieces)
    for piece in pieces:
        block = source.read(piece.name, piece.index)
        block = block[0] if piece.single else block
        rows, columns = piece.hf.rows, piece.hf.columns
        if rows is None and columns is None:
            result = block
            break
        result = block.new_empty(shape, dtype=dtype) if result is None else result
        if columns is not None and rows is not None:
            block = block.index_select(1, torch.tensor(columns).argsort())
        result[(slice(None), torch.tensor(columns)) if rows is None else torch.tensor(rows)] = block.to(dtype)
    assert result is not None
    return result.t() if pieces[0].hf.transposed else result


class HFWeights:
    """Another library's folder under our names. See :class:`~nanotrain_core.contracts.WeightReader`."""

    def __init__(self, shards: Tensors, atlas: Atlas, dtypes: Mapping[str, torch.dtype], prefix: str) -> None:
        self.shards, self.atlas, self.prefix = shards, atlas, prefix
        self.shapes: Mapping[str, Shape] = atlas.ours
        stored: dict[str, list[torch.dtype]] = {}
        for name, pieces in atlas.pieces.items():
            for piece in pieces:
                stored.setdefault(piece.name, []).append(dtypes[name])
        self.dtypes = {name: _widest(each) for name, each in stored.items()}

    def damage(self) -> Sequence[str]:
        """Return nothing: the other library's files carry no checksum."""
        return ()

    def read(self, name: str, index: Index) -> torch.Tensor:
        """Return a block; of several Hugging Face tensors only the ones it needs are read."""
        hf = self.atlas.mappings[name].hf
        if isinstance(hf, HFTensor):
            return self._read(hf, index)
        return torch.stack([self._read(one, index[1:]).to(self.dtypes[name]) for one in hf[index[0]]])

    def _read(self, hf: HFTensor, index: Index) -> torch.Tensor:
        orders = (hf.rows, hf.columns)
        spans = [_span(order, part) for order, part in zip(orders, index, strict=False)]
        index = (*(span for span, _ in spans), *index[2:])
        name = hf.name.removeprefix(self.prefix)
        block = self.shards.read(name, index[::-1] if hf.transposed else index)
        block = block.t() if hf.transposed else block
        for axis, (_, order) in enumerate(spans):
            block = block if order is None else block.index_select(axis, order)
        return block


def _span(order: Sequence[int] | None, wanted: slice) -> tuple[slice, torch.Tensor | None]:
    """Return the range that contains the wanted rows, and their indices in it; None: all, in order."""
    if order is None:
        return wanted, None
    rows = order[wanted]
    first, last = min(rows), max(rows) + 1
    return slice(first, last), None if rows == range(first, last) else torch.tensor(rows) - first


def missing_prefix(found: Iterable[str], expected: Iterable[str]) -> str:
    """Return the prefix, such as ``transformer.``, that no found name has; empty if one has it.

    It is missing from the names of a model that was saved without its head.
    """
    first = next(iter(expected)).partition(".")[0] + "."
    return "" if any(name.startswith(first) for name in found) else first


def differences(
    found: Mapping[str, Shape], expected: Mapping[str, Shape], ignored: Sequence[str] = ()
) -> Iterator[str]:
    """Yield a problem for each tensor that is missing, has another shape, or is unexpected."""
    for name, shape in expected.items():
        if name not in found:
            yield f"it has no tensor {name}, expected with shape {shape}"
        elif tuple(found[name]) != tuple(shape):
            yield f"{name} has shape {tuple(found[name])}, expected {tuple(shape)}"
    patterns = [re.compile(pattern) for pattern in ignored]
    for name, shape in found.items():
        if name not in expected and 0 not in shape and not any(p.fullmatch(name) for p in patterns):
            yield f"it has a tensor {name}, which the model has no place for"
