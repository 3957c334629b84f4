"""``nanotrain top RUN``: where a run is, in the terminal, from its folder alone."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import suppress
from pathlib import Path

from nanotrain_core.api import Exit, real_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run folder")
    parser.add_argument(
        "--once", action="store_true", help="print once and exit; the default if the output is a pipe"
    )
    parser.add_argument(
        "--every",
        type=real_number("seconds between 0.1 and 3600", lambda seconds: 0.1 <= seconds <= 3600),
        default=2.0,
        metavar="S",
        help="seconds between updates, more for a long run; default: 2",
    )


def run(args: argparse.Namespace) -> int:
    """Show the run until Ctrl-C, or once."""
    from rich.console import Console
    from rich.live import Live

    from nanotrain_report.folder import open_run
    from nanotrain_report.rest import Rest
    from nanotrain_report.screen import screen

    once = args.once or not sys.stdout.isatty()
    console = Console(width=None if sys.stdout.isatty() else 100)
    if once:
        console.print(screen(open_run(args.folder), console.width))
        return Exit.DONE
    open_run(args.folder)  # or it is refused before the screen is taken
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        seen, rest = None, Rest()
        while True:
            now = state(args.folder)
            # A long file takes a while to read: one that has not grown is read in one of ten looks.
            if rest.over and (now != seen or int(time.monotonic() / args.every) % 10 == 0):
                seen = now
                with rest.after():
                    live.update(screen(open_run(args.folder), console.width), refresh=True)
            time.sleep(args.every)
    return Exit.DONE


def state(folder: Path) -> tuple[int, ...]:
    """Return something that changes when there is something new to show."""
    files = [folder / name for name in ("metrics.jsonl", "run.log.jsonl")]
    return tuple(file.stat().st_size if file.exists() else 0 for file in files)
