"""``python -m benchmarks twins``: how many broken twins ``nanotrain conformance`` catches, kind by kind.

Each twin of ``tests/twins.py`` is given to it with no options. One that no check fails has survived.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks.report import write_markdown
from nanotrain_core.component import KINDS
from nanotrain_core.testing.campaign import Options, Verdict, certify

TESTS = Path(__file__).parents[1] / "tests"
MARKER = "twins"
#: Checks that all twins would fail, or might, because of the file they stand in: none of them is credited.
OF_THE_FILE = (
    "loads_without_torch",
    "describes_itself",
    "factory_can_be_imported",
    "config_is_frozen_and_documented",
    "makes_a_recipe",
)


@attrs.define(frozen=True)
class Caught:
    """What became of a twin."""

    kind: str
    fault: str
    use: str
    check: str
    """Of the first check that failed; empty: it survived."""
    why: str = ""


def faults() -> Sequence[Any]:
    """Return the classes of faults, whose plugins import one another."""
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    from twins import FAULTS

    return tuple(FAULTS)


def hunt(fault: Any, use: str, *, directly: bool = False) -> Caught:
    """Give one twin to the harness, until a check fails.

    Args:
        fault: its class.
        use: its name.
        directly: begin with the checks that are meant for the fault, which the score does not need.
    """
    arguments = {"kind": fault.kind, "use": use, "plugins": (fault.path,)}
    words = (*fault.checks, "") if directly else ("",)
    for word in words:
        options = Options(first=True, keyword=word, without=OF_THE_FILE)
        for result in certify(arguments, options):
            if result.verdict in (Verdict.FAILED, Verdict.HUNG):
                return Caught(fault.kind, fault.name, use, result.label, result.reason)
    return Caught(fault.kind, fault.name, use, "")


def table(found: Iterable[Caught]) -> str:
    """Return the score by kind and by class of fault, as Markdown."""
    each = [*found]
    lines = ["| kind | fault | twins | caught | by |", "|---|---|---|---|---|"]
    for kind in KINDS:
        for fault in dict.fromkeys(one.fault for one in each if one.kind == kind):
            mine = [one for one in each if (one.kind, one.fault) == (kind, fault)]
            caught = [one for one in mine if one.check]
            names = dict.fromkeys(f"`{one.check.partition('[')[0]}`" for one in caught)
            lines.append(f"| {kind} | {fault} | {len(mine)} | {len(caught)} | {', '.join(names)} |")
    caught_all = sum(bool(one.check) for one in each)
    share = f"{caught_all / len(each):.0%}" if each else "none"
    lines.append(f"| all | | {len(each)} | {caught_all} ({share}) | |")
    return "\n".join(lines)


def _read(path: Path) -> list[Caught]:
    """Return what an earlier run found, if there was one."""
    return [Caught(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Hunt all twins, print the table, and return 0 if none survived, else 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks twins", description=__doc__)
    parser.add_argument("--kind", choices=KINDS, help="twins of one kind alone")
    parser.add_argument("--directly", action="store_true", help="begin with the checks meant for each fault")
    parser.add_argument(
        "--found", type=Path, metavar="FILE", help="keep what is found there, and go on from what it has"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the table between its markers")
    args = parser.parse_args(arguments)
    known = {(one.kind, one.use): one for one in _read(args.found)} if args.found else {}
    found = []
    for fault in faults():
        for use in fault.twins if args.kind in (None, fault.kind) else ():
            one = known.get((fault.kind, use)) or hunt(fault, use, directly=args.directly)
            found.append(attrs.evolve(one, fault=fault.name))  # its class may have another name by now
            if args.found and (fault.kind, use) not in known:
                with args.found.open("a") as file:
                    file.write(json.dumps(attrs.asdict(one)) + "\n")
            word = "caught  " if one.check else "SURVIVED"
            print(f"{word} {fault.kind}:{use} {one.check}", flush=True)
    text = table(found)
    print(text)
    if args.markdown:
        write_markdown(args.markdown, text, MARKER)
    return 0 if all(one.check for one in found) else 1
