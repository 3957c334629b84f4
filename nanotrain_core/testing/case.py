"""A test case: one component in a small recipe. Torch-free; ranks get the case and rebuild the rest."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import attrs
import tomli_w

from nanotrain_core.component import KINDS, LISTED_KINDS, Component, Support
from nanotrain_core.errors import PluginError, RecipeError
from nanotrain_core.recipe import load_recipe
from nanotrain_core.recipe.merge import merge_tables
from nanotrain_core.recipe.structure import structure
from nanotrain_core.recipe.tree import Recipe, Selection
from nanotrain_core.registry.discovery import PluginArguments
from nanotrain_core.registry.registry import Registry, load_plugins
from nanotrain_core.testing.degrees import Degrees

Tables = dict[str, Any]

#: The recipe around the component: a tiny model, in double precision so that equality can be strict.
TINY: Tables = {
    "run": {"name": "conformance", "steps": 3, "seed": 7, "device": "cpu", "strict_monitors": True},
    "batch": {"sequences": 8, "microbatch": 2, "length": 16},
    "evaluation": {"sequences": 0},
    "topology": {"use": "grid"},
    "kernels": {"use": "auto"},
    "model": {"use": "transformer", "layers": 2, "width": 32, "heads": 4, "vocab": 64, "init_std": 0.2},
    "optimizer": {"use": "sgd", "lr": 0.1, "clip_norm": 0.0},
    "precision": {"use": "fp64"},
    "schedule": {"use": "accumulate"},
    "checkpoint": {"use": "simple"},
    "monitor": [],
    "data": {"use": "synthetic", "vocab": 64, "sequences": 64, "validation_sequences": 10},
}

#: What data reads that has a key ``paths``: some thousand characters, no five of which come twice, so that
#: what is held out can be told from what is trained on. Whole corpora hold many a line twice.
CORPUS = str(Path(__file__).with_name("corpus.txt"))

#: The plugin that every case knows.
HARNESS = str(Path(__file__).parent / "components" / "registered.py")

#: What to do about a recipe that cannot run.
REMEDY = "to change the recipe around the component: Case(..., overrides={...}), or --with KEY=VALUE"

#: Degrees that do not stand in test ids: the world size tells them.
REMAINDER = {"dp", "edp"}


def _texts(paths: Iterable[str | Path]) -> tuple[str, ...]:
    return tuple(str(path) for path in paths)


@attrs.define(frozen=True)
class Case:
    """One component, its config, and the layout it is tested on.

    >>> Case("parallel", use="ddp", config={"bucket_mb": 0.01}, topology={"dp": 2}).id
    'ddp-w2'
    """

    kind: str = attrs.field(validator=attrs.validators.in_(KINDS))
    use: str = attrs.field(kw_only=True)
    config: Mapping[str, Any] = attrs.field(factory=dict, kw_only=True)
    """The component's own table."""
    topology: Mapping[str, int] = attrs.field(factory=dict, kw_only=True)
    """Degrees, data parallelism among them: ``{"dp": 2, "tp": 2}``. Each is a key of the topology, or a
    dimension that its layout must give that size."""
    overrides: Mapping[str, Any] = attrs.field(factory=dict, kw_only=True)
    """Tables laid over the tiny recipe, for example ``{"model": {"vocab": 256}}``. Of the listed kinds the
    component comes after those given here, or where ``{"use": ...}`` with its own name stands among them."""
    plugins: tuple[str, ...] = attrs.field(default=(), kw_only=True, converter=_texts)
    """Plugin files to load, for components without packaging."""
    name: str = attrs.field(default="", kw_only=True)
    """Stands in test ids for a case that component and degrees do not tell from another."""
    plain: bool = attrs.field(default=False, kw_only=True)
    """Leave out layout, wrappers and pipeline: see :meth:`alone`."""
    world_size: int = attrs.field(kw_only=True)
    """The fewest ranks that the topology lays out with these degrees, unless given."""

    @world_size.default
    def _fewest_ranks(self) -> int:
        product = prod(self.topology.values())
        try:
            return (self.degrees().fewest_ranks() if self.topology else None) or product
        except PluginError:  # a plugin of the case is broken, which its checks tell
            return product

    @property
    def id(self) -> str:
        """Names the case in test ids: its name, or ``tp-w4-tp2``."""
        if self.name:
            return self.name
        degrees = [f"{dim}{n}" for dim, n in self.topology.items() if dim not in REMAINDER]
        return "-".join([self.use, f"w{self.world_size}", *degrees])

    @property
    def local(self) -> PluginArguments:
        """The plugin files of every case and of this one."""
        return PluginArguments(local=(HARNESS, *self.plugins))

    def registry(self) -> Registry:
        """Return the plugins of this process, including the case's own.

        Raises:
            PluginError: one of the case's own is broken.
        """
        registry = load_plugins(local=self.local.local)
        for plugin in registry.broken:
            if plugin.local:
                raise PluginError(f"{plugin.module}: {plugin.error}")
        return registry

    def component(self) -> Component:
        """Return the component under test.

        Raises:
            PluginError: there is none of that name.
        """
        return self.registry().get(self.kind, self.use)

    def own_table(self, tables: Tables) -> Tables:
        """Return the component's table in ``tables``."""
        found = tables[self.kind]
        own: Tables = next(t for t in found if t["use"] == self.use) if self.listed else found
        return own

    def degrees(self) -> Degrees:
        """Return the degrees with the topology that implements them.

        Raises:
            PluginError: as :meth:`registry`.
        """
        wanted = {} if self.plain else self.topology
        return Degrees(wanted, self._around({})["topology"], self.registry())

    @property
    def listed(self) -> bool:
        """Whether a recipe has a list of this kind."""
        return self.kind in LISTED_KINDS

    def supported(self, word: str) -> Support:
        """Return how the component, as it is configured here, relates to an optional ability."""
        component = self.component()
        return component.supported(word, self.settings() if component.supports_for else None)

    def settings(self) -> Any:
        """Return the component's config.

        Raises:
            RecipeError: the case's table does not fit the config class, or a degree not the topology.
        """
        self.degrees().check(self.world_size)
        table = dict(self.own_table(self.tables()))
        del table["use"]
        settings, problems = structure(table, self.component().config, self.kind)
        if problems:
            raise RecipeError([f"{problem.key}: {problem.message}" for problem in problems])
        return settings

    def build(self) -> Any:
        """Build the component's object, alone."""
        return self.registry().build(Selection(self.kind, self.use, self.settings()))

    def alone(self) -> Case:
        """Return the single-process run that this case must equal: no layout or pipeline, and no wrapper but
        those that add parameters."""
        return attrs.evolve(self, topology={}, world_size=1, plain=True)

    def tables(self, **changes: Any) -> Tables:
        """Return the recipe as TOML tables: the tiny one, overrides, the component, degrees, ``changes``."""
        tables = self._around({"run": {"ranks": self.world_size}})
        if self.topology and isinstance(tables["topology"], Mapping):
            tables = merge_tables(tables, {"topology": self.degrees().keys})
        return merge_tables(tables, changes)

    def _around(self, layout: Tables) -> Tables:
        """Return the tables without degrees."""
        tables = merge_tables(merge_tables(TINY, layout), self.overrides)
        own = {"use": self.use, **self.config}
        around = self.overrides.get(self.kind)
        if isinstance(around, Mapping) and around.get("use", self.use) == self.use:
            own = {**around, **own}  # merged with another component's table they would be dropped
        if self.listed:
            tables[self.kind] = self._listed(tables.get(self.kind, []), own)
        else:
            tables = merge_tables(tables, {self.kind: own})
        if self.plain:
            tables |= {"topology": TINY["topology"], "schedule": TINY["schedule"]}
            tables["parallel"] = self._adding(tables.get("parallel", []))
        return tables

    def _adding(self, wrappers: list[Tables]) -> list[Tables]:
        """Return the wrappers that add parameters, by ``Component.added``: one process has these too."""
        if not wrappers:
            return []
        registry = self.registry()
        return [table for table in wrappers if registry.get("parallel", table["use"]).added is not None]

    def _listed(self, around: list[Tables], own: Tables) -> list[Tables]:
        """Insert the component where ``around`` names it, otherwise after the others."""
        if all(table.get("use") != self.use for table in around):
            return [*around, own]
        return [own if table.get("use") == self.use else table for table in around]

    def recipe(self, **changes: Any) -> Recipe:
        """Return the checked recipe, sections replaced or extended by ``changes``.

        Raises:
            RecipeError: the case does not make a recipe that can run.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "case.toml")
            path.write_text(tomli_w.dumps(self.tables(**changes)))
            try:
                recipe = load_recipe(path, plugins=self.local)
            except RecipeError as error:
                lines = [line.partition(": ")[2] for line in error.lines]  # the file is gone by then
                raise RecipeError([f"the recipe of case {self.id} is refused", *lines, REMEDY]) from None
        self.degrees().check(self.world_size)
        return recipe
