"""Who is there and who holds what, between steps: ranks, stages, blocks of matrices, optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from nanotrain_core.api import Part, Span
from nanotrain_plan.dry.origin import Origin, place_of
from nanotrain_plan.explain import pictures
from nanotrain_plan.explain.purposes import quoted
from nanotrain_plan.explain.subject import Alike, Subject
from nanotrain_plan.rendering.parts import Body, Bytes, Ranks, Shape, Share, Statement, Table, say

#: Mesh dimensions of which a sentence says what ranks along them share. Others are told by name alone.
MEANING = {
    "pp": "hold different layers",
    "dp": "hold the same dense weights and see different sequences",
    "cp": "hold the same weights and see different parts of each sequence",
    "tp": "hold different blocks of the same matrices",
    "ep": "hold different experts",
    "etp": "hold different blocks of the same experts",
    "edp": "hold the same experts",
    "dp_shard": "hold different rows of the same dense weights",
    "dp_replicate": "hold the same rows of dense weights",
    "edp_shard": "hold different rows of the same experts",
    "edp_replicate": "hold the same rows of experts",
}


def ranks(subject: Subject) -> Body:
    """Tell how the mesh numbers the ranks."""
    layout, (where, *_) = (
        subject.layout,
        [subject.owners.place(label, "layout") for label in _topology(subject)],
    )
    yield say(
        "The run has {ranks:,} {word}: a process with a device and a part of the work each.",
        where,
        ranks=layout.world_size,
        word="ranks" if layout.world_size > 1 else "rank",
    )
    used = {each.placement.view for p in subject.told for each in subject.looked(p).parameters}
    for name, view in layout.views.items():
        if max(view.sizes) == 1 or name not in used:
            continue
        several = [dim for dim in view.dims if view.size(dim) > 1]
        yield say(
            "The {view} view of the mesh numbers them along {dims}, the first slowest: {formula}.",
            where,
            place_of(type(view)),
            view=name,
            dims=" x ".join(f"{dim} {view.size(dim)}" for dim in several),
            formula="rank = " + " + ".join(_term(dim, view.stride(dim)) for dim in several),
        )
        for dim in several:
            yield say(
                "Along {dim}, the group of rank {rank} is ranks {ranks}: {size:,} that {meaning}.",
                where,
                dim=dim,
                rank=0,
                ranks=Ranks(layout.ranks(0, dim)),
                size=layout.size(dim),
                meaning=MEANING.get(dim, f"differ along {dim}"),
            )
    if layout.world_size > 1:
        yield pictures.grid(layout)


def _topology(subject: Subject) -> list[str]:
    return subject.owners.of_kind("topology")


def _term(dim: str, stride: int) -> str:
    return dim if stride == 1 else f"{stride:,} x {dim}"


# --- layers ----------------------------------------------------------------------------------------


def stages(subject: Subject) -> Body:
    """Tell which layers are where."""
    s, (schedule,) = subject.stages, subject.owners.of_kind("schedule")
    where = subject.owners.place(schedule, "parts")
    (model,) = subject.owners.of_kind("model")
    if len(s.parts) == 1:
        yield say(
            "{model} has {layers:,} layers, and every rank holds all of them: there is no pipeline.",
            subject.owners.place(model),
            model=model,
            layers=s.parts[0].last,
        )
        yield from _kinds(subject)
        return
    yield say(
        "{model} has {layers:,} layers, cut into {stages:,} stages for {pp:,} pipeline ranks.",
        where,
        model=model,
        layers=s.parts[-1].last,
        stages=len(s.parts),
        pp=s.pp,
    )
    yield Table(
        ("stage", "pipeline rank", "holds", "FLOPs of a token"),
        [
            (stage, part.rank, contents(part), Share(s.costs.of(part) / s.costs.total))
            for stage, part in enumerate(s.parts)
        ],
    )
    yield from (say("{line}.", where, line=line) for line in subject.described("schedule"))
    yield from _kinds(subject)


def _kinds(subject: Subject) -> Iterator[Statement]:
    found: dict[str, Origin | None] = {}
    for pp_rank in subject.told:
        found |= subject.looked(pp_rank).blocks
    for name, where in found.items():
        text = quoted(where)
        yield say("A layer is a {name}" + (": {text}" if text else "."), where, name=name, text=text)


def contents(part: Part) -> str:
    """Return what a stage holds, in words."""
    layers = [
        f"layers {part.first} to {part.last - 1}" if part.last - part.first > 1 else f"layer {part.first}"
    ]
    held = ["the embedding"] * part.has_embedding + layers * (part.last > part.first)
    return ", ".join([*held, *["the head"] * part.has_head])


# --- matrices --------------------------------------------------------------------------------------


def matrices(subject: Subject) -> Body:
    """Tell who holds which part of which matrix."""
    for pp_rank in subject.told:
        rank = subject.rank(pp_rank)
        groups = subject.alike(pp_rank)
        yield _total(subject, pp_rank)
        yield Table(
            ("parameter", "of these", "whole", f"rank {rank} holds", "split", "gradient summed over"),
            [_row(subject, each) for each in groups],
        )
        told: set[object] = set()
        drawn = []
        for each in groups:
            pattern = each.first.role, str(each.splits)
            if each.splits and pattern not in told:
                yield from _sentences(subject, each, rank)
                drawn.append(each)
                told.add(pattern)
        if drawn:
            others = {each.name: _other_blocks(subject, each, rank) for each in drawn}
            yield pictures.blocks(rank, drawn, others)


def _total(subject: Subject, pp_rank: int) -> Statement:
    parameters = subject.looked(pp_rank).parameters
    whole = subject.stages.steps[pp_rank].global_parameters
    return say(
        "Rank {rank} of pipeline rank {pp_rank} holds {held:,} of the {whole:,} elements of its stages' "
        "parameters, in {dtypes}.",
        place_of(type(parameters[0].placement)),
        rank=subject.rank(pp_rank),
        pp_rank=pp_rank,
        held=sum(each.elements for each in parameters),
        whole=sum(whole.values()),
        dtypes=" and ".join(sorted({str(each.dtype)[6:] for each in parameters})),
    )


def _row(subject: Subject, each: Alike) -> tuple[object, ...]:
    p = each.first.placement
    split = "; ".join(f"axis {axis} over {' x '.join(dims)}" for axis, dims in each.splits.items())
    summed = spanned(p.sync_span(subject.layout)) or "nothing"
    return (
        each.name,
        each.number,
        Shape(p.global_shape),
        Shape(p.shape),
        split or "whole",
        summed if each.first.trained else "no gradient",
    )


def spanned(span: Span) -> str:
    """Return a span in words: ``dp and tp``, ``stages 0 and 3``."""
    stages = [f"pipeline ranks {' and '.join(map(str, span.stages))}"] if span.stages else []
    return " and ".join([*span.dims, *stages])


def _sentences(subject: Subject, each: Alike, rank: int) -> Iterator[Statement]:
    p, layout = each.first.placement, subject.layout
    role = each.first.role
    for axis, dims in each.splits.items():
        yield say(
            "{name} is {whole}: axis {axis} is split over {dims}, {size:,} ranks, and rank {rank} holds "
            "{first:,} to {last:,} of the {length:,} along it. Its module is {role}: {meaning}.",
            *_splitters(subject, dims),
            name=each.name,
            whole=Shape(p.global_shape),
            axis=axis,
            dims=" x ".join(dims),
            size=prod(layout.size(dim) for dim in dims),
            rank=rank,
            first=p.offset[axis],
            last=p.offset[axis] + p.shape[axis] - 1,
            length=p.global_shape[axis],
            role=role.name if role else "without a role",
            meaning=role.value if role else "no wrapper splits it",
        )
    span = p.replica_span(layout)
    if span:
        yield say(
            "Ranks {ranks} hold this same block of {name}, along {span}.",
            place_of(type(p)),
            ranks=Ranks(layout.members(rank, span)),
            name=each.name,
            span=spanned(span),
        )


def _splitters(subject: Subject, dims: Sequence[str]) -> list[Origin | None]:
    owners = subject.owners
    labels = [label for label in owners.of_kind("parallel") if {*dims} & owners.component(label).mesh_dims]
    return [*map(owners.applied, labels)]


def _other_blocks(
    subject: Subject, each: Alike, rank: int
) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return rank -> offset and shape of neighbors that hold another block."""
    found = {}
    for dims in each.splits.values():
        for dim in dims:
            other = subject.neighbors.next_along(rank, dim)
            theirs = subject.neighbors.placements(other)[each.first.placement.name]
            found[other] = theirs.offset, theirs.shape
    return found


