"""What a composed rank holds: each parameter's block, who multiplies it, what an optimizer keeps of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import attrs
import torch

from nanotrain_core.api import Layout, Recipe, Registry, Role, tagged
from nanotrain_core.api.torch import Placement, Run, gemms_of, storage_of
from nanotrain_plan.dry.origin import Origin, place_of
from nanotrain_plan.dry.rank import compose_dry, dry_recipe, survey
from nanotrain_plan.dry.recorder import Recorder
from nanotrain_plan.dry.values import Values
from nanotrain_plan.dry.world import fake_world


@attrs.define(frozen=True, kw_only=True)
class HeldParameter:
    """A parameter on one rank."""

    placement: Placement
    role: Role | None
    """Of the innermost tagged module that has it."""
    dtype: torch.dtype
    trained: bool
    updated: int
    """Elements of the block that this rank updates."""
    sharded: frozenset[str]
    """Mesh dimensions along which ranks that hold the block each update a range of it."""
    gemm: Origin | None
    """Who multiplies by it, if not torch's own linear layer."""

    @property
    def elements(self) -> int:
        """Of the block."""
        return prod(self.placement.shape)


@attrs.define(frozen=True, kw_only=True)
class State:
    """What an optimizer keeps under one name, ``exp_avg``, of all parameters together."""

    name: str
    dtype: str
    tensors: int
    bytes: int


@attrs.define(frozen=True, kw_only=True)
class Looked:
    """One rank of a composed run."""

    parameters: Sequence[HeldParameter]
    state: Sequence[State]
    gradient_dtypes: Sequence[str]
    loss_weights: Mapping[str, float]
    gradients: Origin | None
    optimizer: Origin | None
    blocks: Mapping[str, Origin | None]
    """Classes of modules with role BLOCK, by the first name."""


def look(run: Run) -> Looked:
    """Return what there is before the first step."""
    roles: dict[str, tuple[Role, Origin | None]] = {}
    blocks: dict[str, Origin | None] = {}
    for part in run.stages.values():
        for name, module, tag in tagged(part):
            gemms = gemms_of(module)
            backends = [] if gemms is None else list(gemms.backends.values())
            where = place_of(type(backends[0])) if backends else None
            for parameter, _ in module.named_parameters(prefix=name):
                roles[parameter] = tag.role, where  # outermost first: the innermost stays
            if tag.role is Role.BLOCK:
                blocks.setdefault(type(module).__qualname__, place_of(type(module)))
    updated: Counter[str] = Counter()
    shared: dict[str, frozenset[str]] = {}
    pieces = list(run.gradients.pieces())
    own = {each.placement.name: each.placement for each in run.placed}
    for piece in pieces:
        name = piece.placement.name
        updated[name] += piece.weight.numel()
        shared[name] = piece.placement.sharded - own[name].sharded
    return Looked(
        parameters=[
            HeldParameter(
                placement=each.placement,
                role=roles.get(each.placement.name, (None, None))[0],
                dtype=storage_of(each.parameter).dtype,
                trained=each.parameter.requires_grad,
                updated=updated[each.placement.name],
                sharded=shared.get(each.placement.name, frozenset()),
                gemm=roles.get(each.placement.name, (None, None))[1],
            )
            for each in run.placed
        ],
        state=_state(run),
        gradient_dtypes=_gradient_dtypes(run),
        loss_weights=dict(run.loss_weights),
        gradients=place_of(type(run.gradients)),
        optimizer=place_of(type(run.optimizer)),
        blocks=blocks,
    )


def _state(run: Run) -> list[State]:
    tensors: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    seen: set[int] = set()
    for block in run.optimizer.blocks():
        key = block.name.partition("/")[0], str(block.tensor.dtype)[6:]
        storage = block.tensor.untyped_storage()
        tensors[key] += 1
        sizes[key] += block.tensor.numel() * block.tensor.element_size() if block.tensor.dim() else 0
        if not block.tensor.dim() and storage._cdata not in seen:  # a counter that all parameters share
            sizes[key] += block.tensor.element_size()
        seen.add(storage._cdata)
    return [
        State(name=name, dtype=dtype, tensors=number, bytes=sizes[name, dtype])
        for (name, dtype), number in tensors.items()
    ]


def _gradient_dtypes(run: Run) -> list[str]:
    found = {run.gradients.gradient_of(piece) for piece in run.gradients.pieces()}
    return sorted({str(each.dtype)[6:] for each in found if each is not None})


# --- which axis is split over which dimension ----------------------------------------------------------


class Neighbors:
    """Placements of other ranks, composed when they are asked for."""

    def __init__(self, recipe: Recipe, registry: Registry, layout: Layout, *, host: bool) -> None:
        self.recipe, self.registry = dry_recipe(recipe, registry, host=host), registry
        self.layout, self.host = layout, host
        self._told: list[Any] | None = None
        self._known: dict[int, dict[str, Placement]] = {}

    def placements(self, rank: int) -> Mapping[str, Placement]:
        """Return those of a rank, by name."""
        if rank not in self._known:
            told = self._stages()
            with fake_world(rank, self.layout.world_size), Recorder("meta", Values()):  # answers what is read
                run = compose_dry(self.recipe, self.registry, rank, told, host=self.host)
            self._known[rank] = {each.placement.name: each.placement for each in run.placed}
        return self._known[rank]

    def _stages(self) -> list[Any]:
        """Return what pipeline stages tell one another."""
        if self._told is None:
            pp = self.layout.degree("pp")
            stride = self.layout.view(["pp"]).stride("pp") if pp > 1 else 0
            ranks = [number * stride for number in range(pp)]
            self._told = survey(self.recipe, self.registry, ranks, host=self.host) if pp > 1 else []
        return self._told

    def next_along(self, rank: int, dim: str) -> int:
        """Return the rank after this one along a dimension, the first after the last."""
        ranks = self.layout.ranks(rank, dim)
        return ranks[(ranks.index(rank) + 1) % len(ranks)]

    def splits(self, rank: int, parameters: Sequence[HeldParameter]) -> dict[str, dict[int, list[str]]]:
        """Return for each parameter which of its axes is split over which dimensions, as offsets say."""
        found: dict[str, dict[int, list[str]]] = defaultdict(dict)
        dims = {dim for each in parameters for dim in each.placement.sharded if self.layout.size(dim) > 1}
        for dim in sorted(dims):
            other = self.placements(self.next_along(rank, dim))
            for each in (each for each in parameters if dim in each.placement.sharded):
                mine, theirs = each.placement, other[each.placement.name]
                for axis, (a, b) in enumerate(zip(mine.offset, theirs.offset, strict=True)):
                    if a != b:
                        found[mine.name].setdefault(axis, []).append(dim)
        return found
