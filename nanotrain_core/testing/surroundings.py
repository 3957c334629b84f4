"""What is put around a component under test: every layout, model and precision that it says it admits.

The author names a component and nothing else. ``surroundings_of`` reads its description and yields cases; a
case that the component declares not to be made for is left out by name, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, get_args, get_origin, get_type_hints

import attrs

from nanotrain_core.component import LISTED_KINDS, Component, Support
from nanotrain_core.errors import NanotrainError, RecipeError
from nanotrain_core.testing.case import CORPUS, TINY, Case, Tables, merge

SUMMED, SLICED, SPREAD = ({"use": name} for name in ("summed", "sliced", "spread"))
STAGED: Tables = {"schedule": {"use": "staged"}, "model": {"layers": 4}}
#: Biases, LayerNorm, learned positions, and one table for embedding and head.
BIASED: Tables = {
    "model": {
        "positions": "learned",
        "max_length": 64,
        "norm": "layernorm",
        "activation": "gelu",
        "bias": True,
        "tied": True,
    }
}
#: No size is a power of two; heads share keys; microbatches are odd in number, and of one sequence.
UNEVEN: Tables = {
    "model": {"width": 30, "heads": 4, "kv_heads": 2, "head_size": 10, "ffn": 44, "vocab": 67, "layers": 3},
    "batch": {"sequences": 12, "microbatch": 1, "length": 13},
}
EXPERTS: Tables = {"model": {"use": "routed"}}
MIXED: Tables = {"precision": {"use": "wide_norms"}}
#: float16 with a scale at which the first steps overflow, and are skipped.
SKIPPING: Tables = {"precision": {"use": "fp16", "initial_scale": 2.0**24}, "optimizer": {"use": "adamw"}}

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


class Scope(Enum):
    """Which checks run in a surrounding."""

    ALL = "all"
    FEW = "few"
    """Those of :data:`FEW` for the kind: what another layout or model can break."""


#: Labels of checks, or their names: what runs in surroundings beside the first of each number of ranks.
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
        "monitor": "changes_nothing publishes_what_it_declares",
    }.items()
}


@attrs.define(frozen=True)
class Surrounding:
    """One case of a component, and what of the checks runs there."""

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
    """A surrounding that a component is not tested in, by name."""

    name: str
    reason: str


@attrs.define(frozen=True)
class Wish:
    """A surrounding as it is written down: laid over the author's case, if the component admits it."""

    name: str
    topology: Mapping[str, int] = attrs.field(factory=dict)
    around: Tables = attrs.field(factory=dict)
    config: Tables = attrs.field(factory=dict)
    world: int = 0
    """Of a topology, which makes the degrees itself: how many ranks it lays out."""
    scope: Scope = Scope.FEW
    extra: frozenset[str] = frozenset()
    needs: tuple[str, ...] = ()
    """Words of ``Component.supports``: one that is unsupported there leaves this out."""


def surroundings_of(case: Case, *, quick: bool = False) -> Iterator[Surrounding | Skip]:
    """Yield where a component is tested, the plainest first.

    Args:
        case: the component, and what its author puts around it, which is in every surrounding.
        quick: only the author's case as it is.
    """
    given = case.config
    case = filled(case)
    base = case if quick or case.kind == "topology" else _base(case)
    component = base.component()
    fixed = bool(case.topology)  # the author names the layout: there are no others
    twice = base.kind == "checkpoint" and not quick and not fixed  # all of it runs on two ranks
    yield Surrounding("", base, Scope.FEW if twice else Scope.ALL)
    if quick:
        return
    wishes = [*WISHES.get(case.kind, lambda component: ())(component)]
    on_ranks = next((wish for wish in wishes if wish.scope is Scope.ALL and wish.topology), Wish(""))
    options = [*_own_options(component, given, Wish("") if fixed else on_ranks)]
    for wish in [*wishes, *options]:
        if fixed and (wish.topology or wish.world):
            continue
        if reason := _declined(component, wish.needs):
            yield Skip(wish.name, reason)
            continue
        made = _made(base, wish, given)
        refused = None if case.kind == "topology" else _refusal(made)
        if refused is None and wish in options:
            refused = _not_here(made)
        yield (
            Skip(wish.name, f"refused: {refused}")
            if refused
            else Surrounding(wish.name, made, wish.scope, wish.extra)
        )


