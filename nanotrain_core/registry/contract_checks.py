"""Checks that a built object has the members of its kind's contract: their names, not their signatures."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any

from torch import nn

from nanotrain_core import contracts
from nanotrain_core.component import Component
from nanotrain_core.errors import PluginError
from nanotrain_core.recipe.model_config import ModelConfig

#: Kind -> its contract.
CONTRACTS: dict[str, type] = {
    "topology": contracts.Topology,
    "kernels": contracts.Kernels,
    "model": contracts.Model,
    "parallel": contracts.Parallel,
    "precision": contracts.Precision,
    "optimizer": contracts.Optimizer,
    "schedule": contracts.Schedule,
    "checkpoint": contracts.Checkpoint,
    "data": contracts.Data,
    "monitor": contracts.Monitor,
}

#: Contracts whose attributes exist only after ``open`` or ``setup``; their methods exist from the start.
LATE_ATTRIBUTES = (contracts.Data, contracts.Optimizer)


#: Methods by which a gradient sync is known whose component lacks the capability.
OWNS_GRADIENTS = ("attach", "finish", "pieces", "gradient_of")


def missing_members(contract: type, built: Any) -> list[str]:
    """Return the public methods and attributes of ``contract`` that ``built`` lacks, in its order."""
    members = [] if contract in LATE_ATTRIBUTES else list(vars(contract).get("__annotations__", ()))
    members += [name for name in vars(contract) if name not in members]
    return [name for name in members if not name.startswith("_") and not hasattr(built, name)]


def check_contract(label: str, component: Component, kind: str, built: Any) -> None:
    """Check what a factory returned.

    Raises:
        PluginError: it lacks a member of its contract, and if that is a base class, the text says to inherit;
            or it is a gradient sync that its component does not provide.
    """
    wanted = [CONTRACTS[kind]]
    if "gradient_sync" in component.provides:
        wanted.append(contracts.GradientSync)
    elif kind in ("parallel", "optimizer") and all(hasattr(built, name) for name in OWNS_GRADIENTS):
        raise PluginError(
            f"{label}: {type(built).__name__} is a gradient sync that would never be called, since its "
            'Component does not say so: add provides={"gradient_sync"}'
        )
    for contract in wanted:
        missing = missing_members(contract, built)
        if missing:
            returned = "None" if built is None else f"a {type(built).__name__} without {', '.join(missing)}"
            base = not getattr(contract, "_is_protocol", False) and not isinstance(built, contract)
            see = f"{'inherit from' if base else 'see'} nanotrain_core.api.torch.{contract.__name__}"
            raise PluginError(f"{label}: its factory returned {returned} ({see})")
        expect_spelling(label, contract, type(built))
    if kind == "model":
        expect_spelling(label, ModelConfig, component.config)


def missing_of_part(part: Any) -> list[str]:
    """Return the methods of :class:`~nanotrain_core.contracts.ModelPart` that a part of a model lacks.

    A plain module needs ``constant`` only for its buffers.
    """
    if not isinstance(part, nn.Module):
        return ["initializer"]
    missing = missing_members(contracts.ModelPart, part)
    return [name for name in missing if name != "constant" or [*part.buffers()]]


def check_part(label: str, part: Any) -> None:
    """Check what a model's ``build`` returned.

    Raises:
        PluginError: it is no module, lacks a method of a part, or has one that is misspelt.
    """
    if missing := missing_of_part(part):
        raise PluginError(
            f"{label}: build returned a {type(part).__name__} without {', '.join(missing)} (inherit from "
            "nanotrain_core.api.torch.ModelPart)"
        )
    expect_spelling(label, contracts.ModelPart, type(part))


def expect_spelling(label: str, contract: type, kind: type) -> None:
    """Reject a class with a misspelt override of a base class, whose defaults would hide it.

    Raises:
        PluginError: naming both methods.
    """
    for mine, meant in misspelt_methods(contract, kind):
        raise PluginError(
            f"{label}: {kind.__name__} has a method {mine}, which nobody ever calls, and not "
            f"{meant} of {contract.__name__}: rename it, or begin its name with an underscore"
        )


def misspelt_methods(contract: type, kind: type) -> Iterator[tuple[str, str]]:
    """Yield public methods of ``kind`` that resemble methods of a base class of which it overrides none."""
    if getattr(contract, "_is_protocol", False) or contract not in kind.__mro__:
        return
    inherited = {
        name: member
        for name, member in vars(contract).items()
        if callable(member) and not name.startswith("_") and getattr(kind, name) is member
    }
    own = {name for each in kind.__mro__[: kind.__mro__.index(contract)] for name in vars(each)}
    for name in sorted(own):
        if name.startswith("_") or hasattr(contract, name) or not callable(getattr(kind, name)):
            continue
        if near := [other for other in inherited if _alike(name, other)]:
            yield name, near[0]


def _alike(one: str, other: str) -> bool:
    shorter, longer = sorted((one, other), key=len)
    return longer == f"{shorter}s" or SequenceMatcher(None, one, other).ratio() > 0.9
