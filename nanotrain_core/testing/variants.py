"""The variants of a component under test: every layout, model and precision that it claims to support.

The author names a component and nothing else. ``variants_of`` reads its description and yields cases; a
case that the component declares not to be made for is left out by name, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import attrs

from nanotrain_core.component import LISTED_KINDS, Component, Support
from nanotrain_core.errors import NanotrainError, RecipeError
from nanotrain_core.recipe.merge import merge_tables
from nanotrain_core.testing.case import CORPUS, TINY, Case, Tables
from nanotrain_core.testing.variants_of_kinds import EXPERTS, OF_KIND, Scope, Spec

TEXT: Tables = {"model": {"vocab": 256}, "data": {"use": "text", "paths": [CORPUS]}}

#: What else a component may need around it to make a recipe at all: the first that does is taken.
BASES: tuple[Tables, ...] = (
    {},
    EXPERTS,
    {"model": {"vocab": 256}},
    TEXT,
    {"model": {"layers": 12}},
    {"model": {"vocab": 65536}},
)


#: Labels of checks, or their names: what runs in variants beside the first of each number of ranks.
FEW: Mapping[str, frozenset[str]] = {
    kind: frozenset(names.split())
    for kind, names in {
        "parallel": "gradients_equal[fp64] weights_equal[adamw]",
        "optimizer": "layout_changes_nothing gradient_norm_is_global overflow_is_skipped state_has_a_place "
        "resume_is_bit_equal monitors_see_gradients a_skipped_step_leaves_no_trace",
        "precision": "parameters_have_the_declared_dtype stored_weights_reach_the_model resume_is_bit_equal "
        "every_weight_has_its_gradient overflow_is_agreed_on kept_dtypes_are_kept",
        "checkpoint": "every_bit_comes_back resumed_run_is_the_same_run loads_on_one_process "
        "goes_on_on_another_layout a_missing_tensor_is_refused",
        "schedule": "gradients_equal",
        "monitor": "changes_nothing publishes_what_it_declares publishes_what_one_process_does",
    }.items()
}


@attrs.define(frozen=True)
class Variant:
    """One case of a component, and which checks run in it."""

    name: str
    case: Case
    scope: Scope
    extra: frozenset[str] = frozenset()
    """More checks, by name."""

    def has(self, kind: str, name: str, label: str) -> bool:
        """Return whether a check runs here: those of every kind only in the first, which has no name."""
        if kind == "every":
            return not self.name
        few = FEW.get(self.case.kind)
        return self.scope is Scope.ALL or few is None or bool({name, label} & (few | self.extra))


@attrs.define(frozen=True)
class Skip:
    """A variant that is skipped for a component, by name."""

    name: str
    reason: str


def variants_of(case: Case, *, quick: bool = False) -> Iterator[Variant | Skip]:
    """Yield the variants in which a component is tested, the plainest first.

    Args:
        case: the component, and what its author puts around it, which is in every variant.
        quick: only the author's case as it is, beside whatever it requires.
    """
    given = case.config
    case = filled(case)
    as_it_is = case.kind == "topology" or (quick and _refusal(case) is None)
    base = case if as_it_is else _base(case)
    component = base.component()
    fixed = bool(case.topology)  # the author names the layout: there are no others
    twice = base.kind == "checkpoint" and not quick and not fixed  # all of it runs on two ranks
    yield Variant("", base, Scope.FEW if twice else Scope.ALL)
    if quick:
        return
    known = [*OF_KIND.get(case.kind, lambda component: ())(component)]
    on_ranks = next((spec for spec in known if spec.scope is Scope.ALL and spec.topology), Spec(""))
    options = [*_own_options(base, given, Spec("") if fixed else on_ranks)]
    for spec in [*known, *options]:
        if fixed and (spec.topology or spec.world):
            continue
        if reason := _declined(component, spec.needs):
            yield Skip(spec.name, reason)
            continue
        made = _made(base, spec, given)
        if spec.own and (none := _has_none(base, spec.own)):
            yield Skip(spec.name, none)
            continue
        refused = None if case.kind == "topology" else _refusal(made)
        if refused is None and spec in options and case.kind != "data":  # whose checks compose no run
            refused = _not_here(made)
        yield (
            Skip(spec.name, f"refused: {refused}")
            if refused
            else Variant(spec.name, made, spec.scope, spec.extra)
        )


def filled(case: Case) -> Case:
    """Return the case with a value for each key that its component requires and the tiny recipe has.

    Of data for each that the tiny recipe knows, and for ``paths``: it is small there, so that epochs end.
    Where the author gives no key, or not all that are required, the component's example is laid below.
    """
    component, known = case.component(), {} if case.listed else TINY.get(case.kind, {})
    if case.kind == "data":
        known = {**known, "paths": [CORPUS], **_example_of_text(component)}
    given = {} if case.listed else case.overrides.get(case.kind, {})
    fields = attrs.fields(component.config)
    wanted = [f.name for f in fields if f.default is attrs.NOTHING or case.kind == "data"]
    found = {name: known[name] for name in wanted if name in known}
    required = {f.name for f in fields if f.default is attrs.NOTHING}
    if not {**given, **case.config} or required - {*found, *given, *case.config}:
        found |= component.example
    below = {name: value for name, value in found.items() if name not in given}
    return attrs.evolve(case, config={**below, **case.config})


_examples: dict[str, tuple[TemporaryDirectory[str], Mapping[str, Any]]] = {}
"""What components made of the harness's text, in folders that are there until this process ends."""


