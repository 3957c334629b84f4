"""A plan for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from nanotrain_plan.activation_words import told_activations, told_layers, told_stages, told_tensor
from nanotrain_plan.advice import Advice
from nanotrain_plan.memory import RankMemory, activations
from nanotrain_plan.number_format import count, duration, size
from nanotrain_plan.plan import Plan, largest
from nanotrain_plan.rendering.terminal import INDENT, grid, narrowest, new_table, print_indented
from nanotrain_plan.show_beside import beside
from nanotrain_plan.sweep import Swept

#: Pipeline ranks that are told one by one; of longer pipelines, those that differ in kind.
MOST_RANKS = 8
#: Share of a step above the busiest rank's idle share from which the bubble is said to be of uneven stages.
UNEVEN = 0.01

#: What memory is held by, in the columns of the table.
HOLDERS = ("weights", "masters", "optimizer", "gradients", "activations", "buffers", "transient")


def show(plan: Plan, advice: Sequence[Advice] | None, console: Console) -> None:
    """Print a plan; ``advice`` is None if nobody asked for any."""
    console.print()
    console.print(_title(plan))
    for heading, body in _sections(plan, advice, console.width - INDENT):
        console.print()
        console.print(Text(heading, style="bold"))
        print_indented(body, console)
    console.print()


def show_sweep(swept: Swept, plan: Plan, console: Console) -> None:
    """Print the layouts that were planned in full, and how many others there were."""
    fitting = sum(each.fits for each in swept.candidates)
    told = (
        f"{swept.examined} layouts: {swept.planned} planned, {swept.bounded} left out by bounds, "
        f"{swept.refused} refused. With the recipe as it is, {fitting} of {len(swept.candidates)} fit. "
        f"The fastest, by tokens/s{' of the whole run' if plan.phases else ''}:"
    )
    console.print(Text(told, style="bold"))
    table = _table("layout", "tokens/s", "MFU", "peak", "", "bubble")
    for each in swept.candidates:
        if not each.planned_in_full:
            continue
        style = "green" if each.fits else "red"
        share = f"{each.peak / plan.hardware.usable:.0%}"
        if not each.fits and each.peak <= plan.hardware.usable:
            share += ", too little host memory"
        table.add_row(
            each.layout + (" *" if each.stays_eager else ""),
            f"{each.tokens_per_second:,.0f}",
            f"{each.mfu:.1%}",
            Text(size(each.peak), style=style),
            Text(share, style=style),
            f"{each.bubble:.1%}" if each.bubble > 1e-6 else "",
        )
    print_indented(table, console)
    if any(each.stays_eager for each in swept.candidates):
        console.print(
            Text("* layers stay eager, but are timed as compiled: expect fewer tokens/s", style="dim")
        )
    if swept.left_out:
        console.print(Text("not planned, and why:", style="dim"))
        for reason, number in swept.left_out.items():
            console.print(Text(f"  {number:,}: {reason}", style="dim"))


def _title(plan: Plan) -> Text:
    views = dict(plan.layout.degrees)
    if not plan.parameters.by_kind["experts"]:
        views.pop("expert", None)
    degrees = "; ".join(
        f"{view}: {' x '.join(f'{dim} {n}' for dim, n in dims.items())}" for view, dims in views.items()
    )
    text = Text()
    text.append(plan.recipe.run.name, style="bold")
    text.append(f" on {plan.ranks} x {plan.hardware.name}")
    text.append(f" ({degrees})\n" if degrees else "\n", style="dim")
    for each in plan.refusals:
        text.append("cannot run here", style="bold red")
        text.append(f": {each}\n")
    if not plan.fits:
        text.append("does not fit", style="bold red")
    elif not plan.host.fits:
        text.append("does not fit its hosts' memory, though its devices", style="bold red")
    else:
        text.append("fits", style="bold green")
    text.append(
        f": {size(plan.worst.peak)} of {size(plan.hardware.usable)} at the peak; "
        f"{count(plan.tokens_per_second)} tokens/s{_in_phase(plan.phase)}, "
        f"MFU {plan.tflops() / plan.peak_tflops:.1%}, {duration(plan.seconds)} for "
        f"{count(plan.data.tokens)} tokens"
    )
    return text


def _in_phase(name: str) -> str:
    """Return of which phase a number is; ``phase 1`` is one that the recipe has no name for."""
    return f" in {name}" if name.startswith("phase ") else f" in phase '{name}'" if name else ""


def _sections(
    plan: Plan, advice: Sequence[Advice] | None, width: int
) -> Iterator[tuple[str, RenderableType]]:
    yield "Model", _model(plan)
    yield (
        f"Memory of a rank{_in_phase(plan.memory_phase)}, of {size(plan.hardware.usable)} usable",
        _memory(plan, width),
    )
    yield from _activations(plan)
    if any(plan.traffic.values()):
        where = f" of pipeline rank {plan.loudest}" if plan.stages.pp > 1 else ""
        yield f"Collectives{where} in a step", _collectives(plan)
    yield "Time", _time(plan)
    if plan.phases:
        yield "Phases", _phases(plan)
    yield "Beside the devices", beside(plan)
    if advice is not None and not plan.fits:
        enough = not advice or any(each.fits for each in advice)
        heading = "What would make it fit" if enough else "What lowers the peak, but not enough: add ranks"
        yield heading, _advice(plan, advice)
    yield "Assumptions", Group(*(Text(f"- {each}", style="dim") for each in plan.assumptions))


def _table(*columns: str, left: int = 1) -> Table:
    """Return a table whose first columns, ``left``, are names."""
    return new_table(columns, [number >= left for number in range(len(columns))])


def _model(plan: Plan) -> RenderableType:
    p, f = plan.parameters, plan.flops
    unit, factor = ("G", 1e9) if f.causal >= 1e9 else ("M", 1e6)
    held = [sum(plan.stages.step_of(rank).parameters.values()) for rank in range(plan.stages.pp)]
    kinds = ", ".join(f"{kind} {count(n)}" for kind, n in p.by_kind.items() if n)
    named = {"head": "head", "experts": "experts", "other": "others"}
    shares = {name: plan.flops_by_part[part] / factor for part, name in named.items()}
    matrices = ", ".join(f"{name} {share:.2f}" for name, share in shares.items() if share)
    rows = [
        ("parameters", f"{count(p.total)}: {kinds}"),
        ("active for a token", count(p.active)),
        (
            "on a rank",
            count(max(held)) if min(held) == max(held) else f"{count(min(held))} to {count(max(held))}",
        ),
        (
            "FLOPs for a token",
            f"{f.causal / factor:.2f} {unit}: matrices {f.matmul / factor:.2f} ({matrices}), "
            f"attention {f.attention / factor:.2f} "
            f"(causal; {f.non_causal / factor:.2f} {unit} in all if not)",
        ),
        ("executed", f"{plan.executed / factor:.2f} {unit}, with what backward computes again"),
    ]
    if p.mtp:
        rows.insert(1, ("further tokens (MTP)", f"{count(p.mtp)} more parameters"))
        rows.insert(5, ("", f"+ {f.mtp / factor:.2f} {unit} for further tokens (MTP)"))
    return grid(rows)


def _phases(plan: Plan) -> RenderableType:
    """Tell each phase; of one whose batch grows the first and the last step."""
    lengths = len({phase.length for phase in plan.phases}) > 1
    columns = ("phase", "tokens", "steps", "batch", *(["length"] if lengths else []))
    table = _table(*columns, "step", "tokens/s", "MFU", "time")
    for phase in plan.phases:
        rates = [n * phase.length / seconds for n, seconds in zip(phase.sequences, phase.step, strict=True)]
        shares = [rate * phase.flops_per_token / plan.ranks / 1e12 / plan.peak_tflops for rate in rates]
        table.add_row(
            phase.name,
            count(phase.tokens),
            f"{phase.steps:,}",
            _range(f"{n:,}" for n in phase.sequences),
            *([f"{phase.length:,}"] if lengths else []),
            _range(map(duration, phase.step)),
            _range(map(count, rates)),
            _range(f"{share:.1%}" for share in shares),
            duration(phase.seconds),
        )
    return table


def _range(ends: Iterable[str]) -> str:
    return " to ".join(dict.fromkeys(ends))


def _told(plan: Plan) -> list[tuple[str, RankMemory]]:
    """Return the pipeline ranks to tell, each with its name."""
    everyone = list(plan.memory)
    if len(everyone) == 1:
        return [("every rank", everyone[0])]
    if len(everyone) <= MOST_RANKS:
        return [(f"pp {rank.pp_rank}", rank) for rank in everyone]
    found = []
    for kind in plan.stages.kinds().values():
        alike = [everyone[pp_rank] for pp_rank in kind]
        first, last = alike[0], alike[-1]
        found.append((f"pp {first.pp_rank}", first))
        if len(alike) > 1:
            dots = " .." if len(alike) > 2 else ""
            found.append((f"{dots} pp {last.pp_rank}".strip(), last))
    return found


def _memory(plan: Plan, width: int) -> RenderableType:
    """Return a line for each rank, or where that is wider than the terminal a column, if these fit."""
    headings = (*HOLDERS, "peak", "", "at", "in flight")
    told = {name: _held(rank, plan.hardware.usable) for name, rank in _told(plan)}
    lines, columns = _table("", *headings), _table("", *told)
    for name, cells in told.items():
        lines.add_row(name, *cells)
    for row in zip(headings, *told.values(), strict=True):
        columns.add_row(*row)
    return columns if narrowest(columns) <= width < narrowest(lines) else lines


def _held(rank: RankMemory, usable: float) -> list[str | Text]:
    share = rank.peak / usable
    style = "red" if share > 1 else "yellow" if share > 0.9 else "green"
    return [
        *(size(rank.held.get(holder, 0)) for holder in HOLDERS),
        Text(size(rank.peak), style=f"bold {style}"),
        Text(f"{share:.0%}", style=style),
        rank.where,
        str(rank.in_flight),
    ]


def _activations(plan: Plan) -> Iterator[tuple[str, RenderableType]]:
    own = [activations(plan.stages, stage) for stage in plan.stages.stages_of(plan.worst.pp_rank)]
    found = max(own, key=lambda each: each.bytes)
    of = f" of {told_stages(found)}" if len(plan.stages.parts) > 1 else ""
    table = _table("module", "from", "shape", "dtype", "each", "", "in all", left=4)
    for each in largest(found.tensors, 8):
        table.add_row(*told_tensor(each), size(each.bytes), f"x {each.count}", size(each.bytes * each.count))
    shown = Text(told_layers(found), style="dim")
    yield f"Activations{of}: {told_activations(found)}", Group(shown, table)


def _collectives(plan: Plan) -> RenderableType:
    table = _table("axis", "collective", "ranks", "count", "bytes", "time", "not hidden", left=2)
    for each in sorted(plan.traffic[plan.loudest], key=lambda each: -each.seconds):
        table.add_row(
            each.axis,
            each.op.replace("_", "-"),
            str(each.size),
            f"{each.count:,}",
            size(each.bytes),
            duration(each.seconds),
            duration(each.exposed) if each.exposed else "",
        )
    return table


def _time(plan: Plan) -> RenderableType:
    t, per_device = plan.time, plan.tokens_per_second / plan.ranks
    busy = t.busiest
    rows = [
        (
            "step",
            f"{duration(t.seconds)}{_in_phase(plan.phase)}: pipeline {duration(t.pipeline)}, "
            f"after it {duration(t.after)}",
        ),
        (
            "busiest rank",
            f"GEMMs {duration(busy.gemm)}, attention {duration(busy.attention)}, other operators "
            f"{duration(busy.memory)}, collectives not hidden {duration(busy.communication)}"
            + (f", waits for the host {duration(busy.host)}" if busy.host else ""),
        ),
    ]
    if plan.stages.pp > 1:
        schedule = plan.recipe.schedule.use
        idle = [t.timeline.bubble(rank) for rank in range(plan.stages.pp)]
        text = f"{t.bubble:.1%} ({schedule}, {plan.stages.microbatches} microbatches)"
        if t.bubble - min(idle) > UNEVEN:
            busiest = idle.index(min(idle))
            text += f"; {min(idle):.1%} on pp {busiest}: the other ranks have less to do, and wait for it"
        rows.append(("bubble", text))
        if len(idle) <= MOST_RANKS:
            rows.append(("idle by rank", "  ".join(f"pp {n} {share:.1%}" for n, share in enumerate(idle))))
    rows += [
        ("tokens/s", f"{plan.tokens_per_second:,.0f}, {per_device:,.0f} on each device"),
        (
            "MFU",
            f"{plan.tflops() / plan.peak_tflops:.1%}: {plan.tflops():.1f} TFLOP/s of "
            f"{plan.peak_tflops:.4g} ({plan.unit}), attention causal"
            + (", MTP counted" if plan.flops.mtp else "")
            + f"; {plan.tflops(causal=False) / plan.peak_tflops:.1%} if not causal",
        ),
        ("HFU", f"{plan.hardware_tflops / plan.peak_tflops:.1%}: what is computed again counted"),
        (
            "run",
            f"{plan.recipe.run.steps:,} steps, {count(plan.data.tokens)} tokens: {duration(plan.seconds)}, "
            f"{_hours(plan.seconds * plan.ranks / 3600)} device-hours",
        ),
    ]
    return grid(rows)


def _hours(number: float) -> str:
    return "less than 0.01" if number < 0.01 else f"{number:.3g}" if number < 100 else f"{number:,.0f}"


def _advice(plan: Plan, advice: Sequence[Advice]) -> RenderableType:
    if not advice:
        return Text("No change of one or several keys that was tried does: more ranks, or a smaller model.")
    rate = "tokens/s of the run" if plan.phases else "tokens/s"
    table = _table("change", "peak", "", rate, left=1)
    for each in advice:
        style, share = "green" if each.fits else "red", f"{each.peak / plan.hardware.usable:.0%}"
        if not each.fits and each.peak <= plan.hardware.usable:
            share += ", too little host memory"
        table.add_row(
            each.told,
            Text(size(each.peak), style=style),
            Text("fits" if each.fits else share, style=style),
            f"{each.tokens_per_second:,.0f}",
        )
    return table
