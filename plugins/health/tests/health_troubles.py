"""Troubles to plant in a run, each with words of the sentence that names it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from health_runs import Plant

from nanotrain_core.engine import RuntimeEngine

ROUTED = {"use": "routed"}


@attrs.define(frozen=True)
class Trouble:
    """What is made wrong, and what must be said of it."""

    says: str
    changes: Mapping[str, Any] = attrs.field(factory=dict)
    plant: Plant = lambda engine: None


def kill_layer(engine: RuntimeEngine) -> None:
    """Have a layer hand on what it gets."""
    layer = engine.run.stages[0].layers["1"]
    layer.register_forward_hook(lambda module, args, output: args[0] + 0.0 * output)


def overflow(engine: RuntimeEngine) -> None:
    """Make the gradient of one layer larger than fp16 can be, whatever the loss scale."""

    def grow(module: Any, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * 1e12)

    engine.run.stages[0].layers["2"].register_forward_hook(grow)


def poison(engine: RuntimeEngine) -> None:
    """Make a weight infinite."""
    with torch.no_grad():
        engine.run.stages[0].head.weight[3, 5] = torch.inf


def sharpen(engine: RuntimeEngine) -> None:
    """Make queries of all layers so large that each attends to one key."""
    with torch.no_grad():
        for layer in engine.run.stages[0].layers.values():
            layer.attn.q.weight *= 3e4


def unmask(engine: RuntimeEngine) -> None:
    """Have attention see the future."""

    def attention(q: Any, k: Any, v: Any, scale: float | None = None) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)

    for layer in engine.run.stages[0].layers.values():
        layer.attn.ops = replace(layer.attn.ops, attention=attention)


def copy_targets(engine: RuntimeEngine) -> None:
    """Have the data hand out the inputs as their own targets."""
    data = engine.run.feed.data
    data.train_batch = unshifted(data.train_batch)
    data.validation_batch = unshifted(data.validation_batch)


def unshifted(batch_of: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function with inputs as targets."""

    def give(*args: Any) -> Any:
        batch = batch_of(*args)
        return None if batch is None else attrs.evolve(batch, targets=batch.tokens)

    return give


def mask_targets(engine: RuntimeEngine) -> None:
    """Ignore two thirds of the targets."""
    data = engine.run.feed.data
    before = data.train_batch

    def masked(*args: Any) -> Any:
        batch = before(*args)
        targets = batch.targets.clone()
        targets[:, ::3] = targets[:, 1::3] = -100
        return attrs.evolve(batch, targets=targets)

    data.train_batch = masked


TROUBLES = {
    "lr x 100": Trouble("times too large", {"optimizer": {"lr": 3.0}}),
    "lr / 1000": Trouble("times too small", {"optimizer": {"lr": 3e-6}}),
    "dead layer": Trouble("layers.1 is dead", plant=kill_layer),
    "fp16 overflow": Trouble("with fp16 take bf16", {"precision": {"use": "fp16"}}, overflow),
    "starved expert": Trouble(".router (and 1 more) starve", {"model": {**ROUTED, "favored": 4}}),
    "collapsed attention": Trouble("has collapsed", plant=sharpen),
    "wrong mask": Trouble("sees the future", plant=unmask),
    "targets not shifted": Trouble("not shifted by one", plant=copy_targets),
    "ignored targets": Trouble("targets are ignored", plant=mask_targets),
    "no number": Trouble("the loss is not a number", plant=poison),
}
