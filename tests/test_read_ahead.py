"""``SequenceData.read_ahead``: a thread reads the next batches, which changes no batch and no position."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanotrain_core.batch import Shard
from nanotrain_core.data.order import SequenceData
from nanotrain_core.errors import DataError

TOKENS = 24 * 50 + 1


class Numbers(SequenceData):
    """Token i is i, which tells where a batch was read."""

    def __init__(self, read_ahead, bad=frozenset()):
        self.read_ahead, self.bad, self.readers = read_ahead, bad, []

    def set_length(self, length):
        self.prepare_length(length, train=(TOKENS - 1) // length, validation=2)

    def open(self, length=8):
        self.prepare(length=length, seed=1, train=(TOKENS - 1) // length, validation=2, fingerprint="numbers")
        return self

    def read_sequences(self, numbers, *, validation):
        self.readers.append(threading.current_thread().name)
        if self.bad & set(numbers.tolist()):
            raise DataError(f"bad sequence among {numbers.tolist()}")
        return numbers[:, None] * self.length + np.arange(self.length + 1)


ACTIONS = st.one_of(
    st.tuples(st.just("take"), st.integers(1, 9), st.sampled_from([Shard(), Shard(0, 2), Shard(2, 3)])),
    st.tuples(st.just("length"), st.sampled_from([4, 8, 24])),
    st.tuples(st.just("validate")),
    st.tuples(st.just("skip"), st.integers(1, 9)),
    st.tuples(st.just("save")),
    st.tuples(st.just("load")),
)


@settings(max_examples=60, deadline=None)
@given(depth=st.integers(1, 4), actions=st.lists(ACTIONS, max_size=12))
def test_batches_and_positions_are_those_of_data_that_reads_when_asked(depth, actions):
    both = [Numbers(ahead).open() for ahead in (0, depth)]
    saved = [data.meta() for data in both]
    for what, *details in actions:
        if what == "take":
            plain, ahead = (data.train_batch(*details) for data in both)
            assert plain.tokens.tolist() == ahead.tokens.tolist()
            assert plain.targets.tolist() == ahead.targets.tolist()
        elif what == "validate":
            plain, ahead = (data.validation_batch(0, 2, Shard()) for data in both)
            assert plain.tokens.tolist() == ahead.tokens.tolist()
        elif what == "save":
            saved = [data.meta() for data in both]
        else:
            for data, meta in zip(both, saved, strict=True):
                does = {"length": data.set_length, "skip": data.skip, "load": data.load_meta}
                does[what](*details, *[meta] * (what == "load"))
        plain, ahead = (data.meta() for data in both)
        assert plain == ahead


def test_only_the_first_batch_is_read_by_who_asks():
    data = Numbers(2).open()
    for _ in range(5):
        data.train_batch(4, Shard())
    data._ahead.clear()
    assert data.readers[0] == threading.current_thread().name
    assert len(data.readers) >= 5
    assert all(name.startswith("nanotrain-data") for name in data.readers[1:])


def test_a_batch_that_cannot_be_read_is_told_when_it_is_asked_for():
    data = Numbers(0).open()
    third = [data.train_batch(1, Shard()).tokens[0, 0].item() // 8 for _ in range(3)][-1]
    bad = Numbers(3, bad={third}).open()
    bad.train_batch(1, Shard())
    bad.train_batch(1, Shard())
    for _ in range(2):  # and whenever it is asked for again
        with pytest.raises(DataError, match="bad sequence"):
            bad.train_batch(1, Shard())
