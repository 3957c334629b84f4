"""``nanotrain report RUN``: one HTML file that shows a run, or several side by side."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from nanotrain_core.api import Exit, NanotrainError, whole_number, write_problem, write_text_atomically


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        type=Path,
        help="a run folder; for several, curves are overlaid",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="output file; default: RUN/report.html")
    parser.add_argument("--verify", action="store_true", help="read every checkpoint completely")
    parser.add_argument(
        "--serve",
        action="store_true",
        help="follow the run in a browser, on this machine only, until Ctrl-C",
    )
    parser.add_argument(
        "--port",
        type=whole_number("a port, 0 to 65535", 0, 65535),
        default=0,
        metavar="N",
        help="port for --serve; default: a free one",
    )


def run(args: argparse.Namespace) -> int:
    """Write the report, or serve it."""
    from nanotrain_report.folder import open_run
    from nanotrain_report.html import page

    if args.serve:
        from nanotrain_report.serve import serve

        if args.out is not None:
            raise NanotrainError("--out writes a file, --serve none: give one of them")
        if args.verify:
            raise NanotrainError("--verify reads every checkpoint, --serve again and again: give one of them")
        return serve(args.runs, args.port)
    text = page([open_run(path) for path in args.runs], verify=args.verify)
    out = args.out or default_out(args.runs)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if problem := write_problem(out):
            raise NanotrainError(f"{out}: {problem}; name another with --out")
        write_text_atomically(out.resolve(), text)
    except OSError as error:
        raise NanotrainError(f"{out} cannot be written: {error.strerror}; name another with --out") from None
    print(out)
    return Exit.DONE


def default_out(runs: list[Path]) -> Path:
    """Return ``report.html`` in the run's folder, or for several a file here, named after them."""
    if len(runs) == 1:
        return runs[0] / "report.html"
    names = [re.sub(r"[^\w.-]", "-", path.resolve().name) for path in runs]
    return Path(f"report-{'-'.join(names)[:80]}.html")
