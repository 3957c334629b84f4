"""The report of a recipe's model: sections for people, and the same as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from nanotrain_core.api import CachedToken, Layout, NanotrainError, Recipe, Registry, cached_token_of
from nanotrain_plan.dry.origin import place_of
from nanotrain_plan.hardware import Hardware
from nanotrain_plan.model import Parameters, TokenFLOPs, count_flops, count_parameters
from nanotrain_plan.model_report.components import Pieces
from nanotrain_plan.model_report.layers import Layer, layers
from nanotrain_plan.model_report.roofline import Regime, roofline
from nanotrain_plan.model_report.sensitivity import STATE, Moved, Size, sensitivity, size_of
from nanotrain_plan.rendering.parts import Body, Bytes, FLOPs, Section, Shape, Share, Table, say

#: Of what ``--json`` prints: see :data:`nanotrain_plan.plan.VERSION`.
VERSION = "1.0"

#: Rows of work that are told of each regime, those that take longest.
MOST_WORK = 6


@attrs.define(frozen=True, kw_only=True)
class ModelReport:
    """Of one recipe on one device."""

    recipe: Recipe
    registry: Registry
    hardware: Hardware
    dtype: torch.dtype
    parameters: Parameters
    flops: TokenFLOPs
    layers: Sequence[Layer]
    regimes: Sequence[Regime]
    cached: CachedToken | None
    size: Size
    moved: Sequence[Moved]


def report(
    recipe: Recipe, registry: Registry, layout: Layout, hardware: Hardware, *, batch: int
) -> ModelReport:
    """Build one layer of each kind on ``meta`` and run it.

    Args:
        recipe: checked.
        registry: the plugins.
        layout: of the recipe, which the model's own check is given.
        hardware: whose roofline it is.
        batch: sequences that are decoded at once.

    Raises:
        NanotrainError: the model does something that cannot be followed without numbers.
    """
    dtype = torch.float32 if recipe.precision.use in ("fp32", "fp64") else torch.bfloat16
    cached = cached_token_of(recipe.model.config)
    microbatch, length = recipe.batch.microbatch, recipe.batch.length
    try:
        pieces = Pieces.of(recipe.model, registry, recipe, dtype)
        flops = count_flops(recipe, registry)
        return ModelReport(
            recipe=recipe,
            registry=registry,
            hardware=hardware,
            dtype=dtype,
            parameters=count_parameters(recipe, registry),
            flops=flops,
            layers=layers(pieces, microbatch, length, further=flops.mtp > 0),
            regimes=roofline(pieces, hardware, cached, microbatch=microbatch, length=length, batch=batch),
            cached=cached,
            size=size_of(recipe.model, registry, recipe, dtype),
            moved=sensitivity(recipe, registry, layout, dtype),
        )
    except (NotImplementedError, RuntimeError) as problem:
        text = str(problem).partition("\n")[0]
        raise NanotrainError(f"model '{recipe.model.use}' cannot be inspected: {text}") from problem


# --- for people ---------------------------------------------------------------------------------------


def sections(found: ModelReport) -> list[Section]:
    """Return what a terminal and a page show."""
    told = {
        "The model": _model,
        "The layers, one of each kind": _layers,
        "The KV cache": _cache,
        f"Roofline on {found.hardware.name}": _roofline,
        "What moves it: each key raised by a tenth, or to the next value that the model takes": _sensitivity,
    }
    return [Section(title, list(body(found))) for title, body in told.items()]


def _model(found: ModelReport) -> Body:
    p, f = found.parameters, found.flops
    model = place_of(found.registry.get("model", found.recipe.model.use).load())
    length = found.recipe.batch.length
    yield say(
        "It has {total:,} parameters, of which a token meets {active:,}.",
        model,
        total=p.total,
        active=p.active,
    )
    yield Table(("parameters of", "number"), [(kind, number) for kind, number in p.by_kind.items() if number])
    yield say(
        "Training costs {causal} for a token of a sequence of {length:,}: {matmul} in products with "
        "weights and {attention} in attention, causal; {whole} in all if it were not.",
        model,
        causal=_giga(f.causal),
        length=length,
        matmul=_giga(f.matmul),
        attention=_giga(f.attention),
        whole=_giga(f.non_causal),
    )
    if p.mtp:
        yield say(
            "Modules for further tokens (MTP) have {mtp:,} parameters more and cost {flops} more.",
            model,
            mtp=p.mtp,
            flops=_giga(f.mtp),
        )


def _giga(flops: float) -> str:
    return f"{flops / 1e9:.2f} GFLOP" if flops >= 1e9 else f"{flops / 1e6:.2f} MFLOP"


def _layers(found: ModelReport) -> Body:
    total, activations = found.size.parameters, found.size.activations
    microbatch, length = found.recipe.batch.microbatch, found.recipe.batch.length
    rows = [
        (
            each.piece,
            each.module,
            each.role,
            " ".join(format(Shape(shape)) for shape in each.shapes),
            each.parameters,
            FLOPs(round(each.flops)),
            Bytes(each.weight_bytes),
            Bytes(round(each.kept)),
        )
        for each in found.layers
    ]
    columns = ("of", "module", "role", "shapes", "parameters", "FLOPs of a token, forward", "weights", "kept")
    yield Table(columns, rows)
    yield say(
        "Kept is what a token leaves for backward in {dtype}, without activation checkpointing: a "
        "microbatch of {microbatch:,} x {length:,} tokens leaves {activations} in all layers. "
        "Weights of all {total:,} parameters, MTP included, are {weights}.",
        dtype=str(found.dtype)[6:],
        microbatch=microbatch,
        length=length,
        activations=Bytes(activations),
        total=total,
        weights=Bytes(total * found.dtype.itemsize),
    )


def _cache(found: ModelReport) -> Body:
    if found.cached is None:
        yield say("Model {use} does not say what generation keeps of a token.", use=found.recipe.model.use)
        return
    where = place_of(type(found.recipe.model.config).cached_token)
    size = found.cached.elements * 2
    yield say(
        "Generation keeps {elements:,} numbers of each token, of all layers: {bytes:,} bytes "
        "({kilobytes} KB) in {dtype}, {sequence} for a sequence of {length:,}.",
        where,
        elements=found.cached.elements,
        bytes=size,
        dtype="bfloat16",
        kilobytes=f"{size / 1000:.3f}",
        sequence=Bytes(round(size * found.cached.attended(found.recipe.batch.length))),
        length=found.recipe.batch.length,
    )


def _roofline(found: ModelReport) -> Body:
    h = found.hardware
    peak, bandwidth = h.peak(str(found.dtype)[6:]), h.memory.bandwidth_gb_s * 1e9
    yield say(
        "One {hardware} makes {peak} a second in {dtype} and moves {bandwidth} a second: work with fewer "
        "than {ridge} FLOPs for a byte is bound by memory. All of the model is taken to be on it, "
        "whether it fits or not; nothing overlaps, and nothing waits.",
        hardware=h.name,
        peak=FLOPs(peak),
        dtype=str(found.dtype)[6:],
        bandwidth=Bytes(bandwidth),
        ridge=f"{peak / bandwidth:.0f}",
    )
    for regime in found.regimes:
        yield say(
            "{name} ({assumes}): at most {rate:,.0f} tokens/s; {intensity:.1f} FLOPs for a byte, and "
            "{share} of the time is bound by memory.",
            name=regime.name.capitalize(),
            assumes=regime.assumes,
            rate=regime.tokens_per_second,
            intensity=regime.intensity,
            share=Share(regime.by_memory),
        )
        longest = sorted(regime.work, key=lambda each: -each.seconds)[:MOST_WORK]
        rows = [
            (
                each.piece,
                each.module,
                each.kind,
                FLOPs(round(each.flops)),
                Bytes(round(each.bytes)),
                round(each.intensity, 1),
                each.bound,
                Share(each.seconds / regime.seconds),
            )
            for each in longest
        ]
        columns = ("of", "module", "work", "FLOPs", "bytes", "FLOPs/byte", "bound by", "time")
        yield Table(columns, rows)


def _sensitivity(found: ModelReport) -> Body:
    rows = [
        (
            each.key,
            f"{each.before:,} to {each.after:,}",
            Share(each.after / each.before - 1),
            Share(each.parameters),
            Share(each.flops),
            Share(each.memory),
        )
        for each in found.moved
    ]
    yield Table(("key", "raised", "by", "parameters", "FLOPs of a token", "memory"), rows)
    yield say(
        "Memory is that of training on one device: {each} bytes for a parameter (weight, gradient, "
        "master and Adam's two moments) and the activations of a microbatch, {memory} in all. The "
        "keys that move it most for their raise come first.",
        each=STATE[found.dtype],
        memory=Bytes(found.size.memory),
    )


# --- as JSON -------------------------------------------------------------------------------------------


def as_json(found: ModelReport) -> dict[str, Any]:
    """Return what ``--json`` prints; docs/explain.md lists the keys."""
    cached = found.cached
    return {
        "version": VERSION,
        "recipe": found.recipe.run.name,
        "model": found.recipe.model.use,
        "hardware": found.hardware.name,
        "dtype": str(found.dtype)[6:],
        "parameters": attrs.asdict(found.parameters),
        "flops_per_token": {
            **attrs.asdict(found.flops),
            "causal": found.flops.causal,
            "non_causal": found.flops.non_causal,
            "model": found.flops.model,
        },
        "layers": [attrs.asdict(each) for each in found.layers],
        "size": {**attrs.asdict(found.size), "memory": found.size.memory},
        "kv_cache": None
        if cached is None
        else {"elements": cached.elements, "bytes_bfloat16": 2 * cached.elements, "flops": cached.flops},
        "roofline": {regime.name: regime.as_json() for regime in found.regimes},
        "sensitivity": [attrs.asdict(each) for each in found.moved],
    }