def filled(case: Case) -> Case:
    """Return the case with a value for each key that its component requires and the tiny recipe knows.

    Of data for each that the tiny recipe knows, and for ``paths``: it is small there, so that epochs end.
    Where the author gives no key, or not all that are required, the component's example is laid below.
    """
    component, known = case.component(), {} if case.listed else TINY.get(case.kind, {})
    if case.kind == "data":
        known = {**known, "paths": [CORPUS]}
    given = {} if case.listed else case.overrides.get(case.kind, {})
    fields = attrs.fields(component.config)
    wanted = [f.name for f in fields if f.default is attrs.NOTHING or case.kind == "data"]
    found = {name: known[name] for name in wanted if name in known}
    required = {f.name for f in fields if f.default is attrs.NOTHING}
    if not {**given, **case.config} or required - {*found, *given, *case.config}:
        found |= component.example
    below = {name: value for name, value in found.items() if name not in given}
    return attrs.evolve(case, config={**below, **case.config})


def _base(case: Case) -> Case:
    """Return the case with the least around it that makes a recipe; as it is if nothing does.

    Around a monitor there is text, of which it may read or write some.
    """
    for around in (TEXT, *BASES) if case.kind == "monitor" else BASES:
        for beside in _beside(case):
            tried = attrs.evolve(case, overrides=merge(merge(around, beside), case.overrides))
            if _refusal(tried) is None:
                return tried
    return case


def _beside(case: Case) -> Iterator[Tables]:
    """Yield what may stand beside a component: nothing, or another one that provides what it requires."""
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
    """Return why a run with that option cannot be composed on this machine, as one that needs a GPU."""
    from nanotrain_core.testing.probe import make_run  # it imports torch

    try:
        case.build()
        make_run(case.alone(), {})
    except NanotrainError as error:
        return str(error).splitlines()[0]
    except Exception:  # a mistake, which the checks tell
        return None
    return None


def _declined(component: Component, needs: Iterable[str]) -> str | None:
    for word in needs:
        support = component.supports.get(word)
        if support in (Support.UNSUPPORTED, Support.NOT_IMPLEMENTED):
            return f"it declares {word}: {support.value}"
    return None


def _made(base: Case, wish: Wish, given: Mapping[str, Any]) -> Case:
    """Return the case in a surrounding: what the author gave of its own table stays."""
    around = {key: value for key, value in wish.around.items() if key != base.kind or base.listed}
    listed = [*around.get("parallel", ())]
    theirs = base.overrides.get("parallel", ())
    if theirs:  # what the author puts around it stays; the layout's wrappers come before
        names = {table["use"] for table in theirs}
        around["parallel"] = [*(table for table in listed if table["use"] not in names), *theirs]
    own = {key: value for key, value in base.overrides.items() if key != "parallel"}
    ranks: Any = {} if wish.topology else {"world_size": wish.world or base.world_size}
    return Case(
        base.kind,
        use=base.use,
        topology={**base.topology, **wish.topology},
        overrides=merge(around, own),
        config={**base.config, **wish.config, **given},
        name=f"{base.name or base.use}-{wish.name}",
        plugins=base.plugins,
        **ranks,
    )


# --- a component's own options ---------------------------------------------------------------------


def _own_options(component: Component, given: Mapping[str, Any], where: Wish) -> Iterator[Wish]:
    """Yield every other value of each field that has few: a bool, or one of several words.

    On as many ranks as the kind is tested on first.
    """
    hints = get_type_hints(component.config)
    for field in attrs.fields(component.config):
        if field.name in given or field.name.startswith("_"):
            continue
        for value in _others(hints.get(field.name), field.default):
            text = str(value).lower() if isinstance(value, bool) else value
            yield attrs.evolve(
                where,
                name=f"{field.name}={text}",
                config={field.name: value},
                needs=(*where.needs, field.name),
                scope=Scope.FEW,
            )


def _others(hint: Any, default: Any) -> Sequence[Any]:
    if hint is bool and isinstance(default, bool):
        return (not default,)
    if get_origin(hint) is Literal and isinstance(default, str):
        return [value for value in get_args(hint) if value != default]
    return ()


# --- kind by kind ----------------------------------------------------------------------------------


#: The check with layers that the tiny models do not have.
MORE_LAYERS = "inner_shared_and_biased_layers"


