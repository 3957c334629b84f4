"""Discovers plugins and loads each separately, so that a broken one affects only its own users.

pluggy's own loader skips a duplicate name silently, stops at the first import error and uses the
order of the file system. Here each plugin gets its own plugin manager, in the order of names, and
any failure is recorded as that plugin's error.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, get_args
from weakref import WeakKeyDictionary

import attrs
import pluggy
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

import nanotrain_core
from nanotrain_core import hookspecs
from nanotrain_core.command import CORE_COMMANDS, Command
from nanotrain_core.component import KINDS, Component, Reference
from nanotrain_core.errors import PluginError, describe, did_you_mean
from nanotrain_core.recipe.model_config import ModelConfig
from nanotrain_core.recipe.tree import OptimizerConfig
from nanotrain_core.recipe.types import check_config_types
from nanotrain_core.registry.local_plugins import local_plugins
from nanotrain_core.registry.signatures import expect_signatures

#: Entry-point group in which a distribution lists its plugins.
GROUP = "nanotrain.plugins"
#: Kind -> the base class of its tables, of which the core reads more than the keys.
CONFIG_BASES = {"model": ModelConfig, "optimizer": OptimizerConfig}


def _absolute(paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(os.path.abspath(path) for path in paths))


def _strings(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(words)


@attrs.define(frozen=True, kw_only=True)
class PluginArguments:
    """Plugins to load in addition to the installed ones, and those not to load. The same on every rank."""

    local: tuple[str, ...] = attrs.field(default=(), converter=_absolute)
    """Files and folders given with ``--plugin``, each once."""
    blocked: tuple[str, ...] = attrs.field(default=(), converter=_strings)
    """Plugin or distribution names given with ``--no-plugin``."""


@attrs.define(frozen=True, kw_only=True)
class PluginInfo:
    """One plugin, as ``nanotrain plugins`` shows it."""

    name: str
    """Name of its entry point; for a local file or package, its name without ``.py``."""
    distribution: str
    """Name known to ``pip``; for a local file or package, its name."""
    version: str
    """Version of the distribution; for a local plugin, a hash of its code."""
    module: str
    """The imported module, or the path of a local plugin."""
    error: str | None = None
    """Why it cannot be used; None when it can."""
    components: tuple[tuple[str, Component], ...] = ()
    """(kind, component) of everything it registered."""
    commands: tuple[Command, ...] = ()
    requires_core: str = ""
    """The versions of nanotrain-core that it requires, for example ``>=0.1,<0.2``."""
    local: bool = False
    imports_torch: bool = False
    """Whether loading it imported torch into this process, which makes every command slower."""

    def __str__(self) -> str:
        return f"plugin '{self.name}' ({self.distribution} {self.version})"


Import = Callable[[], Any]

#: The hooks of modules, and what they registered: each is called once, also for ranks that are forked from
#: this process. A module that is loaded again, as in a notebook, has others.
_registered: WeakKeyDictionary[ModuleType, tuple[list[Any], ...]] = WeakKeyDictionary()


def discover(arguments: PluginArguments) -> tuple[PluginInfo, ...]:
    """Load every installed and every local plugin that is not blocked, sorted by name.

    Raises:
        PluginError: there is no plugin at a local path, or a blocked name is not installed.
    """
    found = [*map(_installed, entry_points(group=GROUP))]
    found += [pair for path in arguments.local for pair in _local(path)]
    found.sort(key=lambda pair: (pair[0].name, pair[0].distribution))
    found = list(_unblocked(found, arguments.blocked))
    times = Counter(info.name for info, _ in found)
    return tuple(
        _load(info, importer) if times[info.name] == 1 else _clash(info, found) for info, importer in found
    )


def _installed(entry: EntryPoint) -> tuple[PluginInfo, Import]:
    distribution = entry.dist
    assert distribution is not None, "importlib.metadata sets dist on all that entry_points() returns"
    metadata = distribution.metadata  # parsed anew at every access
    info = PluginInfo(
        name=entry.name,
        distribution=canonicalize_name(metadata["Name"]),
        version=metadata["Version"],
        module=entry.value,
        requires_core=_requires_core(metadata.get_all("Requires-Dist") or distribution.requires or ()),
    )
    return info, entry.load


def _requires_core(requirements: Iterable[str]) -> str:
    for line in requirements:
        requirement = Requirement(line)
        if canonicalize_name(requirement.name) == "nanotrain-core":
            return str(requirement.specifier)
    return ""


def _local(path: str) -> Iterator[tuple[PluginInfo, Import]]:
    try:
        for found in local_plugins(Path(path), GROUP):
            info = PluginInfo(
                name=found.name,
                distribution=found.distribution,
                version=found.digest(),
                module=path,
                requires_core=_requires_core(found.dependencies),
                local=True,
            )
            yield info, found.load
    except (PluginError, InvalidRequirement) as error:
        raise PluginError(f"--plugin {error}") from None
    except OSError as error:
        raise PluginError(f"--plugin {path}: {error.strerror}") from None


def _unblocked(
    found: list[tuple[PluginInfo, Import]], blocked: tuple[str, ...]
) -> Iterator[tuple[PluginInfo, Import]]:
    known = {word for info, _ in found for word in (info.name, info.distribution)}
    for word in blocked:
        if word not in known:
            raise PluginError(f"--no-plugin {word}: no such plugin{did_you_mean(word, sorted(known))}")
    yield from (pair for pair in found if not {pair[0].name, pair[0].distribution} & set(blocked))


def _clash(info: PluginInfo, found: list[tuple[PluginInfo, Import]]) -> PluginInfo:
    several = [other for other, _ in found if other.name == info.name]
    owners = " and ".join(f"{other.distribution} {other.version}" for other in several)
    apart = len({other.distribution for other in several}) > 1
    remedy = "block one with --no-plugin DISTRIBUTION" if apart else "leave out --plugin, or uninstall it"
    return attrs.evolve(info, error=f"there are {len(several)} of this name: {owners}; {remedy}")


def _load(info: PluginInfo, importer: Import) -> PluginInfo:
    """Import a plugin and collect its components; on any failure return it with the error."""
    components: list[tuple[str, Component]] = []
    commands: list[Command] = []
    problem = None
    before = "torch" in sys.modules
    try:
        _check_core(info.requires_core)
        module = importer()
        hooks = [getattr(module, name, None) for name in _hooks()]
        known = _registered.get(module) if isinstance(module, ModuleType) else None  # others may have no hash
        if known is not None and known[0] == hooks:
            components, commands = known[1:]
        else:
            _collect(module, components, commands)
            if isinstance(module, ModuleType):
                _registered[module] = hooks, components, commands
    except PluginError as error:
        problem = str(error)
    except ModuleNotFoundError as error:
        problem = describe(error) + _unfound(info, error.name)
    except SystemExit as error:
        problem = f"it calls sys.exit({error.code!r}) when it is imported"
    except Exception as error:
        problem = describe(error) + _known_field(str(error))
    brought = "torch" in sys.modules and not before
    return attrs.evolve(
        info,
        error=problem,
        components=tuple(components),
        commands=tuple(commands),
        imports_torch=brought,
    )


def _unfound(info: PluginInfo, missing: str | None) -> str:
    """Return where the name is written if the missing module is the plugin itself; otherwise nothing."""
    own = (
        not info.local
        and missing is not None
        and f"{info.module.partition(':')[0]}.".startswith(f"{missing}.")
    )
    entry = f'entry point {info.name} = "{info.module}" of {info.distribution}'
    return f": {entry}: correct it in pyproject.toml, and install the package again" if own else ""


def _check_core(specifier: str) -> None:
    version = nanotrain_core.__version__
    if not Requirement(f"nanotrain-core{specifier}").specifier.contains(version, prereleases=True):
        raise PluginError(f"needs nanotrain-core {specifier}, but {version} is installed")


def _known_field(text: str) -> str:
    """Return the nearest field of Component, from Python's error about an unknown keyword."""
    unknown = re.search(r"Component.*unexpected keyword argument '(\w+)'", text)
    return did_you_mean(unknown.group(1), [f.name for f in attrs.fields(Component)]) if unknown else ""


