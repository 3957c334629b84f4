"""The layouts, models and precisions in which the harness tests a component, by kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum

import attrs

from nanotrain_core.component import Component
from nanotrain_core.recipe.merge import merge_tables
from nanotrain_core.testing.case import Tables

SUMMED, RANGED, SLICED, SPREAD = ({"use": name} for name in ("summed", "ranged", "sliced", "spread"))
#: Sequence parallelism: between the layers that ranks split, each has a share of the tokens.
SLICED_TOKENS = {**SLICED, "sequence_parallel": True}
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
#: Six experts, three for each token, and odd sizes.
UNEVEN_EXPERTS: Tables = {
    "model": {"use": "routed", "experts": 6, "chosen": 3, "ffn": 10, "vocab": 67, "layers": 3},
    "batch": UNEVEN["batch"],
}
#: Some ranks have no expert that gets a token.
NO_TOKENS: Tables = {"model": {"use": "routed", "favored": 2}}
MIXED: Tables = {"precision": {"use": "wide_norms"}}
#: Weights in bfloat16, and masters and moments in float32: elsewhere all tensors have one dtype.
NARROW: Tables = {"precision": {"use": "bf16"}}
#: float16 with a scale at which the first steps overflow, and are skipped.
SKIPPING: Tables = {"precision": {"use": "fp16", "initial_scale": 2.0**24}, "optimizer": {"use": "adamw"}}


class Scope(Enum):
    """Which checks run in a variant."""

    ALL = "all"
    FEW = "few"
    """Those of :data:`FEW` for the kind: what another layout or model can break."""


@attrs.define(frozen=True)
class Spec:
    """The definition of a variant: merged over the author's case, if the component admits it."""

    name: str
    topology: Mapping[str, int] = attrs.field(factory=dict)
    overrides: Tables = attrs.field(factory=dict)
    config: Tables = attrs.field(factory=dict)
    world: int = 0
    """Of a topology, which makes the degrees itself: how many ranks it lays out."""
    scope: Scope = Scope.FEW
    extra: frozenset[str] = frozenset()
    needs: tuple[str, ...] = ()
    """Words of ``Component.supports``: one that is unsupported there leaves this out."""
    own: str = ""
    """A mesh dimension of the component that not every topology has: without it this is left out, by name."""


#: Dimensions of the harness's own topology. A wrapper may have others, of the topology it is made for.
KNOWN_DIMS = ("tp", "cp", "ep", "etp", "pp")
#: The check with layers that the tiny models do not have.
MORE_LAYERS = "inner_shared_and_biased_layers"
#: Of a wrapper along a dimension of its own.
OF_OWN = frozenset({"its_dimensions_are_used", "any_number_of_microbatches"})
#: Of whoever sums gradients, where layers are split as well.
OF_SYNC = frozenset({MORE_LAYERS, "any_number_of_microbatches"})


def _parallel(component: Component) -> Iterator[Spec]:
    own = [dim for dim in KNOWN_DIMS if dim in component.mesh_dims]
    here = {"use": component.name}
    if "gradient_sync" in component.provides:
        yield from _sync("parallel", [here], OF_SYNC)
        if "dp_shard" in component.mesh_dims:
            hybrid = {"dp": 4, "dp_shard": 2}
            yield Spec("dp4-dp_shard2", hybrid, {"parallel": [here]}, extra=OF_SYNC, needs=("dp_shard",))
    elif own:
        for dim in own:
            data, model = ({"dp": 2}, EXPERTS) if dim in ("ep", "etp") else ({}, {})
            two = {**data, dim: 2}
            overrides = {**model, "parallel": [here, SUMMED]}
            yield Spec(f"{dim}2", two, overrides, scope=Scope.ALL, needs=(dim,))
            yield Spec(
                f"dp2-{dim}2", {"dp": 4 if data else 2, dim: 2}, overrides, extra=OF_SYNC, needs=(dim,)
            )
            four = {**({"dp": 4} if data else {}), dim: 4}
            yield Spec(f"{dim}4", four, overrides, extra=frozenset({MORE_LAYERS}), needs=(dim,))
            if model:
                uneven = {**UNEVEN_EXPERTS, "parallel": [here, SUMMED]}
                yield Spec(f"{dim}2-uneven", two, uneven, needs=(dim, "uneven"))
                empty = {**NO_TOKENS, "parallel": [here, SUMMED]}
                yield Spec(f"{dim}2-no_tokens", two, empty, needs=(dim,))
            else:
                yield from _models(f"{dim}2", two, {"parallel": [here, SUMMED]})
            if dim == "cp":
                both = {"cp": 2, "tp": 2}
                for name, cut in (("cp2-tp2", SLICED), ("cp2-tp2-sp", SLICED_TOKENS)):
                    yield Spec(name, both, {"parallel": [cut, here, SUMMED]}, needs=("cp", "tp"))
            staged = merge_tables(STAGED, {**overrides, "model": {**model.get("model", {}), "layers": 4}})
            yield Spec(f"{dim}2-pp2", {**two, "pp": 2}, staged, needs=(dim, "pp"))
    else:
        yield Spec("dp2", {"dp": 2}, {"parallel": [here, SUMMED]}, scope=Scope.ALL)
        yield Spec("tp2", {"tp": 2}, {"parallel": [SLICED, here, SUMMED]})
        yield Spec("tp2-sp", {"tp": 2}, {"parallel": [SLICED_TOKENS, here, SUMMED]})
        yield Spec("pp2", {"pp": 2}, {**STAGED, "parallel": [here, SUMMED]}, needs=("pp",))
        yield from _models("dp2", {"dp": 2}, {"parallel": [here, SUMMED]})
    for dim in sorted(component.mesh_dims.difference(KNOWN_DIMS, ("dp", "edp", "dp_shard"))):
        overrides = {"parallel": [here, SUMMED]}
        # Not all checks: some know what a rank has of a layer only along the dimensions above.
        for name, degrees in ((f"{dim}2", {dim: 2}), (f"dp2-{dim}2", {"dp": 2, dim: 2})):
            yield Spec(name, degrees, overrides, extra=OF_OWN, needs=(dim,), own=dim)


