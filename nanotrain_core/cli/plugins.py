"""``nanotrain plugins``: what is installed, what it provides, and what is wrong with it."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from nanotrain_core.cli.common import PIPED_WIDTH, add_plugin_options, plugin_arguments, tell_broken
from nanotrain_core.component import Component
from nanotrain_core.errors import Exit
from nanotrain_core.hookspecs import HOOKSPEC_VERSION
from nanotrain_core.registry.discovery import PluginInfo
from nanotrain_core.registry.registry import Registry, load_plugins

#: Every command imports every plugin's entry module, and torch takes seconds.
MOVE_IT = "move that behind the factory (nanotrain_core.api.torch imports torch too)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_plugin_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plugins; return 2 if one is broken or two clash."""
    asked = plugin_arguments(args)
    registry = load_plugins(block=asked.blocked, local=asked.local)
    if args.json:
        print(json.dumps(_as_json(registry), indent=2))
    else:
        _print_table(registry)
    for plugin in registry.plugins:
        if plugin.imports_torch:
            print(f"nanotrain: {plugin} imports torch: {MOVE_IT}", file=sys.stderr)
    tell_broken(registry)
    for clash in registry.clashes():
        print(f"nanotrain: {clash}", file=sys.stderr)
    return Exit.USER if registry.broken or registry.clashes() else Exit.DONE


def _print_table(registry: Registry) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        "plugin", "version", "kind", "name", "", title=f"hook specification {HOOKSPEC_VERSION}", box=None
    )
    for plugin in registry.plugins:
        first = (plugin.name, plugin.version)
        if plugin.error:
            table.add_row(*first, "", "[red]broken[/]", escape(plugin.error))
            continue
        rows = [(kind, component.name, component.summary) for kind, component in plugin.components]
        for row in rows + [("command", command.name, command.summary) for command in plugin.commands]:
            table.add_row(*first, *row)
            first = ("", "")
    wide = None if sys.stdout.isatty() else PIPED_WIDTH  # one line per component if piped
    Console(width=wide).print(table)


def _as_json(registry: Registry) -> dict[str, Any]:
    return {"hookspec_version": HOOKSPEC_VERSION, "plugins": [_plugin(p) for p in registry.plugins]}


def _plugin(plugin: PluginInfo) -> dict[str, Any]:
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "module": plugin.module,
        "requires_core": plugin.requires_core,
        "error": plugin.error,
        "imports_torch": plugin.imports_torch,
        "components": [_component(kind, component) for kind, component in plugin.components],
        "commands": [{"name": command.name, "summary": command.summary} for command in plugin.commands],
    }


def _component(kind: str, component: Component) -> dict[str, Any]:
    return {
        "kind": kind,
        "name": component.name,
        "summary": component.summary,
        "provides": sorted(component.provides),
        "requires": sorted(component.requires),
        "conflicts": sorted(component.conflicts),
        "mesh_dims": sorted(component.mesh_dims),
        "supports": {name: support.value for name, support in component.supports.items()},
    }