def _parallel(component: Component) -> Iterator[Wish]:
    own = [dim for dim in ("tp", "cp", "ep", "etp", "pp") if dim in component.mesh_dims]
    here = {"use": component.name}
    inner = frozenset({MORE_LAYERS, "any_number_of_microbatches"})
    if "gradient_sync" in component.provides:
        yield from _sync("parallel", [here], inner)
    elif own:
        for dim in own:
            data, model = ({"dp": 2}, EXPERTS) if dim in ("ep", "etp") else ({}, {})
            two = {**data, dim: 2}
            around = {**model, "parallel": [here, SUMMED]}
            yield Wish(f"{dim}2", two, around, scope=Scope.ALL, needs=(dim,))
            yield Wish(f"dp2-{dim}2", {"dp": 4 if data else 2, dim: 2}, around, extra=inner, needs=(dim,))
            four = {**({"dp": 4} if data else {}), dim: 4}
            yield Wish(f"{dim}4", four, around, extra=frozenset({MORE_LAYERS}), needs=(dim,))
            if not model:
                yield from _models(f"{dim}2", two, {"parallel": [here, SUMMED]})
            staged = merge(STAGED, {**around, "model": {**model.get("model", {}), "layers": 4}})
            yield Wish(f"{dim}2-pp2", {**two, "pp": 2}, staged, needs=(dim, "pp"))
    else:
        yield Wish("dp2", {"dp": 2}, {"parallel": [here, SUMMED]}, scope=Scope.ALL)
        yield Wish("tp2", {"tp": 2}, {"parallel": [SLICED, here, SUMMED]})
        yield Wish("pp2", {"pp": 2}, {**STAGED, "parallel": [here, SUMMED]}, needs=("pp",))
        yield from _models("dp2", {"dp": 2}, {"parallel": [here, SUMMED]})


def _sync(kind: str, wrappers: Sequence[Tables], extra: frozenset[str] = frozenset()) -> Iterator[Wish]:
    """Yield the layouts whose gradients a gradient sync must add up."""
    around: Tables = {"parallel": [*wrappers]}
    cut = {"parallel": [SLICED, *wrappers]}
    tied = merge(STAGED, {**around, "model": {"tied": True}})
    yield Wish("dp2", {"dp": 2}, around, scope=Scope.ALL, needs=("dp",))
    yield Wish("dp4", {"dp": 4}, around, needs=("dp",))
    yield Wish("tp2", {"tp": 2}, cut, extra=extra, needs=("tp",))
    yield Wish("dp2-tp2", {"dp": 2, "tp": 2}, cut, extra=extra, needs=("dp", "tp"))
    yield Wish("pp2-tied", {"pp": 2}, tied, needs=("pp",))
    yield Wish("dp2-pp2-tied", {"dp": 2, "pp": 2}, tied, needs=("dp", "pp"))
    spread = {**EXPERTS, "parallel": [SPREAD, *wrappers]}
    yield Wish("dp2-ep2", {"dp": 2, "ep": 2}, spread, needs=("dp", "ep"))
    yield Wish("dp4-ep2", {"dp": 4, "ep": 2}, spread, needs=("dp", "ep"))
    yield from _models("dp2", {"dp": 2}, around)
    mixed = frozenset({"mixed_dtypes"} if kind == "parallel" else ())
    if not mixed:
        yield Wish("dp2-wide_norms", {"dp": 2}, {**around, **MIXED}, needs=("dp", "wide_norms"))


def _models(layout: str, topology: Mapping[str, int], around: Tables) -> Iterator[Wish]:
    models = {"biased": BIASED, "uneven": UNEVEN, "experts": EXPERTS}
    for name, model in models.items():
        yield Wish(f"{layout}-{name}", topology, {**around, **model}, needs=(name,))


def _optimizer(component: Component) -> Iterator[Wish]:
    sync = "gradient_sync" in component.provides
    yield from _sync("optimizer", [] if sync else [SUMMED])
    yield Wish("experts", {}, EXPERTS, needs=("experts",))
    yield Wish("uneven", {}, UNEVEN, needs=("uneven",))


def _precision(component: Component) -> Iterator[Wish]:
    yield Wish("dp2", {"dp": 2}, {"parallel": [SUMMED]}, needs=("dp",))
    yield Wish("tp2", {"tp": 2}, {"parallel": [SLICED, SUMMED]}, needs=("tp",))
    yield Wish("experts", {}, EXPERTS, needs=("experts",))
    yield Wish("biased", {}, BIASED, needs=("biased",))
    yield Wish("uneven", {}, UNEVEN, needs=("uneven",))


