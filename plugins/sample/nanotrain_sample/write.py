"""What each rank does to write texts, and on rank 0 to tell the user."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from nanotrain_core.api import Resolution
from nanotrain_core.api.torch import Model, Run, caches_context
from nanotrain_sample.generate import Writer
from nanotrain_sample.ranks import ForwardJob
from nanotrain_sample.source import codec_of
from nanotrain_sample.tell import Asked, Teller


@attrs.define(frozen=True, kw_only=True)
class SampleJob(ForwardJob):
    """Prompts to continue."""

    asked: Asked

    def compute(self, found: Resolution, run: Run) -> None:
        """Write all texts as one of the ranks."""
        model: Model = found.registry.build(found.recipe.model)
        caches = caches_context(model)
        writer = Writer(run, self.asked.how, caches=caches)
        codec = codec_of(found.recipe, self.tokenizer, found.registry) if run.mesh.rank == 0 else None
        teller = Teller(codec, self.asked, found.recipe.model.use) if codec else None
        if teller and not caches:
            teller.note(
                f"model '{found.recipe.model.use}' keeps no cache: each token is computed from the whole text"
            )
        for numbers in rounds(len(self.asked.prompts), writer.replica.count):
            self._round(numbers, writer, teller)
        if teller:
            teller.end()

    def _round(self, numbers: Sequence[int], writer: Writer, teller: Teller | None) -> None:
        """Write one text on each replica of the model, and tell of all that are wanted."""
        mesh, prompts = writer.mesh, self.asked.prompts
        mine = numbers[writer.replica.index]
        passes = 0
        if writer.replica.passes_together:
            passes = max(self.asked.how.passes(len(prompts[n]), caches=writer.caches) for n in numbers)
        tell = teller.begin(mine) if teller else lambda token: None
        text = writer.write(prompts[mine], mine, passes, tell)
        everyone = {each.number: each for each in reversed(mesh.gather(text))}  # of each its first rank's
        if teller:
            for number in sorted(everyone):
                teller.text(everyone[number])


def rounds(items: int, replicas: int) -> Iterator[Sequence[int]]:
    """Yield which item each replica of the model takes; in the last round some repeat its first.

    >>> list(rounds(5, 2))
    [[0, 1], [2, 3], [4, 4]]
    """
    for first in range(0, items, replicas):
        yield [n if n < items else first for n in range(first, first + replicas)]
