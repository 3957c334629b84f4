"""Reduce-scatters gradients: every rank ends up with the sum of its own range of each bucket only.

Buckets are filled in the order in which backward reaches parameters, last layers first, and are sent as soon
as their last gradient has arrived *and* every earlier one was sent, so that all ranks issue the same
collectives in the same order. In stage 1 that is once per step, with the last microbatch, to which gradients
were accumulated on each rank; in stage 2 with every microbatch, so that no rank ever holds the gradient of
the whole model. The ranks that shard a parameter's state are read from its placement: this code is
independent of data parallelism and experts.

Source: stages 1 and 2 of Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 5; sums instead of means.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence, Set

import torch
from torch import nn

from nanotrain_core.api import NanotrainError, Span
from nanotrain_core.api.torch import (
    BucketExchange,
    BucketQueue,
    LocalGradients,
    Mesh,
    Passes,
    Pending,
    Piece,
    PlacedParameter,
    storage_key,
)
from nanotrain_zero12 import ShardConfig, Zero12Config
from nanotrain_zero12.bucket_exchange import bucket_exchange
from nanotrain_zero12.flat import Bucket, Flat

#: A pseudo model part for tied parameters, which several stages of this rank or of others hold: they
#: are reduced after all others.
TIED = -1

#: The common properties of a buffer's members: model part or TIED, ranks to sum over, all ranks that hold
#: the same blocks, storage form.
Key = tuple[int, Span, Span, str]


class PartQueue(BucketQueue[Bucket]):
    """The buckets of one model part, which are all sent in each round: for a microbatch, or a sum of them."""

    rounds = 0
    """Rounds of this step that have ended."""

    def reset(self) -> None:
        """Begin a step."""
        self.rounds = 0
        for bucket in self.buckets:
            bucket.summed = False
        self.rewind()

    def rewind(self) -> None:
        """Begin a round."""
        super().rewind()
        self.expecting = False

    def expect(self, parameters: Set[nn.Parameter]) -> None:
        """Expect only gradients of these parameters in this round: those of all others have arrived."""
        if not self.expecting:
            self.expecting = True
            for missing in self.missing.values():
                missing.intersection_update(parameters)

    def rest(self) -> Iterator[Bucket]:
        """Yield all buckets not yet sent, complete or not, and end the round."""
        yield from super().rest()
        self.rounds += 1


class ShardedGradients(LocalGradients):
    """The gradient sync of ``zero12``, including the all-gather of updated weights."""

    config: Zero12Config | ShardConfig
    reduces = True

    def attach(
        self,
        parameters: Sequence[PlacedParameter],
        mesh: Mesh,
        dtype: torch.dtype | None,
        passes: Passes | None = None,
    ) -> None:
        """Move every trained parameter into a flat buffer, and split these into buckets. Collective."""
        self.needs_gradient_hooks = self.config.overlap  # otherwise buckets are sent after backward
        super().attach(parameters, mesh, dtype, passes)
        # A share may have no elements, as of fewer rows than ranks: on all ranks of its group alike.
        trained = [each for each in parameters if each.parameter.requires_grad and each.parameter.numel()]
        self.exchanges: dict[tuple[int, ...], BucketExchange] = {}
        flats = [(key, self._flat(key, members, mesh)) for key, members in group(trained, mesh)]
        self.mesh, self.flats = mesh, [(span, flat) for (_, span, *_), flat in flats]
        self.shards = {piece: shard for _, flat in flats for piece, shard in flat.pieces()}
        arrival = {placed.parameter: number for number, placed in enumerate(reversed(trained))}
        buckets: dict[int, list[Bucket]] = defaultdict(list)
        self.exchange_of: dict[Bucket, BucketExchange] = {}
        for (part, span, *_), flat in flats:
            exchange = self.exchanges[mesh.layout.members(mesh.rank, span)]
            self.exchange_of |= dict.fromkeys(flat.buckets, exchange)
            buckets[part] += flat.buckets
        for part, found in buckets.items():
            if part != TIED:
                found.sort(key=lambda bucket: max(arrival[parameter] for parameter in bucket.parameters))
        self.tied = PartQueue(buckets.pop(TIED, []))
        self.queues = [PartQueue(buckets[part]) for part in sorted(buckets)]
        self.queue_of = {p: queue for queue in (*self.queues, self.tied) for p in queue.buckets_of}
        self.gathering: dict[Bucket, Pending] = {}

    def _flat(self, key: Key, members: Sequence[PlacedParameter], mesh: Mesh) -> Flat:
        _, span, *_ = key
        sharers, ranks = mesh.group_of(span), mesh.layout.members(mesh.rank, span)
        if ranks not in self.exchanges:
            limit = int(self.config.bucket_mb * 2**20)
            self.exchanges[ranks] = bucket_exchange(span, mesh, limit)
        dtype = self.dtype or members[0].parameter.dtype
        return Flat(members, sharers, dtype, self.exchanges[ranks].limit)

    # --- gradients ------------------------------------------------------------------------------

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """Handle a microbatch's gradient; in stage 2 each one is sent immediately."""
        if self.config.stage == 2:
            assert isinstance(parameter, nn.Parameter)
            self._in_last_microbatch.add(parameter)
        super().on_gradient(parameter)

    def on_final_gradient(self, parameter: nn.Parameter) -> None:
        """Send every bucket that is next in order.

        Raises:
            NanotrainError: the parameter's gradient of this microbatch has arrived before: buckets may have
                been sent without this part.
        """
        queue = self.queue_of.get(parameter, self.tied)
        if queue is self.tied or not self.config.overlap:
            return
        # Before a microbatch's W pass, parameters whose wgrad is not deferred may already accumulate the next
        # microbatch's gradient. A bucket sent now could then contain fewer microbatches than the other
        # buckets of the same parameter. So all buckets are sent by the end of the W pass.
        if self.passes.deferred is not None:
            return
        if self.passes.computing is not None:
            queue.expect(self.passes.computing)
        if not queue.awaits(parameter):
            name = next(each.placement.name for each in self.placed if each.parameter is parameter)
            raise NanotrainError(
                f"zero12: autograd completed the gradient of {name} twice in one backward pass, and the "
                "second part may be lost; expected once. If it is used in several activation-checkpointed "
                "calls, pass use_reentrant=False to torch.utils.checkpoint, or set overlap = false for zero12"
            )
        queue.arrived(parameter)
        for bucket in queue.ready():
            self._send(bucket)

    def microbatch_done(self, parameters: Collection[nn.Parameter]) -> None:
        """In stage 2, send the remaining gradients of one microbatch."""
        if self.config.stage == 2:
            self._end_round(self._queue(parameters))

    def backward_done(self, parameters: Collection[nn.Parameter]) -> None:
        """In stage 1, send the remaining gradients."""
        if self.config.stage == 1:
            self._end_round(self._queue(parameters))

    def _queue(self, parameters: Collection[nn.Parameter]) -> PartQueue:
        """Return the queue of one part's parameters: empty if none of them belongs to this part only."""
        queues = (self.queue_of.get(parameter, self.tied) for parameter in parameters)
        return next((queue for queue in queues if queue is not self.tied), PartQueue([]))

    def _end_round(self, queue: PartQueue) -> None:
        for bucket in queue.rest():
            self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        """Reduce-scatter one bucket, with zeros for missing gradients; free gradients sent completely."""
        add, bucket.summed = bucket.summed, True
        self.exchange_of[bucket].reduce_scatter(
            bucket.length, lambda buffer: self._write(bucket, buffer), bucket.shard, add=add
        )
        for part in bucket.slices:
            if part.source.stop == part.parameter.numel():
                self.drop(part.parameter)

    def _write(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        for part in bucket.slices:
            if part.parameter.grad is None:
                buffer[part.target] = 0
            else:
                buffer[part.target].copy_(part.parameter.grad.reshape(-1)[part.source])

    def finish(self) -> None:
        """Reduce-scatter what is left: parts without a complete round, then tied parameters; wait for all."""
        for queue in self.queues:
            if not queue.rounds:
                self._end_round(queue)
        self._end_round(self.tied)
        for exchange in self.exchanges.values():
            exchange.drain()
        super().finish()

    def zero(self) -> None:
        """Clear all gradients; after an interrupted step, also those in flight."""
        super().zero()
        for queue in (*self.queues, self.tied):
            queue.reset()
        for exchange in self.exchanges.values():
            exchange.forget()

    def pieces(self) -> Sequence[Piece]:
        """Return this rank's range of every bucket, split at parameter boundaries."""
        return list(self.shards)

    def pieces_of(self, rank: int) -> Sequence[Piece]:
        """Return the ranges of another rank of this pipeline stage: the core's ``KnowsPieces``."""
        found, layout = [], self.mesh.layout
        for span, flat in self.flats:
            ranks = layout.members(self.mesh.rank, span)
            twin = layout.ranks(self.mesh.rank, *span.dims)[layout.coordinate(rank, *span.dims)]
            found += [piece for piece, *_ in flat.pieces_of(ranks.index(twin))]
        return found

    def gradient_of(self, piece: Piece) -> torch.Tensor:
        """Return the sum in that range, flat."""
        return self.shards[piece]

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        """Refuse: no rank has it."""
        raise NanotrainError("zero12 shards gradients over ranks: ask for those of pieces()")

    # --- weights --------------------------------------------------------------------------------

    def gather_weights(self) -> None:
        """Begin to all-gather every rank's updated range, first layers first."""
        for queue in (self.tied, *self.queues):
            for bucket in reversed(queue.buckets):
                if pending := self.exchange_of[bucket].all_gather(bucket.weights):
                    self.gathering[bucket] = pending
        for exchange in self.exchanges.values():
            exchange.drain()
        if not self.config.overlap:
            self.wait(list(self.queue_of))

    def wait(self, parameters: Collection[nn.Parameter]) -> None:
        """Return when ``parameters`` have been gathered."""
        if not self.gathering:
            return
        for parameter in parameters:
            queue = self.queue_of.get(parameter, self.tied)
            for bucket in queue.buckets_of.get(parameter, ()):
                if pending := self.gathering.pop(bucket, None):
                    pending()


def group(parameters: Sequence[PlacedParameter], mesh: Mesh) -> list[tuple[Key, list[PlacedParameter]]]:
    """Return the parameters of each buffer, last parameters first; those that several stages hold come last.

    All ranks that shard a buffer have it in the same position among the others, with its members in the
    same order: tied parameters are ordered by name, since stages register them in different places.

    The same holds for all ranks that hold the same blocks without summing them, as tensor-parallel ranks hold
    norms: no buffer mixes norms with a vocabulary, whose shards differ by a row, so ranges of norms are the
    same on all of these ranks. Otherwise ranges would overlap, and the blocks of a checkpoint would not tile
    the tensor.
    """
    found: dict[Key, list[PlacedParameter]] = defaultdict(list)
    for placed in reversed(parameters):
        span = placed.placement.sync_span(mesh.layout)
        holders = placed.placement.replica_span(mesh.layout)
        tied = len(placed.parts) > 1 or bool(span.stages)
        part = TIED if tied else placed.parts[0]
        found[part, span, holders, storage_key(placed.parameter)].append(placed)
    tied_keys = sorted((key for key in found if key[0] == TIED), key=lambda key: key[1:])
    for key in tied_keys:
        found[key].sort(key=lambda placed: placed.placement.name)
    return [(key, found[key]) for key in (*(key for key in found if key[0] != TIED), *tied_keys)]
