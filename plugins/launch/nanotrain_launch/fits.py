"""Checks whether a recipe fits the machines, with ``nanotrain plan --json`` if that is installed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from nanotrain_core.api import NanotrainError, Registry, plan_recipe

#: What numbers of bytes and seconds are told in, the largest first.
BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
SECONDS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


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
        total, available = told(host["total"], BYTES), told(host["available"], BYTES)
        problem = f"a host needs {total} of memory, most of it for {_most(host)}, and has {available}"
    else:
        peak, usable = told(memory["peak"], BYTES), told(memory["usable"], BYTES)
        problem = f"a rank needs {peak} of memory at its peak ({memory['where']}), and can have {usable}"
    command = shlex.join(["nanotrain", "plan", *words, "--hardware", hardware])
    raise NanotrainError(
        f"the recipe does not fit {hardware}: {problem}\n"
        f"to see which changes would make it fit: {command}\n"
        "to plan for other machines: --hardware NAME|FILE; to write the script without this check: --no-plan"
    )


def refuse_other_hardware(found: Mapping[str, Any], hardware: str) -> None:
    """Check that no component of the recipe refuses the hardware, as it would when ranks start.

    Raises:
        NanotrainError: one does.
    """
    if refusals := found.get("refusals"):
        raise NanotrainError(
            f"the recipe cannot run on {hardware}: {refusals[0]}\n"
            "to plan for other machines: --hardware NAME|FILE; "
            "to write the script without this check: --no-plan"
        )


def refuse_larger_nodes(found: Mapping[str, Any], nproc: int, ranks: int, hardware: str) -> None:
    """Check that a node has a device for each of its ranks, as the plan of times and host memory assumes.

    Raises:
        NanotrainError: it has fewer.
    """
    there = found["hardware"]["devices_per_node"]
    if nproc > there and not found["hardware"]["cores"]:  # a CPU can have any number of ranks
        raise NanotrainError(
            f"--nproc {nproc}: a node of {hardware} has {there} devices, one for each rank: "
            f"{ranks} ranks need --nodes {-(-ranks // there)}\n"
            "for nodes with more devices: --hardware FILE with another devices_per_node; to write the script "
            "without this check: --no-plan"
        )


def _most(host: Mapping[str, Any]) -> str:
    """Return what takes most of a host's memory, in words."""
    told = {
        "checkpoint": "a checkpoint",
        "offloaded": "offloaded optimizer state",
        "activations": "offloaded activations",
        "processes": "its ranks' processes",
        "tensors": "its ranks' tensors",
    }
    return told[max(told, key=lambda name: host.get(name, 0))]  # older plans have no tensors


def summary(found: Mapping[str, Any], hardware: str) -> str:
    """Return a plan in a line."""
    memory, time = found["memory"], found["time"]
    peak, usable = told(memory["peak"], BYTES), told(memory["usable"], BYTES)
    step = told(time["step"], SECONDS)
    return f"a rank needs {peak} of {usable} of memory on {hardware}, a step takes {step}"


def told(number: float, units: Sequence[tuple[float, str]]) -> str:
    """Return a number with three digits in the largest unit that it has at least one of.

    >>> told(0.00641, SECONDS), told(90, SECONDS), told(81.9e9, BYTES)
    ('6.41 ms', '1.5 min', '81.9 GB')
    """
    factor, unit = next((each for each in units if number >= each[0]), units[-1])
    return f"{number / factor:.3g} {unit}"


def saving_takes(found: Mapping[str, Any]) -> float:
    """Return seconds of a last step and checkpoint."""
    return float(found["checkpoints"]["seconds"] + found["time"]["step"])
