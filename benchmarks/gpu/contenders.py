"""Who takes part in a race of whole training steps, each built in a process of its own.

All train one recipe's sizes on its batches: ours through the engine, the others by a loop in plain PyTorch
(:mod:`benchmarks.gpu.plain`) with a model of its own, nanoGPT's from a clone, or torchao's FP8 layers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import attrs

from nanotrain_core.recipe import load_recipe
from nanotrain_core.recipe.tree import Recipe


@attrs.define(frozen=True, kw_only=True)
class Contender:
    """One side of a race."""

    name: str
    who: Literal["ours", "plain", "nanogpt"] = "ours"
    recipe: Path
    overrides: tuple[str, ...] = ()
    compiled: Literal["", "layers", "whole"] = ""
    """What of a peer ``torch.compile`` takes; ours goes by its recipe."""
    torchao: str = ""
    """A recipe of torchao's FP8 layers, empty: bfloat16."""
    clone: Path | None = None
    on_gpu_only: bool = False
    """Whether it cannot run in tiny sizes on a CPU."""
    bar: str = ""
    """What ours / it is, or for one of ours it / ours, or it / ``versus``."""
    versus: str = ""
    """The name of another peer that its bar is against."""
    memory_bar: str = ""
    mfu_bar: str = ""
    profiled: bool = False

    @property
    def bars(self) -> tuple[str, ...]:
        return tuple(bar for bar in (self.bar, self.memory_bar, self.mfu_bar) if bar)

    def missing(self, device: str) -> str:
        """Return why it cannot take part on this type of device; empty if it can."""
        if self.torchao and find_spec("torchao") is None:
            return "torchao is not installed: pip install torchao"
        if self.who == "nanogpt" and self.clone is None:
            return "no --nanogpt CLONE was given: git clone https://github.com/karpathy/nanoGPT"
        if self.who == "nanogpt" and self.clone is not None and not (self.clone / "model.py").is_file():
            return f"--nanogpt {self.clone} has no model.py"
        if self.on_gpu_only and device == "cpu":
            return "it needs a GPU"
        return ""

    def load(self) -> Recipe:
        """Return the recipe of its sizes and batches."""
        return load_recipe(self.recipe, overrides=list(self.overrides), ranks=1)


@attrs.define(frozen=True)
class Trainer:
    """What a contender's process has built."""

    advance: Callable[[int], object]
    """Train so many steps more."""
    tokens_per_step: int
    parameters: int
    flops_per_token: float = 0.0
    """Of ours."""


def build(contender: Contender, device: str) -> Trainer:
    """Build a side, on this process's device."""
    recipe = contender.load()
    if contender.who == "ours":
        return ours(recipe, device)
    from benchmarks.gpu import plain

    if contender.who == "nanogpt":
        assert contender.clone is not None
        sys.path.insert(0, str(contender.clone))
        model: Any = plain.NanoGPT(import_module("model"), recipe)
    else:
        model = plain.model_of(recipe, device)
        if contender.torchao:
            plain.use_torchao(model, contender.torchao, emulate=device == "cpu")
    loop = plain.Loop(model.to(device), recipe, device, compiled=contender.compiled)
    tokens = recipe.batch.sequences * recipe.batch.length
    return Trainer(loop.advance, tokens, sum(p.numel() for p in model.parameters()))


def ours(recipe: Recipe, device: str) -> Trainer:
    """Build the engine, and train through ``fit`` as every user's run does."""
    from nanotrain_core.engine import RuntimeEngine

    engine = RuntimeEngine.from_recipe(recipe, device=device)
    parameters = sum(p.numel() for part in engine.run.stages.values() for p in part.parameters())

    def advance(steps: int) -> None:
        engine.fit(steps=engine.step + steps)

    return Trainer(advance, engine.run.feed.tokens_per_step, parameters, engine.run.flops_per_token)
