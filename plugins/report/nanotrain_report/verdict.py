"""The four questions that one has about a run, answered from its metrics in a sentence or two each."""

from __future__ import annotations

import re
from collections.abc import Sequence

import attrs
import numpy as np

from nanotrain_report.blocks import Status
from nanotrain_report.families import Line
from nanotrain_report.folder import RunFolder
from nanotrain_report.health import Stretch, stretches
from nanotrain_report.number_format import capital, duration, number, quantity, share
from nanotrain_report.parts import memory_of_ranks, step_parts
from nanotrain_report.sources import bring
from nanotrain_report.trend import noise, trend_of

#: Steps without a gradient after which nothing is learned any more: a loss scale skips one now and then.
RECENT = 2
#: Fewest evaluations for judging by the validation loss instead of the training loss.
FEWEST_HELD = 5
#: Fewest logged steps for judging by the training loss.
FEWEST_STEPS = 5
#: Declarations whose rule says how many times the mean of tokens the busiest expert may get.
LOADS = ("expert_load", "moe/max_load/{router}")
#: Parts of a step that are its purpose, and the share of it that any other may take.
COMPUTES = re.compile("forward|backward|optimizer|comput")
MUCH = 0.3
FULL = 0.9
NO_METRICS = 'The run kept no metrics: add [[monitor]] use = "jsonl" to the recipe.'


@attrs.define(frozen=True)
class Answer:
    """What a question's card says."""

    question: str
    status: Status
    headline: str
    detail: str


def answers(run: RunFolder) -> list[Answer]:
    """Return the answers about one run."""
    return [learning(run), slow(run), full(run), balanced(run)]


def learning(run: RunFolder) -> Answer:
    """Is it learning?"""
    ask = "Is it learning?"
    loss = run.line("loss")
    if run.unmeasured:
        return Answer(ask, "unknown", "Not recorded", NO_METRICS)
    if loss is None or not np.isfinite(loss.values).any():
        none = "no step has been logged yet" if loss is None else "no loss of any step was a number"
        return Answer(ask, "unknown" if loss is None else "bad", none.capitalize(), "")
    if not np.isfinite(loss.values[-1]):
        return Answer(ask, "bad", "The loss is not a number", f"Since step {_broken_since(loss):,}.")
    norm = run.line("grad_norm")
    if norm is not None and not np.isfinite(norm.values[-RECENT:]).any():
        since = f"Since step {_broken_since(norm):,}; such steps change nothing."
        return Answer(ask, "bad", "No: the gradient is not a number", since)
    held = run.line("validation/loss")
    if held is not None and len(held.steps) >= FEWEST_HELD:
        return _by_its_trend(held, "Validation loss")
    return _by_its_trend(loss, f"Training loss{_terms(run)}", noisy=True, held=held)


