"""Checks that a built object has the members of its kind's contract, with the parameters that it declares."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from difflib import SequenceMatcher
from functools import lru_cache
from typing import Any

from torch import nn

from nanotrain_core import contracts
from nanotrain_core.component import Component
from nanotrain_core.data.codec import HasConversations
from nanotrain_core.errors import PluginError
from nanotrain_core.recipe.model_config import ModelConfig
from nanotrain_core.registry.signatures import expect_signatures

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

#: Kind -> the interfaces that its objects may have in addition.
OPTIONAL: dict[str, tuple[type, ...]] = {
    "model": (contracts.ChangesInRun,),
    "schedule": (contracts.SaysInFlight,),
    "data": (
        contracts.SkipsAhead,
        contracts.ChangesLength,
        contracts.MixesSources,
        contracts.HasTokenizer,
        HasConversations,
    ),
}

#: Methods by which a gradient sync is known whose component lacks the capability.
OWNS_GRADIENTS = ("attach", "finish", "pieces", "gradient_of")


def missing_members(contract: type, built: Any) -> list[str]:
    """Return the public methods and attributes of ``contract`` that ``built`` lacks, in its order."""
    members = [] if contract in LATE_ATTRIBUTES else list(vars(contract).get("__annotations__", ()))
    members += [name for name in vars(contract) if name not in members]
    return [name for name in members if not name.startswith("_") and not _has(built, name)]


def _has(built: Any, name: str) -> bool:
    """Return whether an object has a member; a property is not evaluated, which may raise anything."""
    return inspect.getattr_static(built, name, None) is not None or hasattr(built, name)


def check_contract(label: str, component: Component, kind: str, built: Any) -> None:
    """Check what a factory returned.

    Raises:
        PluginError: it is a class, it lacks a member of its contract, or has a method with other parameters;
            or it is a gradient sync that its component does not provide.
    """
    if isinstance(built, type):
        name = built.__name__
        raise PluginError(
            f"{label}: its factory returned the class {name}; expected an object of it: return {name}(config)"
        )
    wanted = [(CONTRACTS[kind], kind)]
    if "gradient_sync" in component.provides:
        wanted.append((contracts.GradientSync, "gradient_sync"))
    elif kind in ("parallel", "optimizer") and all(hasattr(built, name) for name in OWNS_GRADIENTS):
        raise PluginError(
            f"{label}: {type(built).__name__} is a gradient sync that would never be called, since its "
            'Component does not say so: add provides={"gradient_sync"}'
        )
    for contract, _ in wanted:
        expect_members(label, contract, built)
        expect_spelling(label, contract, type(built))
    if kind == "model":
        expect_spelling(label, ModelConfig, component.config)
    if kind == "precision":
        expect_members(label, contracts.LossScale, built.loss_scale, what="its loss_scale is")
        expect_signatures(label, kind, contracts.LossScale, built.loss_scale)
    if isinstance(built, contracts.GathersWeights) and len(wanted) > 1:
        wanted.append((contracts.GathersWeights, "gradient_sync"))
    wanted += [(contract, kind) for contract in OPTIONAL.get(kind, ()) if isinstance(built, contract)]
    known = {contract for contract, _ in wanted}
    wanted += [(base, kind) for base in type(built).__mro__ if _of_the_core(base) and base not in known]
    for contract, page in wanted:
        expect_signatures(label, page, contract, built)


def check_callback(monitor: Any) -> None:
    """Check a monitor that a script passes, as those that factories return.

    Raises:
        PluginError: it is a class, lacks a member of :class:`~nanotrain_core.contracts.Monitor`, or has a
            method that is misspelt or takes other arguments.
    """
    kind = monitor if isinstance(monitor, type) else type(monitor)
    label = f"callback {kind.__name__}"
    if kind is monitor:
        raise PluginError(f"{label} is a class; expected an object of it: {kind.__name__}(...)")
    expect_members(label, contracts.Monitor, monitor, what="it is")
    expect_spelling(label, contracts.Monitor, kind)
    expect_signatures(label, "monitor", contracts.Monitor, monitor)


def check_masters(masters: Iterable[Any]) -> None:
    """Check the masters that a precision returned, one of each class.

    Raises:
        PluginError: one is no :class:`~nanotrain_core.contracts.MasterWeight`, or has methods with other
            parameters.
    """
    label = "precision"
    for master in {type(each): each for each in masters}.values():
        expect_members(label, contracts.MasterWeight, master, what="master returned")
        for contract in (contracts.MasterWeight, contracts.ErrorFeedback):
            if isinstance(master, contract):
                expect_signatures(label, "precision", contract, master)


def _of_the_core(base: type) -> bool:
    """Return whether a class is one of the core's, which calls the methods that plugins override."""
    return base.__module__.startswith("nanotrain_core.")


