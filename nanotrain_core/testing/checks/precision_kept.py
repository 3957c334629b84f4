"""A precision respects dtypes that a module keeps, and its loss scale resumes exactly."""

from __future__ import annotations

import json

import attrs
import torch

from nanotrain_core.contracts import Model
from nanotrain_core.layout.roles import Role, tagged
from nanotrain_core.pipeline.actions import Part
from nanotrain_core.precision.dtypes import keep_dtype, kept_dtypes
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check
from nanotrain_core.testing.checks.precision import precision_of
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import make_engine

#: Steps without overflow after which a scale has surely grown, if it ever does.
STEPS = 5000


@check("precision", since="0.2")
def kept_dtypes_are_kept(case: Case) -> None:
    """``keep_dtype`` holds for parameters of every kind: a router's bias, norms, a matrix, a vector."""
    model = _routed(case)
    part = model.build(Part.whole(model.layers))
    for _, module, found in tagged(part):
        if found.role is Role.NORM:
            keep_dtype(module, "weight")
        if found.role is Role.REPLICATED:
            keep_dtype(module, "weight")
        if found.role is Role.ROW and getattr(module, "bias", None) is not None:
            keep_dtype(module, "bias")
    before = kept_dtypes(part)
    precision = precision_of(case)
    after = kept_dtypes(precision.convert(part))
    wrong = {name: after.get(name) for name, dtype in before.items() if after.get(name) != dtype}
    assert not wrong, f"keep_dtype was told of {sorted(before)}, all float32; convert() left {wrong}"


@check("precision", since="0.2")
def kept_dtypes_are_kept_to_the_end(case: Case) -> None:
    """In a run of experts a router's bias keeps its dtype when parameters are packed and steps are taken."""
    model = _routed(case)
    built = kept_dtypes(model.build(Part.whole(model.layers)))
    around = {**case.overrides, "model": {"use": "routed", "ffn": 16}}  # whole blocks
    (left,) = run_ranks(kept_by_a_run, 1, attrs.evolve(case.alone(), overrides=around))
    wrong = {name: left.get(name) for name, dtype in built.items() if left.get(name) != dtype}
    assert not wrong, f"keep_dtype was told of {built}; when a run has made its steps there is {wrong}"


def kept_by_a_run(case: Case) -> dict[str, torch.dtype]:
    """Return the dtypes of kept parameters, after all steps of the recipe."""
    engine = make_engine(case, {})
    engine.fit()
    parts = engine.run.stages.values()
    return {name: dtype for part in parts for name, dtype in kept_dtypes(part).items()}


def _routed(case: Case) -> Model:
    """Return the harness's model with experts, whose routers keep a bias."""
    model: Model = attrs.evolve(
        case, kind="model", use="routed", config={}, overrides={}, topology={}
    ).build()
    return model


@check("precision", since="0.2")
def loss_scale_grows_when_it_would_have(case: Case) -> None:
    """Restored from ``meta`` at any step, a scale grows at the same step as the old one."""
    for good in (1, 7, 300, STEPS + 3):  # also after it has grown
        old, new = precision_of(case).loss_scale, precision_of(case).loss_scale
        old.update(True)
        for _ in range(good):
            old.update(False)
        new.load_meta(json.loads(json.dumps(old.meta())))
        for step in range(STEPS):
            assert new.value == old.value, (
                f"put back {good} steps after an overflow, the scale is {new.value} {step} steps later, and "
                f"{old.value} without a break"
            )
            old.update(False)
            new.update(False)
