"""``python -m benchmarks gpu``: equality, tests, speed and memory on one GPU, against the bars.

Each part runs in a process of its own. One that fails is reported by its name and the others go on; what a
part had measured before is kept. Exit code 1: something failed, a bar was missed, or a part had no time.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs

from benchmarks.gpu.parts import MACHINE, PARTS, Part
from benchmarks.gpu.process import alone, context
from benchmarks.gpu.records import last_words, read
from benchmarks.gpu.result import Done, Result, commit
from benchmarks.gpu.settings import Settings
from benchmarks.report import write_markdown
from nanotrain_core.launch.cuda import set_allocator

#: Seconds at the end that no part is given.
RESERVE = 8.0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    names = ", ".join(f"{part.name} ({part.about})" for part in PARTS)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {names}; default: all, in this order")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="what does not fit is left out (default: 9)"
    )
    about = "where result.json, table.md, log.txt and profiles go (default: gpu-benchmark)"
    parser.add_argument("--folder", type=Path, default=Path("gpu-benchmark"), help=about)
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="put the tables between its gpu markers"
    )
    parser.add_argument(
        "--nanogpt", type=Path, metavar="CLONE", help="of https://github.com/karpathy/nanoGPT"
    )
    about = "keep the parts that the folder's result.json has; run those that it lacks, or each PART again"
    parser.add_argument("--missing", action="store_true", help=about)
    about = "write for each model where time goes, as a text and a Chrome trace"
    parser.add_argument("--profile", action="store_true", help=about)
    parser.add_argument("--smoke", action="store_true", help="run all of it on a CPU, with tiny sizes")
    args = parser.parse_args(arguments)
    unknown = sorted(set(args.parts) - {part.name for part in PARTS})
    if unknown:
        known = ", ".join(part.name for part in PARTS)
        parser.error(f"no part named {', '.join(unknown)}; there are {known}")
    if args.nanogpt is not None and not (args.nanogpt / "model.py").is_file():
        parser.error(f"--nanogpt {args.nanogpt} has no model.py: it is no clone of nanoGPT")
    return args


def main(arguments: Sequence[str]) -> int:
    """Run the parts, write what they found after each, print it, return 0 if all passed."""
    args = parse(arguments)
    deadline = time.monotonic() + 60 * args.minutes
    args.folder.mkdir(parents=True, exist_ok=True)
    if not args.missing:
        (args.folder / "log.txt").unlink(missing_ok=True)
    _environment(args.smoke)
    settings = Settings(
        smoke=args.smoke,
        records=args.folder / "records",
        nanogpt=args.nanogpt.resolve() if args.nanogpt else None,
        profile=args.folder.resolve() if args.profile else None,
    )
    result = Result(["python", "-m", "benchmarks", "gpu", *arguments], commit(), args.smoke)
    settings = look_at(settings, args.folder, result)
    if not result.machine:
        return 1
    try:
        if args.missing:
            result.take_over(args.folder, again=args.parts)
    except ValueError as problem:
        print(f"--missing: {problem}", file=sys.stderr)
        return 1
    known = {part.name for part in result.parts}
    asked = [p for p in PARTS if p.name not in known and (not args.parts or p.name in args.parts)]
    result.asked = [part.name for part in asked]
    for part in asked:
        done = Done(part.name, ended="was under way")
        result.parts.append(done)
        write = partial(result.write, args.folder)
        run(part, done, settings, args.folder, deadline - RESERVE, write)
        write()
    text = result.markdown()
    print(text)
    if args.markdown:
        write_markdown(args.markdown, text, "gpu")
    return 0 if result.passed else 1


def _environment(smoke: bool) -> None:
    """Set what all processes inherit, where the user has not."""
    set_allocator()
    if smoke and find_spec("triton"):
        os.environ["TRITON_INTERPRET"] = "1"  # which Triton reads when it is first imported
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # to look for a device must not open it


def look_at(settings: Settings, folder: Path, result: Result) -> Settings:
    """Find the device, in a process of its own; return settings that know it."""
    for start in ("forkserver", "spawn"):
        settings = attrs.evolve(settings, start=start)
        done = Done(MACHINE.name)
        run(MACHINE, done, settings, folder, time.monotonic() + MACHINE.most, lambda: None)
        known: dict[str, Any] = {record["name"]: record["value"] for record in done.records}
        if "machine" in known:
            result.machine = known["machine"]
            name, memory = result.machine["device"], result.machine.get("memory GB", 80.0)
            return attrs.evolve(settings, device_name=name, memory=memory)
    print(f"gpu cannot run: {known.get('refusal') or f'{done.ended}: {done.log}'}", file=sys.stderr)
    return settings


def run(
    part: Part, done: Done, settings: Settings, folder: Path, deadline: float, write: Callable[[], None]
) -> None:
    """Run one part in a process of its own, if there is time; fill ``done``, and ``write`` as it grows."""
    left = deadline - time.monotonic()
    least = min(part.least, 1.0) if settings.smoke else part.least
    if left < least:
        done.ran, done.ended = False, f"no time: {max(0.0, left):.0f} s left, it needs {least:.0f}"
        return
    seconds, began = min(left, part.most), time.monotonic()
    print(f"{part.name}: {part.about}, at most {seconds:.0f} s", file=sys.stderr, flush=True)
    log, records = folder / f"{part.name}.log", folder / f"{part.name}.records"
    for file in (log, records):
        file.unlink(missing_ok=True)
    settings = attrs.evolve(settings, records=records.resolve(), deadline=began + seconds - 5)
    how = context(settings.start)

    def meanwhile() -> None:
        done.records, done.seconds = read(records), time.monotonic() - began
        write()

    done.ended = ended = alone(partial(part.call, settings), log, seconds, how, meanwhile)
    done.records, done.seconds = read(records), time.monotonic() - began
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    done.log = last_words(text) if ended else ""
    with (folder / "log.txt").open("a", encoding="utf-8") as whole:
        whole.write(f"=== {part.name}, {done.seconds:.1f} s {ended}\n{text}\n")
    for file in (log, records, records.with_suffix(".tests")):
        file.unlink(missing_ok=True)
    print(f"{part.name}: {done.seconds:.0f} s, {ended or 'done'}", file=sys.stderr, flush=True)
