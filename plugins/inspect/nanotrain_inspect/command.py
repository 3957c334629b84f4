"""``nanotrain inspect PATH [OTHER]``: what saved weights are, and how two of them differ."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from nanotrain_core.api import (
    PIPED_WIDTH,
    Exit,
    NanotrainError,
    add_plugin_options,
    did_you_mean,
    did_you_mean_path,
    did_you_mean_run,
    is_recipe,
    json_text,
    load_plugins,
    natural_sort_key,
    plugin_arguments,
    shipped_recipes,
    show_progress,
    unsigned_int,
)
from nanotrain_inspect.experts import loads_of, loads_told, norms_of, norms_told

if TYPE_CHECKING:
    from nanotrain_core.api.torch import Weights
    from nanotrain_inspect.statistics import Difference, Statistics

_NUMBERS = ("rms", "largest", "outliers", "not finite")
PARAMETER_COLUMNS = ("parameter", "shape", "dtype", "parameters", "mean", *_NUMBERS)
LAYER_COLUMNS = ("module", "tensors", "parameters", "share", *_NUMBERS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    what = (
        "a run folder (its newest checkpoint), a checkpoint, a Hugging Face folder, or a converted one; "
        "with nanotrain-plan also a recipe"
    )
    parser.add_argument("path", metavar="PATH", help=what)
    parser.add_argument("other", metavar="OTHER", nargs="?", help="compare with these weights")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="parameters, 'layers.0.*'; may be repeated",
    )
    parser.add_argument("--all", action="store_true", help="one line per parameter instead of per layer")
    parser.add_argument(
        "--top", type=unsigned_int, default=5, metavar="N", help="outliers to list (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_plugin_options(parser)


def run(args: argparse.Namespace) -> int:
    """Read and print; the exit code is 2 if the weights are damaged.

    Raises:
        NanotrainError: there are no weights. A recipe's model is shown by ``nanotrain-plan``.
    """
    if is_recipe(args.path) and not Path(args.path).is_dir():
        how = "pip install nanotrain-plan (in a checkout: pip install -e plugins/plan)"
        raise NanotrainError(f"{args.path} is a recipe; to see what its model is: {how}")
    asked = plugin_arguments(args)
    registry = load_plugins(block=asked.blocked, local=asked.local)

    if not Path(args.path).exists():
        raise NanotrainError(_missing(args.path))

    from nanotrain_core.api.torch import open_weights

    paths = [path for path in (args.path, args.other) if path is not None]
    opened = [open_weights(Path(path), registry) for path in paths]
    damaged = [_is_damaged(path, weights, args) for path, weights in zip(paths, opened, strict=True)]
    code = _show(opened[0], args) if args.other is None else _compare(opened[0], opened[1], args)
    return Exit.USER if any(damaged) else code


def _is_damaged(path: str, weights: Weights, args: argparse.Namespace) -> bool:
    """Compare the files with their hashes, and tell what is wrong: damaged numbers are shown all the same.

    That reads all files: a look at a few parameters of a large checkpoint does without, and says so.
    """
    if args.only:
        if weights.step is not None:  # other weights have no hashes
            say = f"{path} was not compared with its hashes, as --only is given"
            print(f"nanotrain: note: {say}: `nanotrain ckpt verify {path}` does so", file=sys.stderr)
        return False
    with show_progress("verifying weights"):
        problems = weights.reader.damage()
    for problem in problems:
        print(f"nanotrain: {problem}", file=sys.stderr)
    return bool(problems)


def _missing(word: str) -> str:
    """Return what to tell of a path where nothing is: the run, file or recipe that may be meant."""
    recipes = sorted(name.removesuffix(".toml") for name in shipped_recipes() if "/" not in name)
    near = did_you_mean_run(Path(word)) or did_you_mean_path(Path(word), recipes)
    known = near or f"; recipes are {', '.join(recipes)}"
    return f"{word}: there is no such file, folder or recipe{known}"


def chosen(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that match any of the patterns, in their natural order; all, if there are none.

    Raises:
        NanotrainError: a pattern matches none.
    """
    known = sorted(names, key=natural_sort_key)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            near = did_you_mean(pattern, known)
            raise NanotrainError(f"--only {pattern}: no parameter is called that{near}")
    return [name for name in known if not patterns or any(fnmatchcase(name, p) for p in patterns)]


# --- one model --------------------------------------------------------------------------------


