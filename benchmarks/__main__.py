"""``python -m benchmarks [NAME ...]``: race the engine against its peers and time the commands."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks import (
    bubble,
    conformance,
    data,
    kernels,
    mesh,
    moe,
    monitors,
    narrow,
    optimizer,
    originals,
    planning,
    startup,
)
from benchmarks.cases import ALONE, CASES, DROPINS, SHARDED
from benchmarks.ours import engine
from benchmarks.race import alone, race
from benchmarks.report import Measured, markdown, write_json, write_markdown
from nanotrain_core.launch.environment import loopback

CASE_NAMES = tuple(case.name for case in (*CASES, *SHARDED, *DROPINS, *ALONE))
NAMES = (
    *CASE_NAMES,
    *originals.NAMES,
    "kernels",
    "moe",
    "monitors",
    "optimizer",
    "fp8",
    "fp4",
    "bubble",
    "startup",
    "mesh",
    "planning",
    "conformance",
    "data",
)
ON_GPU = "gpu"
TWINS = "twins"
EARLIER = "earlier"
MONITORS = "monitors"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    about = f"of {', '.join(NAMES)}; default: all, of originals those whose clone is given"
    own = f"{ON_GPU}, {TWINS}, {EARLIER} and {MONITORS}"
    about += f"; {own}, first, are commands of their own: see their --help"
    parser.add_argument("names", nargs="*", metavar="NAME", help=about)
    parser.add_argument("--rounds", type=positive, default=9, help="turns of each side (default: 9)")
    parser.add_argument("--steps", type=positive, default=3, help="optimizer steps in a turn (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the tables between its markers")
    for name, original in originals.CLONES.items():
        about = f"clone of {original.url} to race"
        parser.add_argument(f"--{name}", type=Path, metavar="CLONE", help=about)
    args = parser.parse_args(arguments)
    unknown = sorted(set(args.names) - {*NAMES})
    if unknown:
        parser.error(f"no benchmark named {', '.join(unknown)}; there are {', '.join((*NAMES, ON_GPU))}")
    args.clones = {name: getattr(args, name.replace("-", "_")) for name in originals.CLONES}
    args.originals = originals.chosen(args.names, args.clones)
    missing = originals.problems(args.originals, args.clones)
    if missing:
        parser.error("\n".join(missing))
    return args


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 0 if every bar was passed, else 1."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == [ON_GPU]:
        from benchmarks.gpu import command

        return command.main(words[1:])
    if words[:1] == [TWINS]:
        from benchmarks import twins

        return twins.main(words[1:])
    if words[:1] == [EARLIER]:
        from benchmarks import earlier

        return earlier.main(words[1:])
    if words[:1] == [MONITORS]:
        return monitors.main(words[1:])
    args = parse(words)
    names = args.names or NAMES
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback() or "")  # as `nanotrain run` sets it
    measured: list[Measured] = []
    races = [case for case in (*CASES, *SHARDED, *DROPINS) if case.name in names]
    for case in (*races, *args.originals):
        print(f"{case.name}: {args.rounds} rounds against {case.peer}", file=sys.stderr, flush=True)
        peer = case.peer_builder(args.clones)
        measured.append(
            race(case, partial(engine, local=case.local), peer, rounds=args.rounds, steps=args.steps)
        )
    for case in ALONE:
        if case.name in names:
            print(f"{case.name}: {args.rounds} rounds", file=sys.stderr, flush=True)
            measured.append(alone(case, engine, rounds=args.rounds, steps=args.steps))
    measured += kernels.measure(rounds=args.rounds * args.steps) if "kernels" in names else []
    measured += moe.measure(rounds=args.rounds) if "moe" in names else []
    measured += monitors.measure(rounds=args.rounds) if "monitors" in names else []
    measured += optimizer.measure(rounds=args.rounds) if "optimizer" in names else []
    measured += narrow.measure(rounds=args.rounds, steps=args.steps) if "fp8" in names else []
    measured += narrow.measure_packed(rounds=args.rounds, steps=args.steps) if "fp4" in names else []
    measured += measure_bubbles(args.rounds * args.steps) if "bubble" in names else []
    measured += startup.measure(rounds=args.rounds) if "startup" in names else []
    measured += mesh.measure(rounds=args.rounds) if "mesh" in names else []
    measured += planning.measure(rounds=args.rounds) if "planning" in names else []
    measured += conformance.measure() if "conformance" in names else []
    measured += data.measure(rounds=args.rounds) if "data" in names else []
    text = markdown(measured)
    print(text)
    if args.json:
        write_json(args.json, measured)
    if args.markdown:
        write_markdown(args.markdown, text)
    return 0 if all(each.passed for each in measured) else 1


def measure_bubbles(steps: int) -> list[bubble.Bubble]:
    """Measure every schedule over 2 and 4 ranks."""
    found = []
    for pp in (2, 4):
        for schedule in bubble.SCHEDULES:
            print(f"bubble of {schedule} over {pp} ranks: {steps} steps", file=sys.stderr, flush=True)
            found.append(bubble.measure(schedule, pp, steps=steps))
    return found


if __name__ == "__main__":
    sys.exit(main())
