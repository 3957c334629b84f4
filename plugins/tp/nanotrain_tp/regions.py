"""Tensor parallelism's f and g where tokens enter and leave the split layers: the hooks of each role.

f is a copy in forward and an all-reduce in backward, g the reverse (Megatron-LM, arXiv 1909.08053,
section 3). With sequence parallelism they are an all-gather and a reduce-scatter along the sequence
(arXiv 2205.05198, section 4.2).

Hooks use the module they are called with, never a parameter captured in ``apply``: materialization
creates new parameters, and a precision may replace the module.

Shapes: B batch, S sequence (its share with sequence parallelism, outside sharded layers: shares may differ by
    one token), D width, V this rank's shard of the vocabulary, K experts chosen per token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import nn

from nanotrain_core.api.torch import Batch, RecomputedInput, Routing, WgradPoint, gemms_of, ops_of
from nanotrain_tp.collectives import Copy, Gather, GatherWhole, Ranks, Reduce, Scatter, Slice
from nanotrain_tp.head import Rows, split_cross_entropy
from nanotrain_tp.overlap import OverlappedInput

#: The dimension of tokens [B, S, ...] that sequence parallelism splits.
SEQUENCE = 1

Args = tuple[Any, ...]


class RegionInput:
    """One tensor that sharded layers read: this rank's share of the sequence, or a whole input, with what was
    made of it."""

    def __init__(self, outside: torch.Tensor) -> None:
        self.outside, self.state = outside, self._state(outside)
        self.inside: torch.Tensor | None = None
        """The input of the sharded layers: gathered, or a copy. Its gradient is partial on every rank."""
        self.whole: torch.Tensor | None = None
        """The same values for replicated modules, such as routers: its gradient is complete on every rank."""
        self.first: nn.Module | None = None
        """The first sharded layer that read it, where wgrads are placed; otherwise None."""
        self.recompute: RecomputedInput | None = None
        """This rank's share and :meth:`OverlappedInput.gather_again`, by which layers gather it again in
        backward; None: they keep it."""
        self.overlapped: OverlappedInput | None = None
        """The object of that method."""
        self.watched = False
        """Whether a gradient hook that calls :meth:`ShardedRegion.forget` is installed."""
        self.wgrad_points: dict[nn.Module, WgradPoint] = {}
        """For each layer known from an earlier pass to read it: where its wgrad is computed."""

    def is_of(self, x: torch.Tensor) -> bool:
        """Return whether ``x`` is that tensor, unmodified, and the gradient mode is the same."""
        return x is self.outside and self._state(x) == self.state

    @staticmethod
    def _state(x: torch.Tensor) -> tuple[int, bool]:
        # A compiled graph has no versions: there, a model must not write into the inputs of sharded layers.
        return 0 if torch.compiler.is_compiling() else x._version, torch.is_grad_enabled()

    def wgrad_point_of(self, layer: nn.Module) -> WgradPoint | None:
        """Return a new wgrad point for the weight of ``layer``, if it is trained."""
        weight = layer.get_parameter("weight")
        return WgradPoint(weight, self.recompute) if weight.requires_grad else None

    @property
    def values(self) -> torch.Tensor | None:
        """The gathered values, without a gradient: they need not be gathered again for another use."""
        known = self.whole if self.inside is None else self.inside
        return None if known is None else known.detach()


class ShardedRegion:
    """The region between the collectives of f and g: tokens enter its sharded layers, and leave them.

    Queries, keys and values read the same tensor, and so do gates, shared experts and routers. It is gathered
    once. Gradients of all sharded layers that read it are added here before they are reduced over ranks.
    """

    def __init__(
        self, ranks: Ranks, *, sequence_parallel: bool, overlap: bool = True, keep: bool = True
    ) -> None:
        """Set up the region.

        Args:
            ranks: those that shard the layers.
            sequence_parallel: whether they also split the tokens in between.
            overlap: in backward, overlap the reduction of gradients over ranks with wgrad computation.
            keep: save what was gathered for backward, instead of gathering it again there.
        """
        self._ranks, self.sequence_parallel, self.overlap = ranks, sequence_parallel, overlap
        self.in_graph: Ranks | None = None
        """The counterpart of ``ranks`` inside a compiled graph."""
        self.keep = keep or not sequence_parallel
        self.length: int | None = None
        """Sequence length S in tokens; None: the sum of all ranks' shares if they are equal."""
        self._last: RegionInput | None = None
        self._last_in_graph: RegionInput | None = None
        """As ``_last``, for the graph being traced: nothing from outside it, or from another graph."""
        self._readers: dict[nn.Module, list[nn.Module]] = {}
        """Layers that read the same tensor, by the first of them, as recorded in an earlier pass."""

    @property
    def ranks(self) -> Ranks:
        """The ranks that shard the layers."""
        return self.in_graph if self.in_graph and torch.compiler.is_compiling() else self._ranks

    def begin(self, part: nn.Module, args: Args, kwargs: dict[str, Any]) -> None:
        """Record the sequence length, which a share does not determine: the pre-hook of a model part.

        All sequences of a step have the same length, so the recorded one also holds in recomputation.
        """
        batches = (each for each in (*args, *kwargs.values()) if isinstance(each, Batch))
        self.length = next((batch.tokens.shape[1] for batch in batches), None)

    def _input_of(self, x: torch.Tensor) -> RegionInput:
        if torch.compiler.is_compiling():
            if self._last_in_graph is None or not self._last_in_graph.is_of(x):
                self._last_in_graph = RegionInput(x)
            return self._last_in_graph
        if self._last is None or not self._last.is_of(x):
            self._last = RegionInput(x)
        return self._last

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [B, S, ...] as the input of sharded layers, with the whole sequence."""
        cached = self._input_of(x)
        if cached.inside is None and self.sequence_parallel:
            cached.inside = Gather.apply(x, self.ranks, SEQUENCE, self.length, cached.values)  # type: ignore[no-untyped-call]
        elif cached.inside is None:
            cached.inside = Copy.apply(x, self.ranks)  # type: ignore[no-untyped-call]
        inside: torch.Tensor = cached.inside
        self._forget_in_backward(cached)
        return inside

    def _forget_in_backward(self, cached: RegionInput) -> None:
        """Call :meth:`forget` when the gradient of ``cached`` arrives.

        A layer that backward recomputes also enters tensors, and is interrupted, without a forward hook,
        as soon as all saved tensors are available: the last input and what its graph saved would stay alive
        until the next forward pass. Gradients arrive at what the forward pass entered, after that was
        recomputed.
        """
        inside = cached.inside
        if cached.watched or torch.compiler.is_compiling() or inside is None or not inside.requires_grad:
            return
        cached.watched, region = True, ref(self)

        def forget(gradient: torch.Tensor) -> None:
            here = region()
            if here is not None:
                here.forget()

        inside.register_hook(forget)  # type: ignore[no-untyped-call]

    def enter_layer(self, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        """As :meth:`enter`, and set where the wgrad of ``layer`` is computed, if it can overlap."""
        cached, gemms = self._input_of(x), gemms_of(layer)
        if cached.inside is None and gemms is not None and self._overlaps(x):
            self._enter_overlapped(cached, layer)
        if gemms is not None:
            gemms.wgrad_point = None if cached.first is None else self._wgrad_point(cached, layer)
        return self.enter(x)

    @property
    def places_wgrad(self) -> bool:
        """Whether the readers' wgrads are placed where they overlap with a collective."""
        return not self.keep or (self.overlap and self.ranks.in_background)

    def _overlaps(self, x: torch.Tensor) -> bool:
        if torch.compiler.is_compiling():  # the compiler orders a graph's nodes
            return False
        return x.requires_grad and torch.is_grad_enabled() and self.places_wgrad

    def _enter_overlapped(self, cached: RegionInput, first: nn.Module) -> None:
        """Make ``cached.inside``, whose gradient is reduced while its readers' wgrads are computed."""
        overlapped = OverlappedInput(self.ranks, SEQUENCE if self.sequence_parallel else None, self.length)
        gathered = overlapped.gather(cached.outside, cached.values)
        if not self.keep:
            cached.recompute, cached.overlapped = (
                (cached.outside.detach(), overlapped.gather_again),
                overlapped,
            )
        cached.first, readers = first, self._readers.setdefault(first, [first])
        cached.wgrad_points = {layer: point for layer in readers if (point := cached.wgrad_point_of(layer))}
        cached.inside = overlapped.enter(gathered)

    def _wgrad_point(self, cached: RegionInput, layer: nn.Module) -> WgradPoint | None:
        """Return the point of ``layer``'s wgrad, None if its weight is not trained.

        For a layer not seen in an earlier pass it runs before the reduction starts: no overlap, but
        recomputation needs the same graph.
        """
        assert cached.first is not None
        readers = self._readers[cached.first]
        if layer not in readers:
            readers.append(layer)
        point = cached.wgrad_points.pop(layer, None) or cached.wgrad_point_of(layer)
        if point is not None and cached.overlapped is not None:
            cached.overlapped.expect_reader()
        return point

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """All-gather a share of tokens ``x`` [B, S, ...] for a computation that is the same on every rank."""
        cached = self._input_of(x)
        if cached.whole is None:
            cached.whole = GatherWhole.apply(x, self.ranks, SEQUENCE, self.length, cached.values)  # type: ignore[no-untyped-call]
        whole: torch.Tensor = cached.whole
        return whole

    def forget(self, *_: Any) -> None:
        """Drop the cached :class:`RegionInput`. Also a forward hook."""
        if torch.compiler.is_compiling():
            self._last_in_graph = None
        else:
            self._last = None

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's partial output ``x`` [B, S, D], or this rank's share of it."""
        if torch.compiler.is_compiling():
            self.forget()  # a tensor still cached at the end of a graph would be an output of it
        if self.sequence_parallel:
            return Scatter.apply(x, self.ranks, SEQUENCE)  # type: ignore[no-any-return, no-untyped-call]
        return Reduce.apply(x, self.ranks)  # type: ignore[no-any-return, no-untyped-call]

    def slice(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of whole tokens ``x``."""
        return Slice.apply(x, self.ranks, SEQUENCE)  # type: ignore[no-any-return, no-untyped-call]

    def gather(self, x: torch.Tensor, dim: int, length: int | None = None) -> torch.Tensor:
        """All-gather the ranks' parts for a computation that is the same on all of them.

        ``length``: of the result along ``dim``; by default all parts are equal.
        """
        return GatherWhole.apply(x, self.ranks, dim, length, None)  # type: ignore[no-any-return, no-untyped-call]

    def enter_first(self, module: nn.Module, args: Args) -> Args:
        """Pass the first argument in: the pre-hook of SHARED."""
        return self.enter(args[0]), *args[1:]

    def enter_linear(self, module: nn.Module, args: Args) -> Args:
        """Pass the input in: the pre-hook of COLUMN."""
        return self.enter_layer(args[0], module), *args[1:]

    def leave_last(self, module: nn.Module, args: Args, output: torch.Tensor) -> torch.Tensor:
        """Reduce the output: the hook of a ROW without bias."""
        return self.leave(output)