def expect_members(label: str, contract: type, built: Any, *, what: str = "its factory returned") -> None:
    """Reject an object that lacks members of ``contract``.

    Raises:
        PluginError: if the contract is a base class, with the advice to derive from it: a class that does not
            lacks most of it, of which a few names are enough.
    """
    missing = missing_members(contract, built)
    if not missing:
        return
    name = f"nanotrain_core.api.torch.{contract.__name__}"
    if built is None:
        raise PluginError(f"{label}: {what} None (see {name})")
    found = f"{what} a {type(built).__name__} without "
    if getattr(contract, "_is_protocol", False) or isinstance(built, contract):
        raise PluginError(f"{label}: {found}{', '.join(missing)} (see {name})")
    few = ", ".join(missing) if len(missing) <= 4 else f"{', '.join(missing[:3])} and {len(missing) - 3} more"
    raise PluginError(f"{label}: derive from {name}: {found}{few}")


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
        PluginError: it is no module, lacks a method of a part, or has one that is misspelt or takes other
            arguments, or has a parameter with a hook, or one in two modules.
    """
    if missing := missing_of_part(part):
        raise PluginError(
            f"{label}: build returned a {type(part).__name__} without {', '.join(missing)} (inherit from "
            "nanotrain_core.api.torch.ModelPart)"
        )
    expect_spelling(label, contracts.ModelPart, type(part))
    expect_signatures(label, "model", contracts.ModelPart, part)
    expect_no_parameter_hooks(label, part)
    expect_no_ties(label, part)


def expect_no_ties(label: str, part: nn.Module) -> None:
    """Reject a parameter in two modules: on allocation each would get one of its own."""
    first: dict[nn.Parameter, str] = {}
    for prefix, module in part.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            if first.setdefault(parameter, name) != name:
                raise PluginError(
                    f"{label}: {name} is the same parameter as {first[parameter]}: a tie does not survive "
                    "meta; lend the other module's weight in forward"
                )


def expect_no_parameter_hooks(label: str, part: nn.Module) -> None:
    """Reject hooks on parameters on ``meta``: those that are trained are other objects, without them."""
    for name, parameter in part.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise PluginError(
                f"{label}: parameter {name} has a hook, which would be lost when its memory is allocated: "
                "change its gradient in precondition() of an optimizer or in a gradient sync, or that of a "
                "module's output in an autograd function"
            )


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


@lru_cache(maxsize=1024)  # every run asks about the same classes
def misspelt_methods(contract: type, kind: type) -> list[tuple[str, str]]:
    """Return public methods of ``kind`` that resemble methods of a base class of which it overrides none."""
    if getattr(contract, "_is_protocol", False) or contract not in kind.__mro__:
        return []
    inherited = {
        name: member
        for name, member in vars(contract).items()
        if callable(member) and not name.startswith("_") and getattr(kind, name) is member
    }
    own = {name for each in kind.__mro__[: kind.__mro__.index(contract)] for name in vars(each)}
    found = []
    for name in sorted(own):
        if name.startswith("_") or hasattr(contract, name) or not callable(getattr(kind, name)):
            continue
        if near := [other for other in inherited if _alike(name, other)]:
            found.append((name, near[0]))
    return found


def _alike(one: str, other: str) -> bool:
    shorter, longer = sorted((one, other), key=len)
    return longer in (f"{shorter}s", f"{shorter}ing") or SequenceMatcher(None, one, other).ratio() > 0.9