def _by_its_trend(judged: Line, what: str, *, noisy: bool = False, held: Line | None = None) -> Answer:
    """Answer by the course of a loss; ``held``: few evaluations beside the training loss."""
    ask, beside, finite = "Is it learning?", _held_too(held), np.isfinite(judged.values)
    values, steps = judged.values[finite], judged.steps[finite]
    if len(values) < (FEWEST_STEPS if noisy else 2):
        return Answer(ask, "unknown", "Too early to say", f"{what} is {number(values[-1])} nats.")
    trend = trend_of(steps, values, noisy=noisy)
    detail = f"{what} went from {number(trend.first)} to {number(trend.now)} nats"
    if trend.rose:
        return Answer(ask, "bad", "No: the loss has risen", f"{detail}.{beside}")
    if trend.worse:
        detail += f"; its best was {number(trend.best)}.{beside}"
        return Answer(ask, "warn", f"It has got worse since step {trend.best_step:,}", detail)
    if trend.fell and trend.falls:
        detail += f", and still fell by {number(trend.change, 2)} in the last fifth.{beside}"
        return Answer(ask, "good", "Yes", detail)
    if held is not None and _still_falls(held, since=int(steps[-max(1, len(steps) // 5)])):
        return Answer(ask, "good", "Yes", f"{detail}; what still falls is validation loss.{beside}")
    if not trend.fell:
        detail += f"; from step to step it varies by {number(noise(values), 2)}" if noisy else ""
        headline = "Too early to say" if trend.early else "No: the loss has not fallen"
        return Answer(ask, "unknown" if trend.early else "warn", headline, f"{detail}.{beside}")
    detail += f"; in the last fifth it {_moved(trend.change)}"
    if trend.blurred:
        return Answer(ask, "good", "Yes", f"{detail}, which is within its noise.{beside}")
    return Answer(ask, "good", "Yes, but it has levelled off", f"{detail}.{beside}")


def _still_falls(held: Line, since: int) -> bool:
    """Return whether the newest evaluation, at or after step ``since``, is clearly below the one before."""
    enough = len(held.values) > 1 and bool(np.isfinite(held.values).all()) and held.steps[-1] >= since
    return enough and trend_of(held.steps, held.values, noisy=False).falls


def _moved(change: float) -> str:
    """Return what a loss did that is smaller by ``change``."""
    if change == 0:
        return "stood still"
    return f"{'fell by only' if change > 0 else 'rose by'} {number(abs(change), 2)}"


def _terms(run: RunFolder) -> str:
    """Return what the training loss adds up, where it is not what validation measures."""
    terms = [name.removeprefix("losses/") for name in run.lines if name.startswith("losses/")]
    return f" ({' + '.join(terms)}, weighted)" if len(terms) > 1 else ""


def _held_too(held: Line | None) -> str:
    """Return what few evaluations say beside the training loss, which is judged."""
    if held is None or len(held.values) < 2 or not np.isfinite(held.values[[0, -1]]).all():
        return ""
    return f" Validation loss went from {number(held.values[0])} to {number(held.values[-1])}."


def _broken_since(line: Line) -> int:
    finite = np.nonzero(np.isfinite(line.values))[0]
    return int(line.steps[finite[-1] + 1 if len(finite) else 0])


def slow(run: RunFolder) -> Answer:
    """What is slow?"""
    ask = "What is slow?"
    seconds = run.line("seconds")
    if run.unmeasured:
        return Answer(ask, "unknown", "Not recorded", NO_METRICS)
    if seconds is None:
        return Answer(ask, "unknown", "No step has been timed yet", "")
    usual, rate = float(np.nanmedian(seconds.values)), run.line("tokens_per_second")
    detail = f"A step takes {duration(usual)}"
    detail += f", {number(np.nanmedian(rate.values), 4)} tokens/s" if rate is not None else ""
    detail += _utilization(run)
    worst = _worst(run, "time", "speed", "pipeline")
    parts, shares = step_parts(run), dict[str, float]()
    bubble = run.line("bubble")
    idle = float(np.nanmedian(bubble.values)) if bubble is not None else 0.0
    if parts:
        shares = {part.label: float(np.nanmedian(part.values)) / usual for part in parts}
        name = max(shares, key=lambda each: shares[each])
        headline = f"{capital(name)} takes {share(shares[name])} of a step"
        detail += "; then " + ", ".join(
            f"{other} {share(part)}" for other, part in sorted(shares.items(), key=lambda e: -e[1])[1:3]
        )
    elif idle > 0.05:
        headline = f"Ranks wait {share(idle)} of a step for other stages"
    else:
        missing = bring("time")
        return Answer(ask, "unknown", f"{duration(usual)} a step", f"{detail}. {missing}")
    if parts:
        detail += f". {_meaning(run, parts, name)}" if not COMPUTES.search(name) else ""
        told = any("pipeline" in part.label for part in parts)
        detail += f"; pipeline bubble {share(idle)}" if idle > 0.05 and not told else ""
    detail += _crowded(run)
    if worst is not None:
        return Answer(ask, worst.verdict, headline, f"{detail}. {_about(worst)}")
    waits = max((part for name, part in shares.items() if not COMPUTES.search(name)), default=idle)
    return Answer(ask, "warn" if waits > MUCH else "good", headline, detail + ".")


def _meaning(run: RunFolder, parts: Sequence[Line], label: str) -> str:
    """Return what a part of a step is, as its declaration says."""
    name = next(part.name for part in parts if part.label == label)
    summary = next((f.metric.summary for f in run.families for line in f.lines if line.name == name), "")
    return f"{capital(label)}: seconds of {summary}" if summary else ""


def _crowded(run: RunFolder) -> str:
    """Return that ranks wait for a core, where a host has fewer of them than ranks that compute on them."""
    began = run.begins[-1] if run.begins else {}
    here, cores = int(began.get("local_ranks") or 1), int(began.get("cpus") or 0)
    if run.history.start.get("device") != "cpu" or not 0 < cores < here:
        return ""
    held = "one core" if cores == 1 else f"{cores} cores"
    return f". {here} ranks share {held}: much of what looks like communication is waiting for a core"


def _utilization(run: RunFolder) -> str:
    line = next((run.line(name) for name in ("mfu", "speed/mfu") if run.line(name) is not None), None)
    return f", MFU {share(line.last)}" if line is not None else ""


def full(run: RunFolder) -> Answer:
    """Which rank is full?"""
    ask = "Which rank is full?"
    found = memory_of_ranks(run)
    if found is None:
        return Answer(ask, "unknown", "Not recorded", bring("memory"))
    worst = _worst(run, "memory")
    held, mean = quantity(found.peak, found.unit), quantity(found.mean, found.unit)
    detail = f"The most so far is {held}; the mean of ranks is {mean} ({found.name})."
    host = run.line("memory/host_fraction") if found.on_host else None
    whole = host.last if host is not None else found.share
    status: Status = "good"
    if whole is not None and whole > FULL:
        status = "warn"
        headline = (
            f"Rank {found.fullest}, at {share(whole)}" if host is None else f"The host, at {share(whole)}"
        )
    elif host is not None:
        headline = f"None: rank {found.fullest} holds most"
        detail += f" Of the host's memory {share(host.last)} is in use, by all programs."
    elif whole is not None:
        headline = f"None: rank {found.fullest} comes closest, at {share(whole)}"
    else:
        headline = f"Rank {found.fullest} holds most: {held}"
    if worst is not None:
        headline = headline.replace("None:", "None yet:")
        return Answer(ask, worst.verdict, headline, f"{detail} {_about(worst)}")
    return Answer(ask, status, headline, detail)


def balanced(run: RunFolder) -> Answer:
    """Are experts balanced?"""
    ask = "Are experts balanced?"
    load = run.line("expert_load")
    if load is None:
        if run.recipe.get("model", {}).get("experts"):
            if run.unmeasured:
                return Answer(ask, "unknown", "Not recorded", NO_METRICS)
            return Answer(ask, "unknown", "No step has been logged yet", "")
        return Answer(ask, "none", "The model has no experts", "")
    recent = load.values[-max(1, len(load.values) // 10) :]
    now, first = float(np.nanmedian(recent)), float(load.values[0])
    detail = f"In the worst layer the busiest expert gets {number(now, 3)} times the mean of tokens"
    detail += f"; it began at {number(first, 3)}." if len(load.values) > 1 else "."
    balance = [line.last for name, line in run.lines.items() if name.startswith("moe/balance/")]
    if balance:
        detail += (
            f" Over the last steps the entropy of the load is {number(min(balance), 3)} of an even one's."
        )
    worst = _worst(run, "moe")
    if worst is not None:
        headline = "No" if worst.verdict == "bad" else "Not quite"
        return Answer(ask, worst.verdict, headline, f"{detail} {_about(worst)}")
    rules = [metric.rule for metric in run.declared if metric.name in LOADS and metric.rule is not None]
    if not rules:
        return Answer(
            ask, "unknown", f"The busiest gets {number(now, 3)} times the mean", f"{detail} {bring('moe')}"
        )
    verdict = rules[0].judge(now)
    headline = {"good": "Yes", "warn": "Not quite", "bad": "No"}[verdict]
    return Answer(ask, verdict, headline, detail)


def _worst(run: RunFolder, *groups: str) -> Stretch | None:
    """Return the worst of the stretches that last until now, of metrics of these groups."""
    ruled = [family for family in run.families if family.metric.group in groups]
    now = [each for family in ruled for each in stretches(family, run.judging) if each.goes_on]
    return max(now, key=lambda each: (each.verdict == "bad", each.count), default=None)


def _about(found: Stretch) -> str:
    return f"{found.sentence.rstrip('.')}."
