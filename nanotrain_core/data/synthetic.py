"""A random Markov chain: data that a model can learn, down to an exactly known entropy.

With uniformly random tokens, a common substitute, a model learns nothing: the best loss is the initial one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nanotrain_core.builtin.configs import SyntheticConfig
from nanotrain_core.data.order import Integers, SequenceData
from nanotrain_core.errors import DataError
from nanotrain_core.run.random_state import stream_seed

Floats = npt.NDArray[np.float64]


class MarkovChain:
    """Each of ``vocab`` tokens is followed by one of ``branching`` others, with random probabilities."""

    successors: Integers
    """[vocab, branching]. The first successor of a token is the next token, so all can be reached."""
    probabilities: Floats
    """[vocab, branching], rows sum to 1."""
    stationary: Floats
    """[vocab]: how often each token occurs. The first token of a sequence is drawn from it."""
    entropy: float
    """Entropy of the next token given the current one, in nats: the lowest loss any model can reach."""

    def __init__(self, vocab: int, branching: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        others = [random.choice(vocab - 1, branching - 1, replace=False) + 1 for _ in range(vocab)]
        offsets = np.hstack((np.zeros((vocab, 1), np.int64), np.array(others, np.int64)))
        self.successors = (np.arange(vocab)[:, None] + 1 + offsets) % vocab
        self.probabilities = random.dirichlet(np.ones(branching), vocab)
        self.stationary = self._stationary()
        logs = np.log(self.probabilities, where=self.probabilities > 0, out=np.zeros_like(self.probabilities))
        self.entropy = -float(self.stationary @ (self.probabilities * logs).sum(axis=1))
        self._thresholds = self.probabilities.cumsum(axis=1)[:, :-1]

    def _stationary(self) -> Floats:
        """Power iteration on the lazy chain, which has the same fixed point and no period."""
        vocab = len(self.successors)
        share: Floats = np.full(vocab, 1.0 / vocab)
        for _ in range(100_000):
            flow = (share[:, None] * self.probabilities).ravel()
            after = 0.5 * share + 0.5 * np.bincount(self.successors.ravel(), flow, minlength=vocab)
            if np.abs(after - share).sum() < 1e-15:
                break
            share = after
        normalized: Floats = share / share.sum()
        return normalized

    def walk(self, uniform: Floats) -> Integers:
        """Return the tokens [N, S] selected by uniform random numbers [N, S], one walk per row."""
        tokens = np.empty(uniform.shape, np.int64)
        first = np.searchsorted(self.stationary.cumsum(), uniform[:, 0], side="right")
        tokens[:, 0] = token = np.minimum(first, len(self.stationary) - 1)
        for step in range(1, uniform.shape[1]):
            choice = (uniform[:, step, None] >= self._thresholds[token]).sum(axis=1)
            tokens[:, step] = token = self.successors[token, choice]
        return tokens


class Synthetic(SequenceData):
    """Walks of a Markov chain, each drawn from (seed, split, number). The chain depends on the seed alone."""

    bytes_per_token = None
    position_in_tokens = False

    def __init__(self, config: SyntheticConfig) -> None:
        self.config = config
        self.vocab_size = config.vocab

    def open(self, *, length: int, seed: int) -> None:
        """Create the chain."""
        config = self.config
        self.seed = seed
        self.chain = MarkovChain(config.vocab, config.branching, stream_seed(seed, "data/chain"))
        self.prepare(
            length=length,
            seed=seed,
            train=config.sequences,
            validation=config.validation_sequences,
            fingerprint=f"Markov chain, {config.vocab} tokens, {config.branching} successors, "
            f"{config.sequences} + {config.validation_sequences} sequences",
        )

    def set_length(self, length: int) -> None:
        """Walk ``length`` tokens: the n-th walk continues the shorter one with that number."""
        config = self.config
        self.prepare_length(length, train=config.sequences, validation=config.validation_sequences)

    @property
    def entropy(self) -> float:
        """The lowest mean loss a model can reach, in nats per token."""
        return self.chain.entropy

    def describe(self) -> str:
        """Describe in one line what a model can learn here."""
        vocab = self.config.vocab
        uniform = f"ln {vocab} = {math.log(vocab):.3f}"
        return f"Markov chain, {vocab} tokens, entropy {self.entropy:.3f} nats ({uniform})"

    def read_sequences(self, numbers: Integers, *, validation: bool) -> Integers:
        """Return the walks with these numbers."""
        split = "data/walk/validation" if validation else "data/walk/train"
        uniform = np.empty((len(numbers), self.length + 1))
        for row, number in enumerate(numbers):
            np.random.default_rng(stream_seed(self.seed, split, int(number))).random(out=uniform[row])
        return self.chain.walk(uniform)

    def encode(self, text: str) -> list[int]:
        """Refuse: its tokens are not text.

        Raises:
            DataError: always.
        """
        raise DataError("data 'synthetic' has tokens but no text: it cannot encode a prompt")

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the numbers of the tokens as text."""
        return " ".join(map(str, tokens))
