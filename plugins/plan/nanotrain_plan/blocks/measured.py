"""Blocks of a model at given degrees: the work of embedding, layers and head, from a probe's steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from nanotrain_core.api import Costs, Part
from nanotrain_plan.blocks.buffers import Buffers, find_buffers
from nanotrain_plan.blocks.probe import Probe
from nanotrain_plan.blocks.sync import GradientSync, Pass
from nanotrain_plan.blocks.work import Work
from nanotrain_plan.dry.held import Owned, Share
from nanotrain_plan.dry.phase import Phase
from nanotrain_plan.dry.rank import RankStep

SPLITS = (False, True)


@attrs.define(eq=False)
class Block:
    """Embedding, head or a layer, with its work in each sort of pass."""

    work: dict[Pass, Work]
    above: dict[Pass, float]
    """Peak bytes within the block, above those at its beginning."""
    shares: dict[tuple[str, ...], Share]
    """Parameters, by the mesh dimensions that their gradients are summed over."""
    carry: float = 0.0
    """Bytes that a forward pass leaves until the next one of the stage, where this block is its last."""
    carry_back: float = 0.0
    """The same of a backward pass that this block ends."""

    def alone(self) -> Block:
        """Return it with passes of an only microbatch, which is both the first and the last.

        It writes gradients as the first one does, and sends them as the last.
        """
        work, above = dict(self.work), dict(self.above)
        for kind, place, split in self.work:
            usual, last = (kind, 1, split), (kind, 2, split)
            if place == 0 and usual in self.work and last in self.work:
                both = self.work[kind, 0, split].plus(self.work[last])
                work[kind, 0, split] = both.plus(self.work[usual], -1.0)
                above[kind, 0, split] = self.above[last]
        return attrs.evolve(self, work=work, above=above)

    def ending(self, other: Block) -> Block:
        """Return it with the last microbatch of ``other``, which has another number of sequences."""
        return attrs.evolve(
            self,
            work={key: other.work[key] if key[1] == 2 else own for key, own in self.work.items()},
            above={key: other.above[key] if key[1] == 2 else own for key, own in self.above.items()},
        )


@attrs.define(eq=False)
class StepOverhead:
    """What a rank does around the actions of a step: :attr:`RankStep.around`."""

    work: Work
    above: float
    lasting: int = 0
    """Bytes of buffers that are there in later steps too."""


@attrs.define(eq=False)
class Blocks:
    """All that stages are made of, at one set of degrees."""

    embedding: Block
    layers: Mapping[float, Block]
    """By the FLOPs of a layer."""
    head: Block
    edge: Mapping[Pass, Work]
    """What a stage between others does beside its layers."""
    message: float
    """Bytes that a stage sends to another for a microbatch."""
    around: Mapping[str, StepOverhead]
    owned: Mapping[tuple[str, ...], Owned]
    """Of the probe's ranks together."""
    held: Mapping[tuple[str, ...], Share]
    """Parameters of the probe's ranks together."""
    gradients: float
    """Bytes that gradient sync keeps between steps, for an element that a rank owns."""
    other: float
    buffers: Buffers
    """Those of gradient sync."""
    shards: Mapping[tuple[str, ...], int]
    """Over how many ranks of the probe each range of a parameter's state is sharded: 1 if it is not."""
    overlapped: bool
    """See :attr:`RankStep.overlapped`."""

    def alone(self) -> Blocks:
        """Return them with passes of an only microbatch."""
        return attrs.evolve(
            self,
            embedding=self.embedding.alone(),
            layers={cost: block.alone() for cost, block in self.layers.items()},
            head=self.head.alone(),
        )

    def ending(self, other: Blocks) -> Blocks:
        """Return them with the last microbatch of ``other``, which has another number of sequences."""
        return attrs.evolve(
            self,
            embedding=self.embedding.ending(other.embedding),
            layers={cost: block.ending(other.layers[cost]) for cost, block in self.layers.items()},
            head=self.head.ending(other.head),
            edge={key: other.edge[key] if key[1] == 2 else own for key, own in self.edge.items()},
        )


def tell_apart(probe: Probe, costs: Costs) -> Blocks:
    """Return the blocks of a pipeline's probe: see :mod:`nanotrain_plan.blocks.probe`."""
    first, last = probe.steps
    start, *singles, pair = [n for n, part in enumerate(probe.parts) if part.rank == 0]
    passes = _passes(first)
    embedding, both = (_stage(first, probe, n, passes) for n in (start, pair))
    alone = {costs.layers[probe.parts[n].first]: _stage(first, probe, n, passes) for n in singles}
    neighbors = [costs.layers[probe.parts[pair].first + each] for each in (0, 1)]
    edge = {}
    for kind, place, split in passes:  # the first and the last microbatch have the ends of any other
        usual = kind, 1, split if (kind, 1, split) in both.work else not split
        a, b = (alone[cost].work[usual] for cost in neighbors)
        edge[kind, place, split] = a.plus(b).plus(both.work[usual], -1.0)
    layers = {cost: _without(block, edge) for cost, block in alone.items()}
    common = list(layers)[-1]
    _settle(layers, common, both, neighbors, edge)
    head = _stage(last, probe, len(probe.parts) - 1, _passes(last))
    for key, work in edge.items():
        if key[0] == "F" and key in head.above:
            head.above[key] -= work.change
    around = around_of(first, probe)
    sync = GradientSync(first, probe.axis)
    for block in (embedding, *layers.values(), head):
        sync.give(block.work, block.shares)
    sync.take(around["sync"].work)
    owned = _sum_owned(probe.steps)
    held = _sum_shares(share for step in probe.steps for share in step.shares.items())
    of_gradients = sum(step.state["gradients"] for step in probe.steps)
    return Blocks(
        embedding=embedding,
        layers=layers,
        head=head,
        edge=edge,
        message=max(0.0, *(work.sent["pp", "send"] for work in embedding.work.values())),
        around=around,
        owned=owned,
        held=_sum_shares(first.shares.items()),
        gradients=of_gradients / max(1, sum(each.elements for each in owned.values())),
        other=first.state["other"],
        buffers=find_buffers(first, probe.axis, ("+".join(dims) for dims in held)),
        shards={
            dims: max(1, round(held[dims].elements / each.elements)) if each.elements else 1
            for dims, each in owned.items()
        },
        overlapped=first.overlapped,
    )