def _sync(kind: str, wrappers: Sequence[Tables], extra: frozenset[str] = frozenset()) -> Iterator[Spec]:
    """Yield the layouts whose gradients a gradient sync must sum."""
    overrides: Tables = {"parallel": [*wrappers]}
    cut = {"parallel": [SLICED, *wrappers]}
    tied, spread = _tied(wrappers), {**EXPERTS, "parallel": [SPREAD, *wrappers]}
    yield Spec("dp2", {"dp": 2}, overrides, scope=Scope.ALL, needs=("dp",))
    yield Spec("dp4", {"dp": 4}, overrides, needs=("dp",))
    yield Spec("tp2", {"tp": 2}, cut, extra=extra, needs=("tp",))
    yield _sequence_parallel(wrappers, extra)
    yield Spec("pp2-tied", {"pp": 2}, tied, needs=("pp",))
    yield from _of_four_ranks(wrappers, extra)
    yield Spec("dp4-ep2", {"dp": 4, "ep": 2}, spread, needs=("dp", "ep"))
    yield from _models("dp2", {"dp": 2}, overrides)
    mixed = frozenset({"mixed_dtypes"} if kind == "parallel" else ())
    if not mixed:
        yield Spec("dp2-wide_norms", {"dp": 2}, {**overrides, **MIXED}, needs=("dp", "wide_norms"))


def _sequence_parallel(wrappers: Sequence[Tables] = (SUMMED,), extra: frozenset[str] = frozenset()) -> Spec:
    """Return the layout in which gradients of all that is not sharded are partial over ``tp``."""
    overrides: Tables = {"parallel": [SLICED_TOKENS, *wrappers]}
    return Spec("tp2-sp", {"tp": 2}, overrides, extra=extra, needs=("tp", "sequence_parallel"))


def _of_four_ranks(
    wrappers: Sequence[Tables] = (SUMMED,), extra: frozenset[str] = frozenset()
) -> Iterator[Spec]:
    """Yield layouts in which replicas, and parts of a layer, stages or experts, are on several ranks."""
    cut, spread = ({"parallel": [SLICED, *wrappers]}, {**EXPERTS, "parallel": [SPREAD, *wrappers]})
    yield Spec("dp2-tp2", {"dp": 2, "tp": 2}, cut, extra=extra, needs=("dp", "tp"))
    yield Spec("dp2-pp2-tied", {"dp": 2, "pp": 2}, _tied(wrappers), needs=("dp", "pp"))
    yield Spec("dp2-ep2", {"dp": 2, "ep": 2}, spread, needs=("dp", "ep"))


def _tied(wrappers: Sequence[Tables]) -> Tables:
    return merge_tables(STAGED, {"parallel": [*wrappers], "model": {"tied": True}})


def _models(layout: str, topology: Mapping[str, int], overrides: Tables) -> Iterator[Spec]:
    models = {"biased": BIASED, "uneven": UNEVEN, "experts": EXPERTS}
    for name, model in models.items():
        yield Spec(f"{layout}-{name}", topology, {**overrides, **model}, needs=(name,))


def _optimizer(component: Component) -> Iterator[Spec]:
    sync = "gradient_sync" in component.provides
    yield from _sync("optimizer", [] if sync else [SUMMED], OF_SYNC if sync else frozenset())
    if not sync:  # one that completes gradients itself knows who updates what
        for name, topology, wrappers in (
            ("dp2-ranges", {"dp": 2}, [RANGED]),
            ("dp2-tp2-ranges", {"dp": 2, "tp": 2}, [SLICED, RANGED]),
        ):
            yield Spec(name, topology, {"parallel": wrappers}, needs=(*topology, "ranges"))
        both = {"dp": 2, "pp": 2}
        yield Spec("dp2-pp2-tied-ranges", both, _tied([RANGED]), needs=(*both, "ranges"))
    yield Spec("experts", {}, EXPERTS, needs=("experts",))
    yield Spec("uneven", {}, UNEVEN, needs=("uneven",))


