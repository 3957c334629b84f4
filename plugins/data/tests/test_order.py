"""Blends and permutations that take no memory, against what they are by definition."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nanotrain_data.blend import MOST, Blend, whole_weights
from nanotrain_data.order import BlendedOrder
from nanotrain_data.permutation import Permutation

WEIGHTS = st.lists(st.integers(1, 10**6), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(weights=WEIGHTS, first=st.sampled_from([0, 10**6, 10**12]))
@example(weights=[9, 1, 1, 1, 1, 1], first=0)
@example(weights=[MOST // 2, MOST // 2 - 1, 1], first=10**15)
def test_each_prefix_of_a_blend_has_its_share_of_each_source(weights, first):
    blend = Blend(weights)
    samples = np.arange(first, first + 300)
    sources, before = blend.at(samples)
    had = blend.counts(first)
    for sample, source, index in zip(samples.tolist(), sources.tolist(), before.tolist(), strict=True):
        assert index == had[source]  # of a source one sample after the other, none twice
        had[source] += 1
        if sample % 37 == 0:
            assert had == blend.counts(sample + 1)
        total = sum(weights)
        for count, weight, bound in zip(had, weights, blend.bounds(), strict=True):
            assert abs(count * total - weight * (sample + 1)) <= bound * total


@settings(max_examples=50, deadline=None)
@given(one=st.integers(1, 10**6), other=st.integers(1, 10**6))
def test_of_two_sources_each_has_its_share_rounded_to_nearest(one, other):
    blend = Blend([one, other])
    for samples in range(200):
        for count, weight in zip(blend.counts(samples), (one, other), strict=True):
            assert abs(2 * count * (one + other) - 2 * weight * samples) <= one + other


def test_of_usual_blends_no_source_is_off_by_more_than_a_sample_or_so():
    for weights in ([0.7, 0.2, 0.1], [0.5, 0.3, 0.1, 0.05, 0.05], [1] * 5, [2.0**-n for n in range(20)]):
        assert max(Blend(whole_weights(weights)).bounds()) < 1.11


def megatron(weights, samples):
    """Yield the source of each sample as ``build_blending_indices`` of Megatron-LM's helpers.cpp does."""
    shares = np.array(weights) / sum(weights)
    had = np.zeros(len(weights))
    for sample in range(samples):
        source = int(np.argmax(shares * max(sample, 1.0) - had))
        had[source] += 1
        yield source


@pytest.mark.parametrize("weights", [[1, 1], [3, 1], [5, 3, 1, 1], [1] * 7, [0.9, 0.05, 0.03, 0.02]])
def test_a_blend_keeps_to_its_shares_as_closely_as_megatrons_table(weights):
    samples, shares = 1000, np.array(weights) / sum(weights)
    theirs = np.cumsum(np.eye(len(weights))[[*megatron(weights, samples)]], 0)
    sources, _ = Blend(whole_weights(weights)).at(np.arange(samples))
    ours = np.cumsum(np.eye(len(weights))[sources], 0)
    wanted = np.outer(np.arange(1, samples + 1), shares)
    assert np.abs(ours - wanted).max() <= max(1.0, np.abs(theirs - wanted).max())


def test_weights_are_taken_as_they_are_written():
    assert whole_weights([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert whole_weights([3, 1]) == [3, 1]
    assert whole_weights([1e-12, 1.0]) == [1, MOST]  # not less than a sample in 2^30


@pytest.mark.parametrize("count", [*range(1, 70), 1000, 4096, 4097])
def test_a_permutation_has_every_number_once(count):
    found = Permutation(count, "key").at(np.arange(count))
    assert sorted(found.tolist()) == [*range(count)]


def test_a_permutation_is_the_same_wherever_one_looks():
    whole = Permutation(1000, "key").at(np.arange(1000))
    places = np.random.default_rng(0).integers(0, 1000, 300)
    assert (Permutation(1000, "key").at(places) == whole[places]).all()


PINNED = {
    10: [4, 1, 7, 9, 8, 3, 6, 5, 0, 2],
    10**12: [382819674309, 710015752650, 315926650327],
}


def test_permutations_are_what_they_were():
    """A run that is resumed with a later version goes on in the same order."""
    assert Permutation(10, "1/0/0").at(np.arange(10)).tolist() == PINNED[10]
    assert Permutation(10**12, "1/0/0").at(np.arange(3)).tolist() == PINNED[10**12]


def test_permutations_are_random():
    """Over keys, each number stands at each place about as often: chi-square, and of pairs of neighbors."""
    keys, count = 4000, 7
    found = np.array([Permutation(count, f"key {key}").at(np.arange(count)) for key in range(keys)])
    for place in range(count):
        times = np.bincount(found[:, place], minlength=count)
        assert ((times - keys / count) ** 2 / (keys / count)).sum() < 22.5  # 99.9% of chi-square, 6 degrees
    pairs = Counter(map(tuple, found[:, :2].tolist()))
    expected = keys / (count * (count - 1))
    assert sum((pairs[p] - expected) ** 2 / expected for p in pairs) < 74.7  # 99.9%, 41 degrees
    large = Permutation(10**9, "key").at(np.arange(10_000))
    assert len(set(large.tolist())) == 10_000
    assert abs(np.corrcoef(large, np.arange(10_000))[0, 1]) < 0.04
    assert abs(large.mean() / 10**9 - 0.5) < 0.012


def test_every_source_is_read_whole_before_it_is_read_again():
    order = BlendedOrder(Blend([3, 1]), [12, 5], seed=1)
    numbers = order.at(range(400))
    for first, count in ((0, 12), (12, 5)):
        mine = [number - first for number in numbers.tolist() if first <= number < first + count]
        epochs = [mine[at : at + count] for at in range(0, len(mine) - count, count)]
        assert all(sorted(epoch) == [*range(count)] for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > len(epochs) // 2


def test_a_permutation_of_nothing_is_refused():
    """It would look for a number below 0 without end."""
    assert not Permutation(0, "key").at(np.zeros(0, np.int64)).size
    with pytest.raises(ValueError, match="no numbers"):
        Permutation(0, "key").at(np.zeros(1, np.int64))