def _checkpoint(component: Component) -> Iterator[Wish]:
    yield Wish("dp2", {"dp": 2}, {"parallel": [SUMMED]}, scope=Scope.ALL, needs=("dp",))
    cut = {"parallel": [SLICED, SUMMED]}
    yield Wish("dp2-tp2", {"dp": 2, "tp": 2}, cut, needs=("tp",))
    tied = merge(STAGED, {"parallel": [SUMMED], "model": {"tied": True}})
    yield Wish("pp2-tied", {"pp": 2}, tied, needs=("pp",))
    yield Wish("dp2-ep2", {"dp": 2, "ep": 2}, {**EXPERTS, "parallel": [SPREAD, SUMMED]}, needs=("ep",))
    yield Wish("uneven", {}, UNEVEN, needs=("uneven",))


def _schedule(component: Component) -> Iterator[Wish]:
    around: Tables = {"parallel": [SUMMED], "model": {"layers": 12}}
    if "pp" not in component.mesh_dims:
        yield Wish("dp2", {"dp": 2}, {"parallel": [SUMMED]}, scope=Scope.ALL)
        return
    yield Wish("pp2", {"pp": 2}, around, scope=Scope.ALL, needs=("pp",))
    yield Wish("pp4", {"pp": 4}, around, scope=Scope.ALL, needs=("pp",))
    both = {"dp": 2, "pp": 2}
    yield Wish("dp2-pp2-tied", both, merge(around, {"model": {"tied": True}}), needs=("pp", "tied"))
    yield Wish("pp2-biased", {"pp": 2}, merge(merge(around, BIASED), {"model": {"layers": 12}}))
    yield Wish("pp2-experts", {"pp": 2}, {**around, "model": {"use": "routed", "layers": 12}})


def _monitor(component: Component) -> Iterator[Wish]:
    yield Wish("dp2", {"dp": 2}, {"parallel": [SUMMED]}, scope=Scope.ALL, needs=("dp",))
    yield Wish("tp2", {"tp": 2}, {"parallel": [SLICED, SUMMED]}, needs=("tp",))
    yield Wish("pp2", {"pp": 2}, {**STAGED, "parallel": [SUMMED]}, needs=("pp",))
    yield Wish("experts", {}, EXPERTS, needs=("experts",))
    yield Wish("skipped_steps", {}, SKIPPING, needs=("skipped_steps",))
    yield Wish("every_third_step_logged", {}, {"run": {"log_every": 3}})


def _model(component: Component) -> Iterator[Wish]:
    lengths = {"short": 6, "odd": 19}
    yield from (Wish(name, {}, {"batch": {"length": length}}) for name, length in lengths.items())
    names = [field.name for field in attrs.fields(component.config)]
    for name in names:
        if name in ("kv_heads", "key_value_heads", "num_key_value_heads", "n_kv_heads", "num_kv_heads"):
            yield from (Wish(f"{name}={n}", config={name: n}, needs=(name,)) for n in (2, 1))


def _data(component: Component) -> Iterator[Wish]:
    yield from (Wish(f"length{n}", {}, {"batch": {"length": n}}) for n in (5, 33))


def _topology(component: Component) -> Iterator[Wish]:
    dims = [f.name for f in attrs.fields(component.config) if f.name in ("pp", "cp", "tp", "ep", "etp", "dp")]
    for world in (2, 4):
        yield Wish(f"world{world}", world=world)
        yield from (Wish(f"{dim}2-world{world}", world=world, config={dim: 2}, needs=(dim,)) for dim in dims)
    for one, other in (("pp", "tp"), ("tp", "ep"), ("cp", "tp"), ("pp", "ep")):
        if one in dims and other in dims:
            yield Wish(f"{one}2-{other}2-world4", world=4, config={one: 2, other: 2}, needs=(one, other))


WISHES: Mapping[str, Callable[[Component], Iterator[Wish]]] = {
    "parallel": _parallel,
    "optimizer": _optimizer,
    "precision": _precision,
    "checkpoint": _checkpoint,
    "schedule": _schedule,
    "monitor": _monitor,
    "model": _model,
    "data": _data,
    "topology": _topology,
}
