"""``nanotrain conformance KIND:NAME``: every check of a component, without writing a test."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from nanotrain_core.cli.argument_types import positive_int
from nanotrain_core.component import KINDS
from nanotrain_core.errors import Exit, NanotrainError, RecipeError, did_you_mean
from nanotrain_core.recipe.merge import merge_tables
from nanotrain_core.recipe.source import override_source

if TYPE_CHECKING:
    from nanotrain_core.testing.campaign import Options, Result
    from nanotrain_core.testing.trial_process import Listing

#: Prefix of a line, by verdict.
MARKS = {
    "passed": "ok     ",
    "failed": "FAILED ",
    "hung": "HUNG   ",
    "skipped": "skipped",
    "failed as expected": "xfail  ",
    "passed, though a failure was expected": "XPASS  ",
}


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
        help="a key of the surrounding recipe, for example batch.length=32",
    )
    parser.add_argument(
        "--degree", action="append", default=[], metavar="DIM=N", help="the layout, for example dp=2"
    )
    parser.add_argument(
        "--nproc",
        type=positive_int,
        metavar="N",
        help="ranks, if not the smallest number with these degrees",
    )
    parser.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="PATH",
        help="also load this file or folder as a plugin",
    )
    parser.add_argument(
        "--quick", action="store_true", help="only the component as it is, without every layout and model"
    )
    parser.add_argument("--list", action="store_true", help="list the checks without running them")
    parser.add_argument("--json", action="store_true", help="print results as JSON at the end")
    parser.add_argument(
        "-k",
        dest="keyword",
        default="",
        metavar="PATTERN",
        help="run checks whose id contains this; a printed line will do",
    )
    parser.add_argument("-x", dest="exitfirst", action="store_true", help="stop at the first failure")
    parser.add_argument(
        "--jobs", type=positive_int, metavar="N", help="checks to run in parallel (one per core)"
    )
    parser.add_argument(
        "--timeout", type=float, default=180.0, metavar="SECONDS", help="time limit for one check (180)"
    )
    parser.add_argument(
        "--expect-failure",
        action="append",
        default=[],
        metavar="CHECK",
        help="a check expected to fail, such as weights_equal[adamw]: passing everywhere is then a failure",
    )
    parser.add_argument(
        "--setup", metavar="COMMAND", help="run this in a shell first, for example to start a service"
    )
    parser.add_argument("--teardown", metavar="COMMAND", help="run this in a shell at the end, in any case")


def run(args: argparse.Namespace) -> int:
    """Print a line for each check, and the reasons of those that failed."""
    from nanotrain_core.testing.campaign import Campaign, Options

    options = Options(
        quick=args.quick,
        timeout=args.timeout,
        keyword=args.keyword,
        first=args.exitfirst,
        expected=args.expect_failure,
        **({"jobs": args.jobs} if args.jobs else {}),
    )
    with external_service(args.setup, args.teardown):
        campaign = Campaign(_arguments(args), options)
        try:
            listing = campaign.listing()
            if args.list:
                _print_list(listing, options, as_json=args.json)
                return Exit.DONE
            results = [*_shown(campaign.run(listing), as_json=args.json)]
        finally:
            campaign.close()
    return _conclude(results, as_json=args.json)


def _arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of a :class:`~nanotrain_core.testing.case.Case`."""
    kind, use = _component(args.component)
    return {
        "kind": kind,
        "use": use,
        "config": _tables("--set", args.set),
        "topology": _degrees(args.degree),
        "overrides": _tables("--with", args.overrides),
        "plugins": tuple(map(os.path.abspath, args.plugin)),
        **({"world_size": args.nproc} if args.nproc else {}),
    }


def _shown(results: Iterator[Result], *, as_json: bool) -> Iterator[Result]:
    """Yield results, printing each as it arrives."""
    printed: set[str] = set()
    for result in results:
        if not as_json:
            text = result.reason if result.verdict.value == "skipped" else result.invariant
            print(f"{MARKS[result.verdict.value]} {result.id}: {text}", flush=True)
            for line in _reason(result, printed):
                print(f"       {line}")
        yield result


