"""The ``nanotrain`` command. Each subcommand is one module, imported only when it is the one called."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module

from nanotrain_core import __version__
from nanotrain_core.errors import Exit, NanotrainError, did_you_mean

#: Subcommand -> its line in the help. Module ``cli/<name>.py`` has ``add_arguments`` and ``run``.
COMMANDS = {
    "run": "train what a recipe describes",
    "check": "say whether a recipe can run, and where each of its values comes from",
    "schedule": "draw a pipeline schedule, with its idle time and live activations",
    "recipes": "list the shipped recipes, or copy one",
    "plugins": "list installed plugins and their components",
    "metrics": "list what runs measure, with units and which values are good",
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
    usage = ""
    chosen = next((word for word in words if word in COMMANDS), None)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[:1].upper()}{summary[1:]}.")
        if name == chosen:
            module = import_module(f"nanotrain_core.cli.{name}")
            module.add_arguments(command)
            usage = command.format_usage()
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        near = did_you_mean(words[0], [*COMMANDS])
        raise NanotrainError(f"no command named '{words[0]}'{near}; commands: {', '.join(COMMANDS)}")
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        raise NanotrainError(_unknown(unknown[0], arguments.command or "", usage))
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return Exit.USER
    arguments.words = words
    code: int = module.run(arguments)
    return code


def _unknown(word: str, name: str, usage: str) -> str:
    """Return what comes near a word that the command ``name`` does not take, and how to find what does."""
    prefix, command = (f"{name}: ", f"nanotrain {name}") if name else ("", "nanotrain")
    lists = f"`{command} --help` lists what it takes"
    if not word.startswith("-"):
        return f"{prefix}one argument too many: '{word}'; {lists}"
    options = re.findall(r"--([a-z-]+)", usage)
    near = did_you_mean(word.partition("=")[0].lstrip("-"), options).replace("'", "'--", 1)
    keys = "; a recipe's keys are changed by --set KEY=VALUE" if "set" in options else ""
    return f"{prefix}unknown option '{word}'{near}{keys}; {lists}"
