"""What ``nanotrain check --hardware`` tells of a recipe's memory: the answer of a command that plans it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from nanotrain_core.errors import Exit, NanotrainError
from nanotrain_core.registry.registry import Registry

#: Seconds after which a plan is given up: checking must not hang.
LIMIT = 120.0


def tell_memory(args: argparse.Namespace, registry: Registry, limit: float = LIMIT) -> str:
    """Return one line: what the recipe takes of a device, or why nobody knows.

    Args:
        args: of ``nanotrain check``, with ``hardware``.
        registry: whose commands are asked.
        limit: seconds to wait.

    Raises:
        NanotrainError: there is no such hardware, or its file is wrong.
    """
    name = next((name for name, command in registry.commands().items() if command.tells_memory), None)
    if name is None:
        return "not known: no installed command plans it; to get one: pip install nanotrain-plan"
    words = [name, args.recipe, "--hardware", args.hardware, "--json", "--no-advice"]
    for option, values in (
        ("--set", args.set),
        ("--plugin", args.plugin),
        ("--no-plugin", args.no_plugin),
        ("--nproc", [args.nproc] if args.nproc else []),
        ("--nnodes", [args.nnodes] if args.nnodes else []),
    ):
        for value in values:
            words += [option, str(value)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "nanotrain_core.cli", *words],
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not known: not planned within {limit:g} s; try `nanotrain {name} {args.recipe}`"
    try:
        memory: Any = json.loads(done.stdout)["memory"]
        peak, usable, fits = memory["peak"] / 1e9, memory["usable"] / 1e9, bool(memory["fits"])
    except (ValueError, KeyError, TypeError):
        told = done.stderr.strip().splitlines()
        mistake = told[-1].removeprefix("nanotrain: ") if told else ""
        if done.returncode == Exit.USER and mistake.startswith(("--hardware:", f"{args.hardware}:")):
            raise NanotrainError(mistake) from None
        return f"not known: {told[-1] if told else f'nanotrain {name} told nothing'}"
    share = f"{peak:.3g} GB at the peak of a rank, of {usable:.3g} usable on {args.hardware}"
    if fits:
        return share
    command = f"`nanotrain {name} {args.recipe} --hardware {args.hardware}` tells what would"
    return f"warning: it will not fit: {share}; {command}"
