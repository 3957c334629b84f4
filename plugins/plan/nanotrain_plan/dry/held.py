"""What a composed rank holds: memory by holder, parameters by who sums their gradients, and checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import attrs
import torch
from torch.utils._python_dispatch import _disable_current_modes

from nanotrain_core.api.torch import Block, PlacedParameter, Run, storage_of
from nanotrain_plan.dry.phase import Storage
from nanotrain_plan.dry.recorder import Recorder, pinned

#: What memory of a rank is held by, in the order of a table.
HOLDERS = ("weights", "masters", "optimizer", "gradients", "other")


@attrs.define
class Share:
    """What one model part of a rank has of the parameters that the same ranks sum gradients of."""

    elements: int = 0
    """Of those that are trained."""
    weights: int = 0
    """Bytes."""
    saved: int = 0
    """Bytes of the weights in a checkpoint, where quantized storage is unpacked."""
    frozen: int = 0
    """Of these, bytes of frozen ones."""
    frozen_packed: int = 0
    """Of :attr:`weights`, bytes of frozen ones."""
    tensors: int = 0
    """Those that are trained."""
    masters: float = 0.0
    """Bytes of them all, on however many ranks they are. State per element may differ between parameters."""
    optimizer: float = 0.0


@attrs.define
class Owned:
    """What a rank updates of such parameters: all of them, or a range if optimizer state is sharded."""

    elements: int = 0
    masters: int = 0
    """Bytes."""
    optimizer: int = 0
    weights: int = 0
    """Bytes that a copy of the weights takes in pinned memory: see :func:`pinned`."""

    def add(self, other: Owned) -> None:
        """Count other parameters, too."""
        self.elements += other.elements
        self.masters += other.masters
        self.optimizer += other.optimizer
        self.weights += other.weights


def held_by(run: Run, recorder: Recorder, blocks: Sequence[Block] | None = None) -> dict[str, int]:
    """Return the bytes that are alive after composing, by holder; ``blocks``: the optimizer's."""
    left: dict[int, Storage] = dict(recorder.alive)
    found = dict.fromkeys(HOLDERS, 0)

    def claim(holder: str, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = left.pop(tensor.untyped_storage()._cdata, None)
            if storage is not None:
                found[holder] += storage.bytes

    claim("weights", (storage_of(p.parameter) for p in run.placed))
    blocks = list(run.optimizer.blocks()) if blocks is None else blocks
    claim("masters", (b.tensor for b in blocks if b.name.startswith("master")))
    claim("optimizer", (b.tensor for b in blocks))
    with _disable_current_modes():
        claim("gradients", (run.gradients.gradient_of(piece) for piece in run.gradients.pieces()))
    found["other"] = sum(storage.bytes for storage in left.values())
    return found


def held_of_parts(
    run: Run, blocks: Sequence[Block]
) -> tuple[dict[tuple[int, tuple[str, ...]], Share], dict[tuple[str, ...], Owned]]:
    """Return :attr:`RankStep.shares` and :attr:`RankStep.owned`."""
    dims = {}
    for placed in run.placed:
        span = placed.placement.sync_span(run.mesh.layout)
        dims[placed.placement.name] = (*(("pp",) if span.stages else ()), *span.dims)
    each: dict[str, Owned] = defaultdict(Owned)
    for piece in run.gradients.pieces():
        size = piece.parameter.numel() if piece.span is None else piece.span[1] - piece.span[0]
        each[piece.placement.name].elements += size
        each[piece.placement.name].weights += pinned(size * piece.parameter.element_size())
    for block in blocks:
        found, size = each[block.name.partition("/")[2]], _bytes(block.tensor)
        if block.name.startswith("master"):
            found.masters += size
        else:
            found.optimizer += size
    owned = {summed: Owned() for summed in dims.values()}
    for name, of_name in each.items():
        owned[dims[name]].add(of_name)
    shares: dict[tuple[int, tuple[str, ...]], Share] = defaultdict(Share)
    for placed in run.placed:
        name, stored = placed.placement.name, storage_of(placed.parameter)
        for part in placed.parts:
            share = shares[part, dims[name]]
            share.weights += stored.numel() * stored.element_size()
            share.saved += _bytes(placed.parameter)
            if name in run.frozen:
                share.frozen += _bytes(placed.parameter)
                share.frozen_packed += stored.nbytes
            if placed.parameter.requires_grad:
                # Of a parameter that other ranks have all ranges of, the state is taken to be as of others.
                known = each[name] if each[name].elements else owned[dims[name]]
                copies = placed.parameter.numel() / max(1, known.elements)
                share.elements += placed.parameter.numel()
                share.tensors += 1
                share.masters += copies * known.masters
                share.optimizer += copies * known.optimizer
    return dict(shares), owned


def frozen_bytes(run: Run) -> tuple[float, float]:
    """Return :attr:`RankStep.frozen` and :attr:`RankStep.frozen_packed`."""
    return _weights(run, (p for p in run.placed if p.placement.name in run.frozen))


def _weights(run: Run, chosen: Iterable[PlacedParameter]) -> tuple[float, float]:
    """Return the bytes of the values of weights, and of their storage: of those on several ranks, a share."""
    values = packed = 0.0
    for placed in chosen:
        replicas = placed.placement.replicas(run.mesh.layout)
        values += _bytes(placed.parameter) / replicas
        packed += storage_of(placed.parameter).nbytes / replicas
    return values, packed


def _bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's values, however it is stored."""
    return tensor.numel() * tensor.element_size()


def saved_bytes(run: Run, blocks: Sequence[Block]) -> tuple[float, float]:
    """Return :attr:`RankStep.saved` and :attr:`RankStep.saved_packed`.

    These are weights, and the optimizer's state with its masters, in ``blocks``, each
    by the ranks that hold its parameter: state per element may differ between parameters.
    """
    layout = run.mesh.layout
    weights, packed = _weights(run, run.placed)
    replicas = {piece.placement.name: piece.placement.replicas(layout) for piece in run.gradients.pieces()}
    state = sum(_bytes(b.tensor) / replicas[b.name.partition("/")[2]] for b in blocks)
    return weights + state, packed + state
