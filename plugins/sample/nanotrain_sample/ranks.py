"""Ranks that build a model without what trains it, started by this command or by torchrun or srun."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import ClassVar

import attrs
import torch

from nanotrain_core.api import NanotrainError, Registry, Resolution, resolve_recipe
from nanotrain_core.api.ranks import (
    EXIT_OF,
    Job,
    Nodes,
    Ranks,
    choose_device,
    ending_process_groups,
    join_ranks,
    prepare_ranks,
    start_ranks,
)
from nanotrain_core.api.torch import Run, compose
from nanotrain_sample.layout import resolved, without_data
from nanotrain_sample.source import Source

#: Of the recipe's path and what it says: the job of each rank.
JobOf = Callable[[str, Resolution], "ForwardJob"]


@attrs.define(frozen=True, kw_only=True)
class ForwardJob(Job):
    """Passes through a model that was trained."""

    saves: ClassVar[bool] = False
    opens_data: ClassVar[bool] = False
    """Whether the run's data are read."""
    weights: str
    """What :func:`~nanotrain_core.api.torch.open_weights` opens."""
    tokenizer: str | None
    """As :class:`~nanotrain_sample.source.Source` has it."""

    def run(self, ranks: Ranks) -> str:
        """Be one of the ranks; return ``done``."""
        found = resolve_recipe(
            self.recipe, overrides=self.overrides, plugins=self.plugins, ranks=ranks.world_size
        )
        run = found.recipe.run
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(ranks.threads())
        device = choose_device(run.device, ranks, shared=run.share_device)
        with ending_process_groups():
            join_ranks(self, ranks, found.recipe, device, found.registry)
            recipe = found.recipe if self.opens_data else without_data(found)
            self.compute(
                found,
                compose(
                    recipe,
                    found.registry,
                    rank=ranks.rank,
                    device=device,
                    weights=self.weights,
                    trains=False,
                ),
            )
        return "done"

    def compute(self, found: Resolution, run: Run) -> None:
        """Do it, on every rank."""
        raise NotImplementedError("a job says what its ranks compute")


def run_on_ranks(
    job_of: JobOf,
    source: Source,
    degrees: Mapping[str, int],
    overrides: Sequence[str],
    registry: Registry,
    *,
    scores: bool = False,
    **plugins: object,
) -> int:
    """Make the recipe and have its ranks do the job; return the exit code.

    Args:
        job_of: makes the job.
        source: weights and the recipe they were trained by.
        degrees: how the model is spread over ranks.
        overrides: lines laid over the recipe.
        registry: finds the components.
        scores: whether the run's validation split is kept.
        plugins: keyword arguments of :func:`~nanotrain_core.api.resolve_recipe`.
    """
    joined = Ranks.joined()
    with TemporaryDirectory(prefix="nanotrain-sample-") as folder:
        world = joined.world_size if joined else None
        recipe, found = resolved(
            source, degrees, overrides, registry, folder, ranks=world, scores=scores, **plugins
        )
        ranks = found.recipe.run.ranks
        if ranks > 1 and not joined:
            prepare_ranks(ranks)
        job = job_of(recipe, found)
        if joined:
            return EXIT_OF[job.run(joined)]
        return start_ranks(job, found.recipe, Nodes(nproc=ranks))


def degrees_of(lines: Sequence[str]) -> dict[str, int]:
    """Return lines such as ``tp=2`` as a table.

    Raises:
        NanotrainError: one is not of that form.
    """
    found = {}
    for line in lines:
        dim, _, degree = line.partition("=")
        if not dim or not degree.isdecimal() or int(degree) < 1:
            raise NanotrainError(f"--degree: expected DIM=N such as tp=2, with a number above 0, got {line}")
        found[dim] = int(degree)
    return found
