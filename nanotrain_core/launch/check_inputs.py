"""Checks a run's inputs on this machine before its ranks start: data, tokenizer, weights.

Separate from the checks of a recipe itself, because a recipe is also read where its data is not available:
to list checkpoints, to draw a schedule, to resume with a checkpoint's weights. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from nanotrain_core.checkpoint.info import strip_ema
from nanotrain_core.data.survey import Survey
from nanotrain_core.errors import DataError, PluginError, Problem, as_plugin_error
from nanotrain_core.layout.roles import Role
from nanotrain_core.phases.tables import key_in_force
from nanotrain_core.phases.timeline import PhaseTimeline
from nanotrain_core.recipe.divisibility import divisibility_of
from nanotrain_core.recipe.load import Resolution, refuse
from nanotrain_core.recipe.tree import BatchConfig, Recipe
from nanotrain_core.registry.registry import Registry
from nanotrain_core.run.suggest_run import did_you_mean_weights


def check_inputs(found: Resolution, *, weights: bool = True) -> None:
    """Check that the inputs of a recipe exist and fit it.

    Args:
        found: the recipe.
        weights: whether ``run.weights`` are read; a resumed run uses its checkpoint's.

    Raises:
        RecipeError: with one line for every problem, ``file:line: key: what``.
        PluginError: a component's survey is wrong.
    """
    refuse(found.merged, input_problems(found, weights=weights))


def input_problems(found: Resolution, *, weights: bool = True) -> list[Problem]:
    """Return which inputs of a recipe (data, tokenizer, weights) are missing here, or do not fit."""
    recipe = found.recipe
    known = surveys(recipe, found.registry)
    survey = known[recipe.batch.length]
    said = {problem.message for problem in survey.problems}
    others = dict.fromkeys(problem for problem in _in_phases(recipe, known) if problem.message not in said)
    problems = [*survey.problems, *others, *_vocabulary(recipe, survey), *_sequences(recipe, known)]
    path = strip_ema(Path(recipe.run.weights or ""))[0]
    if weights and recipe.run.weights and not path.exists():
        problems.append(
            Problem("run.weights", f"{path}: there is no such file or folder{did_you_mean_weights(path)}")
        )
    return problems


def survey_of(recipe: Recipe, registry: Registry) -> Survey:
    """Return the data component's survey of sequences of ``batch.length`` tokens.

    Empty if it offers none. For a recipe whose phases change the length, see :func:`surveys`.
    """
    return _survey(recipe, registry, recipe.batch.length)


def surveys(recipe: Recipe, registry: Registry) -> Mapping[int, Survey]:
    """Return the data component's survey of sequences of each length in the run."""
    return {length: _survey(recipe, registry, length) for length in PhaseTimeline(recipe).lengths()}


def _survey(recipe: Recipe, registry: Registry, length: int) -> Survey:
    use, config = recipe.data.use, recipe.data.config
    label = f"data '{use}' of {registry.owner('data', use)}: its survey"
    component = registry.get("data", use)
    tell = component.load_optional("survey")
    changes = "changes_length" in component.provides
    longest = {"longest": max(PhaseTimeline(recipe).lengths())} if changes else {}
    if tell is None:
        return Survey()
    try:
        with as_plugin_error(label):
            found: Any = tell(config, length, **longest)
    except DataError as error:
        return Survey(problems=(Problem("data", str(error)),))
    if not isinstance(found, Survey):
        raise PluginError(f"{label} returned {found!r}; expected a nanotrain_core.api.Survey")
    return found


def _vocabulary(recipe: Recipe, survey: Survey) -> Iterator[Problem]:
    """Compare with the model's vocabulary, if its config gives the size."""
    for extent in divisibility_of(recipe.model.config) or ():
        if survey.vocab is not None and Role.VOCAB in extent.roles and extent.units < survey.vocab:
            yield Problem(
                extent.key,
                f"data '{recipe.data.use}' has {survey.vocab} tokens but the model's vocabulary is "
                f"{extent.units}; expected at least {survey.vocab}",
            )


def _batches(recipe: Recipe) -> list[tuple[int, BatchConfig]]:
    """Return the batches of a run with the numbers of their phases, -1 without phases."""
    return [(number, now.batch) for number, now in PhaseTimeline(recipe).corners()] or [(-1, recipe.batch)]


def _in_phases(recipe: Recipe, known: Mapping[int, Survey]) -> Iterator[Problem]:
    """Yield what the surveys of all lengths found, at the phase that sets the length."""
    for number, batch in _batches(recipe):
        for problem in known[batch.length].problems:
            yield attrs.evolve(problem, key=key_in_force(recipe, number, problem.key))


def _sequences(recipe: Recipe, known: Mapping[int, Survey]) -> Iterator[Problem]:
    """Check that there are enough for each batch, and some for evaluations that the recipe requests."""
    evaluation, too_few = recipe.evaluation, set[str]()
    survey = known[recipe.batch.length]
    for number, batch in _batches(recipe):
        train, key = known[batch.length].train, key_in_force(recipe, number, "batch.sequences")
        if train is None or train >= batch.sequences or key in too_few:
            continue
        too_few.add(key)
        yield Problem(
            key,
            f"one batch takes {batch.sequences} sequences of {batch.length} tokens, but the training data "
            f"has {train}: lower batch.sequences or batch.length, or add data",
        )
    if survey.validation == 0 and evaluation.every and evaluation.sequences:
        yield Problem(
            "evaluation.every",
            f"every {evaluation.every} steps the loss on data that is held out is wanted, but data "
            f"'{recipe.data.use}' holds none out; hold some out, or set evaluation.every = 0",
        )
