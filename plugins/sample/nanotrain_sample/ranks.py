"""What each rank does: build its part of the model, write with the others, and on rank 0 tell the user."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import ClassVar

import attrs
import torch
import torch.distributed as dist

from nanotrain_core.api import Layout, Resolution, resolve_recipe
from nanotrain_core.api.ranks import Job, Ranks, choose_device, join_ranks
from nanotrain_core.api.torch import Model, caches_context, compose
from nanotrain_sample.generate import Writer
from nanotrain_sample.layout import without_data
from nanotrain_sample.source import codec_of
from nanotrain_sample.tell import Asked, Teller


@attrs.define(frozen=True, kw_only=True)
class SampleJob(Job):
    """Prompts to continue."""

    saves: ClassVar[bool] = False
    asked: Asked
    tokenizer: str | None
    """As :class:`~nanotrain_sample.source.Source` has it."""

    def run(self, ranks: Ranks) -> str:
        """Write all texts as one of the ranks; return ``done``."""
        found = resolve_recipe(
            self.recipe, overrides=self.overrides, plugins=self.plugins, ranks=ranks.world_size
        )
        run = found.recipe.run
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(ranks.threads())
        device = choose_device(run.device, ranks, shared=run.share_device)
        join_ranks(self, ranks, found.recipe, device, found.registry)
        try:
            self._write(found, ranks.rank, device)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        return "done"

    def _write(self, found: Resolution, rank: int, device: torch.device) -> None:
        run = compose(
            without_data(found),
            found.registry,
            rank=rank,
            device=device,
            weights=self.asked.weights,
            trains=False,
        )
        model: Model = found.registry.build(found.recipe.model)
        caches = caches_context(model)
        writer = Writer(run, self.asked.how, caches=caches)
        codec = codec_of(found.recipe, self.tokenizer, found.registry) if rank == 0 else None
        teller = Teller(codec, self.asked, found.recipe.model.use) if codec else None
        if teller and not caches:
            teller.note(
                f"model '{found.recipe.model.use}' keeps no cache: each token is computed from the whole text"
            )
        for numbers in rounds(len(self.asked.prompts), writer.replicas):
            self._round(numbers, writer, teller)
        if teller:
            teller.end()

    def _round(self, numbers: Sequence[int], writer: Writer, teller: Teller | None) -> None:
        """Write one text on each replica of the model, and tell of all that are wanted."""
        mesh, prompts = writer.mesh, self.asked.prompts
        mine = numbers[writer.replica]
        passes = 0
        if writer.replicas > 1 and any_exchange_between_replicas(mesh.layout):
            passes = max(self.asked.how.passes(len(prompts[n]), caches=writer.caches) for n in numbers)
        tell = teller.begin(mine) if teller else lambda token: None
        text = writer.write(prompts[mine], mine, passes, tell)
        everyone = {each.number: each for each in reversed(mesh.gather(text))}  # of each its first rank's
        if teller:
            for number in sorted(everyone):
                teller.text(everyone[number])


def rounds(prompts: int, replicas: int) -> Iterator[Sequence[int]]:
    """Yield which prompt each replica of the model continues; in the last round some repeat its first.

    >>> list(rounds(5, 2))
    [[0, 1], [2, 3], [4, 4]]
    """
    for first in range(0, prompts, replicas):
        yield [n if n < prompts else first for n in range(first, first + replicas)]


def any_exchange_between_replicas(layout: Layout) -> bool:
    """Return whether a pass of one replica may need the others: where experts are spread over them."""
    apart = {*layout.views["dense"].dims, "edp"}
    return any(layout.size(dim) > 1 for dim in layout.dims if dim not in apart)