def _settle(
    layers: dict[float, Block],
    common: float,
    both: Block,
    neighbors: Sequence[float],
    edge: Mapping[Pass, Work],
) -> None:
    """Replace the most common layer's work by that in the pair, which ran after all one-time allocations."""
    block = layers[common]
    times = neighbors.count(common)
    other = next((layers[cost] for cost in neighbors if cost != common), None)
    for key, work in both.work.items():
        own = work.plus(edge[key], -1.0)
        if other is not None:
            own = own.plus(other.work[key], -1.0)
        own = Work().plus(own, 1 / times)
        block.work[key] = own
        if key[0] != "F":
            block.above[key] = max(block.above[key], both.above[key] - max(0.0, own.change))


def together(several: Sequence[Blocks]) -> Blocks:
    """Return blocks with the passes of several probes, which differ in their W passes."""
    first, *others = several
    for other in others:
        for mine, theirs in (
            (first.embedding, other.embedding),
            (first.head, other.head),
            *((block, other.layers[cost]) for cost, block in first.layers.items()),
        ):
            mine.work = {**theirs.work, **mine.work}
            mine.above = {**theirs.above, **mine.above}
        first = attrs.evolve(first, edge={**other.edge, **first.edge})
    return first


def around_of(step: RankStep, probe: Probe) -> dict[str, StepOverhead]:
    """Return what a rank of a probe does around its actions."""
    axis = probe.axis
    return {name: StepOverhead(Work.of(p, axis), p.transient, p.lasting) for name, p in step.around.items()}


def stage_of(step: RankStep, probe: Probe, stage: int) -> Block:
    """Return a whole stage of a probe that has no other."""
    found = _stage(step, probe, stage, _passes(step))
    GradientSync(step, probe.axis).give(found.work, found.shares)
    return found


def _passes(step: RankStep) -> list[Pass]:
    return list(dict.fromkeys((kind, place, split) for kind, _, place, split in step.measured))


def _stage(step: RankStep, probe: Probe, stage: int, passes: Sequence[Pass]) -> Block:
    axis = probe.axis
    phases: dict[Pass, Phase] = {(k, p, s): step.measured[k, stage, p, s] for k, p, s in passes}
    own = [n for n, part in enumerate(probe.parts) if part.rank == probe.parts[stage].rank]
    number = own.index(stage)
    work = {key: Work.of(phase, axis) for key, phase in phases.items()}
    # Buffers that later steps find there are no layer's: see Buffers.
    lasting = {key: phase.lasting if key[0] != "F" else 0 for key, phase in phases.items()}
    for key, found in work.items():
        found.change -= lasting[key]
        found.made -= lasting[key]
    carry = max(
        work["F", 1, split].made - work["F", 1, split].change for split in SPLITS if ("F", 1, split) in work
    )
    usual = next((work[key] for key in (("B", 1, False), ("W", 1, True)) if key in work), Work())
    for (kind, place, split), found in work.items():
        if (kind, place) == ("F", 0):  # what it frees is not of this stage
            found.change = found.made - carry
        elif place == 0 and (kind == "W" or not split):
            found.change -= usual.made
    return Block(
        work=work,
        above={key: max(0, phase.transient - lasting[key]) for key, phase in phases.items()},
        shares={dims: share for (part, dims), share in step.shares.items() if part == number},
        carry=carry,
        carry_back=usual.made,
    )


def _without(block: Block, edge: Mapping[Pass, Work]) -> Block:
    """Return a layer as it is within a stage, from a stage that has it alone."""
    above = {key: size - (edge[key].change if key[0] == "F" else 0.0) for key, size in block.above.items()}
    work = {key: found.plus(edge[key], -1.0) for key, found in block.work.items()}
    return attrs.evolve(block, work=work, above=above)


def _sum_shares(
    shares: Iterable[tuple[tuple[int, tuple[str, ...]], Share]],
) -> dict[tuple[str, ...], Share]:
    total: dict[tuple[str, ...], Share] = {}
    for (_, dims), share in shares:
        total[dims] = add_shares(total.get(dims, Share()), share)
    return total


def add_shares(a: Share, b: Share, times: int = 1) -> Share:
    """Return ``a`` and so many times ``b`` together."""
    return Share(
        elements=a.elements + times * b.elements,
        weights=a.weights + times * b.weights,
        saved=a.saved + times * b.saved,
        frozen=a.frozen + times * b.frozen,
        frozen_packed=a.frozen_packed + times * b.frozen_packed,
        tensors=a.tensors + times * b.tensors,
        masters=a.masters + times * b.masters,
        optimizer=a.optimizer + times * b.optimizer,
    )


def _sum_owned(steps: Iterable[RankStep]) -> dict[tuple[str, ...], Owned]:
    total: dict[tuple[str, ...], Owned] = {}
    for step in steps:
        for dims, each in step.owned.items():
            total.setdefault(dims, Owned()).add(each)
    return total


def layers_of(part: Part, costs: Costs) -> list[float]:
    """Return the kind of each layer of a stage, in order."""
    return list(costs.layers[part.first : part.last])
