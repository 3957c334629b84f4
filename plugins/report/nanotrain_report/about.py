"""Sections of words and tables: what a run is, how it went on, checkpoints, samples, recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from nanotrain_core.api import CheckpointError, show_progress, without_secrets
from nanotrain_report.blocks import Block, Facts, Group, Missing, Pre, Section, Sentence, Sentences, Table
from nanotrain_report.clock import wall
from nanotrain_report.folder import RunFolder, Shown
from nanotrain_report.number_format import duration, moment, number, plural, quantity, size

MOST_SAMPLES = 12
#: Characters of an exception's text: torch appends advice and C++ stacks.
MOST_WHY = 240


def what_it_is(shown: Sequence[Shown]) -> Section:
    """Return recipe, model, layout, command, environment and versions, and how each run ended."""
    blocks: list[Block] = []
    if len(shown) > 1:
        blocks.append(_side_by_side(shown))
    for each in shown:
        facts = Facts([*facts_of(each.run)])
        blocks.append(facts if len(shown) == 1 else Group(each.label, [facts], folded=True))
    return Section("run", "The run", blocks)


def _side_by_side(shown: Sequence[Shown]) -> Table:
    rows = []
    for each in shown:
        loss, held = each.run.line("loss"), each.run.line("validation/loss")
        rows.append(
            (
                each.label,
                state_of(each.run),
                f"{each.run.step:,}",
                number(loss.last) if loss else "",
                number(held.last) if held else "",
                str(each.run.history.start.get("world_size", "")),
                duration(wall(each.run)),
            )
        )
    head = ("run", "state", "step", "loss", "validation", "ranks", "time")
    return Table(head, rows, frozenset({2, 3, 4, 5, 6}))


def facts_of(run: RunFolder) -> Iterator[tuple[str, str]]:
    """Yield what is known of a run, each with its name."""
    start, recipe = run.history.start, run.recipe
    yield "State", state_of(run)
    yield "Folder", str(run.path)
    if run.begins:
        began = run.begins[-1]
        yield "Command", without_secrets(str(began.get("command", "")))
        yield "Host", _joined(began, "host", "system", python="Python {}", cpus="{} CPU cores")
    if recipe:
        yield "Model", _model(recipe, start)
        yield "Layout", _layout(recipe, start)
        yield "Components", _components(recipe)
        batch = recipe.get("batch", {})
        yield (
            "Batch",
            f"{batch.get('sequences', '?')} sequences of {batch.get('length', '?')} tokens a step, "
            f"{batch.get('microbatch', '?')} in a microbatch",
        )
        yield "Seed", str(recipe.get("run", {}).get("seed", ""))
        yield "Versions", ", ".join(f"{name} {at}" for name, at in recipe.get("versions", {}).items())
    tokens = run.line("tokens")
    if tokens is not None:
        yield "Tokens seen", f"{tokens.last:,.0f}"
    if run.unread:
        yield "Left out", f"{plural(run.unread, 'line')} of metrics.jsonl that cannot be read"


def _joined(entry: dict[str, Any], *plain: str, **forms: str) -> str:
    found = [str(entry[key]) for key in plain if key in entry]
    return ", ".join(found + [form.format(entry[key]) for key, form in forms.items() if key in entry])


def _model(recipe: Any, start: Any) -> str:
    model = recipe.get("model", {})
    known = ("layers", "width", "heads", "experts", "vocab")
    sizes = ", ".join(f"{key} {model[key]}" for key in known if model.get(key))
    count = f", {start['parameters']:,} parameters" if "parameters" in start else ""
    return f"{model.get('use', '?')}: {sizes}{count}"


def _layout(recipe: Any, start: Any) -> str:
    topology = recipe.get("topology", {})
    above = [f"{k} {v}" for k, v in topology.items() if isinstance(v, int) and v > 1]
    ranks = start.get("world_size") or recipe.get("run", {}).get("ranks", 1)
    folded = f" ({', '.join(above)}, the rest data parallel)" if above else " (data parallel)" * (ranks > 1)
    return f"{plural(int(ranks), 'rank')} on {start.get('device', '?')}{folded}"


def _components(recipe: Any) -> str:
    kinds = ("parallel", "schedule", "optimizer", "precision", "checkpoint", "data", "monitor")
    found = []
    for kind in kinds:
        tables = recipe.get(kind, [])
        uses = [t.get("use", "") for t in (tables if isinstance(tables, list) else [tables])]
        found += [f"{kind}: {', '.join(filter(None, uses))}"] if any(uses) else []
    return "; ".join(found)


def lead(each: Shown, *, alone: bool) -> str:
    """Return a run in one line: its model, its ranks, where it is."""
    start, recipe = each.run.history.start, each.run.recipe
    model = recipe.get("model", {}).get("use")
    parts = [model] if model else []
    if "parameters" in start:
        parts.append(f"{start['parameters'] / 1e6:,.3g} M parameters")
    if start:
        parts.append(_layout(recipe, start))
    text = ", ".join([*parts, state_of(each.run)])
    return text if alone else f"{each.label}: {text}"


def state_of(run: RunFolder) -> str:
    """Return how a run stands, in words."""
    step, steps = run.step, run.steps
    where = f"step {step:,} of {steps:,}" if steps else f"step {step:,}"
    if run.state == "running":
        return f"running, {where}"
    if run.state == "killed":
        return f"ended without a word at {where}: killed, or its machine went away"
    if run.state == "not begun":
        return "nothing logged yet"
    return f"{run.state} after {where}"


def continuity(shown: Sequence[Shown]) -> list[Block]:
    """Return restarts, resumes and rollbacks: what each cost."""
    blocks: list[Block] = []
    for each in shown:
        continuations = each.run.history.continuations
        lost = sum(continuation.came_to - continuation.step for continuation in continuations)
        if not continuations:
            inner: list[Block] = [
                Sentences([Sentence("good", "It ran in one go: no restart, resume or rollback.")])
            ]
        else:
            rows = [
                (
                    f"{continuation.attempt}",
                    continuation.kind,
                    moment(continuation.time),
                    f"{continuation.came_to:,}",
                    f"{continuation.step:,}",
                    f"{continuation.came_to - continuation.step:,}",
                    why(each.run, continuation.time, continuation.reason),
                )
                for continuation in continuations
            ]
            head = ("attempt", "began by", "when", "had come to", "went on from", "steps lost", "because")
            done = each.run.history.step
            caption = f"{plural(lost, 'step')} of {done + lost:,} trained were trained again or given up."
            inner = [Table(head, rows, frozenset({0, 3, 4, 5}), caption)]
        blocks += inner if len(shown) == 1 else [Group(each.label, inner)]
    return blocks


def why(run: RunFolder, when: float, reason: str) -> str:
    """Return what the log says shortly before an attempt began, or the reason that the continuation has."""
    said = [
        entry
        for entry in run.log
        if entry.get("level") in ("error", "critical") and 0 <= when - stamp(entry) < 120
    ]
    if not said or reason not in ("killed", "failed"):
        return reason
    # The launcher, which is no rank, knows which rank was the first; others lost their connections to it.
    return said_in(next((entry for entry in reversed(said) if entry.get("rank") is None), said[0]))


def said_in(entry: Mapping[str, Any]) -> str:
    """Return what a line of the log says: of a monitor that failed which one and on which rank, and why."""
    found = str(entry["event"])
    if "monitor" in entry:
        rank = f" on rank {entry['on_rank']}" if "on_rank" in entry else ""
        found = f"{entry['monitor']}{rank}: {found}"
    trace = str(entry.get("exception") or "").strip().splitlines()
    why = str(entry.get("error") or (trace[-1] if trace else ""))
    return f"{found} ({why[:MOST_WHY]}{'...' if why[MOST_WHY:] else ''})" if why else found


def stamp(entry: dict[str, Any]) -> float:
    """Return the time of an entry of the log in seconds since 1970, minus infinity if it has none."""
    try:
        return datetime.fromisoformat(str(entry["time"])).timestamp()
    except (KeyError, ValueError):
        return float("-inf")


def memory_rows(run: RunFolder) -> Iterator[tuple[str, ...]]:
    """Yield what the fullest rank has of each kind of memory, and the mean."""
    found = [f for f in run.families if f.metric.group == "memory" and f.placeholders == ("over",)]
    found = [f for f in found if f.metric.unit != "1" and "/" not in f.metric.unit]  # no shares, no growth
    told = [({line.label: line.last for line in (*f.lines, *f.others)}, f) for f in found]
    largest = max((last["max"] for last, _ in told), default=0.0)
    for last, family in told:
        unit, bar = family.metric.unit, "█" * max(1, round(24 * last["max"] / largest)) if largest else ""
        name = family.title.rpartition("/")[2].replace("_", " ")
        yield name, f"{last['rank']:.0f}", quantity(last["max"], unit), quantity(last["mean"], unit), bar


def checkpoints(shown: Sequence[Shown], *, verify: bool) -> list[Block]:
    """Return the checkpoints that were saved: sizes, seconds, what is still there, whether they are whole."""
    blocks: list[Block] = []
    for each in shown:
        rows = [*_checkpoint_rows(each.run, verify=verify)]
        head = ("step", "saved", "took", "training waited", "size", "kind", "now")
        block = (
            Table(head, rows, frozenset({0, 2, 3, 4}))
            if rows
            else Missing("No checkpoint was saved: set checkpoint.every in the recipe.")
        )
        blocks += [block] if len(shown) == 1 else [Group(each.label, [block], folded=True)]
    return blocks


def _checkpoint_rows(run: RunFolder, *, verify: bool) -> Iterator[tuple[str, ...]]:
    present = {info.step: (use, info) for use, info in run.saved}
    seen = set()
    for row in run.history.events:
        if row["event"] == "save_failed":
            yield f"{row['step']:,}", moment(row["time"]), "", "", "", "", f"not saved: {row['problem']}"
        if row["event"] != "checkpoint" or row["step"] in seen:
            continue
        seen.add(row["step"])
        use, info = present.get(row["step"], ("", None))
        now = "removed since" if info is None else whole(info) if verify else "there"
        nbytes = size(info.nbytes) if info else ""
        took = duration(row["seconds"]), duration(row.get("blocked", 0.0))
        yield f"{row['step']:,}", moment(row["time"]), *took, nbytes, use, now
    for step, (use, info) in sorted(present.items()) if run.unmeasured else ():
        now = whole(info) if verify else "there"
        yield f"{step:,}", moment(info.path.stat().st_mtime), "", "", size(info.nbytes), use, now


def whole(info: Any) -> str:
    """Return whether a checkpoint is whole, having read all of it."""
    try:
        with show_progress(f"verifying the checkpoint of step {info.step}, {size(info.nbytes)}"):
            problems = info.verify()
    except CheckpointError as error:
        problems = [str(error)]
    return f"damaged: {problems[0]}" if problems else "whole: every byte was read"


def samples(shown: Sequence[Shown]) -> Section:
    """Return what the model wrote."""
    blocks: list[Block] = []
    for each in shown:
        rows = each.run.samples
        found: list[Block] = [Pre(row["text"], title=f"after step {row['step']:,}") for row in rows]
        if not found:
            found = [Missing('No samples were kept: [[monitor]] use = "sample" has the model write some.')]
        elif len(found) > MOST_SAMPLES:
            found = [Group(f"{len(found) - 3} earlier ones", found[:-3], folded=True), *found[-3:]]
        blocks += found if len(shown) == 1 else [Group(each.label, found[-1:])]
    return Section("samples", "Samples", blocks)


def recipe(shown: Sequence[Shown]) -> Section:
    """Return the resolved recipe with the file and line of each value."""
    blocks: list[Block] = []
    for each in shown:
        path = each.run.recipe_file
        if path is None:
            blocks.append(Missing(f"{each.label} left no recipe: it was started by a script."))
            continue
        explained = path.with_suffix(".explained")
        source = explained if explained.exists() else path
        where = "each value with the file and line that it comes from" if source is explained else "resolved"
        try:
            text = without_secrets(source.read_text(encoding="utf-8", errors="replace"))
        except OSError as problem:  # with a secret it is its owner's alone
            blocks.append(Missing(f"{source} cannot be read: {problem.strerror}."))
            continue
        blocks.append(Pre(text, summary=f"{each.label}: {where}" if len(shown) > 1 else where.capitalize()))
    return Section("recipe", "Recipe", blocks)
