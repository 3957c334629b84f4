"""nanoGPT's side: ``train.py`` of a clone, unchanged, with the settings of a recipe and the recipe's text."""

from __future__ import annotations

import os
import pickle
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.learning.records import Finished, Plan, twentieths
from benchmarks.report import machine
from nanotrain_core.batch import IGNORE, Shard
from nanotrain_core.contracts import Data
from nanotrain_core.errors import RecipeError
from nanotrain_core.recipe.tree import Recipe

#: What of a clone a run needs.
FILES = ("train.py", "model.py", "configurator.py")
DATASET = "text"
CHECKPOINT = "out/ckpt.pt"
#: ``train.py`` seeds torch with a number of its own, whatever is asked for.
SEEDED = (
    "import runpy, torch; seed = torch.manual_seed; torch.manual_seed = lambda own: seed({seed}); "
    "runpy.run_path('train.py', run_name='__main__')"
)
ITERATION = re.compile(r"^iter (\d+): loss ([\d.naif]+), time ([\d.]+)ms", re.M)
PARAMETERS = re.compile(r"number of parameters: ([\d.]+)M")


def refuse_others(recipe: Recipe) -> None:
    """Raise what the recipe has that nanoGPT's model and loop do not.

    Raises:
        RecipeError: a key, its value, and nanoGPT's.
    """
    model, schedule = recipe.model.config, recipe.optimizer.config.lr_schedule
    wanted = {
        "positions": "learned",
        "norm": "layernorm",
        "activation": "gelu",
        "tied": True,
        "norm_eps": 1e-5,
    }
    found = {f"model.{key}": (getattr(model, key, None), value) for key, value in wanted.items()}
    found["model.use"] = (recipe.model.use, "transformer")
    found["model.init_std"] = (model.init_std, 0.02)
    found["model.max_length"] = (getattr(model, "max_length", None), recipe.batch.length)
    found["optimizer.use"] = (recipe.optimizer.use, "adamw")
    found["optimizer.lr_schedule.use"] = (schedule.use, "cosine")
    found["data.use"] = (recipe.data.use, "text")
    for key, (value, needed) in found.items():
        if value != needed:
            raise RecipeError([f"{key} is {value}: nanoGPT's is {needed}, so it cannot train this recipe"])


def options(recipe: Recipe) -> dict[str, Any]:
    """Return ``train.py``'s settings that are the recipe's.

    Its tokens are as many: it stops one step after ``max_iters``, at which it saves what is evaluated. Its
    warm-up is one step longer, and its GELU is the exact one; GPT-2's and the recipe's is the tanh form.
    """
    model, batch, adamw = recipe.model.config, recipe.batch, recipe.optimizer.config
    rate, on_gpu = adamw.lr_schedule, recipe.run.device != "cpu"
    steps, micro = recipe.run.steps, batch.microbatch
    model_size = {"n_layer": model.layers, "n_head": model.heads, "n_embd": model.width, "bias": model.bias}
    return model_size | {
        "block_size": batch.length,
        "batch_size": micro,
        "gradient_accumulation_steps": batch.sequences // micro,
        "learning_rate": adamw.lr,
        "min_lr": adamw.lr * rate.final_ratio,
        "warmup_iters": rate.warmup_steps,
        "lr_decay_iters": steps,
        "max_iters": steps,
        "weight_decay": adamw.weight_decay,
        "beta1": adamw.betas[0],
        "beta2": adamw.betas[1],
        "grad_clip": float(adamw.clip_norm),
        "dataset": DATASET,
        "eval_interval": steps,
        "eval_iters": 1,
        "log_interval": 1,
        "device": "cuda" if on_gpu else "cpu",
        "dtype": "bfloat16" if on_gpu else "float32",
        "compile": on_gpu,
    }


