"""Train a tiny recipe twice, eager and with every BLOCK and HEAD compiled, and say what differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any
from unittest import mock

import attrs
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

from nanotrain_core.compose import Run
from nanotrain_core.layout.roles import Role, overridden_by, override_forward, tagged
from nanotrain_core.models.activation_checkpointing import recompute
from nanotrain_core.testing import probe
from nanotrain_core.testing.case import Case

VOCAB = 33

#: One layer each: a second one makes the same graph once more. DeepSeek's other BLOCK, with experts, is the
#: one that predicts further tokens; with it, the HEAD runs twice in a microbatch.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"use": "transformer", "width": 24, "heads": 12, "kv_heads": 6, "ffn": 32},
    "gpt": {"use": "transformer", "width": 24, "heads": 4, "ffn": 32, "activation": "gelu", "tied": True}
    | {"norm": "layernorm", "positions": "learned", "bias": True, "max_length": 16},
    "deepseek": {"use": "deepseek", "width": 16, "heads": 4, "dense_layers": 1, "kv_rank": 8, "q_rank": 8}
    | {"nope_size": 4, "rope_size": 4, "value_size": 4, "ffn": 32, "experts": 8, "top_k": 2, "mtp": 1}
    | {"shared_experts": 1, "expert_ffn": 8, "groups": 4, "group_limit": 2, "bias_update_rate": 0.01}
    | {"seq_balance": 0.1},
}


@attrs.define(frozen=True)
class Cell:
    """One thing to compile."""

    model: str
    precision: str
    tp: str = ""
    """``sp`` or ``whole``: two ranks, with sequence parallelism or with whole sequences; empty: one rank."""
    recompute: str = ""
    """Activation checkpointing ``inside`` of a layer's graph or ``around`` it; empty: none."""
    overlap: bool = False
    """Whether eager collectives go through process groups, as on GPUs, and not through shared memory."""

    length: int = 8
    """Tokens of a sequence: of 7, ranks' shares differ."""

    @property
    def ranks(self) -> int:
        return 2 if self.tp else 1

    @property
    def id(self) -> str:
        overlap = "overlap" if self.overlap else ""
        length = "" if self.length == 8 else str(self.length)
        return "-".join(filter(None, (self.model, self.tp, self.recompute, overlap, length, self.precision)))

    def case(self) -> Case:
        """Return its recipe: 2 steps of 2 microbatches."""
        tensor = {"use": "tp", "sequence_parallel": self.tp == "sp", "overlap": self.overlap}
        wrappers = [{"use": "recompute"}] if self.recompute == "inside" else []
        wrappers += [tensor] if self.tp else []
        overrides = {
            "run": {"steps": 2},
            "kernels": {"use": "torch"},
            "model": {"layers": 1, "vocab": VOCAB, "init_std": 0.3, **MODELS[self.model]},
            "data": {"vocab": VOCAB},
            "precision": {"use": self.precision},
            "batch": {"sequences": 4, "microbatch": 2, "length": self.length},
            "parallel": wrappers,
        }
        return Case("topology", use="grid", topology={"tp": self.ranks}, overrides=overrides, name=self.id)


@attrs.define(frozen=True)
class Found:
    """What one rank found."""

    compiled: list[str]
    """Names of BLOCKs and HEADs."""
    graphs: list[dict[str, int]]
    """What dynamo made of them: how often each graph, with its backward pass, has each collective."""
    differing: list[str]
    """First gradients, and weights after the last step, that are not those of the eager run bit by bit."""
    furthest: float
    """The largest difference of any of them."""
    losses: tuple[list[float], list[float]]
    """Of each step, eager and compiled."""


def compare(cell: Cell) -> Found:
    """Train ``cell`` eager, then compiled; a module that is compiled a second time is an error."""
    compiled: list[str] = []
    graphs: list[dict[str, int]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(collectives(graph))
        return aot_eager(graph, inputs)  # type: ignore[no-any-return]

    make = probe.make_engine

    def make_compiled(*args: Any, **options: Any) -> Any:
        engine = make(*args, **options)
        compiled.extend(compile_modules(engine.run, backend, around=cell.recompute == "around"))
        return engine

    torch._dynamo.reset()
    eager = probe.train(cell.case(), {})
    # Activation checkpointing inside of a graph runs no side effects again: a boundary's memory is one.
    flags = {"error_on_recompile": True, "skip_fwd_side_effects_in_bwd_under_checkpoint": True}
    with torch._dynamo.config.patch(flags), mock.patch.object(probe, "make_engine", make_compiled):
        traced = probe.train(cell.case(), {})
    torch._dynamo.reset()

    pairs = [
        (f"{what} of {ours.name}", ours.tensor, theirs.tensor)
        for what in ("gradients", "weights")
        for ours, theirs in zip(getattr(traced, what), getattr(eager, what), strict=True)
    ]
    return Found(
        compiled=compiled,
        graphs=graphs,
        differing=[name for name, ours, theirs in pairs if not torch.equal(ours, theirs)],
        furthest=max((ours.double() - theirs.double()).abs().max().item() for _, ours, theirs in pairs),
        losses=tuple([report.loss for report in trace.reports] for trace in (eager, traced)),
    )


def compile_modules(run: Run, backend: Callable[..., Any], *, around: bool) -> list[str]:
    """Compile what each BLOCK and HEAD of ``run`` does inside of its own hooks; return their names."""
    names = []
    for part in run.stages.values():
        for name, module, tag in tagged(part):
            if tag.role in (Role.BLOCK, Role.HEAD):
                forward = own_function(overridden_by(module) or type(module).forward)
                override_forward(module, torch.compile(forward, fullgraph=True, backend=backend))
                names.append(name)
            if tag.role is Role.BLOCK and around:
                override_forward(module, partial(recompute, overridden_by(module)))
    return names


def own_function(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward`` behind a code object of its own: dynamo counts recompilations by code objects.

    Modules that shared one would look like recompilations of the first of them.
    """

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(module, *args, **kwargs)

    return FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)


def collectives(graph: torch.fx.GraphModule) -> dict[str, int]:
    """Return how often each collective stands in ``graph`` and in the graphs inside of it."""
    found = Counter(
        str(node.target).split(".")[1]
        for each in graph.modules()
        if isinstance(each, torch.fx.GraphModule)
        for node in each.graph.nodes
        if str(node.target).startswith("_c10d_functional.")
    )
    del found["wait_tensor"]
    return dict(found)
