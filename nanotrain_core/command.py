"""A command: the description with which a plugin adds a subcommand to ``nanotrain``."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Protocol, cast

import attrs

from nanotrain_core.errors import PluginError, describe

#: Commands of the core and their lines in the help; each is the CommandModule
#: ``nanotrain_core.cli.<name>``, with underscores for hyphens.
CORE_COMMANDS = {
    "run": "train the run that a recipe describes",
    "check": "say whether a recipe can run, and where each of its values comes from",
    "schedule": "draw a pipeline schedule, with its idle time and live activations",
    "recipes": "list the shipped recipes, or copy one",
    "plugins": "list installed plugins and their components",
    "new-plugin": "write a working plugin as a starting point",
    "metrics": "list the metrics of a run, with units and healthy values",
    "conformance": "run every check of a component",
    "chaos": "inject every kind of fault into a run, and report the cost",
    "ckpt": "list, show, verify, convert and replay checkpoints",
    "convert": "write weights for Hugging Face transformers, or read theirs",
    "schema": "print a JSON Schema of recipes, for editors",
}


class CommandModule(Protocol):
    """The interface of a command's module. It is imported only when the command is called."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""

    def takes(self, args: argparse.Namespace) -> bool:
        """Return whether to run instead of the command that this extends. Not called for other commands."""

    def run(self, args: argparse.Namespace) -> int:
        """Run the command and return an exit code of :class:`~nanotrain_core.errors.Exit`.

        Raises:
            NanotrainError: a user error, printed without a traceback; ``exit_code`` is the code.
        """


@attrs.define(frozen=True, kw_only=True)
class Command:
    """A subcommand of ``nanotrain``."""

    name: str
    """Lower-case letters, digits and hyphens, such as ``report``; not one of the core's names."""
    summary: str
    """Its line in ``nanotrain --help``: begins with a lower-case verb and has no full stop."""
    module: str
    """A :class:`CommandModule`, such as ``nanotrain_report.report``. Only calling the command imports it."""
    tells_memory: bool = False
    """Whether ``COMMAND RECIPE --hardware NAME --json --no-advice`` prints a JSON object with ``memory``:
    ``fits``, and the bytes ``peak`` and ``usable``. ``nanotrain check --hardware NAME`` calls it."""
    extends: bool = False
    """Whether this extends a command of another plugin: the module's ``takes(args) -> bool`` decides which
    calls it runs instead of that command."""

    def load(self) -> CommandModule:
        """Import the module.

        Raises:
            PluginError: it cannot be imported, or lacks a function.
        """
        try:
            found = import_module(self.module)
        except Exception as error:
            raise PluginError(f"command '{self.name}': {self.module}: {describe(error)}") from error
        for function in ("add_arguments", "run", *["takes"] * self.extends):
            if not callable(getattr(found, function, None)):
                raise PluginError(f"command '{self.name}': {self.module} has no function {function}")
        return cast("CommandModule", found)
