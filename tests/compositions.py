"""Layouts, schedules, models and wrappers in every pairwise combination that can be, up to 8 ranks."""

from __future__ import annotations

from functools import cache
from itertools import product
from math import lcm
from operator import attrgetter
from typing import Any

import attrs
import torch
from covering import cover, in_pairs, numbered

from nanotrain_core.testing.case import Case
from nanotrain_core.testing.probe import Trace, train

#: Schedules and the stages that each puts on one rank.
SCHEDULES = {"gpipe": 1, "1f1b": 1, "zb_h1": 1, "interleaved_1f1b": 2, "dualpipe_v": 2}

AXES: dict[str, tuple[Any, ...]] = {
    "model": ("transformer", "deepseek_v3", "deepseek_v2", "moe"),
    "tp": (1, 2, 4),
    "pp": (1, 2, 4),
    "cp": (1, 2),
    "dp": (1, 2, 4),
    "ep": (1, 2, 4),
    "etp": (1, 2),
    "schedule": ("accumulate", *SCHEDULES),
    "sp": (False, True),
    "tied": (False, True),
    "microbatch": (2, 3),
    "experts_first": (False, True),
    "zero": (0, 1, 2),
    "recompute": (False, True),
    "communication": ("all_to_all", "all_gather", "ring"),
}

#: 11 sequences a step leave one to six microbatches on a rank, the last of them smaller wherever it can be;
#: ranks of dp have 5 and 6, or 2 and 3. Of 7 tokens ranks of tp have 3 and 4, or 1 and 2.
BATCH = {"sequences": 11, "length": 7}

#: Ranks' shares of it differ, whatever their number.
VOCAB = 33

_DEEPSEEK: dict[str, Any] = {
    "use": "deepseek",
    "width": 16,
    "heads": 4,
    "vocab": VOCAB,
    "dense_layers": 1,
    "kv_rank": 8,
    "nope_size": 4,
    "rope_size": 4,
    "value_size": 4,
    "ffn": 32,
    "experts": 8,
    "top_k": 2,
    "shared_experts": 1,
    "expert_ffn": 8,
    "groups": 4,
    "group_limit": 2,
    "mtp": 1,
    "init_std": 0.3,
}

#: Both kinds of routing, with every balance loss there is, heavy enough to be seen in the gradients.
MODELS: dict[str, dict[str, Any]] = {
    "transformer": {
        "use": "transformer",
        "width": 24,
        "heads": 12,
        "kv_heads": 6,  # three for each of two tensor-parallel ranks; four repeat them
        "ffn": 32,
        "vocab": VOCAB,
        "init_std": 0.3,
    },
    "moe": {
        "use": "moe_transformer",
        "width": 24,
        "heads": 12,
        "kv_heads": 6,
        "qk_norm": True,
        "mlp_only_layers": [0],
        "ffn": 32,
        "vocab": VOCAB,
        "experts": 8,
        "top_k": 3,
        "expert_ffn": 8,
        "aux_loss_coeff": 0.1,
        "init_std": 0.3,
    },
    "deepseek_v3": _DEEPSEEK
    | {"q_rank": 8, "score": "sigmoid", "bias_update_rate": 0.01, "seq_balance": 0.1},
    "deepseek_v2": _DEEPSEEK
    | {"score": "softmax", "normalize_weights": False, "route_scale": 2.0}
    | {"expert_balance": 0.1, "device_balance": 0.1, "comm_balance": 0.1},
}


#: Key and value heads of a rank, by model and degree of tensor parallelism: those that cp splits.
HEADS = {(model, tp): lcm(6, tp) // tp for model in ("transformer", "moe") for tp in AXES["tp"]} | {
    (model, tp): 4 // tp for model in ("deepseek_v3", "deepseek_v2") for tp in AXES["tp"]
}


OPTIMIZERS = {
    "sgd": {"use": "sgd", "lr": 0.1, "clip_norm": 0.5},
    "adamw": {"use": "adamw", "lr": 0.01, "clip_norm": 0.5},
}