class BiasedRow:
    """Hooks of a ROW with bias. The ranks' products are summed without it, then it is added once."""

    def __init__(self, region: ShardedRegion) -> None:
        self.region = region
        self.bias: nn.Parameter | None = None

    def before(self, module: nn.Module, args: Args) -> None:
        """Remove the bias from the module."""
        self.bias = module.get_parameter("bias")
        module.register_parameter("bias", None)

    def after(self, module: nn.Module, args: Args, output: torch.Tensor | None) -> torch.Tensor | None:
        """Restore the bias, even if the module failed, and add it to the sum."""
        bias, self.bias = self.bias, None
        module.register_parameter("bias", bias)
        if output is None:
            return None
        assert bias is not None
        return self.region.leave(output) + bias


class Vocabulary:
    """Hooks of an embedding of which this rank holds some rows of the table."""

    def __init__(self, region: ShardedRegion, rows: Rows) -> None:
        self.region, self.rows = region, rows
        self.elsewhere = torch.empty(0)

    def before(self, module: nn.Module, args: Args) -> Args:
        """Look up row 0 for tokens [B, S] on other ranks. Tokens on no rank stay invalid."""
        tokens = args[0]
        local = tokens - self.rows.first
        outside = (local < 0) | (local >= len(module.weight))  # type: ignore[arg-type]
        self.elsewhere = outside & (tokens >= 0) & (tokens < self.rows.vocabulary)
        return local.masked_fill(self.elsewhere, 0), *args[1:]

    def after(self, module: nn.Module, args: Args, output: torch.Tensor) -> torch.Tensor:
        """All-reduce the rows found."""
        return self.region.leave(output.masked_fill(self.elsewhere.unsqueeze(-1), 0.0))


