"""Stages of any pipeline made of measured blocks, in the form of those that a dry run measures whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

import attrs

from nanotrain_core.api import Costs, Layout, Part
from nanotrain_plan.blocks.measured import Block, Blocks, StepOverhead, add_shares, layers_of
from nanotrain_plan.blocks.probe import NotComposable
from nanotrain_plan.blocks.sync import Pass
from nanotrain_plan.blocks.work import Work
from nanotrain_plan.comms import CollectiveTime, Links, ranks_along
from nanotrain_plan.dry.collectives import Collective
from nanotrain_plan.dry.held import Owned, Share
from nanotrain_plan.dry.phase import Phase
from nanotrain_plan.dry.rank import RankStep, Sort

#: Of a rank's state, bytes of buffers that may be a guess; of its peak, those of temporaries.
MOST_GUESSED = 0.01


@attrs.define(eq=False)
class SummedPhase(Phase):
    """A phase that was put together: of its collectives the time is known, and not each of them."""

    collective_time: CollectiveTime = attrs.field(factory=CollectiveTime)
    doubt: int = 0
    """Bytes by which its peak may be lower."""


@attrs.define(frozen=True)
class Linear:
    """Seconds of a number of collectives."""

    latency: float = 0.0
    each_byte: float = 0.0

    def __call__(self, count: float, size: float) -> float:
        """Return the seconds of ``count`` collectives of ``size`` bytes together."""
        return count * self.latency + size * self.each_byte


class Seconds:
    """Time of collectives on a layout, told by axis: it grows linearly with their number and bytes."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self._known: dict[tuple[str, str], tuple[Linear, Linear]] = {}

    def time(self, work: Work) -> CollectiveTime:
        """Return what the collectives of an action take."""
        exposed = hidden = sync = message = ring = 0.0
        for key, count in work.count.items():
            if key[1] == "recv":  # a message counts where it is sent
                continue
            of_exposed, of_hidden = self._of(key)
            own = of_exposed(count, work.sent[key])
            exposed += own
            sync += own if self._is_sync(key) else 0.0
            ring += own if self.links.is_ring(*key) else 0.0
            hidden += of_hidden(count, work.sent[key])
            if key == ("pp", "send") and count > 0.5:  # not what rounding leaves of a difference
                ranks = ranks_along(*key, self.links.layout)
                found = Collective("send", ranks, round(work.sent[key] / count))
                message = max(message, self.links.seconds(found))
        exposed -= self.links.hidden_of_ring(ring, work.gemm)
        return CollectiveTime(
            exposed=max(0.0, exposed), hidden=max(0.0, hidden), sync=max(0.0, sync), message=message
        )

    def _is_sync(self, key: tuple[str, str]) -> bool:
        axis, op = key
        return self.links.is_sync(Collective(op, ranks_along(axis, op, self.links.layout), 0))

    def _of(self, key: tuple[str, str]) -> tuple[Linear, Linear]:
        """Return the exposed and the hidden seconds of an operation along an axis."""
        if key not in self._known:
            axis, op = key
            ranks = ranks_along(axis, op, self.links.layout)
            if len(ranks) == 1:
                return Linear(), Linear()
            small, large = (Collective(op, ranks, size) for size in (0, 10**9))
            exposed, hidden = (
                Linear(seconds(small), (seconds(large) - seconds(small)) / 1e9)
                for seconds in (self.links.exposed, self.links.hidden)
            )
            self._known[key] = exposed, hidden
        return self._known[key]


