"""Verifies that a run can be resumed: from one of its checkpoints it reaches the same bytes again."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanotrain_core.checkpoint.info import CheckpointInfo
from nanotrain_core.cli.common import find_checkpoint, find_checkpoints
from nanotrain_core.errors import CheckpointError, Exit
from nanotrain_core.metrics.history import read_metrics
from nanotrain_core.registry.registry import Registry
from nanotrain_core.run.progress_bar import show_progress


def replay(args: argparse.Namespace, registry: Registry) -> int:
    """Resume in a scratch folder, train to the newest step, and compare files, their metadata, and losses.

    ``--step`` is the checkpoint to resume from; without it that is the oldest.

    Raises:
        CheckpointError: there are fewer than two checkpoints, one is damaged, or the second run has none of
            that step.
    """
    oldest = find_checkpoints(args.path, registry)[0][1].step
    _, last = find_checkpoint(args.path, registry)
    _, first = find_checkpoint(args.path, registry, oldest if args.step is None else args.step)
    if first.step >= last.step:
        raise CheckpointError(f"{args.path}: there is no checkpoint after step {first.step} to compare with")
    if last.describe()["meta"].get("model") == {}:
        raise CheckpointError(f"{args.path} is of a script, not of a recipe: run the script to go on from it")
    _refuse_damaged(first, last)
    with tempfile.TemporaryDirectory(prefix="nanotrain-replay-") as scratch:
        recipe, again = Path(scratch, "recipe.toml"), Path(scratch, "run")
        recipe.write_text(last.describe()["meta"]["recipe"], encoding="utf-8")
        words = ["run", str(recipe), "--folder", str(again), "--resume", str(first.path.resolve())]
        plugins = [f"--plugin={path}" for path in args.plugin]
        code = subprocess.run(
            [sys.executable, "-m", "nanotrain_core.cli", *words, *plugins], check=False
        ).returncode
        if code != Exit.DONE:
            return code
        _, twin = find_checkpoint(again, registry, last.step)
        _refuse_damaged(twin)
        said = [saved.describe() for saved in (last, twin)]
        old, new = (_hashes(each["files"]) for each in said)
        differing = _differing(old, new)
        # The hashes may not cover a checkpoint's other state: position, loss scale, history.
        differing += [f"meta.{key}" for key in _differing(*(each["meta"] for each in said))]
        losses = [final_loss(each.path.resolve().parents[1], last.step) for each in (last, twin)]
    if differing or losses[0] != losses[1]:
        print(f"RESUME FAILED: losses {losses[0]} and {losses[1]}, other bytes in {', '.join(differing)}")
        return Exit.FAILED
    print(f"steps {first.step} to {last.step} again: {len(old)} files byte-equal, final loss {losses[0]}")
    print("RESUME VERIFIED")
    return Exit.DONE


def _refuse_damaged(*checkpoints: CheckpointInfo) -> None:
    """Compare all bytes with the recorded hashes, which stand for them in what is compared later.

    Raises:
        CheckpointError: a checkpoint is damaged.
    """
    for saved in checkpoints:
        with show_progress(f"verifying the checkpoint of step {saved.step}"):
            problems = saved.verify()
        if problems:
            raise CheckpointError(f"the checkpoint {saved.path} is damaged: {'; '.join(problems)}")


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ between two mappings."""
    return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))


def _hashes(files: dict[str, dict[str, str]]) -> dict[str, str]:
    return {name: file["sha256"] for name, file in files.items()}


def final_loss(folder: Path, step: int) -> float | None:
    """Return the loss that ``metrics.jsonl`` of a run folder has for ``step``, None without one."""
    curve = read_metrics(folder, ["loss"]).curves.get("loss", ())
    return dict(curve).get(step)