class Head:
    """Replaces the forward of a head of which this rank holds some rows of the weight, its own or tied."""

    def __init__(self, region: ShardedRegion, rows: Rows) -> None:
        self.region, self.rows = region, rows

    def forward(
        self,
        module: nn.Module,
        x_BSD: torch.Tensor,
        targets_BS: torch.Tensor | None,
        table_VD: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the summed loss, or without targets whole logits, the same on every rank."""
        weight_VD = module.get_parameter("weight") if table_VD is None else table_VD
        x_BSD = self.region.enter(x_BSD)
        self.region.forget()
        ranks = self.region.ranks
        if targets_BS is None:
            logits_BSV = self.rows.pad(F.linear(x_BSD, weight_VD), ranks)
            return self.rows.join(self.region.gather(logits_BSV, dim=-1), ranks)
        return split_cross_entropy(
            x_BSD.flatten(0, 1), weight_VD, targets_BS.flatten(), self.rows, ranks, ops_of(module)
        )


class Experts:
    """Hooks of routers and experts: routers see whole sequences, experts this rank's share."""

    def __init__(self, region: ShardedRegion) -> None:
        self.region = region

    def before_router(self, module: nn.Module, args: Args) -> Args:
        """All-gather the sequence; every rank routes it identically."""
        if not self.region.sequence_parallel:
            return args
        return self.region.whole(args[0]), *args[1:]

    def after_router(self, module: nn.Module, args: Args, routing: Routing) -> Routing:
        """Keep the choices of this rank's share; losses are over whole sequences and stay."""
        experts = self.region.ranks.own(routing.experts, SEQUENCE)
        return replace(routing, experts=experts, weights=self.region.slice(routing.weights))

    def before_experts(self, module: nn.Module, args: Args) -> Args:
        """Keep this rank's share of the tokens."""
        return (args[0] if self.region.sequence_parallel else self.region.slice(args[0])), *args[1:]

    def after_experts(self, module: nn.Module, args: Args, output: torch.Tensor) -> torch.Tensor:
        """All-gather the tokens where they were whole."""
        if self.region.sequence_parallel:
            return output
        return self.region.gather(output, SEQUENCE, self.region.length)
