"""Resolves the type and component of every section of a merged recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import attrs
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from nanotrain_core.component import KINDS, LISTED_KINDS
from nanotrain_core.errors import PluginError, Problem, did_you_mean
from nanotrain_core.phases.tables import PhaseTables, steps_of
from nanotrain_core.recipe.frozen import FrozenMapping
from nanotrain_core.recipe.locate import join
from nanotrain_core.recipe.merge import Merged
from nanotrain_core.recipe.phase import SECTIONS, Phase
from nanotrain_core.recipe.range_validator import LARGEST_COUNT
from nanotrain_core.recipe.structure import absolute_paths, structure
from nanotrain_core.recipe.suggestions import of_another, with_section
from nanotrain_core.recipe.tree import CORE_SECTIONS, Recipe, Selection
from nanotrain_core.recipe.types import found
from nanotrain_core.registry.registry import Registry


class Resolver:
    """Resolves the sections of one recipe, collecting all problems instead of only the first."""

    def __init__(self, merged: Merged, registry: Registry) -> None:
        self.problems: list[Problem] = []
        self._merged = merged
        self._tree = merged.tree
        self._registry = registry

    def recipe(self) -> Recipe | None:
        """Return the typed recipe, or None when ``problems`` explain why there is none."""
        sections: dict[str, Any] = {name: self._table(name, config) for name, config in CORE_SECTIONS.items()}
        for kind in KINDS:
            sections[kind] = self._listed(kind) if kind in LISTED_KINDS else self._single(kind)
        sections["phase"] = self._phases(sections)
        sections["requires"] = self._requirements()
        names = [field.name for field in attrs.fields(Recipe)]
        for name in sorted(set(self._tree) - set(names)):
            near = with_section(name, self._tree, self._registry) or did_you_mean(name, names)
            valid = ", ".join(["extends", *names])
            self.problems.append(Problem(name, f"unknown section '{name}'{near}; valid: {valid}"))
        self.written_versions()
        if self.problems:
            return None
        recipe = Recipe(**sections)
        recipe = attrs.evolve(recipe, versions=self._versions(recipe))
        return recipe if "steps" in self._tree.get("run", {}) else self._with_steps(recipe)

    def _phases(self, sections: Mapping[str, Any]) -> tuple[Phase, ...]:
        """Return the phases, once the sections that they change are valid."""
        configs = [getattr(sections[name], "config", sections[name]) for name in SECTIONS]
        if "phase" not in self._tree or None in configs:
            return ()
        tables = PhaseTables(sections)
        phases = tables.phases(self._tree["phase"])
        self.problems += tables.problems
        return phases

    def _with_steps(self, recipe: Recipe) -> Recipe | None:
        """Return the recipe with ``run.steps`` computed from its phases; None if that is impossible."""
        steps, most = steps_of(recipe), LARGEST_COUNT
        if steps is None or steps > most:
            because = "the last phase has no until_tokens" if steps is None else f"its phases take {steps:,}"
            text = f"missing, and {because}; expected an integer, or phases of at most {most:,} steps"
            self.problems.append(Problem("run.steps", text))
            return None
        return attrs.evolve(recipe, run=attrs.evolve(recipe.run, steps=steps))

    def written_versions(self) -> Mapping[str, str]:
        """Return the ``[versions]`` a resolved recipe was written with, empty for others."""
        table = self._tree.get("versions", {})
        if isinstance(table, dict) and all(isinstance(version, str) for version in table.values()):
            return table
        self.problems.append(Problem("versions", "expected a table of distribution = version, both strings"))
        return {}

    def _structure(self, table: Any, config: type, key: str) -> Any:
        kind = key.partition(".")[0]

        def elsewhere(name: str) -> str:
            if name == "extends" or name in attrs.fields_dict(Recipe):
                return f": {name} belongs above all tables of the file"
            other = of_another(name, kind, self._registry) if kind in KINDS else ""
            return other or with_section(name, self._tree, self._registry)

        table = absolute_paths(table, config, key, self._merged)
        instance, problems = structure(table, config, key, elsewhere)
        self.problems += problems
        return instance

    def _table(self, name: str, config: type) -> Any:
        table = self._tree.get(name, {})
        if name == "run" and isinstance(table, dict) and "phase" in self._tree:
            table = {"steps": 1, **table}  # if it is omitted, the phases determine it
        return self._structure(table, config, name)

    def _single(self, kind: str) -> Selection | None:
        if kind not in self._tree:
            names = ", ".join(self._registry.names(kind))
            text = f'missing: write [{kind}] with use = "NAME"; installed: {names}'
            self.problems.append(Problem(kind, text))
            return None
        return self._selection(kind, kind, self._tree[kind], f"[{kind}]")

    def _listed(self, kind: str) -> tuple[Selection | None, ...]:
        tables = self._tree.get(kind, [])
        if not isinstance(tables, list):
            self.problems.append(Problem(kind, f"expected an array of tables: write [[{kind}]]"))
            return ()
        return tuple(
            self._selection(kind, join(kind, index), table, f"[[{kind}]]")
            for index, table in enumerate(tables)
        )

    def _selection(self, kind: str, key: str, table: Any, header: str) -> Selection | None:
        """Take ``use`` out of a table and structure the rest as that component's config class."""
        if not isinstance(table, dict):
            use = f' with use = "{table}"' if isinstance(table, str) else ""
            self.problems.append(Problem(key, f"expected a table: write {header}{use}, got {found(table)}"))
            return None
        rest = dict(table)
        use = rest.pop("use", None)
        if not isinstance(use, str):
            names = ", ".join(self._registry.names(kind))
            text = "missing" if use is None else f"expected a string, got {found(use)}"
            self.problems.append(Problem(join(key, "use"), f"{text}; installed: {names}"))
            return None
        try:
            component = self._registry.get(kind, use)
        except PluginError as error:
            self.problems.append(Problem(join(key, "use"), str(error)))
            return None
        known = len(self.problems)
        config = self._structure(rest, component.config, key)
        valid = len(self.problems) == known  # a plugin's function is not asked about a config that is not
        unsupported = component.unsupported(config) if valid else frozenset[str]()
        return Selection(kind, use, config, unsupported, component.mesh_dims)

    def _requirements(self) -> tuple[str, ...]:
        lines = self._tree.get("requires", [])
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            text = 'expected an array of strings, for example ["nanotrain-ddp>=0.1"]'
            self.problems.append(Problem("requires", text))
            return ()
        for index, line in enumerate(lines):
            self.problems += (Problem(f"requires.{index}", text) for text in self._unmet(line))
        return tuple(lines)

    def _unmet(self, line: str) -> Iterator[str]:
        """Yield why a requirement such as ``nanotrain-ddp>=0.1`` is not met."""
        try:
            requirement = Requirement(line)
            installed = version(requirement.name)
        except InvalidRequirement:
            yield f"'{line}' is not a requirement such as 'nanotrain-ddp>=0.1'"
            return
        except PackageNotFoundError:
            yield f"{requirement.name} is not installed: pip install '{line}'"
            return
        if not requirement.specifier.contains(installed, prereleases=True):
            yield f"needs {line}, but {installed} is installed: pip install '{line}'"
        for plugin in self._registry.broken:
            if plugin.distribution == canonicalize_name(requirement.name):
                yield f"{plugin} is broken: {plugin.error}"

    def _versions(self, recipe: Recipe) -> FrozenMapping[str]:
        """Return the versions of the distributions that the recipe uses: the core, torch and its plugins."""
        used = {self._registry.owner(s.kind, s.use).distribution for s in recipe.selections()}
        used |= {canonicalize_name(Requirement(line).name) for line in recipe.requires}
        used |= {"nanotrain-core", "torch"}
        return FrozenMapping({name: v for name, v in self._registry.versions().items() if name in used})