def _precision(component: Component) -> Iterator[Spec]:
    yield Spec("dp2", {"dp": 2}, {"parallel": [SUMMED]}, needs=("dp",))
    yield Spec("tp2", {"tp": 2}, {"parallel": [SLICED, SUMMED]}, needs=("tp",))
    yield _sequence_parallel()
    yield from _of_four_ranks()
    yield Spec("dp2-ranges", {"dp": 2}, {"parallel": [RANGED]}, needs=("dp", "ranges"))
    yield Spec("experts", {}, EXPERTS, needs=("experts",))
    yield Spec("biased", {}, BIASED, needs=("biased",))
    yield Spec("uneven", {}, UNEVEN, needs=("uneven",))


def _checkpoint(component: Component) -> Iterator[Spec]:
    yield Spec("dp2", {"dp": 2}, {"parallel": [SUMMED]}, scope=Scope.ALL, needs=("dp",))
    cut = {"parallel": [SLICED, SUMMED]}
    yield Spec("dp2-tp2", {"dp": 2, "tp": 2}, cut, needs=("tp",))
    yield Spec("pp2-tied", {"pp": 2}, _tied([SUMMED]), needs=("pp",))
    yield Spec("dp2-ep2", {"dp": 2, "ep": 2}, {**EXPERTS, "parallel": [SPREAD, SUMMED]}, needs=("ep",))
    yield Spec("uneven", {}, UNEVEN, needs=("uneven",))
    yield Spec("bf16", {}, NARROW, needs=("bf16",))


def _schedule(component: Component) -> Iterator[Spec]:
    overrides: Tables = {"parallel": [SUMMED], "model": {"layers": 12}}
    if "pp" not in component.mesh_dims:
        yield Spec("dp2", {"dp": 2}, {"parallel": [SUMMED]}, scope=Scope.ALL)
        return
    yield Spec("pp2", {"pp": 2}, overrides, scope=Scope.ALL, needs=("pp",))
    yield Spec("pp4", {"pp": 4}, overrides, scope=Scope.ALL, needs=("pp",))
    both = {"dp": 2, "pp": 2}
    tied = merge_tables(overrides, {"model": {"tied": True}})
    yield Spec("dp2-pp2-tied", both, tied, needs=("pp", "tied"))
    yield Spec(
        "pp2-biased", {"pp": 2}, merge_tables(merge_tables(overrides, BIASED), {"model": {"layers": 12}})
    )
    yield Spec("pp2-experts", {"pp": 2}, {**overrides, "model": {"use": "routed", "layers": 12}})


def _monitor(component: Component) -> Iterator[Spec]:
    yield Spec("dp2", {"dp": 2}, {"parallel": [SUMMED]}, scope=Scope.ALL, needs=("dp",))
    yield Spec("tp2", {"tp": 2}, {"parallel": [SLICED, SUMMED]}, needs=("tp",))
    yield _sequence_parallel()
    yield Spec("pp2", {"pp": 2}, {**STAGED, "parallel": [SUMMED]}, needs=("pp",))
    yield from _of_four_ranks()
    yield Spec("experts", {}, EXPERTS, needs=("experts",))
    yield Spec("skipped_steps", {}, SKIPPING, needs=("skipped_steps",))
    yield Spec("every_third_step_logged", {}, {"run": {"log_every": 3}})


def _model(component: Component) -> Iterator[Spec]:
    lengths = {"short": 6, "odd": 19}
    yield from (Spec(name, {}, {"batch": {"length": length}}) for name, length in lengths.items())
    names = [field.name for field in attrs.fields(component.config)]
    for name in names:
        if name in ("kv_heads", "key_value_heads", "num_key_value_heads", "n_kv_heads", "num_kv_heads"):
            yield from (Spec(f"{name}={n}", config={name: n}, needs=(name,)) for n in (2, 1))


def _data(component: Component) -> Iterator[Spec]:
    yield from (Spec(f"length{n}", {}, {"batch": {"length": n}}) for n in (5, 33))


def _topology(component: Component) -> Iterator[Spec]:
    dims = [f.name for f in attrs.fields(component.config) if f.name in ("pp", "cp", "tp", "ep", "etp", "dp")]
    for world in (2, 4):
        yield Spec(f"world{world}", world=world)
        yield from (Spec(f"{dim}2-world{world}", world=world, config={dim: 2}, needs=(dim,)) for dim in dims)
    for one, other in (("pp", "tp"), ("tp", "ep"), ("cp", "tp"), ("pp", "ep")):
        if one in dims and other in dims:
            yield Spec(f"{one}2-{other}2-world4", world=4, config={one: 2, other: 2}, needs=(one, other))


OF_KIND: Mapping[str, Callable[[Component], Iterator[Spec]]] = {
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
