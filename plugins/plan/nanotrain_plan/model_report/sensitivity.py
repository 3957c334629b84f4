"""Which keys of a model move its parameters, FLOPs and memory most: each raised by a tenth, by itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

from nanotrain_core.api import TRAINING_ONLY, Layout, NanotrainError, Recipe, Registry, Selection
from nanotrain_plan.model_report.components import Pieces

#: A key is raised by this, or to the next value above that the model takes.
RAISE = 0.1

#: Values that are tried for a key.
TRIES = 4096

#: Bytes of a parameter in training: weight and gradient, master and two moments, as Adam keeps them.
STATE = {torch.bfloat16: 18, torch.float32: 16}


@attrs.define(frozen=True, kw_only=True)
class Size:
    """What a model takes."""

    parameters: int
    flops: float
    """Forward and backward of a token, causal."""
    state: int
    """Bytes of all parameters in training."""
    activations: int
    """Bytes that a forward pass of one microbatch keeps, all layers, without activation checkpointing."""

    @property
    def memory(self) -> int:
        """Both."""
        return self.state + self.activations


@attrs.define(frozen=True, kw_only=True)
class Moved:
    """One key raised; shares of what each was before."""

    key: str
    before: float
    after: float
    parameters: float
    flops: float
    memory: float

    def elasticity(self, what: str) -> float:
        """Return by how many percent ``what`` grows with one percent of the key."""
        found: float = getattr(self, what) / (self.after / self.before - 1)
        return found


def size_of(selection: Selection, registry: Registry, recipe: Recipe, dtype: torch.dtype) -> Size:
    """Build and run a model, one layer of each kind.

    Raises:
        ValueError: or what else a model raises that cannot be built.
    """
    pieces = Pieces.of(selection, registry, recipe, dtype)
    parameters = pieces.parameters()
    kept = 0
    for piece, phase in pieces.run(recipe.batch.microbatch, recipe.batch.length, training=True):
        kept += piece.number * phase.made
    return Size(
        parameters=parameters,
        flops=pieces.model.flops(recipe.batch.length).total,
        state=parameters * STATE[dtype],
        activations=kept,
    )


def sensitivity(recipe: Recipe, registry: Registry, layout: Layout, dtype: torch.dtype) -> list[Moved]:
    """Return the keys that move anything, those that move memory most first."""
    base = size_of(recipe.model, registry, recipe, dtype)
    found = []
    for key, value in _numbers(recipe.model.config):
        raised = _raised(recipe, registry, layout, key, value, dtype)
        if raised is None:
            continue
        after, size = raised
        shares = {
            what: getattr(size, what) / getattr(base, what) - 1 for what in ("parameters", "flops", "memory")
        }
        if any(shares.values()):
            found.append(Moved(key=f"model.{key}", before=value, after=after, **shares))
    return sorted(found, key=lambda each: -abs(each.elasticity("memory")))


def _numbers(config: Any) -> Iterator[tuple[str, int]]:
    """Yield the whole numbers above 0 that say what the model computes; fractions shape no tensor."""
    for field in attrs.fields(type(config)):
        value = getattr(config, field.name)
        if type(value) is int and value > 0 and not field.metadata.get(TRAINING_ONLY):
            yield field.name, value


def _raised(
    recipe: Recipe, registry: Registry, layout: Layout, key: str, value: int, dtype: torch.dtype
) -> tuple[int, Size] | None:
    """Return the next value of a key that the model takes, and what it is then; None if there is none."""
    first = math.ceil(value * (1 + RAISE))
    for after in range(first, min(2 * first, first + TRIES) + 1):
        try:
            config = attrs.evolve(recipe.model.config, **{key: after})
        except ValueError:
            continue
        selection = attrs.evolve(recipe.model, config=config)
        if _refused(attrs.evolve(recipe, model=selection), registry, layout):
            continue
        try:
            return after, size_of(selection, registry, recipe, dtype)
        except (NanotrainError, ValueError, RuntimeError):
            continue
    return None


def _refused(recipe: Recipe, registry: Registry, layout: Layout) -> Sequence[Any]:
    """Return what the model's own check has against it, whatever the layout's degrees."""
    check = registry.get("model", recipe.model.use).check
    return list(check(recipe, recipe.model.config, layout)) if check else []
