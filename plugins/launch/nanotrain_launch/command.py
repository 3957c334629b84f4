"""``nanotrain launch slurm|k8s|torchrun|ssh RECIPE --nodes N``: the script that runs it there."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import attrs

from nanotrain_core.api import (
    Exit,
    Layout,
    NanotrainError,
    Recipe,
    Registry,
    Resolution,
    add_recipe_options,
    fewest_machines,
    input_problems,
    plugin_arguments,
    positive_int,
    resolve_recipe,
    unsigned_int,
    write_problem,
    write_text_atomically,
)
from nanotrain_launch import fits, kubernetes, slurm, ssh, torchrun
from nanotrain_launch.job import Job
from nanotrain_launch.options import Option, read_environment, read_options

TARGETS: dict[str, ModuleType] = {"slurm": slurm, "k8s": kubernetes, "torchrun": torchrun, "ssh": ssh}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("target", choices=list(TARGETS), help="the tool that starts processes there")
    add_recipe_options(parser)
    parser.add_argument("--nodes", type=positive_int, metavar="N", help="machines, as --nnodes")
    parser.add_argument(
        "--min-nnodes",
        type=positive_int,
        metavar="N",
        help="as of `nanotrain run`: machines that are enough to begin, and to go on with",
    )
    parser.add_argument(
        "--check-hosts",
        action="store_true",
        help="have `nanotrain doctor` examine each machine first: one that is unfit does not join",
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the target, may be repeated: "
        + "; ".join(f"{name}: {', '.join(target.OPTIONS)}" for name, target in TARGETS.items()),
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an environment variable for the ranks",
    )
    parser.add_argument("--out", metavar="FILE", help="write the script there instead of printing it")
    parser.add_argument("--folder", metavar="PATH", help="run folder (run.folder, or runs/<name>)")
    parser.add_argument("--max-restarts", type=unsigned_int, metavar="N", help="as in `nanotrain run`")
    parser.add_argument(
        "--hardware",
        metavar="NAME|FILE",
        help="hardware for `nanotrain plan` (h100, or cpu with run.device)",
    )
    parser.add_argument(
        "--no-plan", action="store_true", help="do not check with `nanotrain plan` whether it fits"
    )


def run(args: argparse.Namespace) -> int:
    """Check the recipe, plan it, and print the script.

    Raises:
        NanotrainError: the recipe cannot run, does not fit, or an option is wrong.
    """
    target = TARGETS[args.target]
    known: dict[str, Option] = target.OPTIONS
    problem = "" if args.out is None else write_problem(Path(args.out), recipe=args.recipe)
    if problem:
        raise NanotrainError(f"--out {args.out}: {problem}")
    options = read_options(args.target, args.option, known)
    environment = read_environment(args.env)
    option = _choose_sizes(args)
    found = resolve_recipe(
        args.recipe,
        overrides=args.set,
        plugins=plugin_arguments(args),
        ranks=args.nproc * args.nnodes,
        ranks_option=f"--nproc x {option}",
    )
    recipe = found.recipe
    restarts = recipe.run.max_restarts if args.max_restarts is None else args.max_restarts
    _check_fewest(args, option, recipe, restarts)
    for text in (*found.notes, *_notes(args, recipe, found.layout), *_missing(found)):
        _tell(text)
    if args.target == "ssh":
        options.setdefault("workdir", str(Path.cwd()))
    job = Job(
        recipe=args.recipe,
        name=recipe.run.name,
        nodes=args.nnodes,
        nproc=args.nproc,
        gpus=recipe.run.device != "cpu",
        grace=recipe.run.grace,
        patience=max(recipe.run.timeout, recipe.run.hang_timeout),
        folder=args.folder or recipe.run.folder or f"runs/{recipe.run.name}",
        changes=_changes(args),
        max_restarts=restarts,
        min_nodes=args.min_nnodes,
        checks_hosts=args.check_hosts,
        environment=environment,
        made_by=shlex.join(["nanotrain", *args.words]),
    )
    script = target.script(job, options)  # rejects wrong options before the plan, which takes seconds
    if not args.no_plan and (plan := _planned(args, recipe, found.registry)):
        script = target.script(attrs.evolve(job, plan=plan), options)
    return _deliver(script, args.out)


def _choose_sizes(args: argparse.Namespace) -> str:
    """Fill in ranks of a node from the recipe's own ranks, where they divide.

    Returns:
        The option that the number of nodes was given by: errors name it.

    Raises:
        NanotrainError: the number of nodes is missing, given twice, or does not divide the ranks.
    """
    if None not in (args.nodes, args.nnodes) and args.nodes != args.nnodes:
        raise NanotrainError(f"--nodes {args.nodes}, but --nnodes {args.nnodes}: give one of them")
    option = "--nnodes" if args.nodes is None else "--nodes"
    args.nnodes = nodes = args.nnodes if args.nodes is None else args.nodes
    if nodes is None:
        raise NanotrainError("give the number of machines with --nodes N")
    if any("\n" in word for word in (args.recipe, *args.set, *args.plugin, *args.env, args.folder or "")):
        raise NanotrainError("a script has one line for each word: expected no line break in any")
    if args.nproc is None:
        found = resolve_recipe(args.recipe, overrides=args.set, plugins=plugin_arguments(args))
        ranks = found.recipe.run.ranks
        if ranks % nodes:
            say = "give the ranks of a node with --nproc N (as many as it has GPUs)"
            divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
            near = sorted(sorted(divisors, key=lambda n: abs(n - nodes))[:2])
            raise NanotrainError(
                f"{option} {nodes}: run.ranks = {ranks} cannot be shared evenly by {nodes} nodes: {say}, "
                f"or {option} {' or '.join(map(str, near))}"
            )
        args.nproc = ranks // nodes
    return option


def _check_fewest(args: argparse.Namespace, option: str, recipe: Recipe, restarts: int) -> None:
    """Check that the recipe runs on every number of machines that ``--min-nnodes`` allows.

    Raises:
        NanotrainError: it does not, the number is not valid, or ranks would not be restarted.
    """
    least = args.min_nnodes
    if least is None:
        return
    if least > args.nnodes:
        raise NanotrainError(f"--min-nnodes {least}: expected at most {option}, which is {args.nnodes}")
    if least < args.nnodes and not restarts:
        text = "all ranks start again where a machine is lost: give --max-restarts N as well"
        raise NanotrainError(f"--min-nnodes {least}: {text}")
    fewest_machines(args, recipe)


def _changes(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the options that change the recipe, as they were given."""
    given = (("--set", args.set), ("--plugin", args.plugin), ("--no-plugin", args.no_plugin))
    return tuple(word for option, values in given for value in values for word in (option, value))


