"""What each rank does to write texts, and on rank 0 to tell the user."""

from __future__ import annotations

import attrs

from nanotrain_core.api import Resolution
from nanotrain_core.api.torch import Model, Run, caches_context
from nanotrain_sample.generate import Prompt, Writer
from nanotrain_sample.output import Asked, Teller
from nanotrain_sample.ranks import ForwardJob
from nanotrain_sample.replica import rounds
from nanotrain_sample.source import codec_of


@attrs.define(frozen=True, kw_only=True)
class SampleJob(ForwardJob):
    """Prompts to continue."""

    asked: Asked

    def compute(self, found: Resolution, run: Run) -> None:
        """Write all texts as one of the ranks."""
        model: Model = found.registry.build(found.recipe.model)
        caches = caches_context(model)
        writer = Writer(run, caches=caches)
        codec = codec_of(found.recipe, self.tokenizer, found.registry) if run.mesh.rank == 0 else None
        teller = Teller(codec, self.asked, found.recipe.model.use) if codec else None
        if teller and not caches:
            teller.note(
                f"model '{found.recipe.model.use}' keeps no cache: each token is computed from the whole text"
            )
        prompts = [Prompt(tokens, self.asked.how) for tokens in self.asked.prompts]
        for numbers in rounds(len(prompts), writer.replica.count):
            # Rank 0, which has the teller, is of the first replica.
            tell = teller.begin(numbers[0]) if teller else lambda token: None
            for text in writer.write_round(prompts, numbers, tell):
                if teller:
                    teller.text(text)
        if teller:
            teller.end()
