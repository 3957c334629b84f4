"""``nanotrain schedule NAME|RECIPE``: draw a pipeline schedule as a timeline, without running it."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanotrain_core.cli.argument_types import positive_int
from nanotrain_core.cli.common import add_plugin_options, plugin_arguments
from nanotrain_core.cli.drawing import draw
from nanotrain_core.errors import Exit, NanotrainError, PluginError, RecipeError, describe
from nanotrain_core.phases.timeline import PhaseTimeline
from nanotrain_core.pipeline.actions import Costs, Part
from nanotrain_core.pipeline.simulator import simulate
from nanotrain_core.recipe.load import resolve_recipe
from nanotrain_core.recipe.schedule_checks import expect_one_step
from nanotrain_core.recipe.source import is_recipe, override_source
from nanotrain_core.recipe.structure import structure
from nanotrain_core.recipe.tree import Selection
from nanotrain_core.recipe.validate import microbatches_of
from nanotrain_core.registry.registry import load_plugins

if TYPE_CHECKING:
    from nanotrain_core.contracts import Model, Schedule


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("subject", metavar="NAME|RECIPE", help="a schedule such as 1f1b, or a recipe")
    parser.add_argument("--pp", type=positive_int, metavar="P", help="pipeline ranks (4)")
    parser.add_argument("--microbatches", type=positive_int, metavar="M", help="microbatches per step (8)")
    parser.add_argument("--v", type=positive_int, metavar="V", help="virtual stages on each rank: --set v=V")
    parser.add_argument("--layers", type=positive_int, metavar="L", help="also show how L layers are split")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a key of the schedule's own table, or any key of a recipe",
    )
    add_plugin_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the timeline."""
    of = _of_recipe if is_recipe(args.subject) else _of_name
    title, schedule, pp, microbatches, costs = of(args)
    layers = len(costs.layers) if costs else None
    try:
        expect_one_step(schedule, layers=layers, pp=pp, microbatches=microbatches)
        parts = schedule.parts(costs, pp) if costs else ()
        timeline = simulate(schedule.actions(pp, microbatches))
    except ValueError as error:
        raise NanotrainError(f"{title}: {error}") from None
    except Exception as error:
        raise PluginError(f"{title} raised {describe(error)}") from error
    counts = f"pp {pp}, {microbatches} microbatch{'es' if microbatches > 1 else ''}"
    print(f"{title}: {counts}, {timeline.makespan:g} units of time, bubble {timeline.bubble():.1%}\n")
    for line in draw(timeline, shutil.get_terminal_size().columns if sys.stdout.isatty() else None):
        print(line)
    for stage, part in enumerate(parts):
        print(f"{'' if stage else chr(10)}stage {stage} on rank {part.rank}: {_contents(part)}")
    return Exit.DONE


def _of_name(args: argparse.Namespace) -> tuple[str, Schedule, int, int, Costs | None]:
    """Return title, schedule, ranks, microbatches and equal layers of a schedule without a recipe."""
    asked = plugin_arguments(args)
    registry = load_plugins(block=asked.blocked, local=asked.local)
    component = registry.get("schedule", args.subject)
    pp = args.pp or (4 if "pp" in component.mesh_dims else 1)
    table: dict[str, Any] = {"v": args.v} if args.v else {}
    for number, text in enumerate(args.set, start=1):
        table |= override_source(number, text).data
    config, problems = structure(table, component.config, "schedule")
    if problems:
        raise RecipeError([f"{problem.key}: {problem.message}" for problem in problems])
    schedule: Schedule = registry.build(Selection("schedule", args.subject, config))
    if pp > 1 and "pp" not in component.mesh_dims:
        raise NanotrainError(f"schedule '{args.subject}' has no pipeline: expected --pp 1, got {pp}")
    layers = args.layers or _listed_layers(table)
    costs = Costs.alike(layers) if layers else None
    return args.subject, schedule, pp, args.microbatches or 8, costs


def _listed_layers(table: Mapping[str, Any]) -> int:
    """Return how many layers the key ``layers`` of a schedule's table splits, 0 if it has none."""
    layers = table.get("layers")
    return sum(layers) if isinstance(layers, list) and all(type(n) is int for n in layers) else 0


def _of_recipe(args: argparse.Namespace) -> tuple[str, Schedule, int, int, Costs]:
    """Return title, schedule, ranks, microbatches and the model's costs, which require torch."""
    remedies = {
        "pp": "topology.pp",
        "v": "schedule.v",
        "layers": "model.layers",
        "microbatches": "batch.sequences",
    }
    for option, key in remedies.items():
        if getattr(args, option) is not None:
            raise NanotrainError(f"--{option} goes with a schedule's name; of a recipe --set {key}=N")
    found = resolve_recipe(args.subject, overrides=args.set, plugins=plugin_arguments(args))
    schedule: Schedule = found.registry.build(found.recipe.schedule)
    model: Model = found.registry.build(found.recipe.model)
    return (
        f"{args.subject}: {found.recipe.schedule.use}",
        schedule,
        found.layout.degree("pp"),
        microbatches_of(found.recipe, found.layout),
        # A run splits its stages once, for this length.
        model.flops(PhaseTimeline(found.recipe).largest().batch.length),
    )


def _contents(part: Part) -> str:
    """Describe the contents of a stage."""
    layers = (
        f"layers {part.first} to {part.last - 1}" if part.last - part.first > 1 else f"layer {part.first}"
    )
    held = ["embedding"] * part.has_embedding
    held += [layers] if part.last > part.first else ["no layers"]
    return ", ".join([*held, *["head"] * part.has_head])
