"""``nanotrain conformance KIND:NAME``: every check of a component, without writing a test."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import attrs

from nanotrain_core.cli.common import positive
from nanotrain_core.component import KINDS
from nanotrain_core.errors import Exit, NanotrainError, RecipeError, did_you_mean
from nanotrain_core.recipe.source import override_source

if TYPE_CHECKING:
    from nanotrain_core.testing.case import Case


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("component", metavar="KIND:NAME", help="for example parallel:ddp")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the component's own table"
    )
    parser.add_argument(
        "--with",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="a key of the recipe around it, for example batch.length=32",
    )
    parser.add_argument(
        "--degree", action="append", default=[], metavar="DIM=N", help="the layout, for example dp=2"
    )
    parser.add_argument(
        "--nproc", type=positive, metavar="N", help="ranks, if not the fewest that have the degrees"
    )
    parser.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="PATH",
        help="also load this file or folder as a plugin",
    )


def run(args: argparse.Namespace) -> int:
    """Print a line for each check, and the reasons of those that failed."""
    from nanotrain_core.testing import Case, close_pools, failures, trials

    kind, use = _component(args.component)
    ranks = {"world_size": args.nproc} if args.nproc else {}
    case = Case(
        kind,
        use=use,
        config=_tables("--set", args.set),
        topology=_degrees(args.degree),
        overrides=_tables("--with", args.overrides),
        plugins=args.plugin,
        **ranks,
    )
    case.settings()
    told: set[str] = set()
    failed = 0
    for trial in trials(case):
        error = failures([trial]).get(trial.label)
        failed += error is not None
        print(f"{'ok    ' if error is None else 'FAILED'} {trial.id}: {trial.check.invariant}")
        for line in _reason(error, told):
            print(f"       {line}")
    close_pools()
    print(f"{failed} failed" if failed else f"all checks passed{_untried(case)}")
    return Exit.FAILED if failed else Exit.DONE


def _untried(case: Case) -> str:
    """Return what to add about checks that one rank is too few for."""
    from nanotrain_core.testing.checks import checks_of

    if case.world_size > 1:
        return ""
    tried = {check.name for check in checks_of(case)}
    names = [c.name for c in checks_of(attrs.evolve(case, world_size=2)) if c.name not in tried]
    return f"; not tried, for want of ranks (--degree DIM=N): {', '.join(names)}" if names else ""


def _reason(error: Exception | None, told: set[str]) -> list[str]:
    """Return the lines to print under a check; what failed others for the same reason stands there."""
    text = "" if error is None else str(error)
    if text in told:
        return ["for the same reason"]
    told.update({text} if text else ())
    return text.splitlines()


def _component(text: str) -> tuple[str, str]:
    kind, _, use = text.partition(":")
    if kind not in KINDS or not use:
        near, kinds = "" if kind in KINDS else did_you_mean(kind, KINDS), ", ".join(KINDS)
        raise NanotrainError(f"expected KIND:NAME such as parallel:ddp, got '{text}'{near}; kinds: {kinds}")
    return kind, use


def _degrees(lines: list[str]) -> dict[str, int]:
    """Read lines such as ``dp=2``."""
    form = "DIM=N such as dp=2"
    degrees = _tables("--degree", lines, form)
    for dim, degree in degrees.items():
        if type(degree) is not int or degree < 1:
            raise NanotrainError(f"--degree: expected {form} with a number above 0, got {dim}={degree}")
    return degrees


def _tables(option: str, lines: list[str], form: str = "KEY=VALUE as in a recipe") -> dict[str, Any]:
    """Read lines such as ``batch.length=32`` or ``model.use=mine``, as ``--set`` of a recipe does."""
    tables: dict[str, Any] = {}
    for number, line in enumerate(lines, start=1):
        try:
            _lay_over(tables, override_source(number, line).data)
        except RecipeError as error:
            reason = str(error).partition(": ")[2]
            raise NanotrainError(f"{option}: expected {form}, got {line}: {reason}") from None
    return tables


def _lay_over(tables: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(tables.get(key), dict):
            _lay_over(tables[key], value)
        else:
            tables[key] = value
