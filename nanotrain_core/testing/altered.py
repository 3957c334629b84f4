"""Code that ranks run for checks that modify a model: other modules, additional parameters."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast
from unittest import mock

import attrs
import torch
from torch import nn

from nanotrain_core.contracts import Block, Initializer, Optimizer
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.roles import Role, replace_module, tag, tagged
from nanotrain_core.pipeline.accumulate import Accumulate
from nanotrain_core.pipeline.actions import Action
from nanotrain_core.precision.uniform import Uniform
from nanotrain_core.run import log, model_parts, random_state
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.probe import FirstGradients, Trace, make_engine, rank, train, weights

# --- weights of another run --------------------------------------------------------------------------


@attrs.define(frozen=True, eq=False)
class FirstStep:
    """The results of a process in the first step."""

    weights: list[Block]
    """With which: dequantized, where they are quantized."""
    gradients: list[Block]
    """Complete, before clipping."""


def first_step(
    case: Case, changes: Mapping[str, Any], whole: Mapping[str, torch.Tensor] | None = None
) -> FirstStep:
    """Train on this rank; in one process, with the values of ``whole``, by name, as weights if given."""
    log.ensure(rank())
    random_state.seed_all(1, rank())
    engine = make_engine(case, changes)
    if whole is not None:
        for placed in engine.run.placed:
            placed.parameter.data.copy_(whole[placed.placement.name])
    before, optimizer = weights(engine.run), FirstGradients(engine.run)
    engine.run = attrs.evolve(engine.run, optimizer=cast(Optimizer, optimizer))
    engine.fit()
    return FirstStep(before, optimizer.first)


# --- modules that a precision replaces ---------------------------------------------------------------


class Replacement(nn.Module):
    """A linear layer as a precision might substitute it: its own class, the same parameters."""

    def __init__(self, old: nn.Module) -> None:
        super().__init__()
        self.register_parameter("bias", None)
        for name, parameter in old.named_parameters(recurse=False):
            self.register_parameter(name, parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.get_parameter("bias")
        return nn.functional.linear(x, self.get_parameter("weight"), bias)


def train_with_replaced(case: Case, changes: Mapping[str, Any]) -> Trace:
    """Train with every tagged linear layer replaced after the wrappers, as a precision may do."""
    convert = Uniform.convert

    def replace_all(precision: Uniform, part: nn.Module) -> nn.Module:
        for name, module, found in list(tagged(part)):
            if found.role in (Role.COLUMN, Role.ROW, Role.REPLICATED):
                parent, _, last = name.rpartition(".")
                setattr(part.get_submodule(parent), last, replace_module(module, Replacement(module)))
        return convert(precision, part)

    with mock.patch.object(Uniform, "convert", replace_all):
        return train(case, changes)


# --- what the model at hand may lack: the roles INNER, PER_HEAD and SHARED, and biases ----------------


class Scales(nn.Module):
    """Multiplies each head [..., H, K] by its own ``weight`` and by the constant ``slopes``, both [H]."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))
        self.slopes: torch.Tensor
        self.register_buffer("slopes", torch.empty(heads), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * ((1 + self.weight) * self.slopes)[:, None].to(x.dtype)


class NormOfUnits(nn.Module):
    """A COLUMN, then a norm of each unit of its outputs, such as a head's queries: ``inner.weight`` [unit].

    All units are multiplied with one number per token, SHARED by them, and where each is on one rank, with
    a number of its own.
    """

    def __init__(self, column: nn.Module, unit: int, *, grouped: bool) -> None:
        super().__init__()
        self.column, self.unit = column, unit
        self.inner = tag(nn.LayerNorm(unit), Role.INNER)
        heads = len(column.get_parameter("weight")) // unit
        self.scales = nn.Identity() if grouped else tag(Scales(heads), Role.PER_HEAD)
        self.shared = tag(nn.Identity(), Role.SHARED)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        units = self.scales(self.inner(self.column(x).unflatten(-1, (-1, self.unit))))
        y: torch.Tensor = units.flatten(-2) * (1 + self.shared(x[..., :1]))
        return y


def train_with_more_roles(case: Case, changes: Mapping[str, Any]) -> Trace:
    """Train with a bias in each tagged linear, and INNER and SHARED modules at each COLUMN that has units."""
    build = model_parts.build_stages

    def build_with_more(model: Any, parts: Any, mesh: Any, ops: Any) -> Any:
        stages = build(model, parts, mesh, ops)
        with torch.device("meta"):
            for part in stages.values():
                _add_roles_and_biases(part)
        return stages

    with mock.patch.object(model_parts, "build_stages", build_with_more):
        return train(case, changes)


def _add_roles_and_biases(part: Any) -> None:
    before, had_buffers = set(dict(part.named_parameters())), any(True for _ in part.buffers())
    renamed: dict[str, str] = {}
    freezes = False  # the bias of the first COLUMN of each BLOCK: a wrapper that splits it keeps it frozen
    for name, module, found in list(tagged(part)):
        freezes = freezes or found.role is Role.BLOCK
        if found.role not in (Role.COLUMN, Role.ROW, Role.REPLICATED):
            continue
        if module.bias is None:
            module.register_parameter("bias", nn.Parameter(torch.empty(len(module.get_parameter("weight")))))
        if found.role is Role.COLUMN and freezes:
            module.bias.requires_grad_(False)
            freezes = False
        if found.role is Role.COLUMN and found.unit > 1:
            parent, _, last = name.rpartition(".")
            setattr(part.get_submodule(parent), last, NormOfUnits(module, found.unit, grouped=found.grouped))
            renamed |= {f"{name}.column.{key}": f"{name}.{key}" for key, _ in module.named_parameters()}
    known = part.initializer

    def initializer(name: str) -> Initializer:
        old = renamed.get(name, name)
        return known(old) if old in before else Initializer("normal", 0.5)

    part.initializer = initializer
    slopes = {name: len(buffer) for name, buffer in part.named_buffers() if name.endswith(".scales.slopes")}
    own: Any = part.constant if had_buffers else None

    def constant(name: str) -> torch.Tensor:
        found: torch.Tensor = torch.linspace(0.5, 1.5, slopes[name]) if name in slopes else own(name)
        return found

    part.constant = constant


# --- a backward pass that is split ------------------------------------------------------------------


def train_with_weight_passes(case: Case, changes: Mapping[str, Any]) -> Trace:
    """Train with the weight gradients of each microbatch deferred to a W pass, two microbatches later."""
    plain = Accumulate.actions

    def with_weight_passes(schedule: Accumulate, pp: int, microbatches: int) -> Any:
        lists = []
        for actions in plain(schedule, pp, microbatches):
            late: list[Action] = []
            for action in actions:
                late.append(action)
                if action.kind == "B" and action.microbatch >= 2:
                    late.append(Action("W", action.stage, action.microbatch - 2))
            rest = range(max(0, microbatches - 2), microbatches)
            lists.append((*late, *(Action("W", actions[0].stage, number) for number in rest)))
        return tuple(lists)

    with mock.patch.object(Accumulate, "actions", with_weight_passes):
        return train(case, changes)


# --- two runs in one process -----------------------------------------------------------------------


def train_around(case: Case, changes: Mapping[str, Any], other: Mapping[str, Any]) -> list[Block]:
    """Build the run, train another one in this process, then train the first; return its weights."""
    log.ensure(rank())
    random_state.seed_all(1, rank())
    engine = make_engine(case, changes)
    train(case, other)
    random_state.seed_all(1, rank())
    engine.fit()
    return weights(engine.run)


# --- a parameter that not every rank uses ---------------------------------------------------------


def train_with_extra(case: Case, changes: Mapping[str, Any], used_on: str) -> Trace:
    """Train with an additional parameter in every stage.

    Used ``nowhere``, ``on_one_rank`` of dp, or on all ranks ``from_the_second_step`` on or
    ``in_the_first_step``.
    """
    batch = case.recipe(**changes).batch
    with extra_parameter(used_on, lambda mesh: batch.microbatches(mesh.size("dp"))):
        return train(case, changes)


@contextlib.contextmanager
def extra_parameter(used_on: str, microbatches: Callable[[Mesh], int] = lambda mesh: 0) -> Iterator[None]:
    """Build every stage with one more parameter, used in the loss of the last dp rank, of none, or of all.

    Args:
        used_on: see :func:`train_with_extra`.
        microbatches: how many passes a rank has in the first step.
    """
    build = model_parts.build_stages

    def build_with_extra(model: Any, parts: Any, mesh: Any, ops: Any) -> Any:
        stages = build(model, parts, mesh, ops)
        used = used_on == "on_one_rank" and mesh.coordinate("dp") == mesh.size("dp") - 1
        changes = used_on in ("from_the_second_step", "in_the_first_step")
        for number, part in stages.items():
            first_step = microbatches(mesh) if changes else 0
            early = used_on == "in_the_first_step"
            _add_extra(part, f"extra_{number}", used or changes, first_step, early=early)
        return stages

    with mock.patch.object(model_parts, "build_stages", build_with_extra):
        yield


def _add_extra(part: Any, name: str, used: bool, first_passes: int, *, early: bool) -> None:
    """Make a part use one more parameter: after its ``first_passes``, or, if ``early``, only in these."""
    known, passes = part.initializer, itertools.count()
    part.register_parameter(name, torch.nn.Parameter(torch.empty(3, device="meta")))
    part.initializer = lambda n: Initializer("constant", 1.0) if n == name else known(n)

    def add_to_loss(module: Any, inputs: Any, output: Any) -> Any:
        if torch.is_grad_enabled() and (next(passes) < first_passes) != early:
            return output
        losses = {term: value + getattr(module, name).sum() for term, value in output.losses.items()}
        return attrs.evolve(output, losses=losses)

    if used:
        part.register_forward_hook(add_to_loss)
