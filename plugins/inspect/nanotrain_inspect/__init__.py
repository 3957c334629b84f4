"""Looks into a run: profiles of chosen steps, and dumps of weights, gradients, updates and activations.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

from collections.abc import Iterator
from typing import Any, Literal

import attrs

from nanotrain_core.api import (
    Command,
    Component,
    Layout,
    Problem,
    Range,
    Recipe,
    Register,
    RegisterCommand,
    hookimpl,
    not_empty,
)
from nanotrain_inspect.steps import Steps

__version__ = "0.1.0"


def _steps(instance: Any, field: Any, value: str) -> None:
    Steps.parse(value)


def _one_range(instance: Any, field: Any, value: str) -> None:
    if len(Steps.parse(value).parts) > 1:
        raise ValueError(f"expected one range of steps, such as '100:105', got {value!r}")


@attrs.define(frozen=True, kw_only=True)
class ProfilerConfig:
    """``[[monitor]] use = "profiler"``: torch's profiler over a few steps."""

    steps: str = attrs.field(default="5:7", validator=_one_range)
    """First and last step, both profiled. The step before warms the profiler up, if there is one."""
    ranks: tuple[int, ...] = attrs.field(default=(), validator=Range(0))
    """Which ranks are profiled; none named: all."""
    shapes: bool = False
    """Record the shapes of operators' inputs."""
    stacks: bool = False
    """Record Python's stacks, which makes steps slower and files larger."""
    memory: bool = False
    """Record what operators allocate and free."""
    merge: int = attrs.field(default=16, validator=Range(0))
    """Most profiled ranks whose traces are merged into one file; 0: never merge."""
    memory_snapshot: bool = True
    """Record the GPU's allocations, and write the newest to the run folder when memory runs out."""


@attrs.define(frozen=True, kw_only=True)
class DumpConfig:
    """``[[monitor]] use = "dump"``: tensors of chosen modules at chosen steps."""

    steps: str = attrs.field(validator=_steps)
    """Steps and ranges, both ends meant: ``"1,10"``, ``"100:110"``, ``"0:10000:500"`` every 500th."""
    what: tuple[Literal["weights", "gradients", "updates", "activations"], ...] = attrs.field(
        default=("gradients",), validator=not_empty
    )
    """`weights` are those that the step computed with, `gradients` are complete and not clipped, `updates`
    are by how much the step changed weights, `activations` what modules returned in forward passes."""
    modules: tuple[str, ...] = ("*",)
    """Names or patterns of modules, `layers.0.attn`: whatever lies in them, and what they return."""
    form: Literal["tensors", "statistics"] = "tensors"
    """`tensors` are written to `dumps` in the run folder, `statistics` (norm, RMS, mean, standard deviation,
    largest magnitude) are published as metrics."""
    most_mb: float = attrs.field(default=1024.0, validator=Range(0.001, 1e6))
    """Megabytes of one file, which rank 0 holds. The run stops before it gathers more."""


def check_profiler(recipe: Recipe, config: ProfilerConfig, layout: Layout) -> Iterator[Problem]:
    """Refuse steps and ranks that a run does not have."""
    first = Steps.parse(config.steps).parts[0].start
    if first > recipe.run.steps:
        yield Problem("monitor", f"'profiler' begins with step {first} of a run of {recipe.run.steps} steps")
    for rank in config.ranks:
        if rank >= layout.world_size:
            yield Problem("monitor", f"'profiler' asks for rank {rank} of {layout.world_size} ranks")


def check_dump(recipe: Recipe, config: DumpConfig, layout: Layout) -> Iterator[Problem]:
    """Refuse steps that a run does not have."""
    first = min(part.start for part in Steps.parse(config.steps).parts)
    if first > recipe.run.steps:
        yield Problem("monitor", f"'dump' begins with step {first} of a run of {recipe.run.steps} steps")
    every, steps = recipe.run.log_every, Steps.parse(config.steps)
    unseen = [n for n in range(1, recipe.run.steps) if n in steps and n % every] if every > 1 else []
    if "activations" in config.what and unseen:
        yield Problem(
            "monitor",
            f"'dump' asks for activations of step {unseen[0]}, but modules are looked at in logged steps: "
            f"choose multiples of run.log_every = {every}",
        )


@hookimpl
def nanotrain_register_monitor(register: Register) -> None:
    """Register ``profiler`` and ``dump``."""
    from nanotrain_inspect.declared import METRICS

    register(
        Component(
            name="profiler",
            config=ProfilerConfig,
            factory="nanotrain_inspect.profiler:Profiler",
            summary="torch's profiler for chosen steps: a Perfetto trace of each rank, and a merged one",
            check=check_profiler,
            example={"steps": "1:2"},
        )
    )
    register(
        Component(
            name="dump",
            config=DumpConfig,
            factory="nanotrain_inspect.dump:Dump",
            summary="weights, gradients, updates and activations of chosen modules at chosen steps",
            check=check_dump,
            example={"steps": "0:4:2", "what": ["weights", "gradients", "updates", "activations"]},
            metrics=METRICS,
            reads_modules=lambda config: ((f"modules.{n}", name) for n, name in enumerate(config.modules)),
        )
    )


@hookimpl
def nanotrain_register_command(register: RegisterCommand) -> None:
    """Register ``nanotrain inspect``."""
    register(
        Command(
            name="inspect",
            summary="summarize saved weights, or compare two sets of them",
            module="nanotrain_inspect.command",
        )
    )