def make_step(
    blocks: Blocks, parts: Mapping[int, Part], costs: Costs, seconds: Seconds, whole: Block | None = None
) -> RankStep:
    """Return the step of a rank that holds ``parts``, by stage.

    Args:
        blocks: measured at the degrees of the layout, but for pp and dp.
        parts: of one pipeline rank.
        costs: of the model's layers.
        seconds: of collectives on the layout.
        whole: without a pipeline, the stage of embedding, one layer and head, less that layer.
    """
    layout = seconds.links.layout
    tied = _tied_in_rank(blocks, parts) if whole is None else {}
    held: dict[tuple[str, ...], Share] = {}
    measured: dict[Sort, Phase] = {}
    sent: list[Counter[tuple[str, str]]] = []
    for stage, part in parts.items():
        sent.append(Counter())
        found = _blocks_of(blocks, part, costs)
        shares = [block.shares for block in found]
        if whole is not None:
            shares = [whole.shares, *shares[1:-1]]
        for dims, share in (pair for each in shares for pair in each.items()):
            held[dims] = add_shares(held.get(dims, Share()), share)
        for key in blocks.edge:
            kind, place, split = key
            work = _sum_of(blocks, part, found, key, whole)
            if (kind, place) == ("F", 0):
                work.change += found[-1].carry
            if place == 0 and kind != "F" and (kind == "W" or not split):
                work.change += found[0].carry_back
            if (kind, place) == ("B", 0) and not part.has_embedding:
                work.change += blocks.message  # what was sent is held until the next message
                work.made += blocks.message
            if (kind, place) == ("B", 0) and part.has_embedding:  # the head's backward pass made it before
                gradient = blocks.gradients * sum(share.elements for share in tied.values())
                work.change -= gradient
                work.made -= gradient
            peak = _highest(blocks, part, found, key)
            measured[kind, stage, place, split] = _phase(str(key), work, peak, seconds)
            sent[-1] |= work.sent
    held.update(tied)
    own = {
        dims: share.elements / _shards(blocks, dims, layout, stages=1 if dims in tied else 2)
        for dims, share in held.items()
    }
    state = _state(blocks, held, own)
    around = {name: _around(blocks, each, held, own, seconds) for name, each in blocks.around.items()}
    buffers = _buffers(blocks, sent, layout, sum(state.values()))
    around["sync"] = _with_buffers(around["sync"], buffers)
    return RankStep(
        rank=0,
        coordinates={},
        state=state,
        parameters={},
        global_parameters={},
        measured=measured,
        copied=round(sum(_per_element(blocks.owned[dims]) * elements for dims, elements in own.items())),
        around=around,
        saved=_saved(held, layout, tied, lambda share: share.saved + share.masters + share.optimizer),
        saved_packed=_saved(
            held, layout, tied, lambda share: share.weights + share.masters + share.optimizer
        ),
        frozen=_saved(held, layout, tied, attrgetter("frozen")),
        frozen_packed=_saved(held, layout, tied, attrgetter("frozen_packed")),
        descriptions={},
        overlapped=blocks.overlapped,
    )


def _tied_in_rank(blocks: Blocks, parts: Mapping[int, Part]) -> dict[tuple[str, ...], Share]:
    """Return what embedding and head share, if the rank has both: as DualPipe-V's first rank.

    A probe has them on two ranks, each of which holds a copy.
    """
    if not any(p.has_embedding for p in parts.values()) or not any(p.has_head for p in parts.values()):
        return {}
    shares = blocks.embedding.shares
    return {dims: shares[dims] for dims in blocks.head.shares if "pp" in dims and dims in shares}


def _blocks_of(blocks: Blocks, part: Part, costs: Costs) -> list[Block]:
    return [
        *([blocks.embedding] if part.has_embedding else []),
        *(blocks.layers[cost] for cost in layers_of(part, costs)),
        *([blocks.head] if part.has_head else []),
    ]


def _sum_of(blocks: Blocks, part: Part, found: Sequence[Block], key: Pass, whole: Block | None) -> Work:
    """Return what a stage does: embedding and head were measured with their own ends of a stage."""
    layers = found[int(part.has_embedding) : len(found) - int(part.has_head)]
    total = Work()
    for block, times in Counter(layers).items():
        total = total.plus(block.work[key], times)
    if whole is not None:
        return total.plus(whole.work[key])
    ends = int(part.has_embedding) + int(part.has_head)
    if part.has_embedding:
        total = total.plus(blocks.embedding.work[key])
    if part.has_head:
        total = total.plus(blocks.head.work[key])
    return total if ends == 1 else total.plus(blocks.edge[key], 1.0 if not ends else -1.0)


def _highest(blocks: Blocks, part: Part, found: Sequence[Block], key: Pass) -> float:
    """Return the most bytes within, above those at the beginning: blocks run one after the other."""
    forward = key[0] == "F"
    level = 0.0 if part.has_embedding or not forward else blocks.edge[key].change
    most = 0.0
    for block in found if forward else reversed(found):
        most = max(most, level + block.above[key])
        level += block.work[key].change
    return most


def _phase(name: str, work: Work, peak: float, seconds: Seconds) -> SummedPhase:
    return SummedPhase(
        name=name,
        before=0,
        peak=round(peak),
        after=round(work.change),
        made=round(work.made),
        host=round(work.host),
        gemm_flops=Counter({kind: max(0.0, flops) for kind, flops in work.gemm.items()}),
        moved=round(max(0.0, work.moved)),
        eager=round(min(max(0.0, work.eager), max(0.0, work.moved))),
        kernels=round(max(0.0, work.kernels)),
        collective_time=seconds.time(work),
    )


