"""Writes one text after another on the ranks of a run: prefill, then a pass for each token.

Every rank of a replica of the model calls the same functions. One of them, which has logits, draws the token
and tells the others.

Shapes: B batch (1), S tokens of a pass, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import attrs
import torch
import torch.distributed as dist

from nanotrain_core.api import NanotrainError
from nanotrain_core.api.text import sample_token
from nanotrain_core.api.torch import Batch, Cache, Executor, Run, stream_seed
from nanotrain_sample.replica import Replica

#: Tokens of a prompt that pass through the model at once: logits of all of them are computed.
CHUNK = 512


@attrs.define(frozen=True, kw_only=True)
class How:
    """What is written, and how tokens are chosen."""

    tokens: int = 200
    """At most, after the prompt."""
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234
    vocab: int
    """Tokens from here on are none of the tokenizer's, and never drawn."""
    ends: frozenset[int] = frozenset()
    """Tokens that end a text: of a document, or of a turn."""
    limit: int | None = None
    """Tokens that the model can read, if it is limited."""


@attrs.define(frozen=True)
class Prompt:
    """What a text begins with, and how it is continued."""

    tokens: tuple[int, ...]
    """At least one."""
    how: How

    @property
    def most(self) -> int:
        """Most tokens that can follow: the last one is not passed through the model."""
        how = self.how
        return how.tokens if how.limit is None else min(how.tokens, how.limit - len(self.tokens) + 1)

    def passes(self, *, caches: bool) -> int:
        """Return how many passes through the model it takes, if nothing ends it before."""
        return (-(-len(self.tokens) // CHUNK) if caches else 1) + self.most - 1


@attrs.define(frozen=True)
class Text:
    """A generated text."""

    number: int
    """Number of the prompt."""
    tokens: tuple[int, ...]
    """Tokens after the prompt."""
    prefill: float
    """Seconds until the first token."""
    decode: float
    """Seconds for all others."""
    stopped: str
    """Why it stopped: ``end`` of the text, as many ``tokens`` as requested, or the model's ``limit``."""
    bytes_per_token: int | None
    """Bytes per token of this rank's KV cache; None without a cache."""


class Writer:
    """Writes texts with the model of a run, which has no optimizer."""

    def __init__(self, run: Run, *, caches: bool) -> None:
        """Make groups. Collective over the run."""
        self.mesh, self.caches = run.mesh, caches
        self.executor = Executor(run.stages, run.gradients, run.mesh, run.owners, run.passes)
        self.final = len(run.owners) - 1
        self.replica = Replica(run)

    def write_round(
        self,
        prompts: Sequence[Prompt],
        numbers: Sequence[int],
        tell: Callable[[int], None] = lambda token: None,
        ends: Callable[[Sequence[int]], bool] = lambda tokens: False,
    ) -> list[Text]:
        """Continue one prompt on each replica of the model; return all texts, on every rank. Collective.

        Args:
            prompts: all of them.
            numbers: those of this round, one for each replica (:func:`~nanotrain_sample.replica.rounds`).
            tell: called with each token of this rank's text.
            ends: returns whether a text ends with the tokens that follow its prompt; the same on all ranks.

        Returns:
            A text for each of ``numbers`` in ascending order, once.
        """
        mine = numbers[self.replica.index]
        passes = 0
        if self.replica.passes_together:
            passes = max(prompts[number].passes(caches=self.caches) for number in numbers)
        text = self.write(prompts[mine], mine, passes, tell, ends)
        found = {each.number: each for each in reversed(self.mesh.gather(text))}  # of each its first rank's
        return [found[number] for number in sorted(found)]

    def write(
        self,
        prompt: Prompt,
        number: int,
        passes: int,
        tell: Callable[[int], None] = lambda token: None,
        ends: Callable[[Sequence[int]], bool] = lambda tokens: False,
    ) -> Text:
        """Continue ``prompt``, and go through ``passes`` passes in all: as many as other replicas do.

        Args:
            prompt: to be continued.
            number: of the text: with the seed it decides what is drawn.
            passes: at least those that :meth:`Prompt.passes` says, where ranks of several replicas meet in
                them.
            tell: called with each token.
            ends: returns whether the text ends with the tokens that follow its prompt.
        """
        how = prompt.how
        generator = torch.Generator().manual_seed(stream_seed(how.seed, "sample", number))
        most = prompt.most
        cache = Cache(len(prompt.tokens) + most - 1) if self.caches else None
        began = time.perf_counter()
        text = [*prompt.tokens]
        found: list[int] = []
        seen = 0
        first = began
        ended = False
        while len(found) < most and not ended:
            logits = None
            while seen < len(text):
                end = min(len(text), seen + CHUNK) if cache else len(text)
                logits = self._read(text[seen:end], cache)
                seen, passes = end, passes - 1
            token = self._draw(logits, generator, how)
            text.append(token)
            found.append(token)
            tell(token)
            ended = token in how.ends or ends(found)
            if cache is None:
                seen = 0
            first = time.perf_counter() if len(found) == 1 else first
        written = time.perf_counter()
        for _ in range(passes):
            self._read([0], None)
        stopped = "end" if ended else "tokens" if len(found) == how.tokens else "limit"
        size = cache.bytes_per_token if cache else None
        return Text(number, tuple(found), first - began, written - first, stopped, size)

    def _read(self, tokens: Sequence[int], cache: Cache | None) -> torch.Tensor | None:
        """Pass tokens through the model; return logits [V] after the last, None where there are none."""
        tokens_BS = torch.tensor([tokens], device=self.mesh.device)
        outputs = self.executor.through(Batch(tokens_BS, cache=cache))
        if cache is not None:
            cache.advance(len(tokens))
        logits_BSV = outputs[self.final].value if self.final in outputs else None
        return None if logits_BSV is None else logits_BSV[0, -1]

    def _draw(self, logits_V: torch.Tensor | None, generator: torch.Generator, how: How) -> int:
        """Broadcast: return the token that the drawing rank draws."""
        token = torch.zeros(1, dtype=torch.int64, device=self.mesh.device)
        if self.mesh.rank == self.replica.speaker:
            assert logits_V is not None
            known_V = logits_V[: how.vocab]
            if not bool(known_V.isfinite().all()):
                raise NanotrainError(
                    "the model's logits are not all finite numbers: its weights have diverged"
                )
            chosen = sample_token(
                known_V, generator, temperature=how.temperature, top_k=how.top_k, top_p=how.top_p
            )
            token.fill_(chosen)
        if self.replica.group is not None:
            with self.mesh.waits.collectives:
                dist.broadcast(token, self.replica.speaker, group=self.replica.group)
        return int(token)