def _example_of_text(component: Component) -> Mapping[str, Any]:
    """Return the keys that name what a component prepared from the harness's text, once per process."""
    make = component.load_optional("example_of_text")
    if make is None:
        return {}
    reference = str(component.example_of_text)
    if reference not in _examples:
        folder = TemporaryDirectory(prefix="nanotrain-example-")
        _examples[reference] = folder, make(Path(CORPUS), Path(folder.name))
    return _examples[reference][1]


def _base(case: Case) -> Case:
    """Return the case with the fewest overrides that make a recipe; unchanged if nothing does.

    Around a monitor there is text, of which it may read or write some.
    """
    for overrides in (TEXT, *BASES) if case.kind == "monitor" else BASES:
        for beside in _beside(case):
            tried = attrs.evolve(
                case, overrides=merge_tables(merge_tables(overrides, beside), case.overrides)
            )
            if _refusal(tried) is None:
                return tried
    return case


def _beside(case: Case) -> Iterator[Tables]:
    """Yield what a component may be combined with: nothing, or another one that provides what it requires."""
    yield {}
    requires = case.component().requires
    for plugin in case.registry().plugins if requires else ():
        for kind, other in plugin.components:
            if kind != case.kind and requires <= other.provides:
                table = {"use": other.name}
                yield {kind: [table] if kind in LISTED_KINDS else table}


def _refusal(case: Case) -> str | None:
    """Return why a case makes no recipe, in one line."""
    try:
        case.settings()
        case.recipe()
    except RecipeError as error:
        return next((line for line in error.lines if not line.startswith("the recipe of")), str(error))
    except NanotrainError as error:
        return str(error).splitlines()[0]
    return None


def _not_here(case: Case) -> str | None:
    """Return why a run with that option cannot be composed on this machine, such as one that needs a GPU."""
    from nanotrain_core.testing.probe import make_run  # it imports torch

    try:
        case.build()
        make_run(case.alone(), {})
    except NanotrainError as error:
        return str(error).splitlines()[0]
    except Exception:  # a mistake, which the checks tell
        return None
    return None


def _has_none(base: Case, dim: str) -> str | None:
    """Return that the topology around a case has no dimension of this name; None if it has."""
    if _refusal(base) is not None:  # which the checks tell
        return None
    topology = base.recipe().topology
    if dim in base.registry().build(topology).layout(base.world_size).dims:
        return None
    return f"{dim}: topology '{topology.use}' has none; expected one that has, with --with topology.use=NAME"


def _declined(component: Component, needs: Iterable[str]) -> str | None:
    for word in needs:
        support = component.supports.get(word)
        if support in (Support.UNSUPPORTED, Support.NOT_IMPLEMENTED):
            return f"it declares {word}: {support.value}"
    return None


def _made(base: Case, spec: Spec, given: Mapping[str, Any]) -> Case:
    """Return the case of a variant: the author's values in its own table are kept."""
    overrides = {key: value for key, value in spec.overrides.items() if key != base.kind or base.listed}
    listed = [*overrides.get("parallel", ())]
    theirs = base.overrides.get("parallel", ())
    if theirs:  # what the author puts around it stays; the layout's wrappers come before
        names = {table["use"] for table in theirs}
        overrides["parallel"] = [*(table for table in listed if table["use"] not in names), *theirs]
    own = {key: value for key, value in base.overrides.items() if key != "parallel"}
    ranks: Any = {} if spec.topology else {"world_size": spec.world or base.world_size}
    return Case(
        base.kind,
        use=base.use,
        topology={**base.topology, **spec.topology},
        overrides=merge_tables(overrides, own),
        config={**base.config, **spec.config, **given},
        name=f"{base.name or base.use}-{spec.name}",
        plugins=base.plugins,
        **ranks,
    )


# --- a component's own options ---------------------------------------------------------------------


def _own_options(base: Case, given: Mapping[str, Any], where: Spec) -> Iterator[Spec]:
    """Yield every other value of each field with few values: a bool, or one of several words.

    Other than in ``base``, whose config has the component's example. On as many ranks as the kind is tested
    on first.
    """
    component = base.component()
    hints = get_type_hints(component.config)
    for field in attrs.fields(component.config):
        if field.name in given or field.name.startswith("_"):
            continue
        for value in _values(hints.get(field.name), field.default):
            if value == base.config.get(field.name, field.default):
                continue
            text = str(value).lower() if isinstance(value, bool) else value
            yield attrs.evolve(
                where,
                name=f"{field.name}={text}",
                config={field.name: value},
                needs=(*where.needs, field.name),
                scope=Scope.FEW,
            )


def _values(hint: Any, default: Any) -> Sequence[Any]:
    """Return the values that a field can have, beside None; none if there are more than a few."""
    if get_origin(hint) in (Union, UnionType):  # Literal[...] | None
        hints = [each for each in get_args(hint) if each is not type(None)]
        return [value for each in hints for value in _values(each, default)] if default is None else ()
    if hint is bool and default is not attrs.NOTHING:
        return (True, False)
    if get_origin(hint) is Literal:
        return [value for value in get_args(hint) if isinstance(value, str)]
    return ()