def _conclude(results: Sequence[Result], *, as_json: bool) -> int:
    counts = Counter(result.verdict.value for result in results)
    bad = sum(result.verdict.bad for result in results)
    if as_json:
        rows = [attrs.asdict(result) | {"verdict": result.verdict.value} for result in results]
        print(json.dumps({"failed": bad, "counts": counts, "results": rows}, indent=1))
    elif not results:
        print("nothing was checked: no check has an id that -k asks for (--list shows them)")
        return Exit.USER
    else:
        others = "".join(f", {n} {word}" for word, n in counts.items() if word not in ("passed", "failed"))
        print(f"{bad} failed{others}" if bad else f"all {counts['passed']} checks passed{others}")
    return Exit.FAILED if bad else Exit.DONE


def _print_list(listing: Listing, options: Options, *, as_json: bool) -> None:
    chosen = [trial for trial in listing.trials if options.wants(trial)]
    if as_json:
        skipped = [{"id": name, "reason": reason} for name, reason in listing.skipped]
        print(json.dumps({"checks": [attrs.asdict(trial) for trial in chosen], "skipped": skipped}, indent=1))
        return
    for trial in chosen:
        print(f"{trial.id}: {trial.invariant}")
    for name, reason in listing.skipped:
        print(f"skipped {name}: {reason}")
    print(f"{len(chosen)} checks")


@contextmanager
def external_service(setup: str | None, teardown: str | None) -> Iterator[None]:
    """Run a shell command before all checks, and another one after them, whatever the result.

    Raises:
        NanotrainError: the first one failed.
    """
    if setup:
        code = subprocess.run(setup, shell=True, check=False).returncode
        if code:
            raise NanotrainError(f"--setup: '{setup}' ended with code {code}")
    try:
        yield
    finally:
        if teardown:
            code = subprocess.run(teardown, shell=True, check=False).returncode
            if code:
                print(f"--teardown: '{teardown}' ended with code {code}", file=sys.stderr)


def _reason(result: Result, printed: set[str]) -> list[str]:
    """Return the lines to print under a check; checks that failed for the same reason share them."""
    text = "" if result.verdict.value == "skipped" else result.reason
    if text in printed:
        return ["for the same reason"]
    printed.update({text} if text else ())
    return text.splitlines()


def _component(text: str) -> tuple[str, str]:
    kind, _, use = text.partition(":")
    if kind == "command":
        raise NanotrainError(
            f"'{text}' is no component: conformance has no checks of commands; "
            f'a test calls nanotrain_core.cli.main(["{use or "NAME"}", ...])'
        )
    if kind not in KINDS or not use:
        near, kinds = "" if kind in KINDS else did_you_mean(kind, KINDS), ", ".join(KINDS)
        raise NanotrainError(f"expected KIND:NAME such as parallel:ddp, got '{text}'{near}; kinds: {kinds}")
    return kind, use


def _degrees(lines: list[str]) -> dict[str, int]:
    """Parse lines such as ``dp=2``."""
    form = "DIM=N such as dp=2"
    degrees = _tables("--degree", lines, form)
    for dim, degree in degrees.items():
        if type(degree) is not int or degree < 1:
            raise NanotrainError(f"--degree: expected {form} with a number above 0, got {dim}={degree}")
    return degrees


def _tables(option: str, lines: list[str], form: str = "KEY=VALUE as in a recipe") -> dict[str, Any]:
    """Parse lines such as ``batch.length=32`` or ``model.use=mine``, like ``--set`` of a recipe."""
    tables: dict[str, Any] = {}
    for number, line in enumerate(lines, start=1):
        try:
            tables = _lay_over(tables, override_source(number, line).data)
        except RecipeError as error:
            reason = str(error).partition(": ")[2]
            raise NanotrainError(f"{option}: expected {form}, got {line}: {reason}") from None
    return tables


def _lay_over(tables: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    for name, table in more.items():
        if isinstance(table, dict) and "use" in table and isinstance(tables.get(name), dict):
            tables[name].setdefault("use", table["use"])  # it may be given after keys of its table
    return merge_tables(tables, more)
