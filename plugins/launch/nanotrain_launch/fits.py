"""Checks whether a recipe fits the machines, with ``nanotrain plan --json`` if that is installed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from nanotrain_core.api import NanotrainError, Registry, plan_recipe

GB = 1e9


def plan(registry: Registry, words: Sequence[str], hardware: str) -> dict[str, Any] | None:
    """Return the plan of a recipe; None if ``nanotrain plan`` is not installed.

    Args:
        registry: the installed commands are read from it.
        words: recipe and options, as ``nanotrain plan`` takes them.
        hardware: a name, or a file.

    Raises:
        NanotrainError: planning failed, for example for unknown hardware.
    """
    planned = plan_recipe(registry, [*words, "--hardware", hardware])
    if planned is not None and planned.plan is None:
        errors = planned.errors.removeprefix("nanotrain: ").replace("\nnanotrain: ", "\n")
        raise NanotrainError(f"nanotrain {planned.command}: {errors or f'ended with code {planned.code}'}")
    return planned.plan if planned is not None else None


def refuse_what_does_not_fit(found: Mapping[str, Any], words: Sequence[str], hardware: str) -> None:
    """Check the memory of a plan, of devices and of hosts.

    Raises:
        NanotrainError: it is not enough; the text has the command that lists which keys to change.
    """
    memory, host = found["memory"], found["host_memory"]
    if memory["fits"] and host["fits"]:
        return
    if memory["fits"]:
        total, available = host["total"] / GB, host["available"] / GB
        problem = f"{total:,.0f} GB of a host's memory, of {available:,.0f}, for {_most(host)}"
    else:
        peak, usable = memory["peak"] / GB, memory["usable"] / GB
        problem = f"{peak:.3g} GB of a rank, of {usable:.3g} ({memory['where']})"
    command = shlex.join(["nanotrain", "plan", *words, "--hardware", hardware])
    raise NanotrainError(
        f"does not fit {hardware}: {problem}\n"
        f"which keys to change to what: {command}\n"
        "other machines: --hardware NAME|FILE; without this check: --no-plan"
    )


def refuse_larger_nodes(found: Mapping[str, Any], nproc: int, ranks: int, hardware: str) -> None:
    """Check that a node has a device for each of its ranks, as the plan of times and host memory assumes.

    Raises:
        NanotrainError: it has fewer.
    """
    there = found["hardware"]["devices_per_node"]
    if nproc > there and not found["hardware"]["cores"]:  # a CPU can have any number of ranks
        raise NanotrainError(
            f"{nproc} ranks on a node, and a node of {hardware} has {there} devices: {ranks} ranks are "
            f"--nodes {-(-ranks // there)}\n"
            "other machines: --hardware NAME|FILE with its devices_per_node; without this check: --no-plan"
        )


def _most(host: Mapping[str, Any]) -> str:
    """Return what takes most of a host's memory, in words."""
    told = {
        "checkpoint": "a checkpoint",
        "offloaded": "offloaded optimizer state",
        "activations": "offloaded activations",
        "processes": "its ranks' processes",
    }
    return told[max(told, key=host.__getitem__)]


def summary(found: Mapping[str, Any], hardware: str) -> str:
    """Return a plan in a line."""
    memory, time = found["memory"], found["time"]
    peak, usable = memory["peak"] / GB, memory["usable"] / GB
    return f"{peak:.1f} of {usable:.1f} GB of a rank on {hardware}, {time['step']:.3g} s a step"


def saving_takes(found: Mapping[str, Any]) -> float:
    """Return seconds of a last step and checkpoint."""
    return float(found["checkpoints"]["seconds"] + found["time"]["step"])
