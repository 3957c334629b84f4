"""Collectives of a step by mesh axis, and how long they take on given links."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs

from nanotrain_core.api import Layout
from nanotrain_plan.dry.collectives import Collective
from nanotrain_plan.dry.cost import ATTENTION
from nanotrain_plan.dry.phase import Phase
from nanotrain_plan.hardware import Hardware
from nanotrain_plan.stages import Stages


@attrs.define(frozen=True, kw_only=True)
class AxisTraffic:
    """Collectives of one sort along one axis, of one rank in one step."""

    axis: str
    op: str
    size: int
    """Ranks of the group."""
    count: int
    bytes: int
    seconds: float
    exposed: float
    """Seconds of these that are not hidden: by the shares of ``[overlap]``, and by computation that is too
    short for gradient sync."""


#: Operations between two ranks.
MESSAGES = ("send", "recv")


def axis_of(ranks: Sequence[int], op: str, layout: Layout, *, of_experts: bool = False) -> str:
    """Return along which mesh dimensions ranks differ: ``tp``, ``dp``, ``world``, ``pp`` of a message.

    A group that is complete along dimensions of the dense view is named by these, otherwise by those of the
    expert view; two ranks that exchange a message, by the dimensions of the dense view along which they
    differ, and two stages that share a tied parameter, by ``pp``. ``of_experts``: try the expert view first.
    """
    if not of_experts and len(ranks) == layout.world_size:
        several = [dim for dim in layout.views["dense"].dims if layout.size(dim) > 1]
        return several[0] if len(several) == 1 else "world"
    for view in reversed(layout.views.values()) if of_experts else layout.views.values():
        spread = {dim: {view.coordinate(rank, dim) for rank in ranks} for dim in view.dims}
        varying = [dim for dim in view.dims if len(spread[dim]) > 1]
        whole = op in MESSAGES or all(len(spread[dim]) == view.size(dim) for dim in varying if dim != "pp")
        if whole and math.prod(len(spread[dim]) for dim in varying) == len(ranks):
            return "+".join(varying)
    return "other"


def ranks_along(axis: str, op: str, layout: Layout) -> tuple[int, ...]:
    """Return the ranks of rank 0's group for a collective along ``axis``: the inverse of :func:`axis_of`.

    Along ``pp``, a message involves two neighboring stages, and a sum the first and the last stage; along
    other dimensions a message goes to the next rank.
    """
    if axis in ("world", "other"):
        return tuple(range(layout.world_size))
    dims = [dim for dim in axis.split("+") if dim]
    own = layout.ranks(0, *(dim for dim in dims if dim != "pp"))
    if "pp" not in dims or layout.size("pp") == 1:
        return own[:2] if op in MESSAGES else own
    stages = 1 if op in MESSAGES else layout.size("pp") - 1
    stride = layout.view(["pp"]).stride("pp") * stages
    return (*own, *(rank + stride for rank in own))


#: Mesh dimensions by the key of ``[overlap]`` that says how much of their collectives is hidden.
OVERLAP = {"tp": "tp", "etp": "ep", "ep": "ep", "cp": "cp", "pp": "pp"} | {
    f"{dim}{part}": "dp" for dim in ("dp", "edp") for part in ("", "_shard", "_replicate")
}

#: What gradient sync consists of.
SUMS = ("all_reduce", "all_gather", "reduce_scatter")

#: Collectives that NCCL runs as rings (or trees), one for each NIC of a node.
RINGS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")


def attention_seconds(gemm_flops: Mapping[str, float], hardware: Hardware) -> float:
    """Return the seconds of attention among FLOPs of a phase: half of the scores are masked, and left out."""
    return sum(
        flops / 2 / hardware.attention_rate(kind.removeprefix(ATTENTION))
        for kind, flops in gemm_flops.items()
        if kind.startswith(ATTENTION)
    )


@attrs.define(frozen=True, kw_only=True)
class CollectiveTime:
    """Seconds that the collectives of one phase take."""

    exposed: float = 0.0
    """Time that is not hidden by computation, by the shares of ``[overlap]``."""
    hidden: float = 0.0
    """The rest of gradient sync, which is hidden if the phase computes for at least as long."""
    sync: float = 0.0
    """Of :attr:`exposed`, that of gradient sync, for which no other pipeline stage waits."""
    message: float = 0.0
    """Time of the longest message to another pipeline rank from the end of the phase, with what of it is in
    :attr:`exposed`, to its arrival."""


@attrs.define(frozen=True)
class _Priced:
    """What :class:`Links` says of one collective."""

    axis: str
    seconds: float
    exposed: float
    hidden: float
    sync: bool


class Links:
    """Times of collectives on the links of a hardware."""

    def __init__(self, hardware: Hardware, layout: Layout) -> None:
        self.hardware, self.layout = hardware, layout
        self._axes: dict[tuple[tuple[int, ...], bool, bool], str] = {}
        self._priced: dict[Collective, _Priced] = {}
        self._locals: dict[tuple[tuple[int, ...], str, bool], int] = {}
        self._times: dict[Phase, CollectiveTime] = {}

    def axis(self, found: Collective) -> str:
        """Return :func:`axis_of`, remembered.

        An all-to-all whose group fits both views is attributed to the expert view's dimensions, if ``ep`` or
        ``etp`` is among them; not with gloo, which also uses all-to-alls for gradients. If the same ranks
        also split sequences, the all-to-all may belong to either: ``cp+ep``.
        """
        of_experts = found.op == "all_to_all" and not self.hardware.gloo
        key = found.ranks, of_experts, found.op in MESSAGES
        if key not in self._axes:
            self._axes[key] = axis = axis_of(found.ranks, found.op, self.layout)
            spread = axis_of(found.ranks, found.op, self.layout, of_experts=True) if of_experts else axis
            if {"ep", "etp"} & {*spread.split("+")}:
                both = axis != spread and axis in self.layout.sequence_dims
                self._axes[key] = f"{axis}+{spread}" if both else spread
        return self._axes[key]

    def _price(self, found: Collective) -> _Priced:
        """Return what is known of a collective, remembered: a step has thousands, and few that differ."""
        known = self._priced.get(found)
        if known is None:
            axis, sync = self.axis(found), self._sums_data(found)
            seconds, share = self._time(found), self._hidden_share(axis, sync)
            hidden = seconds * share if sync else 0.0
            known = _Priced(axis, seconds, seconds * (1 - share), hidden, sync)
            self._priced[found] = known
        return known

    def seconds(self, found: Collective) -> float:
        """Return how long a collective takes by itself."""
        return self._price(found).seconds

    def _time(self, found: Collective) -> float:
        """Return how long a collective takes by itself.

        Within a node, bandwidth is that of NVLink. Between nodes, NCCL runs as many rings at once as the
        group has ranks in a node, each through the NIC of another one of them: together they have the
        bandwidth of these NICs, at most NVLink's (331 GB/s were measured in an all-reduce over 4 nodes of 8
        H100 with 8 x 50 GB/s). gloo runs one. Of an all-to-all, what leaves the node takes the network and
        the rest NVLink, at once. Latency grows with the logarithm of the ranks.
        """
        links, n, local = self.hardware.links, len(found.ranks), self._local(found)
        latency = links.latency_us * 1e-6 * (1 + 0.25 * math.log2(n))
        intra, inter = (1e9 * links.achieved * gb_s for gb_s in (links.intra_gb_s, links.inter_gb_s))
        if found.op == "all_to_all":
            inside, outside = (local - 1) / n, (n - local) / n
            return latency + found.bytes * max(inside / intra, outside / inter)
        factor = {"all_reduce": 2 * (n - 1) / n, "all_gather": (n - 1) / n, "reduce_scatter": (n - 1) / n}
        rings = local if found.op in RINGS and not self.hardware.gloo else 1
        rate = intra if local == n else min(intra, rings * inter)
        return latency + found.bytes * factor.get(found.op, 1.0) / rate

    def _local(self, found: Collective) -> int:
        """Return how many ranks of a group share a node: fewest on any node, of any group like this one.

        Groups that are moved along the other dimensions may lie otherwise on nodes, and all ranks wait for
        the slowest: with tp 6 on nodes of 8 the ranks 0 to 5 share a node, and 6 to 11 do not.
        """
        key = found.ranks, self.axis(found), found.op in MESSAGES
        if key not in self._locals:
            node = self.hardware.domain
            places = (Counter((rank + by) // node for rank in found.ranks) for by in self._moves(*key))
            self._locals[key] = min(min(place.values()) for place in places)
        return self._locals[key]

    def _moves(self, ranks: Sequence[int], axis: str, message: bool) -> set[int]:
        """Return by how much a group is moved to become any other along its axis, modulo a node's ranks.

        A ``message`` goes from any rank along its axis to the one as far from it; a sum along ``pp`` is over
        the same stages.
        """
        dims, node = axis.split("+"), self.hardware.domain
        try:
            view = self.layout.view(dims)
        except KeyError:  # no dimensions, or those of two views: world, cp+ep
            return {0}
        moves = {0}
        for dim in view.dims:
            first, last = (view.coordinate(ranks[end], dim) for end in (0, -1))
            if dim in dims and not message:
                continue
            places = range(view.size(dim) - abs(last - first))
            moves = {(by + (place - first) * view.stride(dim)) % node for by in moves for place in places}
        return moves

    def exposed(self, found: Collective) -> float:
        """Return the seconds of :meth:`seconds` that are not hidden where there is enough to compute."""
        return self._price(found).exposed

    def hidden(self, found: Collective) -> float:
        """Return the part of :meth:`seconds` that only computation of the same action can hide.

        That is the case for gradient sync, since the backward pass itself waits for its buckets. Messages,
        and all-to-alls where a schedule such as DualPipe overlaps two microbatches, also overlap other
        actions.
        """
        return self._price(found).hidden

    def _hidden_share(self, axis: str, sync: bool) -> float:
        if sync:
            return self.hardware.overlap.dp
        axes = [OVERLAP.get(each, "") for each in axis.split("+")]
        shares = [getattr(self.hardware.overlap, each) for each in axes if each]
        return min(shares, default=0.0)

    def is_sync(self, found: Collective) -> bool:
        """Return whether a collective is of gradient sync."""
        return self._price(found).sync

    def _sums_data(self, found: Collective) -> bool:
        """Return whether a collective sums gradients, or gathers weights: along data-parallel ranks.

        Where ``cp`` is the only such dimension, its sums are taken for those of gradients, too, also if
        attention gathers keys and values there: neither axis nor operation tells them apart. Along ``pp``
        alone, stages sum the gradient of a tied parameter; the other sums there, of a norm or counts, are of
        a few numbers.
        """
        if found.op not in SUMS:
            return False
        axis, dense = self.axis(found), self.layout.views["dense"]
        spread = [dim for dim in dense.dims if dense.size(dim) > 1]
        dims = spread if axis == "world" else axis.split("+")
        of_data = any(OVERLAP.get(dim) == "dp" for dim in dims)
        return of_data or dims == ["pp"] or ("cp" in dims and "dp" not in spread)

    def is_ring(self, axis: str, op: str) -> bool:
        """Return whether an operation sends to another rank that shares sequences, as ring attention does."""
        return op == "send" and axis in self.layout.sequence_dims

    def hidden_of_ring(self, seconds: float, gemm_flops: Mapping[str, float]) -> float:
        """Return how much of the time of a ring's messages attention hides: that of the same phase."""
        return min(seconds, attention_seconds(gemm_flops, self.hardware)) if seconds else 0.0

    def ring(self, phase: Phase) -> float:
        """Return the seconds that the messages of a ring take, less the share of ``[overlap]``."""
        return sum(self.exposed(each) for each in phase.collectives if self.is_ring(self.axis(each), each.op))

    def time(self, phase: Phase) -> CollectiveTime:
        """Return what the collectives of a recorded phase take, remembered.

        A message counts once, where it is sent: who receives it waits for its arrival.
        """
        if phase not in self._times:
            priced = [(each.op, self._price(each)) for each in phase.collectives]
            sends = (own.seconds - own.exposed for op, own in priced if op == "send" and own.axis == "pp")
            self._times[phase] = CollectiveTime(
                exposed=sum(own.exposed for op, own in priced if op != "recv")
                - self.hidden_of_ring(self.ring(phase), phase.gemm_flops),
                hidden=sum(own.hidden for _, own in priced),
                sync=sum(own.exposed for _, own in priced if own.sync),
                message=max(sends, default=0.0),
            )
        return self._times[phase]


