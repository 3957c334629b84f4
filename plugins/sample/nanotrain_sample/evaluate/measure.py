"""What is measured: the validation split of a run, and files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import torch

from nanotrain_core.api import DataError, NanotrainError, Recipe
from nanotrain_core.api.text import TextCodec
from nanotrain_core.api.torch import ChangesLength, Data, Executor, Run
from nanotrain_sample.evaluate.scorer import Score
from nanotrain_sample.evaluate.windows import Request, windows


@attrs.define(frozen=True, kw_only=True)
class Measured:
    """How well a model predicts one text."""

    name: str
    tokens: int
    """That were predicted; 0 of a model without a next-token loss."""
    loss: float
    """Mean negative logarithm of a token's probability; of such a model its loss in training."""
    bits_per_byte: float | None
    """Of the text; None where its bytes are not known."""
    losses: Mapping[str, float] = attrs.field(factory=dict)
    """Unweighted mean of each term of the model's loss, by name: of the validation split alone."""

    @property
    def perplexity(self) -> float | None:
        """Return e to the loss, infinity where that is too large for a number; None without predictions."""
        if not self.tokens:
            return None
        return math.exp(self.loss) if self.loss < 700 else math.inf


def check_split(data: Data, recipe: Recipe, trained_on: str | None, lengths: Sequence[int]) -> None:
    """Refuse data of which another part may be held out: the run may have trained on it.

    Args:
        data: opened.
        recipe: what it was opened by, which has no phases.
        trained_on: fingerprint of the run's data.
        lengths: of the run's sequences, in all its phases.

    Raises:
        DataError: the data's fingerprint is another one.
    """
    if data.meta().get("fingerprint") != trained_on and len(lengths) > 1 and isinstance(data, ChangesLength):
        # The run had announced its lengths, which the fingerprint tells.
        data.expect_lengths(lengths)
        data.open(length=recipe.batch.length, seed=recipe.run.seed)
    found = data.meta().get("fingerprint")
    if found != trained_on:
        raise DataError(
            "the run trained on other data, or held out another part of it, so this validation split may be "
            "what it trained on: expected the run's files, and no --set of data, batch.length or run.seed; "
            f"--text scores other files\n  checkpoint:      {trained_on}\n  this evaluation: {found}"
        )


@torch.no_grad()
def validation(run: Run) -> Measured:
    """Return what an evaluation of the run itself reports, on any layout. Collective.

    Raises:
        NanotrainError: the recipe holds nothing out.
    """
    executor = Executor(run.stages, run.gradients, run.mesh, run.owners, run.passes)
    sums = run.validation_sums()
    for batch, positions in run.feed.validation():
        sums.add(executor.forward(batch), run.feed.counts(batch), positions)
    found = sums.total()
    if found is None:
        raise NanotrainError(
            "the run's recipe evaluates nothing: --set evaluation.sequences=N, or name files with --text"
        )
    return Measured(
        name="validation",
        tokens=found.tokens,
        loss=found.loss,
        bits_per_byte=found.bits_per_byte(run.feed.bytes_per_token),
        losses=found.losses,
    )


@attrs.define(frozen=True)
class Text:
    """A file to be scored."""

    name: str
    bytes: int
    """Of the tokens that are scored."""
    requests: tuple[Request, ...]

    def measured(self, scores: Sequence[Score]) -> Measured:
        """Return the means of its requests' scores."""
        total = -math.fsum(score.log_probability for score in scores)
        tokens = sum(request.scored for request in self.requests)
        bits = total / math.log(2) / self.bytes
        return Measured(name=self.name, tokens=tokens, loss=total / tokens, bits_per_byte=bits)


def read_text(path: Path, codec: TextCodec, length: int, stride: int, prefix: Sequence[int] = ()) -> Text:
    """Return a file as requests, after the tokens of ``prefix`` or what ends documents.

    Raises:
        DataError: it cannot be read, is not UTF-8, or has no two tokens.
    """
    try:
        content = path.read_bytes()
        text = content.decode()
    except OSError as problem:
        raise DataError(f"--text {path}: {problem.strerror}") from None
    except UnicodeDecodeError as problem:
        raise DataError(f"--text {path}: no UTF-8 at byte {problem.start}; expected a text") from None
    tokens = codec.encode(text)
    start = prefix or ([] if codec.separator is None else [codec.separator])
    found = tuple(windows(tokens, length, stride, start))
    if not found:
        raise DataError(f"--text {path}: there is nothing to predict in it; expected a text of some tokens")
    unscored = "" if start else codec.decode(tokens[:1])
    # A part of a character, decoded as U+FFFD, counts with the token that completes it.
    return Text(str(path), len(content) - len(unscored.rstrip("\ufffd").encode()), found)