def _show(weights: Weights, args: argparse.Namespace) -> int:
    from nanotrain_inspect.statistics import statistics_of

    names = chosen(weights.reader.shapes, args.only)
    found = []
    with show_progress("reading weights", total=len(names), unit="parameters") as advance:
        for name in names:
            found.append(statistics_of(weights.reader, name))
            advance(1)
    norms = norms_of(found)
    loads = loads_of(Path(args.path)) if norms else {}
    if args.json:
        table = {
            "model": weights.selection.use,
            "parameters": [attrs.asdict(each) for each in found],
            "expert_loads": {name: attrs.asdict(load) for name, load in loads.items()},
        }
        print(json_text(table, indent=2))
        return Exit.DONE
    count = sum(each.count for each in found)
    print(f"{args.path}: model '{weights.selection.use}', {count:,} parameters in {len(found)} tensors")
    if args.all:
        _print(PARAMETER_COLUMNS, [_row(each) for each in found])
    else:
        _print(LAYER_COLUMNS, [_layer_row(name, each, count) for name, each in by_layer(found).items()])
    _tell_outliers(found, args.top)
    if norms:
        print(*norms_told(norms), *loads_told(loads), sep="\n")
    return Exit.DONE


def by_layer(found: Sequence[Statistics]) -> dict[str, list[Statistics]]:
    """Group parameters by layer, ``layers.3``; those outside of layers by their module."""
    groups: dict[str, list[Statistics]] = {}
    for each in found:
        layer = re.match(r"\w+\.\d+(?=\.)", each.name)
        groups.setdefault(layer[0] if layer else each.name.rpartition(".")[0] or each.name, []).append(each)
    return groups


def _row(each: Statistics) -> tuple[str, ...]:
    shape = " x ".join(map(str, each.shape)) or "scalar"
    numbers = (f"{each.mean:.3g}", f"{each.rms:.4g}", f"{each.max_abs:.4g}", _share(each.outliers))
    return each.name, shape, each.dtype, f"{each.count:,}", *numbers, _bad(each.nonfinite)


def _layer_row(name: str, group: Sequence[Statistics], whole: int) -> tuple[str, ...]:
    count = sum(each.count for each in group)
    rms = (sum(each.rms**2 * each.count for each in group) / max(1, count)) ** 0.5
    outliers = sum(each.outliers * each.count for each in group) / max(1, count)
    numbers = (f"{rms:.4g}", f"{max(each.max_abs for each in group):.4g}", _share(outliers))
    bad = _bad(sum(each.nonfinite for each in group))
    return name, str(len(group)), f"{count:,}", f"{count / max(1, whole):.1%}", *numbers, bad


def _share(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _bad(count: int) -> str:
    return f"{count:,}" if count else ""


def _tell_outliers(found: Sequence[Statistics], top: int) -> None:
    ordered = sorted((each for each in found if len(each.shape) > 1), key=lambda each: -each.peak)
    if ordered and top > 0:
        print("\nlargest outliers of matrices: largest magnitude over root mean square")
    for each in ordered[:top]:
        print(f"  {each.peak:8.1f}  {each.name}, {each.max_abs:.4g} where the rms is {each.rms:.4g}")


# --- two models -------------------------------------------------------------------------------


def _compare(first: Weights, second: Weights, args: argparse.Namespace) -> int:
    from nanotrain_inspect.statistics import difference_of

    ours, theirs = first.reader.shapes, second.reader.shapes
    names = chosen(ours.keys() | theirs.keys(), args.only)
    both = [
        name for name in names if name in ours and name in theirs and tuple(ours[name]) == tuple(theirs[name])
    ]
    found = []
    with show_progress("comparing weights", total=len(both), unit="parameters") as advance:
        for name in both:
            found.append(difference_of(first.reader, second.reader, name))
            advance(1)
    unlike = {
        name: (_shape_of(ours.get(name)), _shape_of(theirs.get(name))) for name in names if name not in both
    }
    if args.json:
        table = {"parameters": [attrs.asdict(each) for each in found], "unlike": unlike}
        print(json_text(table, indent=2))
        return Exit.DONE
    same = sum(each.differing == 0.0 for each in found)
    print(f"{args.path} and {args.other}: {same} of {len(names)} tensors have the same values")
    for name, (one, other) in unlike.items():
        print(f"  {name}: {one} in the first, {other} in the second")
    different = sorted((each for each in found if each.differing), key=lambda each: -each.relative)
    shown = different if args.all else different[: max(args.top, 20)]
    if shown:
        columns = ("parameter", "relative difference", "largest", "cosine", "elements that differ")
        _print(columns, [_difference_row(each) for each in shown])
    if len(shown) < len(different):
        print(f"... and {len(different) - len(shown)} more that differ less: --all lists them")
    return Exit.DONE


def _shape_of(shape: Any) -> str:
    return "missing" if shape is None else " x ".join(map(str, shape)) or "scalar"


def _difference_row(each: Difference) -> tuple[str, ...]:
    numbers = (f"{each.relative:.3e}", f"{each.max_abs:.3e}", f"{each.cosine:.6f}", f"{each.differing:.1%}")
    return each.name, *numbers


def _print(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(table)
