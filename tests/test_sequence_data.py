"""``SequenceData`` asks a subclass for as little as it can."""

import numpy as np
import torch

from nanotrain_core.api.torch import IGNORE, SequenceData, Shard

LENGTH = 4


class Stacked(SequenceData):
    """Sequence n counts from n, in the dtype of a file of tokens; none at all cannot be stacked."""

    def open(self, *, length, seed):
        self.prepare(length=length, seed=seed, train=6, validation=5, fingerprint="counting")

    def read_sequences(self, numbers, *, validation):
        return np.stack([np.arange(n, n + self.length + 1) for n in numbers]).astype(np.uint16)


def opened(**settings):
    data = Stacked()
    for name, value in settings.items():
        setattr(data, name, value)
    data.open(length=LENGTH, seed=1)
    return data


def test_a_shard_without_rows_of_the_last_validation_batch_reads_nothing():
    """np.stack refuses an empty list, and so did the evaluation of a run on as many ranks."""
    whole = opened().validation_batch(1, 4, Shard(0, 1))
    for settings in ({}, {"document_end": 2}):
        shards = [opened(**settings).validation_batch(1, 4, Shard(i, 4)) for i in range(4)]
        assert torch.equal(torch.cat([shard.targets for shard in shards]), whole.targets)
        assert [bool((shard.targets == IGNORE).all()) for shard in shards] == [False, True, True, True]


def test_tokens_of_any_integers_become_int64():
    """An embedding refuses uint16, the dtype that token files are written in."""
    batch = opened().train_batch(2, Shard(0, 1))
    assert (batch.tokens.dtype, batch.targets.dtype) == (torch.int64, torch.int64)
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    assert torch.equal(batch.targets, batch.tokens + 1)