def _collect(module: Any, components: list[tuple[str, Component]], commands: list[Command]) -> None:
    """Call the hooks of one plugin and append what it registers.

    Raises:
        PluginError: a hook or a component violates the contract.
    """
    manager = pluggy.PluginManager("nanotrain")
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(module)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(_known_hooks(str(error))) from None
    _check_hooks(module, manager)
    for kind in KINDS:

        def register(*given: Any, kind: str = kind, **named: Any) -> None:
            if named or len(given) != 1 or not isinstance(given[0], Component):
                raise PluginError(f"a {kind} hook must call register(Component(...)) with one Component")
            component = given[0]
            _check_component(kind, component, components)
            components.append((kind, component))

        getattr(manager.hook, f"nanotrain_register_{kind}")(register=register)

    def register_command(*given: Any, **named: Any) -> None:
        if named or len(given) != 1 or not isinstance(given[0], Command):
            raise PluginError("a command hook must call register(Command(...)) with one Command")
        _check_command(given[0], commands)
        commands.append(given[0])

    manager.hook.nanotrain_register_command(register=register_command)
    if not components and not commands:
        raise PluginError(f"registers no component and no command; hooks are {', '.join(_hooks())}")


def _hooks() -> tuple[str, ...]:
    return tuple(f"nanotrain_register_{kind}" for kind in (*KINDS, "command"))


