"""Adapters beside the linear layers of a frozen model: y = W x + scale B (A x).

A [rank, in] and B [out, rank] lie beside a layer's weight as its blocks do. Where ranks have some of its
rows, they have the same rows of B, and all of A, whose gradient is then of their own outputs: partial. Where
they have some of its columns, likewise columns of A, and all of B. The adapter adds to what the layer itself
computes, before ranks sum or gather it, so that no further activation is communicated.

Sources: Hu et al., arXiv 2106.09685, equation 3; Kalajdzievski, arXiv 2312.03732, for alpha / sqrt(rank).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import sqrt
from typing import Any, cast

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from nanotrain_core.api import NanotrainError, Problem, Role, did_you_mean, lies_in, tagged
from nanotrain_core.api.torch import LINEAR_ROLES, Initializer, Mesh, Parallel, Placement, Placements
from nanotrain_lora import LoRAConfig


class LoRA(Parallel):
    """The ``lora`` component."""

    def __init__(self, config: LoRAConfig) -> None:
        self.config = config
        self._seen: list[str] = []
        """Linear layers of this rank's parts that may have adapters."""
        self._laid: dict[str, tuple[Placement, Placement]] = {}
        """How a layer's weight and A lay when its adapter was added, by the layer's name."""
        self._matched = False

    def apply(self, part: nn.Module, placements: Placements, mesh: Mesh) -> nn.Module:
        """Freeze the part, and add adapters to the layers that are named.

        Raises:
            NanotrainError: ranks hold parts of both the rows and the columns of a weight.
        """
        part.requires_grad_(False)
        patterns, added = self.config.patterns(), dict[str, Initializer]()
        for name, module, _ in linear_layers(part):
            self._seen.append(name)
            if not patterns or any_in(name, patterns):
                weight = placements[f"{name}.weight"]
                a, b = beside(weight, name, self.config.rank)
                self._laid[name] = weight, a
                for placed in (a, b):
                    placements[placed.name] = placed
                    key = placed.name.rpartition(".")[2]
                    setattr(module, key, nn.Parameter(torch.empty(placed.shape, device="meta")))
                # As PEFT: A by kaiming_uniform_(a=sqrt(5)), B 0.
                added[f"{name}.lora_a"] = Initializer("uniform", 1 / sqrt(weight.global_shape[1]))
                added[f"{name}.lora_b"] = Initializer("constant", 0.0)
                # First: before what a wrapper has ranks do with their parts of the output.
                module.register_forward_hook(Adapter(self.config.scale), prepend=True)
        initialize(part, added)
        return part

    def shard(self, part: nn.Module, placements: Placements, mesh: Mesh) -> None:
        """Check, once all wrappers have been applied, that every target has a layer, beside its adapter.

        Raises:
            NanotrainError: a target names no linear layer, or a later wrapper has split one.
        """
        for name, before in self._laid.items():
            weight, a = (placements.get(old.name, old) for old in before)
            # What shards whatever there is, wherever it is listed, such as fsdp2, shards A along it as well,
            # which is not summed over dp then either, if replicas of its shards sum its gradient in backward.
            both = (a.sharded - before[1].sharded) | (before[1].summed - a.summed)
            now, then = ((each.sharded - both, each.summed - both) for each in (weight, before[0]))
            if now != then or (not both and weight.shape != before[0].shape):
                raise NanotrainError(
                    f"lora: {name} was split by a wrapper that is listed after it, which leaves its adapter "
                    'whole. List "lora" after that wrapper'
                )
        # A dry run knows the layers of one pipeline stage alone, and targets may lie in another.
        known = mesh.device.type != "meta" or mesh.degree("pp") == 1
        if known and not self._matched:
            self._matched = True
            self._expect_layers(
                list(dict.fromkeys(name for names in mesh.gather(self._seen) for name in names))
            )

    def _expect_layers(self, seen: list[str]) -> None:
        """Refuse targets without a linear layer among those of all ranks."""
        for number, text in unmatched(self.config, seen):
            raise NanotrainError(f"lora: targets.{number}: {text}")
        if not seen:
            raise NanotrainError("lora: the model has no linear layer in its layers to add an adapter to")