@attrs.define(frozen=True)
class Composition:
    """One point of the matrix."""

    model: str
    tp: int
    pp: int
    dp: int
    ep: int
    etp: int
    schedule: str
    sp: bool
    tied: bool
    microbatch: int
    experts_first: bool
    """Whether the expert wrapper stands before the tensor-parallel one in the recipe."""
    zero: int
    """Stage of ``zero12``, which is the optimizer and syncs gradients; 0: ``ddp`` syncs them."""
    recompute: bool = False
    """Whether layers are recomputed in backward (activation checkpointing)."""
    cp: int = 1
    communication: str = "all_to_all"
    """Of ranks of cp."""

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def layers(self) -> int:
        """At least one for each stage."""
        return 8 if SCHEDULES.get(self.schedule, 1) * self.pp == 8 else 4

    @property
    def id(self) -> str:
        flags = [name for name in ("sp", "tied", "experts_first", "recompute") if getattr(self, name)]
        flags += [self.communication] if self.cp > 1 else []
        degrees = [
            f"{dim}{n}" for dim in ("tp", "pp", "cp", "dp", "ep", "etp") if (n := getattr(self, dim)) > 1
        ]
        schedule = [] if self.schedule == "accumulate" else [self.schedule]
        flags += [f"zero{self.zero}"] if self.zero else []
        return "-".join([self.model, *degrees, *schedule, *flags, f"mb{self.microbatch}"])

    def valid(self) -> bool:
        """Return whether it is a run of its own: no choice is made where nothing depends on it."""
        experts = self.model != "transformer"
        return (
            1 < self.ranks <= 8
            and (self.pp > 1) == (self.schedule != "accumulate")
            and (self.tp > 1 or not self.sp)
            and (experts or (self.ep == self.etp == 1 and not self.experts_first))
            and self.ranks % (self.pp * self.ep * self.etp) == 0
            and (self.cp > 1 or self.communication == "all_to_all")
            and (self.communication != "all_to_all" or HEADS[self.model, self.tp] % self.cp == 0)
        )

    def optimizers(self) -> dict[str, dict[str, Any]]:
        """Return the optimizers to train with, by the name of what they must equal in one process."""
        if not self.zero:
            return OPTIMIZERS
        sharded = {"use": "zero12", "stage": self.zero, "bucket_mb": 0.0013}  # ends within tensors
        return {"adamw": {**OPTIMIZERS["adamw"], **sharded}}

    def case(self) -> Case:
        """Return it as a case of the harness."""
        tensor = {"use": "tp", "sequence_parallel": self.sp}
        wrappers = [tensor, {"use": "ep_deepseek"}] if self.model != "transformer" else [tensor]
        if self.experts_first:
            wrappers.reverse()
        if self.recompute:
            wrappers.insert(0, {"use": "recompute"})
        model = {**MODELS[self.model], "layers": self.layers, "tied": self.tied}
        if self.cp > 1:
            wrappers.insert(self.experts_first, {"use": "cp", "communication": self.communication})
        degrees = {dim: getattr(self, dim) for dim in ("tp", "pp", "cp", "dp", "ep", "etp")}
        overrides = {
            "evaluation": {"sequences": 8},
            "batch": {**BATCH, "microbatch": self.microbatch},
            "model": model,
            "data": {"vocab": VOCAB},
            "schedule": {"use": self.schedule},
            "parallel": wrappers if self.zero else [*wrappers, {"use": "ddp"}],
        }
        return Case("topology", use="grid", topology=degrees, overrides=overrides, name=self.id)


def compiled(case: Case) -> Case:
    """Return the same run with layers compiled, without what a compiler may round otherwise."""
    changes = {
        "run": {"compile": True, "compile_backend": "aot_eager"},
        "kernels": {"use": "torch"},
        "evaluation": {"sequences": 0},
    }
    return attrs.evolve(case, overrides={**case.overrides, **changes})


def to_compile() -> list[Composition]:
    """Return few compositions that cover what stands in graphs, and what stands around them.

    Of 11 sequences a rank has one microbatch or two unequal ones, so that few graphs are made.
    """
    plain = {
        **{"tp": 1, "pp": 1, "dp": 1, "ep": 1, "etp": 1, "schedule": "accumulate", "sp": False},
        **{"tied": False, "microbatch": 6, "experts_first": False, "zero": 0},
    }
    chosen: list[dict[str, Any]] = [
        {"model": "transformer", "tp": 2, "sp": True, "tied": True, "recompute": True},
        {"model": "transformer", "pp": 2, "dp": 2, "schedule": "1f1b", "zero": 2},
        {"model": "deepseek_v3", "dp": 2, "ep": 2},
        {"model": "deepseek_v2", "tp": 2, "sp": True, "ep": 2, "zero": 1, "recompute": True},
        {"model": "moe", "tp": 2, "sp": True, "ep": 2, "recompute": True},
    ]
    return [Composition(**{**plain, **each}) for each in chosen]


def splits_backward(composition: Composition) -> bool:
    """Return whether its schedule has W passes."""
    return composition.schedule in ("zb_h1", "dualpipe_v")


@cache
def pairwise() -> list[Composition]:
    """Return few compositions in which every two values of two axes meet that meet in any.

    Takes a second: no module with functions that ranks run may call it when it is imported, since every rank
    imports that module.
    """
    found = everything()
    return [found[row] for row in cover(in_pairs(choices()))]


@cache
def choices() -> torch.Tensor:
    """Return, for every composition there is, the number of its value on each of :data:`AXES`."""
    return numbered([*map(attrgetter(*AXES), everything())])


@cache
def everything() -> tuple[Composition, ...]:
    """Return every composition there is."""
    of_layout, of_run = list(AXES)[:8], list(AXES)[8:]
    plain = {name: AXES[name][0] for name in of_run}
    layouts = [row for row in _rows(of_layout) if Composition(**row, **plain).valid()]
    runs, fitting = _rows(of_run), dict[tuple[Any, ...], list[dict[str, Any]]]()
    for layout in layouts:  # which runs there are depends on few properties of a layout
        if (key := _asked_of(layout)) not in fitting:
            fitting[key] = [run for run in runs if Composition(**layout, **run).valid()]
    return tuple(Composition(**layout, **run) for layout in layouts for run in fitting[_asked_of(layout)])


def _asked_of(layout: dict[str, Any]) -> tuple[Any, ...]:
    """Return what :meth:`Composition.valid` asks of a layout where it judges the rest of a run."""
    return layout["model"], layout["tp"], layout["cp"]


def _rows(axes: list[str]) -> list[dict[str, Any]]:
    return [dict(zip(axes, row, strict=True)) for row in product(*(AXES[name] for name in axes))]


def train_each(case: Case, optimizers: dict[str, Any]) -> dict[str, Trace]:
    """Train with every optimizer, one after the other, on this rank.

    It stands here because every rank imports the module of what it runs.
    """
    return {
        name: train(case, {"optimizer": table}, watch_gradients=True) for name, table in optimizers.items()
    }
