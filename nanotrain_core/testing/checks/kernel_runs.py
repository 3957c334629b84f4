"""A run with kernels equals that of plain PyTorch, for any model, and is independent of other runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nanotrain_core.contracts import Model
from nanotrain_core.pipeline.actions import Part
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.testing.altered import train_around, train_with_weight_passes
from nanotrain_core.testing.case import TINY, Case
from nanotrain_core.testing.checks import check
from nanotrain_core.testing.checks.kernels import CPU, kernels_of
from nanotrain_core.testing.checks.parallel import assert_same_reports
from nanotrain_core.testing.compare import EXACT, assert_bitwise, assert_same, whole
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import train

PLAIN = {"use": "torch"}
GROUPED = {**TINY["model"], "kv_heads": 2}
ROUTED = {"use": "routed"}
#: Sequences of 15 tokens, and a vocabulary of 61: nothing fits a tile.
ODD = {**TINY["model"], "vocab": 61, "width": 42, "heads": 3, "kv_heads": 1, "ffn": 37}
RECOMPUTE = {"parallel": [{"use": "recompute"}]}
#: Its fused kernel writes weights without advancing their version counter, which a backend may cache by.
ADAMW = {"optimizer": {"use": "adamw", "lr": 0.01, "clip_norm": 0.0}}

#: By variant: what is trained, what of the recipe is changed, and how.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[..., Any]]] = {
    "transformer": (GROUPED, {}, train),
    "routed": (ROUTED, {}, train),
    "odd": (ODD, {"batch": {"length": 15, "microbatch": 3}, "data": {"vocab": 61}}, train),
    "recomputed": (GROUPED, RECOMPUTE, train),
    "recomputed_experts": (ROUTED, RECOMPUTE, train),
    "weight_passes": (GROUPED, ADAMW, train_with_weight_passes),
    "weight_passes_of_experts": (ROUTED, ADAMW, train_with_weight_passes),
}


@check("kernels", since="0.2", variants=tuple(RUNS))
def runs_equal_pytorch(case: Case, variant: str) -> None:
    """Losses, gradients, norms and weights are those of plain PyTorch, to 1e-10 in float64.

    Also under activation checkpointing, and with weight gradients that are left to W passes. What
    plain PyTorch trains with is neither. With `sgd`, and those of W passes with `adamw`.
    """
    model, around, how = RUNS[variant]
    own = {"model": model, **around}
    plain = {key: value for key, value in own.items() if key != "parallel"}
    (got,) = run_ranks(how, 1, case.alone(), own)
    (want,) = run_ranks(train, 1, case.alone(), {**plain, "kernels": PLAIN})
    assert_same_reports(got, want, atol=EXACT)
    assert_same(whole([got.gradients]), whole([want.gradients]), "gradients of the first step")
    assert_same(whole([got.weights]), whole([want.weights]), "weights after the last step")


@check("kernels", since="0.2", variants=("transformer", "routed"))
def parameters_stay_themselves(case: Case, variant: str) -> None:
    """``apply`` keeps each parameter the same object, under its name, on ``meta``, and adds none."""
    use = {"transformer": GROUPED, "routed": ROUTED}[variant]
    recipe = case.alone().recipe(model=use)
    model: Model = case.registry().build(recipe.model)
    kernels = kernels_of(case)
    part = model.build(Part.whole(model.layers), kernels.ops(CPU))
    before = dict(part.named_parameters())
    shapes = {name: (p.shape, p.dtype, p.requires_grad) for name, p in before.items()}
    kernels.apply(part, Passes())
    after = dict(part.named_parameters())
    assert list(after) == list(before), f"parameters were {list(before)} and are {list(after)}"
    other = [name for name in before if after[name] is not before[name]]
    assert not other, f"apply put other parameters in the place of {', '.join(other)}"
    now = {name: (p.shape, p.dtype, p.requires_grad) for name, p in after.items()}
    changed = [name for name, p in after.items() if now[name] != shapes[name] or not p.is_meta]
    assert not changed, f"apply changed the shape, dtype or device of {', '.join(changed)}"
    assert not list(part.named_buffers()), "apply added buffers, which would come to life uninitialized"


@check("kernels", since="0.2")
def runs_are_independent(case: Case) -> None:
    """A run has the same bits if another one, of another model, is built and trained in between."""
    own: dict[str, Any] = {"model": GROUPED}
    others: list[dict[str, Any]] = [
        {"model": ROUTED, "precision": {"use": "bf16"}, "run": {"seed": 8}},
        {"model": GROUPED, "run": {"seed": 8}},
    ]
    (alone,) = run_ranks(train, 1, case.alone(), own)
    for other in others:
        (found,) = run_ranks(train_around, 1, case.alone(), own, other)
        what = f"weights beside a run of {other['model']['use']}"
        assert_bitwise(whole([found]), whole([alone.weights]), what)