def initialize(part: Any, added: Mapping[str, Initializer]) -> None:
    """Have the part say how parameters that were added to it are initialized."""
    given = part.initializer
    part.initializer = lambda name: added[name] if name in added else given(name)


def unmatched(config: LoRAConfig, layers: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the number of each target that matches none of these linear layers, and an error text."""
    last = [*dict.fromkeys(name.rpartition(".")[2] for name in layers)]
    around = dict.fromkeys(word for name in layers for word in name.split(".")[1:-1] if not word.isdecimal())
    for number, (target, pattern) in enumerate(zip(config.targets, config.patterns(), strict=True)):
        if not any(lies_in(name, pattern) for name in layers):
            near = did_you_mean(target, [*last, *around, *layers])
            text = f"'{target}' names no linear layer{near}; there are {', '.join(last)}. Routers and routed"
            yield number, f"{text} experts get no adapters"


def problems(model: nn.Module, config: LoRAConfig, key: str, later: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what is wrong with the targets of a recipe's table, or with its place.

    Args:
        model: the whole model.
        config: the table.
        key: its key in the recipe, such as ``parallel.0``.
        later: wrappers listed after it that split linear layers, each with its degree as text.
    """
    layers = {name: role for name, _, role in linear_layers(model)}
    for number, text in unmatched(config, list(layers)):
        yield Problem(f"{key}.targets.{number}", text)
    patterns, split = config.patterns(), (Role.COLUMN, Role.ROW)
    for name, role in layers.items():
        if role in split and (not patterns or any_in(name, patterns)):
            for use, degree in later.items():
                text = (
                    f"'lora' is listed before '{use}', which splits {name} over {degree} and would leave its"
                )
                yield Problem(key, f'{text} adapter whole; expected "lora" after "{use}"')
            return


def any_in(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a layer lies in what any of the patterns names."""
    return any(lies_in(name, each) for each in patterns)


def linear_layers(part: nn.Module) -> Iterator[tuple[str, nn.Module, Role]]:
    """Yield the linear layers within the layers of a part: not those of routers and routed experts."""
    found = list(tagged(part))
    inside = tuple(f"{name}." for name, _, tag in found if tag.role is Role.BLOCK)
    apart = tuple(f"{name}." for name, _, tag in found if tag.role in (Role.ROUTER, Role.EXPERTS))
    for name, module, tag in found:
        if tag.role in LINEAR_ROLES and name.startswith(inside) and not name.startswith(apart):
            yield name, module, tag.role


def beside(weight: Placement, name: str, rank: int) -> tuple[Placement, Placement]:
    """Return the placements of A and B beside a block of a layer's weight.

    Raises:
        NanotrainError: it is a block of rows and of columns.
    """
    (out, width), (rows, columns) = weight.global_shape, weight.shape
    if rows < out and columns < width:
        dims = ", ".join(sorted(weight.sharded))
        raise NanotrainError(f"lora: {name}.weight is split along both axes over {dims}; expected one")
    whole = attrs.evolve(weight, sharded=frozenset(), summed=weight.summed | weight.sharded)
    of_a, of_b = (whole, weight) if rows < out else (weight, whole) if columns < width else (weight, weight)
    return (
        attrs.evolve(
            of_a,
            name=f"{name}.lora_a",
            global_shape=(rank, width),
            shape=(rank, columns),
            offset=(0, weight.offset[1]),
        ),
        attrs.evolve(
            of_b,
            name=f"{name}.lora_b",
            global_shape=(out, rank),
            shape=(rows, rank),
            offset=(weight.offset[0], 0),
        ),
    )


class Adapter:
    """The forward hook of a linear layer: it uses the module that it is called with."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        """Return the layer's output with the adapter's added."""
        a, b = cast(torch.Tensor, module.lora_a), cast(torch.Tensor, module.lora_b)
        return out + F.linear(F.linear(args[0], a) * self.scale, b)
