"""Whether a recipe can be trained on this machine by ``--trace``, and which keys make it small enough."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from nanotrain_core.api import (
    NanotrainError,
    PhaseTimeline,
    PluginArguments,
    Problem,
    Resolution,
    Role,
    divisibility_of,
    host_memory,
    input_problems,
    resolve_recipe,
)
from nanotrain_plan.model import Parameters, count_parameters
from nanotrain_plan.number_format import count, size

#: Processes of one machine.
MOST_RANKS = 16

#: Bytes of a parameter in training, in float32: weight, gradient, a bucket of it, two moments.
PER_PARAMETER = 20

#: FLOPs of the two steps: half an hour if all ranks together make 30 GFLOP/s.
MOST_FLOPS = 5e13

#: FLOPs of the two steps of a recipe that is suggested: seconds, beside what ranks take to start.
FEW_FLOPS = 1e11

#: Ranks of a recipe that is suggested in place of one with too many, the fewest first.
RANKS = (1, 2, 4, 8, 16)

#: Tokens of its sequences, and kinds of them.
LENGTH = 64
VOCABULARY = 1024

#: Rounds in which a model's numbers are halved.
ROUNDS = 12


def check_small(recipe: str, overrides: Sequence[str], plugins: PluginArguments, found: Resolution) -> None:
    """Refuse what is too large for this machine, and data that is not on it.

    Raises:
        NanotrainError: with the ``--set`` options of a smaller recipe that can be traced, if one is found, on
            synthetic data if the recipe's own is missing.
    """
    problem, missing = _problem(found), _missing_data(found)
    if problem is None:
        if not missing:
            return
        words = " ".join(f"--set {shlex.quote(change)}" for change in (*overrides, _synthetic(found)))
        told = f"on synthetic data: nanotrain explain {recipe} --trace {words}"
        raise NanotrainError(f"--trace: {missing[0].key}: {missing[0].message}\n{told}")
    smaller = _smaller(recipe, list(overrides), plugins)
    changed = {change.partition("=")[0] for change in smaller}
    kept = [change for change in overrides if change.partition("=")[0].strip() not in changed]
    advice = (
        f"this is small enough: nanotrain explain {recipe} --trace "
        + " ".join(f"--set {shlex.quote(change)}" for change in (*kept, *smaller))
        if smaller
        else "choose a smaller recipe with the same components"
    )
    raise NanotrainError(f"--trace: {problem}\n{advice}")


def _missing_data(found: Resolution) -> list[Problem]:
    """Return what is wrong with the recipe's data on this machine; a trace reads no weights."""
    return [each for each in input_problems(found, weights=False) if each.key.startswith("data")]


def _synthetic(found: Resolution, vocabulary: int | None = None) -> str:
    """Return the override that takes as many kinds of tokens from a formula: as the model has, by default."""
    kinds = vocabulary or getattr(found.recipe.model.config, "vocab", 2)
    return f'data={{use="synthetic",vocab={kinds}}}'


def _problem(found: Resolution) -> str | None:
    ranks = found.layout.world_size
    if ranks > MOST_RANKS:
        return f"{ranks:,} ranks are too many for one machine; at most {MOST_RANKS}"
    parameters = count_parameters(found.recipe, found.registry)
    needed, there = _needed(found, parameters), host_memory().most
    if needed > there / 2 > 0:
        return f"training takes some {size(needed)} of this machine's {size(there)}; at most half"
    batch, flops = PhaseTimeline(found.recipe).largest().batch, _flops(found, parameters)
    if flops > MOST_FLOPS:
        return (
            f"two steps of {batch.sequences:,} sequences take some {count(flops)} floating-point operations; "
            f"at most {count(MOST_FLOPS)}"
        )
    return None


def _flops(found: Resolution, parameters: Parameters) -> int:
    """Return the floating-point operations of both steps."""
    batch = PhaseTimeline(found.recipe).largest().batch
    return 2 * 6 * (parameters.active + parameters.mtp) * batch.sequences * batch.length


