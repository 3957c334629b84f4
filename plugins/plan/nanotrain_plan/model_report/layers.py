"""Modules of each kind of layer: shapes, parameters, FLOPs of a token, bytes of weights and activations."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import attrs

from nanotrain_plan.dry.phase import Phase
from nanotrain_plan.model_report.components import Piece, Pieces
from nanotrain_plan.number_format import starred


@attrs.define(frozen=True, kw_only=True)
class Layer:
    """A module of one kind of layer; what it takes is of one of them."""

    piece: str
    number: int
    module: str
    role: str
    shapes: Sequence[tuple[int, ...]]
    parameters: int
    flops: float
    """Of a forward pass for one token, attention causal."""
    weight_bytes: int
    kept: float
    """Bytes that a token of a forward pass leaves for backward, without activation checkpointing."""


def layers(pieces: Pieces, microbatch: int, length: int, *, further: bool) -> list[Layer]:
    """Return the modules of each kind of layer that have parameters, multiply, or keep something.

    With ``further`` tokens (MTP), training calls the head again. Without, its loss may pad the vocabulary.
    """
    tokens = microbatch * length
    forward = {piece.name: _forward_flops(phase, length) for piece, phase in pieces.run(1, length)}
    losses = {
        piece.name: _forward_flops(phase, length)
        for piece, phase in pieces.run(1, length, training=True, keeps=False)
    }
    training = list(pieces.run(microbatch, length, training=True))
    found, seen = [], set[str]()
    for piece, phase in training:
        own_flops, trained = forward[piece.name], losses[piece.name]
        again = {name: number - own_flops[name] for name, number in trained.items() if own_flops.get(name)}
        flops = {**trained, **{name: number for name, number in own_flops.items() if number}}
        kept: Counter[str] = Counter()
        for storage in phase.kept:
            kept[storage.module] += storage.bytes
        for name in dict.fromkeys([*_modules(piece), *flops, *kept]):
            own = [m for m in piece.matrices if m.name.rpartition(".")[0] == name and m.name not in seen]
            seen.update(m.name for m in own)
            elements = sum(m.elements for m in own)
            if own or flops.get(name) or kept[name]:
                found.append(
                    Layer(
                        piece=piece.name,
                        number=piece.number,
                        module=starred(name) or "between modules",
                        role=own[0].role if own else "",
                        shapes=[m.shape for m in own],
                        parameters=elements,
                        flops=flops.get(name, 0.0),
                        weight_bytes=elements * pieces.dtype.itemsize,
                        kept=kept[name] / tokens,
                    )
                )
        if further:
            found += [_called_again(piece, name, more) for name, more in again.items() if more > 0]
    return found


def _forward_flops(phase: Phase, length: int) -> dict[str, float]:
    """Return FLOPs of a token by module, of attention half of the scores."""
    found: dict[str, float] = defaultdict(float)
    for (name, kind), number in phase.flops_of.items():
        found[name] += number / length * (0.5 if kind == "attention" else 1.0)
    return found


def _called_again(piece: Piece, name: str, flops: float) -> Layer:
    """Return the row of a module that training calls again: the head, for further tokens (MTP)."""
    return Layer(
        piece=piece.name,
        number=piece.number,
        module=f"{starred(name)}, again for further tokens",
        role="",
        shapes=[],
        parameters=0,
        flops=flops,
        weight_bytes=0,
        kept=0.0,
    )


def _modules(piece: Piece) -> list[str]:
    return [each.name.rpartition(".")[0] for each in piece.matrices]
