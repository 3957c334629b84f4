"""Calls the subcommand that a command line names, and turns errors into exit codes."""

from __future__ import annotations

import argparse
import atexit
import errno
import gc
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from resource import RLIMIT_NOFILE, getrlimit
from typing import NoReturn

from nanotrain_core import __version__
from nanotrain_core.command import CORE_COMMANDS, CommandModule
from nanotrain_core.errors import Exit, NanotrainError, did_you_mean, shortened
from nanotrain_core.registry.advice import FIRST_PARTY, how_to_install, nearest_command
from nanotrain_core.registry.discovery import PluginInfo
from nanotrain_core.registry.registry import Registry, load_plugins

#: Where as many files may be open, too many of them are a mistake of the program.
FEW_FILES = 512


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(shortened(message))


def call(words: list[str]) -> int:
    """Run one command and return its exit code; user errors are printed without a traceback."""
    atexit.register(gc.freeze)  # or the interpreter searches all of torch for cycles before it ends: a second
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a damaged file may have names that no terminal can show
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _call(words)
        sys.stdout.flush()  # a full disk refuses what is buffered
        return code
    except NanotrainError as error:
        for line in str(error).splitlines():
            print(f"nanotrain: {line}", file=sys.stderr)
        return error.exit_code
    except (BrokenPipeError, SystemExit) as end:  # the reader, such as `head`, has closed the pipe
        if not isinstance(end, BrokenPipeError) and not isinstance(end.__context__, BrokenPipeError):
            raise  # rich raises SystemExit where the pipe is closed, but so does argparse
        _skip_last_flush()
        return Exit.DONE
    except OSError as error:
        where = error.filename
        if where is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            where = "the output cannot be written"
            _skip_last_flush()
        elif error.errno == errno.EMFILE and (most := getrlimit(RLIMIT_NOFILE)[0]) < FEW_FILES:
            where = f"`ulimit -n` allows {most} and {FEW_FILES} or more are expected"
        elif error.errno != errno.ENAMETOOLONG:  # any access to a path may raise it
            raise
        print(f"nanotrain: {shortened(f'{where}: {error.strerror}')}", file=sys.stderr)
        return Exit.USER


def _skip_last_flush() -> None:
    """Have the interpreter, which flushes stdout at its exit, write to nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _call(words: list[str]) -> int:
    parser = _Parser(prog="nanotrain", description="Train language models composed from plugins.")
    parser.add_argument("--version", action="version", version=f"nanotrain {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    chosen = words[0] if words and not words[0].startswith("-") else None
    # Load plugins only if the command may be one of theirs, or if all commands are listed.
    asked = chosen not in CORE_COMMANDS and words != ["--version"]
    registry = load_plugins(**_plugins_among(words[1:])) if asked else None
    added = {name: command.summary for name, command in registry.commands().items()} if registry else {}
    module, extensions, usage = None, list[CommandModule](), ""
    for name, summary in {**CORE_COMMANDS, **added}.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[:1].upper()}{summary[1:]}.")
        if name == chosen:
            module = _module(name, registry)
            module.add_arguments(command)
            if registry is not None:
                extensions = [extension.load() for extension in registry.extensions(name)]
                for extension in extensions:
                    extension.add_arguments(command)
                from nanotrain_core.cli.common import add_plugin_options

                # A local plugin's command needs --plugin, even if its module does not add that option.
                add_plugin_options(command)
            usage = command.format_usage()
    if chosen is not None and module is None:
        assert registry is not None
        raise NanotrainError(_no_command(chosen, [*CORE_COMMANDS, *added], registry.broken))
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        paths = _plugins_among(words[1:]).get("local", []) if chosen in added else []
        given = "".join(f" --plugin {path}" for path in paths)
        raise NanotrainError(_unknown(unknown[0], arguments.command or "", usage, given))
    if module is None:
        parser.print_help(sys.stderr)
        return Exit.USER
    arguments.words = words
    taking = next((extension for extension in extensions if extension.takes(arguments)), module)
    return taking.run(arguments)


def _module(name: str, registry: Registry | None) -> CommandModule:
    if registry is None:
        found: CommandModule = import_module(f"nanotrain_core.cli.{name.replace('-', '_')}")
        return found
    return registry.command(name).load()


def _plugins_among(words: list[str]) -> dict[str, list[str]]:
    """Parse ``--plugin`` and ``--no-plugin`` at any position: the command may be one of such a plugin."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--plugin", action="append", default=[], dest="local")
    parser.add_argument("--no-plugin", action="append", default=[], dest="block")
    try:
        return vars(parser.parse_known_args(words)[0])
    except argparse.ArgumentError:  # an option without its value, which the command itself reports
        return {}


def _no_command(word: str, known: list[str], broken: Sequence[PluginInfo]) -> str:
    """Return the error for an unknown command, with the plugins that could not register theirs."""
    lines = [f"{plugin} is broken: {plugin.error}" for plugin in broken]
    if package := FIRST_PARTY.get(("command", word)):
        if all(plugin.distribution != package for plugin in broken):
            lines.insert(0, f"no command named '{word}' is installed; to get it: {how_to_install(package)}")
        return "\n".join(lines)
    near = nearest_command(word, known)
    own = "" if near or broken else f"; of a file or folder: nanotrain {word} --plugin PATH"
    return "\n".join([f"no command named '{word}'{near}; commands: {', '.join(known)}{own}", *lines])


def _unknown(word: str, name: str, usage: str, given: str) -> str:
    """Return the nearest option to a word that the command ``name`` does not take, and how to list options.

    ``given``: options that the command requires.
    """
    prefix, command = (f"{name}: ", f"nanotrain {name}{given}") if name else ("", "nanotrain")
    lists = f"`{command} --help` lists what it takes"
    if not word.startswith("-"):
        return f"{prefix}one argument too many: '{word}'; {lists}"
    options = re.findall(r"--([a-z-]+)", usage)
    near = did_you_mean(word.partition("=")[0].lstrip("-"), options).replace("'", "'--", 1)
    keys = "; a recipe's keys are changed by --set KEY=VALUE" if "set" in options else ""
    if "option" in options:  # of `launch`, whose targets have their own
        keys += ", a target's options are given by --option KEY=VALUE"
    return f"{prefix}unknown option '{word}'{near}{keys}; {lists}"
