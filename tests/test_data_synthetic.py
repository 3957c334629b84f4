"""The data component ``synthetic``: a Markov chain with a known entropy."""

import attrs
import numpy as np
import pytest
import torch

from nanotrain_core.batch import IGNORE, Shard
from nanotrain_core.builtin.configs import SyntheticConfig
from nanotrain_core.data.synthetic import MarkovChain, Synthetic
from nanotrain_core.errors import DataError

WHOLE = Shard()


def opened(*, length=16, seed=7, **options):
    data = Synthetic(SyntheticConfig(**{"vocab": 12, "branching": 3, "sequences": 400} | options))
    data.open(length=length, seed=seed)
    return data


def transitions(chain):
    matrix = np.zeros((len(chain.successors),) * 2)
    for token, (after, probability) in enumerate(zip(chain.successors, chain.probabilities, strict=True)):
        matrix[token, after] += probability
    return matrix


@pytest.mark.parametrize(("vocab", "branching"), [(2, 2), (12, 3), (64, 4), (5, 1), (9, 9)])
def test_each_token_is_followed_by_as_many_different_ones_as_asked(vocab, branching):
    matrix = transitions(MarkovChain(vocab, branching, seed=1))
    assert ((matrix > 0).sum(axis=1) == branching).all()
    np.testing.assert_allclose(matrix.sum(axis=1), 1.0, atol=1e-14)


def test_a_chain_or_an_order_that_no_memory_holds_is_refused():
    """Such recipes passed `check`, and filled the host's memory for minutes."""
    with pytest.raises(ValueError, match=r"vocab x branching = 1,073,741,824; expected at most 134,217,728"):
        SyntheticConfig(vocab=2**20, branching=2**10)
    with pytest.raises(ValueError, match=r"expected an integer from 1 to 134,217,728"):
        SyntheticConfig(vocab=64, sequences=2**31 - 1)


@pytest.mark.parametrize(("vocab", "branching"), [(2, 2), (12, 3), (64, 4), (5, 1)])
def test_the_stationary_distribution_is_the_left_eigenvector_of_one(vocab, branching):
    chain = MarkovChain(vocab, branching, seed=1)
    matrix = transitions(chain)
    # Solve pi (P - 1) = 0 and sum(pi) = 1 directly: it has one solution, as every token can be reached.
    equations = np.vstack((matrix.T - np.eye(vocab), np.ones(vocab)))
    expected = np.linalg.lstsq(equations, np.array([0.0] * vocab + [1.0]), rcond=None)[0]
    np.testing.assert_allclose(chain.stationary, expected, atol=1e-12)


def test_the_entropy_is_that_of_the_transitions():
    chain = MarkovChain(12, 3, seed=1)
    expected = 0.0
    for share, row in zip(chain.stationary, transitions(chain), strict=True):
        expected -= share * sum(p * np.log(p) for p in row if p > 0)
    assert chain.entropy == pytest.approx(expected, abs=1e-12)
    assert MarkovChain(5, 1, seed=1).entropy == 0.0


def test_generated_sequences_have_the_entropy_and_the_shares_of_the_chain():
    data = opened(length=200)
    batch = data.train_batch(400, WHOLE)
    matrix = transitions(data.chain)
    losses = -np.log(matrix[batch.tokens.numpy(), batch.targets.numpy()])
    # 80,000 draws: the standard error of the mean is about 0.003.
    assert losses.mean() == pytest.approx(data.entropy, abs=0.015)
    assert np.isfinite(losses).all()
    shares = np.bincount(batch.tokens.numpy().ravel(), minlength=12) / batch.tokens.numel()
    np.testing.assert_allclose(shares, data.chain.stationary, atol=0.01)


def test_sequences_are_stationary_from_the_first_token():
    data = opened(length=2, sequences=20_000)
    first = data.train_batch(20_000, WHOLE).tokens[:, 0].numpy()
    np.testing.assert_allclose(np.bincount(first, minlength=12) / 20_000, data.chain.stationary, atol=0.012)


def test_the_description_tells_the_entropy():
    data = opened()
    assert data.describe() == f"Markov chain, 12 tokens, entropy {data.entropy:.3f} nats (ln 12 = 2.485)"


def test_an_epoch_has_every_sequence_once():
    data = opened(length=64)
    first, second = (data.train_batch(400, WHOLE).tokens.tolist() for _ in range(2))
    assert sorted(first) == sorted(second)
    assert first != second
    assert len({tuple(row) for row in first}) == 400


def test_validation_sequences_are_no_training_sequences():
    data = opened(length=40, validation_sequences=100)
    train = {tuple(row) for row in data.train_batch(400, WHOLE).tokens.tolist()}
    held = {tuple(row) for row in data.validation_batch(0, 100, WHOLE).tokens.tolist()}
    assert len(held) == 100
    assert train.isdisjoint(held)


@pytest.mark.parametrize("count", [2, 4])
def test_the_global_batch_is_the_same_for_every_number_of_ranks(count):
    whole, ranks = opened(), [opened() for _ in range(count)]
    for _ in range(2):
        parts = [data.train_batch(8, Shard(i, count)).targets for i, data in enumerate(ranks)]
        assert torch.equal(torch.cat(parts), whole.train_batch(8, WHOLE).targets)


def test_a_saved_position_goes_on_with_the_same_batches():
    data, resumed = opened(), opened()
    data.train_batch(24, WHOLE)
    resumed.load_meta(data.meta())
    assert torch.equal(resumed.train_batch(8, WHOLE).tokens, data.train_batch(8, WHOLE).tokens)


@pytest.mark.parametrize(
    "options", [{"seed": 8}, {"vocab": 13}, {"branching": 2}, {"sequences": 399}, {"length": 17}]
)
def test_a_position_in_another_chain_is_refused(options):
    with pytest.raises(DataError, match="other data"):
        opened(**options).load_meta(opened().meta())


def test_the_last_validation_batch_is_padded():
    data = opened(validation_sequences=10)
    batch = data.validation_batch(1, 8, WHOLE)
    assert batch.tokens.shape == (8, 16)
    assert (batch.targets[:2] != IGNORE).all()
    assert (batch.targets[2:] == IGNORE).all()
    assert data.validation_batch(2, 8, WHOLE) is None


def test_more_sequences_than_an_epoch_are_refused():
    with pytest.raises(DataError, match="takes 401 sequences of 16 tokens, but the training data has 400"):
        opened().train_batch(401, WHOLE)


def test_tokens_decode_to_their_numbers_and_no_text_encodes():
    assert opened().decode([3, 11]) == "3 11"
    with pytest.raises(DataError, match="no text"):
        opened().encode("prompt")


def test_more_successors_than_tokens_are_refused():
    with pytest.raises(ValueError, match="5 different tokens cannot follow each of 4"):
        attrs.validate(SyntheticConfig(vocab=4, branching=5))
