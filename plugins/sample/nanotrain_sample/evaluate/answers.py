"""Questions of rank 0 that all ranks answer: scores of sequences, and generated texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from nanotrain_core.api.text import TextCodec
from nanotrain_core.api.torch import Model, Run, caches_context
from nanotrain_sample.evaluate.generation import Generation, generate
from nanotrain_sample.evaluate.scorer import Score, Scorer
from nanotrain_sample.evaluate.windows import Request
from nanotrain_sample.generate import Writer


class Answers:
    """Scores and writes on all ranks. Rank 0 asks; the others :meth:`follow` until it calls :meth:`end`."""

    def __init__(self, run: Run, model: Model, read_codec: Callable[[], TextCodec]) -> None:
        """Make groups. Collective over the run."""
        self.mesh, self.model = run.mesh, model
        self._run, self._read_codec = run, read_codec
        # What keeps no cache may depend on the length, as dynamic RoPE does.
        self.scorer = Scorer(run, model.vocab_size, pads=caches_context(model))

    def scores(self, requests: Sequence[Request]) -> list[Score]:
        """Return a score for each request, on rank 0."""
        self.mesh.gather(("score", requests))
        return self.scorer.score(requests)

    def texts(self, asked: Sequence[Generation], tell: Callable[[], object] = lambda: None) -> list[str]:
        """Return the text of each, on rank 0.

        Args:
            asked: what to generate.
            tell: called after each text.
        """
        self.mesh.gather(("generate", asked))
        found = []
        for text in generate(self.writer, asked, self.codec):
            found.append(text)
            tell()
        return found

    def end(self) -> None:
        """Let the other ranks go."""
        self.mesh.gather(None)

    def follow(self) -> None:
        """Compute with rank 0, on another rank, until it ends."""
        while (asked := self.mesh.gather(None)[0]) is not None:
            what, items = asked
            if what == "score":
                self.scorer.score(items)
            else:
                for _ in generate(self.writer, items, self.codec):
                    pass

    @cached_property
    def codec(self) -> TextCodec:
        """The model's, which ranks other than 0 need only where texts are generated."""
        return self._read_codec()

    @cached_property
    def writer(self) -> Writer:
        """The one that generates: its groups are made when it is first asked for, on all ranks."""
        return Writer(self._run, caches=caches_context(self.model))
