"""Sums gradients into shards: every rank is left with the sum in its own range of each bucket, no more.

Buckets are filled in the order in which backward reaches parameters, last layers first, and leave as soon
as their last gradient has arrived *and* every earlier one has left, so that all ranks issue the same
exchanges in the same order. In stage 1 that is once a step, with the last microbatch, to which gradients
were added up on each rank; in stage 2 with every microbatch, so that no rank ever holds the gradient of the
whole model. Which ranks a parameter's state is sharded over is read from its placement: this code knows
neither data parallelism nor experts.

Source: stages 1 and 2 of Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 5; sums for means.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import nn

from nanotrain_core.api import NanotrainError, Span
from nanotrain_core.api.torch import (
    BucketExchange,
    LocalGradients,
    Mesh,
    Passes,
    Pending,
    Piece,
    PlacedParameter,
    form_of,
)
from nanotrain_zero12 import ShardConfig, Zero12Config
from nanotrain_zero12.flat import Bucket, Flat
from nanotrain_zero12.transport import choose

#: The model part, so to say, of tied parameters, which several stages of this rank or of others hold: they
#: are reduced after all of those.
TIED = -1

#: What the members of one buffer have in common: model part or TIED, ranks to sum over, all ranks that hold
#: the same blocks, how they are held.
Key = tuple[int, Span, Span, str]


class Line:
    """The buckets of one model part, in the order in which they leave."""

    def __init__(self, buckets: Sequence[tuple[Bucket, BucketExchange]]) -> None:
        self.buckets = buckets
        self.by_parameter: dict[nn.Parameter, list[Bucket]] = defaultdict(list)
        for bucket, _ in buckets:
            for fill in bucket.fills:
                self.by_parameter[fill.parameter].append(bucket)
        self.reset()

    def reset(self) -> None:
        """Begin a step."""
        self.rounds = 0
        """How many microbatches, or sums of them, have left in this step."""
        for bucket, _ in self.buckets:
            bucket.summed = False
        self._rewind()

    def _rewind(self) -> None:
        self.sent = 0
        for bucket, _ in self.buckets:
            bucket.reset()

    def arrived(self, parameter: nn.Parameter) -> None:
        """Note a gradient."""
        for bucket in self.by_parameter[parameter]:
            bucket.missing.discard(parameter)

    def ready(self) -> Iterator[tuple[Bucket, BucketExchange]]:
        """Yield the next buckets in line, as far as they are complete."""
        while self.sent < len(self.buckets) and not self.buckets[self.sent][0].missing:
            self.sent += 1
            yield self.buckets[self.sent - 1]

    def rest(self) -> Iterator[tuple[Bucket, BucketExchange]]:
        """Yield all that have not left, complete or not, and end the round."""
        yield from self.buckets[self.sent :]
        self.rounds += 1
        self._rewind()


class ShardedGradients(LocalGradients):
    """The gradient sync of ``zero12``, and what brings updated weights back together."""

    config: Zero12Config | ShardConfig

    def attach(
        self,
        parameters: Sequence[PlacedParameter],
        mesh: Mesh,
        dtype: torch.dtype | None,
        passes: Passes | None = None,
    ) -> None:
        """Move every trained parameter into a flat buffer, and cut these into buckets. Collective."""
        super().attach(parameters, mesh, dtype, passes)
        trained = [placed for placed in parameters if placed.parameter.requires_grad]
        self.transports: dict[tuple[int, ...], BucketExchange] = {}
        flats = [(key, self._flat(key, members, mesh)) for key, members in group(trained, mesh)]
        self.shards = {piece: shard for _, flat in flats for piece, shard in flat.pieces()}
        arrival = {placed.parameter: number for number, placed in enumerate(reversed(trained))}
        buckets: dict[int, list[tuple[Bucket, BucketExchange]]] = defaultdict(list)
        for (part, span, *_), flat in flats:
            transport = self.transports[mesh.layout.members(mesh.rank, span)]
            buckets[part] += [(bucket, transport) for bucket in flat.buckets]
        for part, found in buckets.items():
            if part != TIED:
                found.sort(key=lambda each: max(arrival[fill.parameter] for fill in each[0].fills))
        self.tied = Line(buckets.pop(TIED, []))
        self.lines = [Line(buckets[part]) for part in sorted(buckets)]
        self.line_of = {p: line for line in (*self.lines, self.tied) for p in line.by_parameter}
        self.gathering: dict[Bucket, Pending] = {}

    def _flat(self, key: Key, members: Sequence[PlacedParameter], mesh: Mesh) -> Flat:
        _, span, *_ = key
        sharers, ranks = mesh.group_of(span), mesh.layout.members(mesh.rank, span)
        if ranks not in self.transports:
            limit = int(self.config.bucket_mb * 2**20)
            self.transports[ranks] = choose(span, mesh, limit)
        dtype = self.dtype or members[0].parameter.dtype
        return Flat(members, sharers, dtype, self.transports[ranks].limit)

    def check(self, mesh: Mesh) -> None:
        """Any layout will do."""

    # --- gradients ------------------------------------------------------------------------------

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """Take a microbatch's gradient; in stage 2 each one goes out at once."""
        if self.config.stage == 2:
            assert isinstance(parameter, nn.Parameter)
            self._in_last_microbatch.add(parameter)
        super().on_gradient(parameter)

    def on_final_gradient(self, parameter: nn.Parameter) -> None:
        """Send every bucket whose turn has come."""
        line = self.line_of[parameter]
        if line is self.tied:
            return
        line.arrived(parameter)
        # Where weight gradients are put off, a parameter may get the next microbatch's before this one's have
        # left: a bucket that went ahead would have only a part of what the rest of the parameter has.
        if self.config.overlap and not (self.config.stage == 2 and self.passes.splits_backward):
            for bucket, transport in line.ready():
                self._send(bucket, transport)

    def microbatch_done(self, parameters: Collection[nn.Parameter]) -> None:
        """In stage 2, send what is left of one microbatch's gradients."""
        if self.config.stage == 2:
            self._end_round(self._line(parameters))

    def backward_done(self, parameters: Collection[nn.Parameter]) -> None:
        """In stage 1, send what is left of the gradients."""
        if self.config.stage == 1:
            self._end_round(self._line(parameters))

    def _line(self, parameters: Collection[nn.Parameter]) -> Line:
        """Return the line of one part's parameters: an empty one if none of them is this part's alone."""
        lines = (self.line_of.get(parameter, self.tied) for parameter in parameters)
        return next((line for line in lines if line is not self.tied), Line([]))

    def _end_round(self, line: Line) -> None:
        for bucket, transport in line.rest():
            self._send(bucket, transport)

    def _send(self, bucket: Bucket, transport: BucketExchange) -> None:
        """Reduce-scatter one bucket, with zeros where no gradient came; free what has left as a whole."""
        add, bucket.summed = bucket.summed, True
        transport.reduce_scatter(
            bucket.length, lambda buffer: self._write(bucket, buffer), bucket.shard, add=add
        )
        for fill in bucket.fills:
            if fill.source.stop == fill.parameter.numel():
                self.drop(fill.parameter)

    def _write(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        for fill in bucket.fills:
            if fill.parameter.grad is None:
                buffer[fill.target] = 0
            else:
                buffer[fill.target].copy_(fill.parameter.grad.reshape(-1)[fill.source])

    def finish(self) -> None:
        """Send what nobody announced to be complete, then what several stages add to, and wait."""
        for line in self.lines:
            if not line.rounds:
                self._end_round(line)
        self._end_round(self.tied)
        for transport in self.transports.values():
            transport.drain()
        super().finish()

    def zero(self) -> None:
        """Forget all gradients; after a step that was broken off, also what is on its way."""
        super().zero()
        for line in (*self.lines, self.tied):
            line.reset()
        for transport in self.transports.values():
            transport.forget()

    def pieces(self) -> Sequence[Piece]:
        """Return this rank's range of every bucket, cut where parameters begin and end."""
        return list(self.shards)

    def gradient_of(self, piece: Piece) -> torch.Tensor:
        """Return the sum in that range, flat."""
        return self.shards[piece]

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        """Refuse: no rank has it."""
        raise NanotrainError("zero12 shards gradients over ranks: ask for those of pieces()")

    # --- weights --------------------------------------------------------------------------------

    def gather_weights(self) -> None:
        """All-gather: begin to bring every rank's updated range to all others, first layers first."""
        for line in (self.tied, *self.lines):
            for bucket, transport in reversed(line.buckets):
                if pending := transport.all_gather(bucket.weights):
                    self.gathering[bucket] = pending
        for transport in self.transports.values():
            transport.drain()
        if not self.config.overlap:
            self.wait(list(self.line_of))

    def wait(self, parameters: Collection[nn.Parameter]) -> None:
        """Return when ``parameters`` have been gathered."""
        if not self.gathering:
            return
        for parameter in parameters:
            for bucket in (
                self.line_of[parameter].by_parameter[parameter] if parameter in self.line_of else ()
            ):
                if pending := self.gathering.pop(bucket, None):
                    pending()


def group(parameters: Sequence[PlacedParameter], mesh: Mesh) -> list[tuple[Key, list[PlacedParameter]]]:
    """Return what shares a buffer, last parameters first; those that several stages hold come last.

    All ranks that shard a buffer find it among the others in the same place, and its members in the
    same order: of tied parameters by name, since stages hold them in different places.

    So do all ranks that hold the same blocks without summing them, as tensor-parallel ranks hold norms: no
    buffer mixes norms with a vocabulary, whose shares differ by a row, so ranges of norms are the same on all
    of these ranks. Otherwise ranges would overlap, and the blocks of a checkpoint would not tile the tensor.
    """
    found: dict[Key, list[PlacedParameter]] = defaultdict(list)
    for placed in reversed(parameters):
        span = placed.placement.sync_span(mesh.layout)
        holders = placed.placement.replica_span(mesh.layout)
        tied = len(placed.parts) > 1 or bool(span.stages)
        part = TIED if tied else placed.parts[0]
        found[part, span, holders, form_of(placed.parameter)].append(placed)
    tied_keys = sorted((key for key in found if key[0] == TIED), key=lambda key: key[1:])
    for key in tied_keys:
        found[key].sort(key=lambda placed: placed.placement.name)
    return [(key, found[key]) for key in (*(key for key in found if key[0] != TIED), *tied_keys)]