def phases_of(stages: Stages, pp_rank: int) -> Iterator[Phase]:
    """Yield what a rank does in a step, all microbatches, in order."""
    around = stages.step_of(pp_rank).around
    yield around["counts"]
    for action in stages.actions[pp_rank]:
        yield stages.phase(pp_rank, action)
    for name in ("sync", "update", "balance"):
        yield around[name]


def traffic(
    stages: Stages, pp_rank: int, links: Links, excess: Callable[[Phase], float]
) -> list[AxisTraffic]:
    """Return a rank's collectives of a step, summed by axis and operation.

    ``excess``: the seconds of gradient sync that a phase should hide, but computes for too short a time.
    """
    total: dict[tuple[str, str, int], list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
    for phase, times in Counter(phases_of(stages, pp_rank)).items():
        more = excess(phase)
        share = more / sum(map(links.hidden, phase.collectives)) if more else 0.0
        ring = links.ring(phase)
        of_ring = links.hidden_of_ring(ring, phase.gemm_flops) / ring if ring else 0.0
        for found in phase.collectives:
            axis = links.axis(found)
            sums = total[axis, found.op, len(found.ranks)]
            exposed = links.exposed(found) * (1 - of_ring if links.is_ring(axis, found.op) else 1)
            exposed = 0.0 if found.op == "recv" else exposed  # see Links.time
            sums[0] += times
            sums[1] += times * found.bytes
            sums[2] += times * links.seconds(found)
            sums[3] += times * (exposed + share * links.hidden(found))
    return [
        AxisTraffic(axis=axis, op=op, size=size, count=int(n), bytes=int(b), seconds=seconds, exposed=exposed)
        for (axis, op, size), (n, b, seconds, exposed) in sorted(total.items())
    ]
