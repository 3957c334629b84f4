"""Looks components up by the name a recipe uses."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import attrs

import nanotrain_core
from nanotrain_core.command import Command
from nanotrain_core.component import KINDS, LISTED_KINDS, TORCH_FREE_KINDS, Component
from nanotrain_core.errors import PluginError, as_plugin_error, did_you_mean
from nanotrain_core.recipe.tree import Selection
from nanotrain_core.registry.advice import FIRST_PARTY, how_to_install
from nanotrain_core.registry.discovery import PluginArguments, PluginInfo, discover


@attrs.define(frozen=True)
class Registry:
    """All plugins of this process and the components they registered."""

    plugins: tuple[PluginInfo, ...]

    @property
    def broken(self) -> tuple[PluginInfo, ...]:
        return tuple(plugin for plugin in self.plugins if plugin.error)

    def offers(self, kind: str, use: str) -> tuple[tuple[PluginInfo, Component], ...]:
        """Return every (plugin, component) of that kind and name: more than one is a conflict."""
        return tuple(
            (plugin, component)
            for plugin in self.plugins
            if not plugin.error
            for of_kind, component in plugin.components
            if (of_kind, component.name) == (kind, use)
        )

    def names(self, kind: str) -> tuple[str, ...]:
        """Return the names of the usable components of one kind, sorted."""
        usable = (plugin for plugin in self.plugins if not plugin.error)
        return tuple(sorted({c.name for plugin in usable for k, c in plugin.components if k == kind}))

    def clashes(self) -> tuple[str, ...]:
        """Return one line per name that several plugins register."""
        keys = [(kind, name) for kind in KINDS for name in self.names(kind)]
        found = [self._clash(*key) for key in keys if len(self.offers(*key)) > 1]
        owners = {name: self._owners_of_command(name) for name in self.commands()}
        return tuple(found + [_clash("command", *each) for each in owners.items() if len(each[1]) > 1])

    def commands(self) -> dict[str, Command]:
        """Return the commands that plugins add, by name, sorted; in a conflict the first."""
        found = [c for plugin in reversed(self.plugins) if not plugin.error for c in plugin.commands]
        return {c.name: c for c in sorted(found, key=lambda command: command.name) if not c.extends}

    def extensions(self, name: str) -> list[Command]:
        """Return the extensions that plugins add to the command of that name."""
        found = [c for plugin in self.plugins if not plugin.error for c in plugin.commands]
        return [c for c in found if c.name == name and c.extends]

    def command(self, name: str) -> Command:
        """Return the command that a plugin adds under that name.

        Raises:
            PluginError: several plugins add it.
            KeyError: none does.
        """
        owners = self._owners_of_command(name)
        if len(owners) > 1:
            raise PluginError(_clash("command", name, owners))
        return self.commands()[name]

    def _owners_of_command(self, name: str) -> list[PluginInfo]:
        usable = [plugin for plugin in self.plugins if not plugin.error]
        return [p for p in usable if any(name == c.name and not c.extends for c in p.commands)]

    def get(self, kind: str, use: str) -> Component:
        """Return the component a recipe selects.

        Raises:
            PluginError: no plugin or several register it, or the plugin that does is broken.
        """
        offers = self.offers(kind, use)
        if len(offers) > 1:
            raise PluginError(self._clash(kind, use))
        if not offers:
            raise PluginError(self._unknown(kind, use))
        return offers[0][1]

    def build(self, selection: Selection) -> Any:
        """Return the object behind a selected component.

        Raises:
            PluginError: the factory cannot be imported, raises, or returns an object that lacks part of the
                contract of its kind, or has methods with other parameters. An unexpected exception is the
                ``__cause__``.
        """
        component = self.get(selection.kind, selection.use)
        label = f"{selection.kind} '{selection.use}'"
        try:
            factory = component.load()
        except PluginError as error:
            raise PluginError(f"{label}: {error}") from error.__cause__
        with as_plugin_error(f"{label}: its factory"):
            built = factory(selection.config)
        if selection.kind not in TORCH_FREE_KINDS or "torch" in sys.modules:
            from nanotrain_core.registry.contract_checks import (
                check_contract,  # contracts use torch's types
            )

            owner = self.owner(selection.kind, selection.use)
            check_contract(f"{label} of {owner}", component, selection.kind, built)
        return built

    def owner(self, kind: str, use: str) -> PluginInfo:
        """Return the plugin that registered a component.

        Raises:
            PluginError: as :meth:`get`.
        """
        self.get(kind, use)
        return self.offers(kind, use)[0][0]

    def providers(self, capability: str) -> tuple[str, ...]:
        """Return ``kind "name"`` of every usable component that provides ``capability``."""
        return tuple(
            f'{kind} "{component.name}"'
            for plugin in self.plugins
            if not plugin.error
            for kind, component in plugin.components
            if capability in component.provides
        )

    def remedies(self, dim: str) -> str:
        """Return what a recipe must contain to use ranks along ``dim``; empty: no installed plugin can."""
        ways = []
        for kind in KINDS:
            fit = [name for name in self.names(kind) if dim in self.offers(kind, name)[0][1].mesh_dims]
            if fit:
                ways.append(f"{header(kind)} with use = " + " or ".join(f'"{name}"' for name in fit))
        return " or ".join(ways)

    def versions(self) -> dict[str, str]:
        """Return distribution -> version of the core, torch and every usable plugin, sorted."""
        found = {plugin.distribution: plugin.version for plugin in self.plugins if not plugin.error}
        found["nanotrain-core"] = nanotrain_core.__version__
        try:
            found["torch"] = cached_version("torch")
        except PackageNotFoundError:
            found["torch"] = "not installed"
        return dict(sorted(found.items()))

    def _clash(self, kind: str, use: str) -> str:
        return _clash(kind, use, [plugin for plugin, _ in self.offers(kind, use)])

    def _unknown(self, kind: str, use: str) -> str:
        names = self.names(kind)
        text = f"no {kind} named '{use}'{did_you_mean(use, names)}; installed: {', '.join(names) or 'none'}"
        suspects = [plugin for plugin in self.broken if _may_offer(plugin, kind, use)]
        if suspects:
            return text + "".join(f"; {plugin} is broken: {plugin.error}" for plugin in suspects)
        if (kind, use) in FIRST_PARTY:
            return f"{text}; to get it: {how_to_install(FIRST_PARTY[kind, use])}"
        if elsewhere := self._elsewhere(use):
            return f"{text}; {elsewhere}"
        if self.broken:
            return f"{text}; broken, see `nanotrain plugins`: {', '.join(p.name for p in self.broken)}"
        return (
            text
            if did_you_mean(use, names)
            else f"{text}; if a file or folder of yours has it: --plugin PATH"
        )

    def _elsewhere(self, use: str) -> str:
        """Return a clause if ``use`` is a component of another kind, or a plugin's name; otherwise empty."""
        for kind in KINDS:
            if use in self.names(kind):
                return f"{kind} '{use}' stands under {header(kind)}"
        for plugin in self.plugins:
            if use in (plugin.name, plugin.distribution) and plugin.components and not plugin.error:
                offered = ", ".join(f'{kind} "{component.name}"' for kind, component in plugin.components)
                return f"'{use}' is a plugin, which offers {offered}"
        return ""


