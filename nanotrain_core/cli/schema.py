"""``nanotrain schema``: print a JSON Schema of recipes from the installed plugins."""

from __future__ import annotations

import argparse
import json

from nanotrain_core.cli.common import add_plugin_options, plugin_arguments
from nanotrain_core.errors import Exit
from nanotrain_core.recipe.schema import recipe_schema
from nanotrain_core.registry.registry import load_plugins


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_plugin_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the schema."""
    asked = plugin_arguments(args)
    print(json.dumps(recipe_schema(load_plugins(block=asked.blocked, local=asked.local)), indent=2))
    return Exit.DONE
