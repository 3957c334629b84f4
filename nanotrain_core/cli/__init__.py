"""The ``nanotrain`` command. Each subcommand is one module, imported only when it is the one called."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from nanotrain_core import __version__
from nanotrain_core.errors import Exit, NanotrainError

#: Subcommand -> its line in the help. Module ``cli/<name>.py`` has ``add_arguments`` and ``run``.
COMMANDS = {
    "run": "train what a recipe describes",
    "check": "say whether a recipe can run, and where each of its values comes from",
    "schedule": "draw a pipeline schedule, with its idle time and live activations",
    "recipes": "list the shipped recipes, or copy one",
    "plugins": "list installed plugins and their components",
    "conformance": "run every check of a component",
    "chaos": "hurt a run in every way, and see what it cost",
    "ckpt": "list, show, verify, convert and replay checkpoints",
    "convert": "write weights for Hugging Face transformers, or read theirs",
    "schema": "print a JSON Schema of recipes, for editors",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; mistakes of the user are told without a traceback."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        return _call(words)
    except NanotrainError as error:
        for line in str(error).splitlines():
            print(f"nanotrain: {line}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough. Spare the interpreter its last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.DONE


def _call(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="nanotrain", description="Train language models composed from plugins."
    )
    parser.add_argument("--version", action="version", version=f"nanotrain {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    chosen = next((word for word in words if word in COMMANDS), None)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[:1].upper()}{summary[1:]}.")
        if name == chosen:
            module = import_module(f"nanotrain_core.cli.{name}")
            module.add_arguments(command)
    arguments = parser.parse_args(words)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return Exit.USER
    code: int = module.run(arguments)
    return code