def _needed(found: Resolution, parameters: Parameters) -> int:
    """Return bytes of all ranks' state, as if each pipeline's were whole: more than it takes."""
    split = found.layout.degree("pp", "tp")
    whole = (parameters.total + parameters.mtp) * PER_PARAMETER
    return whole * max(1, found.layout.world_size // split)


# --- smaller -----------------------------------------------------------------------------------------


def _smaller(recipe: str, overrides: Sequence[str], plugins: PluginArguments) -> list[str]:
    """Return overrides with which the recipe can be traced; empty if none were found."""

    def attempt(changes: Mapping[str, int | str]) -> Resolution | None:
        asked = [*overrides, *(f"{key}={value}" for key, value in changes.items())]
        try:
            return resolve_recipe(recipe, overrides=asked, plugins=plugins)
        except NanotrainError:
            return None

    first = attempt({})
    if first is None:
        return []
    axes, shorter = _axes(first), list(_shorter_steps(first))
    whole = (each for each in shorter if (found := attempt(each)) and _axes(found) == axes)
    changes = next(whole, None) or next((each for each in reversed(shorter) if attempt(each)), {})
    two = {"run.steps": 2} if "run.steps" in changes else {}
    for fewer in (_fewer_tokens(first), two):
        if attempt({**changes, **fewer}):
            changes |= fewer
    found = attempt(changes)
    for _ in range(ROUNDS):
        if found is None or (_problem(found) is None and _is_quick(found)):
            break
        before = dict(changes)
        for key, value in _halves(found.recipe.model.config):
            if attempt({**changes, key: value}):
                changes[key] = value
        if changes == before:
            break
        found = attempt(changes)
    if found is None or _problem(found) is not None:
        return []
    return [f"{key}={value}" for key, value in changes.items()]


def _is_quick(found: Resolution) -> bool:
    return _flops(found, count_parameters(found.recipe, found.registry)) <= FEW_FLOPS


def _axes(found: Resolution) -> set[str]:
    """Return the mesh dimensions along which ranks exchange tensors."""
    return {dim for view in found.layout.degrees.values() for dim, size in view.items() if size > 1}


def _shorter_steps(found: Resolution) -> Iterator[dict[str, int | str]]:
    """Yield a batch of as many microbatches as is usual, without phases, which would set another.

    Of too many ranks it is with degrees of at most 2, on ever more ranks.
    """
    recipe, ranks = found.recipe, found.layout.world_size
    degrees = {f"topology.{key}": 2 for key, value in _integers(recipe.topology.config) if value > 1}
    largest = PhaseTimeline(recipe).largest().batch.sequences
    for fewer in RANKS if ranks > MOST_RANKS else (ranks,):
        changes: dict[str, int | str] = {"run.ranks": fewer, **degrees} if fewer != ranks else {}
        sequences = 2 * fewer * recipe.batch.microbatch
        if largest > sequences:
            changes["batch.sequences"] = sequences
            if recipe.phase:
                changes["phase"] = "[]"
                if found.merged.origin("run.steps") is None:  # phases alone said how many there are
                    changes["run.steps"] = recipe.run.steps
        if recipe.batch.length > LENGTH:
            changes["batch.length"] = LENGTH
        yield changes


def _fewer_tokens(found: Resolution) -> dict[str, int | str]:
    """Return changes to fewer kinds of tokens, from a formula, if the recipe's data is that or missing."""
    missing, config = bool(_missing_data(found)), found.recipe.model.config
    if not missing and found.recipe.data.use != "synthetic":
        return {}
    kinds = min(VOCABULARY, getattr(config, "vocab", 2))
    changes: dict[str, int | str] = {"model.vocab": kinds} if getattr(config, "vocab", 0) > kinds else {}
    if missing:
        table, _, keys = _synthetic(found, kinds).partition("=")
        return {**changes, table: keys}
    return {**changes, "data.vocab": kinds} if changes else {}


def _halves(config: Any) -> Iterator[tuple[str, int]]:
    """Yield each number of a model that is large, halved; not the vocabulary, which data shares."""
    kept = {each.key for each in divisibility_of(config) or () if Role.VOCAB in each.roles}
    for key, value in _integers(config):
        if value > 4 and f"model.{key}" not in kept:
            yield f"model.{key}", (value + 1) // 2


def _integers(config: Any) -> Iterator[tuple[str, int]]:
    for field in attrs.fields(type(config)):
        value = getattr(config, field.name)
        if type(value) is int:
            yield field.name, value