def write_text(data: Data, length: int, folder: Path) -> None:
    """Write the tokens that the recipe trains on, in the order of the text, and what is held out.

    nanoGPT draws windows from anywhere in a file. Where held-out sequences were taken out, one in twenty, a
    window may contain a seam.
    """
    folder.mkdir(parents=True)
    reads: Any = data
    for name, validation, count in (("train", False, reads.train), ("val", True, reads.validation)):
        tokens = reads.read_sequences(np.arange(count), validation=validation)[:, :length]
        (folder / f"{name}.bin").write_bytes(tokens.astype(np.uint16).data)
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": data.vocab_size}))


def rows(data: Data, recipe: Recipe) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the tokens and targets [B, S] on which the recipe's run is evaluated."""
    wanted, size = recipe.evaluation.sequences, recipe.batch.microbatch
    for index in range(wanted // size):
        batch = data.validation_batch(index, size, Shard(0, 1))
        if batch is None:
            return
        assert batch.targets is not None
        yield batch.tokens, batch.targets


@torch.no_grad()
def held_out(folder: Path, data: Data, recipe: Recipe) -> tuple[float, int]:
    """Return the loss of the saved model on what the recipe's run is evaluated on, and its tokens."""
    saved = torch.load(folder / CHECKPOINT, map_location="cpu", weights_only=False)
    if saved["iter_num"] != recipe.run.steps:
        raise RuntimeError(f"nanoGPT saved step {saved['iter_num']}, not {recipe.run.steps}")
    theirs: Any = runpy.run_path(str(folder / "model.py"))
    model = theirs["GPT"](theirs["GPTConfig"](**saved["model_args"]))
    model.load_state_dict({name.removeprefix("_orig_mod."): each for name, each in saved["model"].items()})
    device = "cuda" if recipe.run.device != "cpu" else "cpu"
    model.eval().to(device)
    total, count = 0.0, 0
    for tokens, targets in rows(data, recipe):
        predicted = int((targets != IGNORE).sum())
        _, loss = model(tokens.to(device), targets.masked_fill(targets == IGNORE, -1).to(device))
        total, count = total + float(loss) * predicted, count + predicted
    return total / count, count


def train(plan: Plan, recipe: Recipe, data: Data, clone: Path, folder: Path) -> Finished:
    """Run ``train.py`` in ``folder``.

    Args:
        plan: its seed counts.
        recipe: whose settings it gets.
        data: the recipe's, opened.
        clone: of nanoGPT.
        folder: that does not exist yet.
    """
    folder.mkdir(parents=True)
    for name in FILES:
        shutil.copy(clone / name, folder / name)
    write_text(data, recipe.batch.length, folder / "data" / DATASET)
    given = [f"--{key}={value}" for key, value in options(recipe).items()]
    command = [sys.executable, "-c", SEEDED.format(seed=plan.seed), *given]
    began = time.perf_counter()
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=os.environ)
    seconds = time.perf_counter() - began
    (folder / "log").write_text(ended.stdout + ended.stderr, encoding="utf-8")
    if ended.returncode:
        raise RuntimeError(f"nanoGPT ended with {ended.returncode}: {folder / 'log'}\n{ended.stderr[-2000:]}")
    found = ITERATION.findall(ended.stdout)
    loss, predicted = held_out(folder, data, recipe)
    per_step = recipe.batch.sequences * recipe.batch.length
    parameters = PARAMETERS.search(ended.stdout)
    reads: Any = data
    return Finished(
        plan=plan,
        model=f"{parameters[1] if parameters else '?'} million parameters without positions",
        text=data.describe(),
        steps=recipe.run.steps,
        tokens=recipe.run.steps * per_step,
        training=twentieths([float(loss) for _, loss, _ in found[: recipe.run.steps]]),
        validation=((recipe.run.steps, loss),),
        held_out=loss,
        held_out_tokens=predicted,
        bytes_per_token=reads.bytes_per_token,
        tokens_per_second=per_step / median(float(time) for *_, time in found) * 1000,
        seconds=round(seconds, 1),
        machine=machine(),
    )