def _notes(args: argparse.Namespace, recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Yield notes on settings that work, but may be unintended."""
    width = layout.degree("tp")
    if args.nnodes > 1 and (width > args.nproc or args.nproc % width):
        yield f"tp = {width} spans nodes of {args.nproc} ranks: its collectives use the network between nodes"
    if recipe.run.hang_timeout >= recipe.run.timeout:
        yield "run.hang_timeout is not below run.timeout: a hang is noticed, but not which rank caused it"


def _missing(found: Resolution) -> Iterator[str]:
    """Yield what of the recipe's data and weights is missing or does not fit on this machine."""
    for problem in input_problems(found):
        yield f"on this machine {problem.key}: {problem.message}; each node checks this when it starts"


def _planned(args: argparse.Namespace, recipe: Recipe, registry: Registry) -> str:
    """Return the plan in a line, empty if nothing plans here.

    Raises:
        NanotrainError: the recipe does not fit.
    """
    usual = "cpu" if recipe.run.device == "cpu" else "h100"
    hardware = usual if args.hardware is None else args.hardware
    words = [args.recipe, *_changes(args), "--nnodes", str(args.nnodes), "--nproc", str(args.nproc)]
    plan = fits.plan(registry, words, hardware)
    if plan is None:
        _tell("nanotrain-plan is not installed: whether the recipe fits was not checked")
        return ""
    fits.refuse_larger_nodes(plan, args.nproc, args.nproc * args.nnodes, hardware)
    fits.refuse_other_hardware(plan, hardware)
    fits.refuse_what_does_not_fit(plan, words, hardware)
    seconds = fits.saving_takes(plan)
    if seconds > recipe.run.grace:
        text = (
            f"a last step and checkpoint take {seconds:.0f} s by plan, and run.grace is {recipe.run.grace:g}"
        )
        _tell(f"{text}: raise it, and the script's time with it")
    return fits.summary(plan, hardware)


def _deliver(script: str, out: str | None) -> int:
    """Print a script, or write it to a file that can be executed if it is a shell's.

    Raises:
        NanotrainError: it cannot be written.
    """
    if out is None:
        print(script, end="")
        return Exit.DONE
    path = Path(out).resolve()  # a symbolic link stays one
    try:
        write_text_atomically(path, script)
        if script.startswith("#!"):
            path.chmod(path.stat().st_mode | 0o111)
    except OSError as problem:
        raise NanotrainError(f"--out {out}: {problem.strerror}") from None
    print(f"wrote {out}")
    return Exit.DONE


def _tell(text: str) -> None:
    print(f"nanotrain: note: {text}", file=sys.stderr)
