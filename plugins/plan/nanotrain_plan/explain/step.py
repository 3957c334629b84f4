"""What happens in a step: which ranks communicate, what is computed again, in which order and precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nanotrain_core.api import PhaseTimeline, draw_timeline
from nanotrain_core.api.torch import Exchange, Executor, GlooExchange
from nanotrain_plan.budget import checkpoint_bytes
from nanotrain_plan.dry.origin import Origin, place_of
from nanotrain_plan.explain import pictures
from nanotrain_plan.explain.communication import WHEN, Exchanged, flops_by_dtype, recomputed
from nanotrain_plan.explain.purposes import EXCHANGES, purpose, quoted
from nanotrain_plan.explain.subject import Subject
from nanotrain_plan.number_format import starred
from nanotrain_plan.rendering.parts import Body, Bytes, FLOPs, Ranks, Share, Statement, Table, say

#: Most actions of a rank that are drawn for a terminal.
DRAWN = 64


def batch(subject: Subject) -> Body:
    """Tell what a step takes in."""
    recipe, layout = subject.recipe, subject.layout
    sequences, length, dp = recipe.batch.sequences, recipe.batch.length, layout.size(*layout.row_dims)
    yield say(
        "A step trains on {sequences:,} sequences of {length:,} tokens, {tokens:,} in all. Each "
        "of {dp:,} data-parallel {word} takes its own share, cut into microbatches of at most "
        "{microbatch:,} sequences: {microbatches:,} of them.",
        place_of(type(recipe.batch)),
        sequences=sequences,
        length=length,
        tokens=sequences * length,
        dp=dp,
        word="ranks" if dp > 1 else "rank",
        microbatches=subject.stages.microbatches,
        microbatch=recipe.batch.microbatch,
    )
    if (parts := layout.size(*layout.sequence_dims)) > 1:
        yield say(
            "Each sequence is shared along {dims}: of its tokens each of {parts:,} ranks has {tokens:,} "
            "at most.",
            place_of(type(layout)),
            dims=" x ".join(layout.sequence_dims),
            parts=parts,
            tokens=-(-length // parts),
        )
    if subject.phases:
        yield say(
            "The recipe has {phases:,} {word} of training, which change numbers such as the batch size "
            "as the run goes on: this is a step with the largest batch of them.",
            place_of(PhaseTimeline),
            phases=subject.phases,
            word="phases" if subject.phases > 1 else "phase",
        )
    weights = subject.looked(subject.told[-1]).loss_weights
    (model,) = subject.owners.of_kind("model")
    yield say(
        "Its loss is the sum of {terms}. Each is a sum over tokens, divided by a count over the whole "
        "batch before backward: so every gradient, over whatever ranks, is completed by adding up.",
        subject.owners.place(model),
        terms=" and ".join(f"{weight:g} x {name}" for name, weight in weights.items()),
    )


# --- order -------------------------------------------------------------------------------------------


def schedule(subject: Subject) -> Body:
    """Tell in which order passes run."""
    stages, timeline = subject.stages, subject.timeline
    (label,) = subject.owners.of_kind("schedule")
    where = subject.owners.place(label)
    for rank, actions in enumerate(stages.actions):
        kinds = [action.kind for action in actions]
        if rank not in subject.told and rank != stages.pp - 1:
            continue
        yield say(
            "Pipeline rank {rank} makes its first backward pass after {warm:,} of its {passes:,} forward "
            "passes, and has at most {flying:,} in flight; each leaves {kept} on its device for the "
            "backward pass. It is idle for {idle} of the time, if a forward takes one unit of time and a "
            "backward two.",
            where,
            rank=rank,
            warm=kinds.index("B"),
            passes=kinds.count("F"),
            flying=subject.memory(rank).in_flight,
            kept=Bytes(subject.kept_for_backward(rank)),
            idle=Share(timeline.bubble(rank)),
        )
    if any(action.kind == "W" for actions in stages.actions for action in actions):
        yield say(
            "A backward pass (B) computes the gradient of its inputs (dgrad), which the stage before "
            "waits for, and leaves that of the weights (wgrad) to a pass of its own (W).",
            where,
        )
    if stages.pp > 1:
        yield say(
            "Of all pipeline ranks' time, {bubble} is bubble, with {schedule} and {m:,} microbatches.",
            where,
            bubble=Share(timeline.bubble()),
            schedule=label,
            m=stages.microbatches,
        )
    lines = list(draw_timeline(timeline)) if len(stages.actions[0]) <= DRAWN else []
    yield pictures.pipeline(timeline, lines)


# --- communication -----------------------------------------------------------------------------------


def communication(subject: Subject) -> Body:
    """Tell which ranks communicate, when, why, and how many bytes."""
    exchange = GlooExchange if subject.host else Exchange
    yield say(
        "Collectives are operations in which all ranks of a group take part. " + EXCHANGES[subject.host],
        place_of(exchange),
        name=exchange.__name__,
    )
    told: set[object] = set()
    for pp_rank in subject.told:
        found = subject.exchanges(pp_rank)
        rank = subject.rank(pp_rank)
        yield _communication_total(found, rank, place_of(exchange))
        for each in found:
            origin = each.place.origin
            key = each.place.when, each.place.op, each.place.axis, origin.name if origin else ""
            if key not in told:
                yield _exchange(subject, each, rank)
                told.add(key)
        if found:
            columns = ("when", "collective", "axis", "ranks", "times", "bytes", "called by")
            yield Table(columns, [_communication_row(subject, each) for each in found])
    if any(subject.exchanges(pp_rank) for pp_rank in subject.told):
        yield pictures.communication(subject.layout, {p: subject.exchanges(p) for p in subject.told})


def _communication_total(found: list[Exchanged], rank: int, where: Origin | None) -> Statement:
    if not found:
        return say("Rank {rank} does not communicate in a step.", where, rank=rank)
    return say(
        "In a step rank {rank} takes part in {count:,} collectives and messages, of {bytes} in all.",
        where,
        rank=rank,
        count=sum(each.count for each in found),
        bytes=Bytes(sum(each.bytes for each in found)),
    )


def _exchange(subject: Subject, each: Exchanged, rank: int) -> Statement:
    place = each.place
    others = tuple(other for other in place.ranks if other != rank)
    who = {
        "send": "{when}, rank {rank} sends to rank {others}",
        "recv": "{when}, rank {rank} receives from rank {others}",
    }.get(place.op, "{when}, rank {rank} with {others}: {op}")
    what = " along {axis}, {count:,} in a step, {bytes} in all"
    where = ""
    if each.modules:
        again = ", whose forward is computed again" if place.when in "BW" else ""
        where = f", called from {{modules}}{again}"
    owner = subject.owners.of(place.origin)
    why, caller = ". {owner} calls it.", dict[str, str]()
    if place.origin:
        caller = {"function": place.origin.name, "text": purpose(owner, place.origin)}
        why = ". {owner} calls it in {function}" + (": {text}" if caller["text"] else ".")
    return say(
        who + what + where + why,
        place.origin,
        rank=rank,
        others=Ranks(others),
        op=place.op.replace("_", "-"),
        axis=place.axis,
        count=each.count,
        bytes=Bytes(each.bytes),
        when=WHEN[place.when].capitalize(),
        modules=" and ".join(each.modules[:3]) + (" and others" if len(each.modules) > 3 else ""),
        owner=sentence(owner),
        **caller,
    )


def sentence(words: str) -> str:
    """Return words as the beginning of a sentence."""
    return words[:1].upper() + words[1:]


def _communication_row(subject: Subject, each: Exchanged) -> tuple[object, ...]:
    place = each.place
    return (
        WHEN[place.when],
        place.op.replace("_", "-"),
        place.axis,
        Ranks(place.ranks),
        each.count,
        Bytes(each.bytes),
        f"{subject.owners.of(place.origin)}: {place.origin.name}" if place.origin else "",
    )


# --- what is computed ----------------------------------------------------------------------------------


def computed(subject: Subject) -> Body:
    """Tell what is multiplied in which precision, and what a second time."""
    (precision,) = subject.owners.of_kind("precision")
    where, describes = (subject.owners.place(precision, name) for name in ("convert", "describe"))
    for pp_rank in subject.told:
        rank = subject.rank(pp_rank)
        forward, again, modules = recomputed(subject.stages, pp_rank)
        yield _again(subject, rank, forward, again, modules)
        looked = subject.looked(pp_rank)
        yield say(
            "{precision}: its weights are {weights}, its gradients {gradients}.",
            where,
            precision=precision,
            weights=" and ".join(sorted({str(each.dtype)[6:] for each in looked.parameters})),
            gradients=" and ".join(looked.gradient_dtypes) or "not there between steps",
        )
        yield from _gemms(subject, pp_rank)
        rows = [
            (WHEN[when].removeprefix("in "), kind, FLOPs(flops))
            for when, kinds in flops_by_dtype(subject.stages, pp_rank).items()
            for kind, flops in kinds.items()
        ]
        yield Table(("matrix products", "of (attention: whole scores)", "in a step"), rows)
    yield from (say("{line}", describes, line=line) for line in subject.described("precision"))


def _again(subject: Subject, rank: int, forward: int, again: int, modules: Sequence[str]) -> Statement:
    """Return what activation checkpointing computes a second time."""
    if not modules:
        executed = place_of(Executor.run)
        return say("Rank {rank} computes nothing twice: activations are kept.", executed, rank=rank)
    owners = subject.owners
    wrappers = [label for label in owners.of_kind("parallel") if owners.selections[label].use == "recompute"]
    text = (
        "Rank {rank} computes {again} of the {forward} of its forward passes a second time in backward, "
        "{share}, in {modules}: their activations were not kept."
        if again
        else "Rank {rank} makes no matrix product of its {forward} a second time, but in backward the other "
        "operators of {modules}: their activations were not kept."
    )
    numbers = {"again": FLOPs(again), "share": Share(again / forward)} if again else {}
    return say(
        text,
        *map(owners.applied, wrappers or owners.of_kind("parallel")),
        rank=rank,
        forward=FLOPs(forward),
        modules=" and ".join(modules[:4]) + (" and others" if len(modules) > 4 else ""),
        **numbers,
    )


def _gemms(subject: Subject, pp_rank: int) -> Iterator[Statement]:
    by_backend: dict[str, dict[str, None]] = {}
    origins = {}
    for each in subject.looked(pp_rank).parameters:
        if each.gemm is not None:
            by_backend.setdefault(each.gemm.name, {})[starred(each.placement.name)] = None
            origins[each.gemm.name] = each.gemm
    for name, parameters in by_backend.items():
        yield say(
            "{count:,} kinds of matrices, as {example}, are multiplied by {name}, forward, dgrad and wgrad "
            "apart" + (": {text}" if (text := quoted(origins[name])) else "."),
            origins[name],
            count=len(parameters),
            example=next(iter(parameters)),
            name=name,
            text=text,
        )


def saved(subject: Subject) -> Body:
    """Tell what a checkpoint holds."""
    (label,) = subject.owners.of_kind("checkpoint")
    names = ["its weight", *sorted({each.name for p in subject.told for each in subject.looked(p).state})]
    yield say(
        "{checkpoint} saves {bytes}: of every parameter {names}, each block once, "
        "under a name and an offset in the whole tensor, so that any layout can read it.",
        subject.owners.place(label, "save"),
        checkpoint=label,
        bytes=Bytes(checkpoint_bytes(subject.stages)),
        names=" and ".join(names),
    )
