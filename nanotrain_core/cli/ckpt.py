"""``nanotrain ckpt``: list, show, verify, convert and replay checkpoints of any format."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from nanotrain_core.cli.common import add_plugin_options, find_checkpoint, find_checkpoints, plugin_arguments
from nanotrain_core.errors import CheckpointError, Exit
from nanotrain_core.registry.registry import Registry, load_plugins
from nanotrain_core.run.progress_bar import amount, show_progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, (function, summary) in ACTIONS.items():
        action = actions.add_parser(
            name,
            aliases=["list"] if name == "ls" else [],
            help=summary,
            description=f"{summary[:1].upper()}{summary[1:]}.",
        )
        action.set_defaults(act=function)
        action.add_argument("path", metavar="PATH", type=Path, help="a run folder, or a checkpoint in it")
        if name != "ls":
            default = {"verify": "all", "replay": "the oldest"}.get(name, "the newest")
            action.add_argument("--step", type=int, metavar="N", help=f"which one; default: {default}")
        add_plugin_options(action)
        if name == "show":
            action.add_argument("--json", action="store_true", help="its complete description as JSON")
            action.add_argument("--recipe", action="store_true", help="the resolved recipe of the run")
        if name == "convert":
            action.add_argument("out", metavar="OUT", type=Path, help="a new folder")
            action.add_argument("--to", required=True, metavar="KIND", help="a checkpoint component's name")


def run(args: argparse.Namespace) -> int:
    """Run the subcommand."""
    asked = plugin_arguments(args)
    code: int = args.act(args, load_plugins(block=asked.blocked, local=asked.local))
    return code


#: What is said of a checkpoint that a live run's retention has deleted since it was listed.
DELETED = "deleted meanwhile"


def ls(args: argparse.Namespace, registry: Registry) -> int:
    """Print a line for each checkpoint."""
    found = find_checkpoints(args.path, registry)
    print(f"{'step':>10}  {'kind':12}  {'size':>10}  {'ranks':>5}  saved")
    for use, saved in found:
        try:
            ranks = str(saved.describe()["world_size"])
        except CheckpointError:
            ranks = "?"
        try:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(saved.path.stat().st_mtime))
        except FileNotFoundError:
            print(f"{saved.step:>10}  {use:12}  {DELETED}")
            continue
        note = "" if ranks != "?" else "  damaged: see `nanotrain ckpt verify`"
        print(f"{saved.step:>10}  {use:12}  {amount(saved.nbytes, 'B'):>10}  {ranks:>5}  {when}{note}")
    return Exit.DONE


def show(args: argparse.Namespace, registry: Registry) -> int:
    """Print a checkpoint's description."""
    use, saved = find_checkpoint(args.path, registry, args.step)
    described = saved.describe()
    if args.json:
        print(json.dumps(described, indent=2, ensure_ascii=False))
    elif args.recipe:
        print(described["meta"]["recipe"], end="")
    else:
        print(f"{saved.path}: step {saved.step}, {use}, {amount(saved.nbytes, 'B')}")
        for line in summary(described):
            print(f"  {line}")
    return Exit.DONE


#: Maximum characters per line of ``show``; ``--json`` has everything.
LONGEST = 1000


def summary(described: Mapping[str, Any]) -> list[str]:
    """Return what fits on a line: everything short, tensors by kind, files."""
    apart = ("meta", "tensors", "files", "sha256")
    lines = [f"{key:12} {json.dumps(value)}" for key, value in described.items() if key not in apart]
    for key, value in described["meta"].items():
        text = json.dumps(value)
        lines.append(f"{key:12} {'...' if key == 'recipe' or len(text) > LONGEST else text}")
    kinds: dict[str, list[int]] = {}
    for name, tensor in described["tensors"].items():
        kinds.setdefault(name.rpartition("/")[0] or "weights", []).append(prod(tensor["shape"]))
    for kind, numbers in sorted(kinds.items()):
        lines.append(f"{'tensors':12} {kind}: {len(numbers)}, {sum(numbers):,} numbers")
    return lines + [f"{name}  sha256 {file['sha256']}" for name, file in described["files"].items()]


def verify(args: argparse.Namespace, registry: Registry) -> int:
    """Read checkpoints completely; the exit code is 2 if one is damaged."""
    from nanotrain_core.run.added_parameters import model_problems

    code = Exit.DONE
    found = find_checkpoints(args.path, registry, args.step)
    several = len({use for use, _ in found}) > 1
    for number, (use, saved) in enumerate(found, 1):
        with show_progress(f"verifying checkpoint {number} of {len(found)}, {amount(saved.nbytes, 'B')}"):
            try:
                problems = saved.verify() or model_problems(saved, registry)
            except FileNotFoundError as problem:
                problems = [str(problem)]
        deleted = bool(problems) and not saved.path.exists()
        said = DELETED if deleted else "; ".join(problems) or "whole"
        print(f"step {saved.step}{f', {use}' if several else ''}: {said}")
        code = Exit.USER if problems and not deleted else code
    print("nanotrain: a resume also compares its own recipe and data, not read here", file=sys.stderr)
    return code


def convert(args: argparse.Namespace, registry: Registry) -> int:
    """Write a checkpoint in another format."""
    from nanotrain_core.checkpoint.convert import convert_checkpoint

    if args.to in ("huggingface", "nanotrain"):
        instead = f"`nanotrain convert {args.path} {args.out} --to {args.to}`"
        raise CheckpointError(f"'{args.to}' is no kind of checkpoint; for the weights alone: {instead}")
    use, saved = find_checkpoint(args.path, registry, args.step)
    path = convert_checkpoint(registry, use, saved, args.to, args.out)
    print(f"{path}: step {saved.step}, '{use}' as '{args.to}', of one rank")
    return Exit.DONE


def replay(args: argparse.Namespace, registry: Registry) -> int:
    """Train again from a checkpoint, and compare."""
    from nanotrain_core.cli.replay import replay as again

    return again(args, registry)


ACTIONS = {
    "ls": (ls, "list the checkpoints of a run"),
    "show": (show, "print the description of a checkpoint"),
    "verify": (verify, "read checkpoints completely and report errors; all of them without --step"),
    "convert": (convert, "write a checkpoint as another kind; for weights alone see `nanotrain convert`"),
    "replay": (replay, "train again from a checkpoint to the newest one, elsewhere, and compare every byte"),
}