def _clash(kind: str, name: str, plugins: list[PluginInfo]) -> str:
    owners = " and ".join(map(str, plugins))
    options = " or ".join(f"--no-plugin {p.name}" for p in plugins if p.name != "builtin")
    what = "command" if kind == "command" else "component"
    return f"{kind} '{name}' is registered by {owners}; {options}, or rename the {what}"


cached_version = cache(version)  # which reads and parses a metadata file


def header(kind: str) -> str:
    """Return the TOML header of a kind's table: ``[model]``, ``[[parallel]]``."""
    return f"[[{kind}]]" if kind in LISTED_KINDS else f"[{kind}]"


def _may_offer(plugin: PluginInfo, kind: str, use: str) -> bool:
    """Return whether a broken plugin is likely the intended one: it may have failed before it registered."""
    registered = any((k, c.name) == (kind, use) for k, c in plugin.components)
    return registered or use == plugin.name or plugin.distribution == FIRST_PARTY.get((kind, use))


def load_plugins(*, block: Iterable[str] = (), local: Iterable[str] = ()) -> Registry:
    """Load all plugins once per process and return the registry.

    Every process of a run calls this first, with the same arguments.

    Args:
        block: plugin or distribution names not to load.
        local: paths of Python files, packages and distributions to load as plugins.

    Raises:
        PluginError: there is no plugin at a path of ``local``, or a name of ``block`` is not installed.
    """
    return _load_plugins(os.getpid(), PluginArguments(local=local, blocked=block))


@cache
def _load_plugins(pid: int, arguments: PluginArguments) -> Registry:
    return Registry(discover(arguments))