def _known_hooks(text: str) -> str:
    """Return pluggy's error without the module's repr, and the nearest existing hook."""
    unknown = re.search(r"unknown hook '(\w+)'", text)
    if unknown:
        return f"unknown hook '{unknown.group(1)}'{did_you_mean(unknown.group(1), _hooks())}"
    return re.sub(r"^Plugin .*? for hook ", "hook ", " ".join(text.split()))


def _check_hooks(module: Any, manager: pluggy.PluginManager) -> None:
    for name in dir(module):
        if name in _hooks() and manager.parse_hookimpl_opts(module, name) is None:
            raise PluginError(f"{name} lacks @hookimpl: from nanotrain_core import hookimpl")
    for caller in manager.get_hookcallers(module) or ():
        for implementation in caller.get_hookimpls():
            for parameter in inspect.signature(implementation.function).parameters.values():
                if parameter.default is not parameter.empty:
                    # pluggy 1.6 passes such a default and ignores the caller's value, 1.7 does the opposite.
                    raise PluginError(f"{caller.name}: argument '{parameter.name}' must not have a default")


def _check_component(kind: str, component: Component, earlier: list[tuple[str, Component]]) -> None:
    label, config = f"{kind} '{component.name}'", component.config
    if not re.fullmatch(r"[a-z0-9_]+", component.name):
        raise PluginError(f"{label}: a name has only lower-case letters, digits and underscores")
    for field in ("factory", *get_args(Reference)):
        reference = getattr(component, field)
        optional = field != "factory" and reference is None
        if not optional and not re.fullmatch(r"[^:\s]+:[^:\s]+", str(reference)):
            raise PluginError(f"{label}: {field} {reference!r} is not of the form 'module:attribute'")
    if any(kind == other and component.name == it.name for other, it in earlier):
        raise PluginError(f"{label} is registered twice")
    if not _is_frozen(config):
        raise PluginError(f"{label}: config must be a frozen attrs class: @attrs.define(frozen=True)")
    base = CONFIG_BASES.get(kind, object)
    if not issubclass(config, base):
        raise PluginError(f"{label}: {config.__name__} must derive from nanotrain_core.api.{base.__name__}")
    if base is not object:
        expect_signatures(label, kind, base, config)
    try:
        check_config_types(config)
    except (TypeError, NameError) as error:
        raise PluginError(f"{label}: {error}") from None


def _check_command(command: Command, earlier: list[Command]) -> None:
    label = f"command '{command.name}'"
    if not re.fullmatch(r"[a-z][a-z0-9-]*", command.name):
        raise PluginError(f"{label}: a name has only lower-case letters, digits and hyphens")
    if command.name in CORE_COMMANDS:
        raise PluginError(f"{label} is one of the core's own; choose another name")
    if any(command.name == other.name for other in earlier):
        raise PluginError(f"{label} is registered twice")


def _is_frozen(config: Any) -> bool:
    """Return whether an instance is frozen by trying to modify it: attrs has no public check before 25.4."""
    if not (isinstance(config, type) and attrs.has(config)):
        return False
    try:
        setattr(object.__new__(config), "any", None)  # noqa: B010
    except attrs.exceptions.FrozenInstanceError:
        return True
    except AttributeError:
        return False
    return False
