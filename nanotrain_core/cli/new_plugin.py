"""``nanotrain new-plugin NAME --kind KIND``: create a working plugin as a starting point."""

from __future__ import annotations

import argparse
import keyword
import os
import re
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

from nanotrain_core.cli.plugin_templates import OFFERS, NewPlugin
from nanotrain_core.errors import Exit, FolderError, NanotrainError, did_you_mean
from nanotrain_core.registry.registry import Registry, load_plugins


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("name", metavar="NAME", help="its name in recipes, for example my_optimizer")
    parser.add_argument("--kind", required=True, metavar="KIND", help=f"one of {', '.join(OFFERS)}")
    parser.add_argument(
        "--package", action="store_true", help="an installable package with tests; otherwise one file"
    )
    parser.add_argument("--folder", default=".", metavar="DIR", help="where to write it (current folder)")


def run(args: argparse.Namespace) -> int:
    """Write the files, and print how to use and to test them."""
    if args.kind not in OFFERS:
        near = did_you_mean(args.kind, list(OFFERS))
        raise NanotrainError(f"--kind: there is no kind '{args.kind}'{near}; kinds: {', '.join(OFFERS)}")
    _check_identifier(args.name)
    plugin = NewPlugin(args.name, args.kind, args.package)
    _check_free(plugin, load_plugins())
    folder = Path(args.folder)
    _write(folder, plugin)
    print(f"wrote {folder / plugin.root}")
    if str(folder) != ".":
        print(f"cd {folder}")
    for line in (plugin.run(), *plugin.tests(), *_installed(plugin)):
        print(f"  {line}")
    return Exit.DONE


def _installed(plugin: NewPlugin) -> list[str]:
    return [f"pip install -e {plugin.root} && pytest {plugin.root}"] if plugin.package else []


def _check_identifier(name: str) -> None:
    """Reject a name that is not a module name.

    Raises:
        NanotrainError: with the nearest valid name.
    """
    if re.fullmatch(r"[a-z][a-z0-9_]*", name) and not keyword.iskeyword(name):
        return
    near = re.sub(r"\W+", "_", name.lower()).strip("_")
    near = near if near and near[0].isalpha() else f"my_{near}".strip("_")
    near = f"{near}_" if keyword.iskeyword(near) else near
    near = f", for example {near}" if re.fullmatch(r"[a-z][a-z0-9_]*", near) else ""
    raise NanotrainError(
        f"'{name}' cannot be the name of a module; expected lower-case letters, digits and underscores, "
        f"a letter first, and no word of Python's own{near}"
    )


def _check_free(plugin: NewPlugin, registry: Registry) -> None:
    """Reject the name of something that exists: recipes could not tell them apart.

    Raises:
        NanotrainError: with an unused name.
    """
    kind = OFFERS[plugin.kind].kind
    owners = [str(found) for found, _ in registry.offers(kind, plugin.name)]
    taken = f"{kind} '{plugin.name}' is {owners[0]}'s" if owners else ""
    if not taken and not kind and plugin.command in _commands(registry):
        taken = f"there is a command '{plugin.command}'"
    for other in registry.plugins:
        if not taken and plugin.name == other.name:
            taken = f"{other} is installed"
    if not taken and plugin.package and find_spec(f"nanotrain_{plugin.name}"):
        taken = f"there is a module nanotrain_{plugin.name}"
    if taken:
        raise NanotrainError(f"the name is taken: {taken}; expected another, such as my_{plugin.name}")


def _commands(registry: Registry) -> set[str]:
    from nanotrain_core.command import CORE_COMMANDS

    return {*CORE_COMMANDS, *registry.commands()}


def _write(folder: Path, plugin: NewPlugin) -> None:
    """Write all files or none, and never overwrite.

    Raises:
        FolderError: a file exists, or it cannot be written.
    """
    target = folder / plugin.root
    if target.exists():
        raise FolderError(f"{target} is there already: choose another NAME or --folder, or remove it")
    if not folder.is_dir():
        raise FolderError(f"--folder {folder}: expected a folder that is there")
    scratch = None
    try:
        scratch = Path(tempfile.mkdtemp(prefix=".new-plugin-", dir=folder))
        for path, text in plugin.files().items():
            (scratch / path).parent.mkdir(parents=True, exist_ok=True)
            (scratch / path).write_text(text, encoding="utf-8")
        os.rename(scratch / plugin.root, target)
    except OSError as error:
        raise FolderError(f"{target}: {error.strerror}") from None
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
