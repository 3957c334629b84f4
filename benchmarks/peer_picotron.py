"""The other side: picotron, run from a clone of its repository.

Its model, its wrappers and its functions that take a step are called as its ``train.py`` calls them. What its
files import and a step on a CPU never calls is stood in for where it is not installed (``ABSENT``), and so is
``torch.cuda.synchronize``, which its pipelines call after every message on any device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch

from benchmarks.ours import Microbatches, batches
from nanotrain_core.recipe.tree import Recipe

#: Kernels for CUDA, a library that reads data sets, and a service to log to.
ABSENT = {
    "flash_attn": (
        "flash_attn_interface",
        "layers",
        "layers.rotary",
        "ops",
        "ops.triton",
        "ops.triton.layer_norm",
    ),
    "datasets": (),
    "wandb": (),
}


class Absent(ModuleType):
    """A module that gives whatever is imported from it, and refuses every call."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return partial(self._refuse, name)

    def _refuse(self, name: str, *_: Any, **__: Any) -> NoReturn:
        raise ImportError(f"{self.__name__}.{name} is called, but not installed")


def peer(clone: Path, recipe: Recipe, rank: int) -> Callable[[int], object]:
    """Return what trains for so many steps more, pipelines under 1F1B."""
    os.environ.update(LOCAL_RANK=str(rank), DEVICE="cpu", DTYPE="float32", FLASH_ATTEN="0")
    # transformers looks for the same modules as it is loaded, and would find those that stand in.
    from transformers import AutoConfig, AutoTokenizer  # noqa: F401

    stand_in()
    sys.path.insert(0, str(clone))
    script = import_module("train")
    degrees, batch = recipe.topology.config, recipe.batch
    replicas = recipe.run.ranks // (degrees.tp * degrees.pp)
    script.setup_process_group_manager(tp_size=degrees.tp, cp_size=1, pp_size=degrees.pp, dp_size=replicas)
    torch.manual_seed(recipe.run.seed)
    model = build(script, recipe, replicas)
    optimizer = script.AdamW(model.parameters(), lr=recipe.optimizer.config.lr)
    feed = Feed(recipe, rank)
    device, shape = torch.device("cpu"), (batch.microbatch, batch.length, recipe.model.config.width)

    def advance(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            if degrees.pp > 1:
                loss = script.train_step_pipeline_1f1b(model, feed, shape, device, torch.float32)
            else:
                loss = script.train_step(model, feed, device)
            script.average_loss_across_dp_cp_ranks(loss, device)
            optimizer.step()
            if replicas > 1:
                model.reset()

    return advance


def stand_in() -> None:
    """Put an ``Absent`` in the place of each module of ``ABSENT`` that is not installed."""
    for top, parts in ABSENT.items():
        if find_spec(top) is None:
            for name in (top, *(f"{top}.{part}" for part in parts)):
                sys.modules[name] = module = Absent(name)
                module.__path__ = []
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda device=None: None


def build(script: Any, recipe: Recipe, replicas: int) -> torch.nn.Module:
    """Return this rank's part of its Llama, wrapped in the order in which its ``train.py`` wraps it."""
    config, degrees = shape_of(recipe), recipe.topology.config
    model = script.Llama(config=config)
    if degrees.tp > 1:
        model = script.apply_tensor_parallel(model)
    if degrees.pp > 1:
        model = script.PipelineParallel(model, config)
    if replicas > 1:
        model = script.DataParallelBucket(model)
    return model.train()


def shape_of(recipe: Recipe) -> SimpleNamespace:
    """Return the recipe's sizes by the names of Hugging Face's ``LlamaConfig``."""
    model = recipe.model.config
    return SimpleNamespace(
        hidden_size=model.width,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.heads,
        intermediate_size=model.ffn,
        vocab_size=model.vocab,
        max_position_embeddings=recipe.batch.length,
        rms_norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
    )


class Feed:
    """Microbatches of the recipe's data, as picotron's loader gives them."""

    def __init__(self, recipe: Recipe, rank: int) -> None:
        degrees, batch = recipe.topology.config, recipe.batch
        replicas = recipe.run.ranks // (degrees.tp * degrees.pp)
        self.grad_acc_steps = batch.sequences // (batch.microbatch * replicas)
        self._steps = batches(recipe, rank)
        self._left: Microbatches = []
        self._positions = torch.arange(batch.length).expand(batch.microbatch, -1)

    def __next__(self) -> dict[str, torch.Tensor | None]:
        self._left = self._left or next(self._steps)
        tokens, targets = self._left.pop(0)
        return {
            "input_ids": tokens,
            "target_ids": targets,
            "position_ids": self._positions,
            "hidden_states": None,
        }
