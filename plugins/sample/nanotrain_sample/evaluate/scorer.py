"""Scores token sequences on the ranks of a run: the logarithms of their probabilities.

Shapes: B sequences of a pass, S their tokens but the last, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import attrs
import torch

from nanotrain_core.api import NanotrainError
from nanotrain_core.api.torch import Batch, Executor, Run
from nanotrain_sample.evaluate.windows import Request
from nanotrain_sample.replica import Replica, rounds

#: Numbers of logits that a pass makes at most, unless one sequence has more: 512 MiB in float32.
LOGITS = 2**27


@attrs.define(frozen=True)
class Score:
    """Of the scored tokens of one request."""

    log_probability: float
    """Sum of natural logarithms."""
    greedy: bool
    """Whether each was the likeliest token."""


class Scorer:
    """Scores requests with the model of a run, which has no optimizer."""

    def __init__(self, run: Run, vocab: int, *, pads: bool = True) -> None:
        """Make groups. Collective over the run.

        Args:
            run: composed with ``trains=False``.
            vocab: columns of the model's logits.
            pads: whether sequences of different lengths share a pass. False for a model whose logits depend
                on tokens behind, as with RoPE that is scaled by the length.
        """
        self.pads = pads
        self.mesh = run.mesh
        self.executor = Executor(run.stages, run.gradients, run.mesh, run.owners, run.passes)
        self.final = len(run.owners) - 1
        self.replica = Replica(run)
        self.tokens = max(1, LOGITS // vocab)
        """Of a pass, at most."""

    def score(self, requests: Sequence[Request]) -> list[Score]:
        """Return a score for each request, on every rank. All ranks give the same ones. Collective."""
        batches = list(self._batches(requests))
        mine: dict[int, Score] = {}
        for numbers in rounds(len(batches), self.replica.count):
            number = numbers[self.replica.index]
            again = number == numbers[0] and self.replica.index > 0
            if not again or self.replica.passes_together:
                mine.update(self._pass(batches[number], requests))
        everyone: dict[int, Score] = {}
        for scores in self.mesh.gather(mine):
            everyone.update(scores)
        return [everyone[number] for number in range(len(requests))]

    def _batches(self, requests: Sequence[Request]) -> Iterator[list[int]]:
        """Yield numbers of requests whose sequences pass through the model together, the longest first."""
        order = sorted(range(len(requests)), key=lambda number: -len(requests[number].tokens))
        batch: list[int] = []
        for number in order:
            longest = len(requests[(batch or [number])[0]].tokens) - 1
            fits = self.pads or len(requests[number].tokens) - 1 == longest
            if batch and not (fits and longest * (len(batch) + 1) <= self.tokens):
                yield batch
                batch = []
            batch.append(number)
        if batch:
            yield batch

    @torch.no_grad()
    def _pass(self, numbers: Sequence[int], requests: Sequence[Request]) -> dict[int, Score]:
        """Return the scores of one batch, on the rank that speaks for its replica; elsewhere none.

        Shorter sequences are filled up behind their end, where no token of theirs looks.
        """
        sequences = [torch.tensor(requests[number].tokens, device=self.mesh.device) for number in numbers]
        tokens_BS = torch.nn.utils.rnn.pad_sequence([each[:-1] for each in sequences], batch_first=True)
        outputs = self.executor.through(Batch(tokens_BS))
        if self.mesh.rank != self.replica.speaker:
            return {}
        logits_BSV = outputs[self.final].value
        assert logits_BSV is not None
        found = {}
        for row, (number, sequence) in enumerate(zip(numbers, sequences, strict=True)):
            end, scored = len(sequence) - 1, requests[number].scored
            logits_SV, targets_S = logits_BSV[row, end - scored : end], sequence[-scored:]
            wide_SV = logits_SV.to(torch.promote_types(logits_SV.dtype, torch.float32))
            logs_S = wide_SV.log_softmax(-1).gather(-1, targets_S.unsqueeze(-1)).double()
            total = logs_S.sum().item()
            if math.isnan(total):
                raise NanotrainError(
                    "the model's logits are not all finite numbers: its weights have diverged"
                )
            found[number] = Score(total, bool((wide_SV.argmax(-1) == targets_S).all()))
        return found