def _shards(blocks: Blocks, dims: tuple[str, ...], layout: Layout, *, stages: int) -> int:
    """Return over how many ranks optimizer state is sharded; ``stages``: that hold a tied parameter."""
    if blocks.shards.get(dims, 1) == 1:
        return 1
    return layout.size(*(dim for dim in dims if dim != "pp")) * (stages if "pp" in dims else 1)


def _state(
    blocks: Blocks, held: Mapping[tuple[str, ...], Share], own: Mapping[tuple[str, ...], float]
) -> dict[str, int]:
    masters = optimizer = 0.0
    for dims, share in held.items():
        part = own[dims] / max(1, share.elements)
        masters += share.masters * part
        optimizer += share.optimizer * part
    gradients = sum(own.values()) * blocks.gradients
    return {
        "weights": sum(share.weights for share in held.values()),
        "masters": round(masters),
        "optimizer": round(optimizer),
        "gradients": round(gradients),
        "other": round(blocks.other),
    }


def _per_element(owned: Owned) -> float:
    return owned.weights / owned.elements if owned.elements else 0.0


def _buffers(
    blocks: Blocks, sent: Sequence[Mapping[tuple[str, str], float]], layout: Layout, state: int
) -> int:
    """Return the bytes of a rank's buffers of gradient sync.

    Raises:
        NotComposable: the rank may have larger buckets than were measured, which count beside its ``state``.
    """
    size, guessed = blocks.buffers.size(sent, lambda key: len(ranks_along(*key, layout)))
    if guessed > MOST_GUESSED * state:
        raise NotComposable("layers are smaller than a bucket of gradient sync")
    return round(size)


def _with_buffers(phase: SummedPhase, size: int) -> SummedPhase:
    """Return what a rank does around its actions, with buffers that are there in later steps too."""
    return attrs.evolve(phase, peak=phase.peak + size, after=phase.after + size, lasting=phase.lasting + size)


def _saved(
    held: Mapping[tuple[str, ...], Share],
    layout: Layout,
    tied: Mapping[tuple[str, ...], Share],
    bytes_of: Callable[[Share], float],
) -> float:
    """Return :attr:`RankStep.saved`, or these bytes of it.

    As if all ranks that hold the same parameters summed their gradients.
    """
    saved = 0.0
    for dims, share in held.items():
        stages = 2 if "pp" in dims and dims not in tied else 1
        replicas = stages * layout.size(*(dim for dim in dims if dim != "pp"))
        saved += bytes_of(share) / replicas
    return saved


def _around(
    blocks: Blocks,
    found: StepOverhead,
    held: Mapping[tuple[str, ...], Share],
    own: Mapping[tuple[str, ...], float],
    seconds: Seconds,
) -> SummedPhase:
    """Return what a rank does around its actions: in proportion to the parameters that it holds or owns."""
    of_probe = {dims: share.elements / blocks.shards.get(dims, 1) for dims, share in blocks.held.items()}
    moved = sum(own.values()) / max(1.0, sum(of_probe.values()))
    tensors = sum(share.tensors for share in held.values()) / max(
        1, sum(share.tensors for share in blocks.held.values())
    )
    full = sum(share.elements for share in held.values()) / max(
        1, sum(share.elements for share in blocks.held.values())
    )
    by_axis = {
        "+".join(dims): share.elements / max(1, blocks.held[dims].elements)
        for dims, share in held.items()
        if dims in blocks.held
    }
    work = attrs.evolve(
        found.work,
        change=found.work.change * full,
        made=found.work.made * full,
        moved=found.work.moved * moved,
        eager=found.work.eager * moved,
        kernels=found.work.kernels * tensors,
        gemm=Counter({kind: flops * moved for kind, flops in found.work.gemm.items()}),
        count=Counter({key: n * by_axis.get(key[0], 1.0) for key, n in found.work.count.items()}),
        sent=Counter({key: n * by_axis.get(key[0], 1.0) for key, n in found.work.sent.items()}),
    )
    # Temporaries take as much for a few tensors at a time as for all, or grow with what there is.
    grown = max(1.0, moved, full)
    phase = _phase("around", work, found.above * grown, seconds)
    return attrs.evolve(
        phase,
        lasting=round(found.lasting * full),
        doubt=round(found.above * (grown - min(1.0, moved, full))),
    )
