"""The memory line of ``nanotrain check --hardware``: the result of a command that plans memory."""

from __future__ import annotations

import argparse
from typing import Any

from nanotrain_core.cli.planned import plan_recipe
from nanotrain_core.errors import Exit, NanotrainError
from nanotrain_core.registry.advice import how_to_install
from nanotrain_core.registry.registry import Registry

#: Seconds after which a plan is stopped: checking must not hang.
LIMIT = 120.0


def memory_line(args: argparse.Namespace, registry: Registry, limit: float = LIMIT) -> str:
    """Return one line: the device memory that the recipe needs, or why it is unknown.

    Args:
        args: of ``nanotrain check``, with ``hardware``.
        registry: its commands are searched.
        limit: seconds to wait.

    Raises:
        NanotrainError: there is no such hardware, or its file is wrong.
    """
    words = [args.recipe, "--hardware", args.hardware]
    for option, values in (
        ("--set", args.set),
        ("--plugin", args.plugin),
        ("--no-plugin", args.no_plugin),
        ("--nproc", [args.nproc] if args.nproc else []),
        ("--nnodes", [args.nnodes] if args.nnodes else []),
    ):
        for value in values:
            words += [option, str(value)]
    planned = plan_recipe(registry, words, limit)
    if planned is None:
        return f"not known: no installed command plans it; to get one: {how_to_install('nanotrain-plan')}"
    name = planned.command
    if planned.code is None:
        return f"not known: not planned within {limit:g} s; try `nanotrain {name} {args.recipe}`"
    try:
        memory: Any = (planned.plan or {})["memory"]
        peak, usable, fits = memory["peak"] / 1e9, memory["usable"] / 1e9, bool(memory["fits"])
    except (KeyError, TypeError):
        last = (planned.errors.splitlines() or [""])[-1]
        mistake = last.removeprefix("nanotrain: ")
        if planned.code == Exit.USER and mistake.startswith(("--hardware:", f"{args.hardware}:")):
            raise NanotrainError(mistake) from None
        return f"not known: {last or f'nanotrain {name} printed nothing'}"
    if refusals := (planned.plan or {}).get("refusals"):
        return f"warning: it cannot run on {args.hardware}: {refusals[0]}"
    share = f"{peak:.3g} GB at the peak of a rank, of {usable:.3g} usable on {args.hardware}"
    command = f"`nanotrain {name} {args.recipe} --hardware {args.hardware}` tells what would"
    return share if fits else f"warning: it will not fit: {share}; {command}"
