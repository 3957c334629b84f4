"""``nanotrain plan RECIPE``: what a recipe takes on any hardware, from a dry run of its own objects."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from nanotrain_core.api import (
    Exit,
    NanotrainError,
    add_recipe_options,
    check_modules,
    plugin_arguments,
    positive_int,
    resolve_recipe,
    usable_processors,
)
from nanotrain_plan.garbage import seldom_collected
from nanotrain_plan.hardware import find_hardware, shipped
from nanotrain_plan.options import (
    amount,
    count,
    factor,
    seed,
    share,
    world_size,
)

if TYPE_CHECKING:
    from nanotrain_core.api import Registry
    from nanotrain_plan.advice import Advice
    from nanotrain_plan.plan import Plan
    from nanotrain_plan.simulation import Simulated
    from nanotrain_plan.sweep import Swept


#: Options that only the simulation reads.
SIMULATED = (
    "slow_ranks",
    "slow_factor",
    "failure_hours",
    "checkpoint_minutes",
    "restart_minutes",
    "times",
    "draws",
    "seed",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_recipe_options(parser)
    parser.add_argument(
        "--ranks",
        type=positive_int,
        metavar="N",
        help="devices to plan for (default: the recipe's run.ranks)",
    )
    parser.add_argument(
        "--hardware",
        metavar="NAME|FILE",
        help=f"{', '.join(shipped())}, or your own TOML file (default: h100; cpu where run.device is)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: docs/planning.md lists the keys")
    parser.add_argument("--html", metavar="FILE", help="also write an HTML page with the pipeline's timeline")
    parser.add_argument(
        "--sweep",
        type=positive_int,
        nargs="?",
        const=500,
        metavar="N",
        help="also compare N layouts (default: 500) by tokens/s, those left out by bounds counted; takes "
        "seconds to minutes",
    )
    many = parser.add_argument_group("simulation of a long run, with --simulate")
    many.add_argument("--simulate", action="store_true", help="also simulate slow ranks and failures")
    many.add_argument(
        "--slow-ranks",
        type=share,
        default=0.01,
        metavar="SHARE",
        help="probability that a rank is slow in a step (default: 0.01)",
    )
    many.add_argument(
        "--slow-factor",
        type=factor,
        default=1.5,
        metavar="X",
        help="factor by which slow ranks take longer (default: 1.5)",
    )
    many.add_argument(
        "--failure-hours",
        type=amount,
        metavar="H",
        help="hours between failures of the run (default: 50,700 over its number of ranks, as in Llama 3)",
    )
    many.add_argument(
        "--checkpoint-minutes",
        type=amount,
        metavar="M",
        help="minutes between checkpoints (default: the recipe's)",
    )
    many.add_argument(
        "--restart-minutes",
        type=amount,
        default=5.0,
        metavar="M",
        help="minutes from a failure until the run trains again (default: 5)",
    )
    many.add_argument(
        "--times", metavar="FILE", help="JSON of measured seconds of actions: docs/planning.md lists its keys"
    )
    many.add_argument(
        "--draws", type=count, default=1000, metavar="N", help="simulated steps (default: 1000)"
    )
    many.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="seed of the random numbers (default: 0)"
    )
    parser.add_argument(
        "--no-advice", action="store_true", help="do not search for changes that make a recipe fit"
    )


@seldom_collected()  # imports make more objects than anything else here
def run(args: argparse.Namespace) -> int:
    """Print the plan; the exit code says whether it fits, and whether a run would be refused.

    Raises:
        NanotrainError: the recipe cannot run, an option is wrong, or there is no such hardware.
    """
    from nanotrain_plan.rendering.file import check_page, tell_page, write_page

    check_page(args)
    _check_simulation(args)
    ranks, option = world_size(args)
    hardware = find_hardware(args.hardware) if args.hardware is not None else None
    found = resolve_recipe(
        args.recipe,
        overrides=args.set,
        plugins=plugin_arguments(args),
        ranks=ranks,
        ranks_option=option,
    )
    check_modules(found)
    _check_failures(args, found.layout.world_size)
    hardware = hardware or find_hardware("cpu" if found.recipe.run.device == "cpu" else "h100")
    if args.nproc is not None:
        hardware = attrs.evolve(hardware, devices_per_node=args.nproc)
    for note in found.notes:
        print(f"nanotrain: note: {note}", file=sys.stderr)
    from nanotrain_plan.plan import make_plan, to_json

    plan = make_plan(found.recipe, found.registry, found.layout, hardware, processes=usable_processors())
    swept = _sweep(args.sweep, plan, found.registry)
    simulated = _simulate(args, plan)
    skip = plan.fits or args.no_advice or swept
    advice = None if skip else _advise(plan, found.registry)
    if args.html:
        from nanotrain_plan.page import page

        write_page(args, page(plan, advice))
    if args.json:
        table = to_json(plan)
        table["memory"]["advice"] = [
            {"change": a.told, "peak": a.peak, "fits": a.fits, "tokens_per_second": a.tokens_per_second}
            for a in advice or ()
        ]
        if swept:
            table["sweep"] = attrs.asdict(swept)
        if simulated:
            from nanotrain_plan.simulation import as_table

            table["simulation"] = as_table(simulated)
        json.dump(table, sys.stdout, indent=1)
        print()
    else:
        from nanotrain_plan.rendering.terminal import plain_console
        from nanotrain_plan.show import show, show_sweep

        console = plain_console(140)
        show(plan, advice, console)
        if swept:
            show_sweep(swept, plan, console)
        if simulated:
            from nanotrain_plan.show_simulation import show_simulation

            show_simulation(simulated, plan, console)
    tell_page(args)
    return Exit.DONE if plan.fits_everywhere and not plan.refusals else Exit.USER


def _sweep(limit: int | None, plan: Plan, registry: Registry) -> Swept | None:
    """Return other layouts, if they are asked for; tell on a terminal how many were examined."""
    if limit is None:
        return None
    from nanotrain_plan.sweep import sweep

    with _shown(f"examined {{}} of at most {limit} layouts") as tell:
        return sweep(plan, registry, limit, tell)


def _advise(plan: Plan, registry: Registry) -> Sequence[Advice]:
    """Return what would make a recipe fit; tell on a terminal how many changes were planned."""
    from nanotrain_plan.advice import advise

    with _shown("the recipe does not fit; changes tried: {}") as tell:
        return advise(plan, registry, tell)


@contextmanager
def _shown(told: str) -> Iterator[Callable[[int], None]]:
    """Give what shows a count on a terminal, in one line of stderr."""
    terminal = sys.stderr.isatty()

    def tell(number: int) -> None:
        if terminal:
            print("\r" + told.format(number), end="", file=sys.stderr, flush=True)

    try:
        yield tell
    finally:
        if terminal:
            print(file=sys.stderr)


def _check_simulation(args: argparse.Namespace) -> None:
    """Check that options of the simulation come with it, and the file of measured times.

    Raises:
        NanotrainError: there is one, and no ``--simulate``; or the file is wrong.
    """
    if args.simulate:
        if args.times is not None:
            from nanotrain_plan.simulation import read_times

            read_times(
                Path(args.times)
            )  # how many stages there are is known after the plan, which takes long
        return
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for name in SIMULATED:
        if getattr(args, name) != parser.get_default(name):
            raise NanotrainError(f"--{name.replace('_', '-')} is of the simulation: add --simulate")


def _check_failures(args: argparse.Namespace, ranks: int) -> None:
    """Check that a run can go on between failures, or its simulation would not end either.

    Raises:
        NanotrainError: it restarts, or trains from one checkpoint to the next, for too long.
    """
    if not args.simulate:
        return
    from nanotrain_plan.goodput import MOST_FAILURES
    from nanotrain_plan.simulation import DEVICE_HOURS

    between = 60 * (args.failure_hours or DEVICE_HOURS / ranks)
    for name in ("restart_minutes", "checkpoint_minutes"):
        minutes = getattr(args, name)
        if minutes is not None and minutes > MOST_FAILURES * between:
            option, most = f"--{name.replace('_', '-')}", MOST_FAILURES * between
            raise NanotrainError(
                f"{option} {minutes:g}: the run fails every {between:.3g} minutes, so that it would hardly "
                f"ever go on; expected at most {most:.3g}"
            )


def _simulate(args: argparse.Namespace, plan: Plan) -> Simulated | None:
    """Return what a long run of the plan meets, if it is asked for."""
    if not args.simulate:
        return None
    from nanotrain_plan.many import Stragglers
    from nanotrain_plan.simulation import Wanted, simulate_plan

    wanted = Wanted(
        stragglers=Stragglers(share=args.slow_ranks, factor=args.slow_factor),
        failure_hours=args.failure_hours,
        checkpoint_minutes=args.checkpoint_minutes,
        restart_minutes=args.restart_minutes,
        steps=args.draws,
        seed=args.seed,
        times=None if args.times is None else Path(args.times),
    )
    return simulate_plan(plan, wanted)