# --- state ------------------------------------------------------------------------------------------


def state(subject: Subject) -> Body:
    """Tell what the optimizer keeps, and of how much of the parameters."""
    for pp_rank in subject.told:
        looked, rank = subject.looked(pp_rank), subject.rank(pp_rank)
        trained = [each for each in looked.parameters if each.trained]
        held = sum(each.elements for each in trained)
        updated = sum(each.updated for each in trained)
        dims = sorted({dim for each in trained for dim in each.sharded if subject.layout.size(dim) > 1})
        if updated < held:
            yield say(
                "Rank {rank} updates {updated:,} of the {held:,} trained elements that it holds, "
                "{share}: ranks that hold the same blocks, along {dims}, update the others (ZeRO).",
                looked.optimizer,
                looked.gradients,
                rank=rank,
                updated=updated,
                held=held,
                share=Share(updated / held),
                dims=" and ".join(dims),
            )
        else:
            yield say(
                "Rank {rank} updates all {updated:,} trained elements that it holds. Ranks that hold the "
                "same block, if there are any, make the same update.",
                looked.optimizer,
                rank=rank,
                updated=updated,
            )
        apart = sum(each.elements for each in looked.parameters) - held
        if apart:
            yield say(
                "{apart:,} further elements, as of routers' biases, have no gradient: no optimizer "
                "updates them.",
                looked.optimizer,
                apart=apart,
            )
        bytes_ = subject.stages.steps[pp_rank].state
        text = (
            "Between steps its device holds weights of {weights} and gradient buffers of {gradients}; "
            "masters of {masters} and optimizer state of {optimizer} are offloaded to the host's memory."
            if subject.offloads_state
            else "Between steps it holds weights of {weights}, masters of {masters}, optimizer state of "
            "{optimizer} and gradient buffers of {gradients}."
        )
        yield say(
            text,
            looked.optimizer,
            looked.gradients,
            **{key: Bytes(bytes_[key]) for key in ("weights", "masters", "optimizer", "gradients")},
        )
        buffers = subject.memory(pp_rank).state["buffers"]
        if buffers:
            text = "A step leaves {buffers} of buffers beside these, which the next one uses again."
            yield say(text, looked.gradients, looked.optimizer, buffers=Bytes(buffers))
        if rows := [(each.name, each.dtype, each.tensors, Bytes(each.bytes)) for each in looked.state]:
            yield Table(("optimizer state", "dtype", "tensors", "bytes"), rows)
