"""The data component ``text``, and the order of sequences that it shares with ``synthetic``."""

import numpy as np
import pytest
import torch
from opened_text import WHOLE, opened, refusal, validation

from nanotrain_core.batch import IGNORE, Shard
from nanotrain_core.builtin.configs import TextConfig
from nanotrain_core.data.documents import Source
from nanotrain_core.data.held_out import Split, held_out
from nanotrain_core.data.text import Text
from nanotrain_core.errors import DataError


@pytest.fixture
def corpus(tmp_path):
    """2,500 bytes in two files, each four bytes of it different from every other four."""
    text = np.random.default_rng(0).permutation(625).astype(">u4").tobytes()
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    (folder / "one.txt").write_bytes(text[:1000])
    (folder / "sub" / "two.txt").write_bytes(text[1000:])
    return folder


def rows(batch):
    """Each sequence of a batch with its last target, as one tuple of length + 1 tokens."""
    return [
        (*tokens, last)
        for tokens, last in zip(batch.tokens.tolist(), batch.targets[:, -1].tolist(), strict=True)
    ]


def epoch(data):
    return [rows(data.train_batch(1, WHOLE))[0] for _ in range(data.train)]


# --- reading ----------------------------------------------------------------------------------


def test_without_a_path_the_text_is_the_standard_library_of_python():
    data = Text(TextConfig())
    data.open(length=256, seed=0)
    text = data.decode(data.tokens.tolist())
    assert "class OrderedDict(dict):" in text
    assert "site-packages" not in text.splitlines()[0]
    assert len(data.tokens) > 5_000_000
    assert data.bytes_per_token == 1.0


def test_files_are_joined_in_sorted_order_with_a_separator(tmp_path):
    (tmp_path / "b").mkdir()
    for name, text in {"b/x.md": "two", "a.txt": "one", "c.py": "three", "d.rst": "no"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / ".hidden.txt").write_text("no")
    (tmp_path / "empty.txt").write_text("")
    assert opened(tmp_path, length=2).tokens.tobytes() == b"one\0two\0three\0"


def test_folders_that_are_links_are_read_once_each_and_loops_end(tmp_path):
    corpus, other = tmp_path / "corpus", tmp_path / "other"
    (corpus / "real").mkdir(parents=True)
    (other / "deep").mkdir(parents=True)
    for path, text in (
        (corpus / "real" / "x.txt", "one"),
        (other / "y.txt", "two"),
        (other / "deep" / "z.txt", "three"),
    ):
        path.write_text(text)
    for name, target in {
        "a": corpus / "real",  # which keeps its own name
        "linked": other,
        "twice": other,
        "real/loop": corpus,
        ".hidden": tmp_path,
        "gone": tmp_path / "none",
    }.items():
        (corpus / name).symlink_to(target)
    (other / "back").symlink_to(corpus)
    files = Source(corpus, (".txt",)).files()
    assert [str(path.relative_to(corpus)) for path in files] == [
        "linked/deep/z.txt",
        "linked/y.txt",
        "real/x.txt",
    ]
    assert opened(corpus, length=2).tokens.tobytes() == b"three\0two\0one\0"


def test_several_paths_are_read_in_their_given_order(corpus):
    single = corpus / "sub" / "two.txt"
    data = opened(single, corpus / "one.txt")
    assert data.tokens.tobytes() == single.read_bytes() + b"\0" + (corpus / "one.txt").read_bytes() + b"\0"


def test_encode_and_decode_are_inverse(corpus):
    data = opened(corpus)
    assert data.decode(data.encode("naïve ✓")) == "naïve ✓"
    assert data.decode([0x41, 0xFF, 300, 0x42]) == "A\ufffd\ufffdB"


# --- sequences --------------------------------------------------------------------------------


def test_targets_are_the_tokens_one_place_on(corpus):
    data = opened(corpus)
    batch = data.train_batch(16, WHOLE)
    assert batch.tokens.shape == batch.targets.shape == (16, 8)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    text = data.tokens.tobytes()
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        assert tokens[1:] == targets[:-1]
        assert bytes([*tokens, targets[-1]]) in text


def test_an_epoch_has_every_training_sequence_once_and_the_next_another_order(corpus):
    data = opened(corpus)
    first, second = epoch(data), epoch(data)
    assert len(set(first)) == len(first) == data.train
    assert set(first) == set(second)
    assert first != second
    assert first != sorted(first)


def test_training_and_validation_are_disjoint_and_together_everything(corpus):
    data = opened(corpus, validation_fraction=0.2)
    train = set(epoch(data))
    held = {row for batch in validation(data) for row in rows(batch) if IGNORE not in row}
    everything = {tuple(data.tokens[i * 8 : i * 8 + 9].tolist()) for i in range((len(data.tokens) - 1) // 8)}
    assert train.isdisjoint(held)
    assert train | held == everything
    assert len(held) == data.validation == round(0.2 * len(everything))


def test_held_out_pieces_are_found_without_a_table():
    """What is trained on is all that is not held out, in order, for every number of pieces."""
    for count in range(2, 60):
        for held in range(count):
            split = Split(count, held)
            out = split.pieces(np.arange(held), validation=True) if held else np.empty(0, np.int64)
            kept = split.pieces(np.arange(split.train), validation=False)
            assert kept.tolist() == np.setdiff1d(np.arange(count), out).tolist()


@pytest.mark.parametrize(("count", "fraction"), [(29_296_875_000, 0.01), (10**11, 0.1)])
def test_held_out_pieces_of_corpora_too_large_for_64_bits(count, fraction):
    """15 trillion tokens in sequences of 512 are 29 billion pieces; Python's integers are the truth."""
    held = held_out(count, fraction)
    split, near = Split(count, held), range(held - 1000, held)
    out = split.pieces(np.array(near), validation=True)
    assert out.dtype == np.int64
    assert out.tolist() == [(2 * j + 1) * count // (2 * held) for j in near]
    kept = split.pieces(np.arange(split.train - 5000, split.train), validation=False)
    assert kept.tolist() == [i for i in range(int(kept[0]), count) if i not in {*out.tolist()}]


@pytest.mark.parametrize(
    ("count", "fraction", "expected"), [(100, 0.05, 5), (7, 0.01, 1), (1, 0.5, 0), (9, 0.0, 0)]
)
def test_held_out_sequences_are_spread_evenly(count, fraction, expected):
    split = Split(count, held_out(count, fraction))
    assert split.held == expected
    train = split.pieces(np.arange(split.train), validation=False)
    held = split.pieces(np.arange(split.held), validation=True)
    assert sorted(train) == train.tolist()
    assert sorted([*train, *held]) == list(range(count))
    assert all(np.diff(held) == count // max(expected, 1))


def test_a_batch_may_reach_into_the_next_epoch(corpus):
    one_by_one, at_once = opened(corpus), opened(corpus)
    size = at_once.train - 1
    expected = epoch(one_by_one) + epoch(one_by_one)
    batches = rows(at_once.train_batch(size, WHOLE)) + rows(at_once.train_batch(size, WHOLE))
    assert batches == expected[: 2 * size]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_global_batch_is_the_same_for_every_number_of_ranks(corpus, count):
    whole = opened(corpus)
    ranks = [opened(corpus) for _ in range(count)]
    for _ in range(3):
        parts = [data.train_batch(8, Shard(i, count)) for i, data in enumerate(ranks)]
        batch = whole.train_batch(8, WHOLE)
        assert torch.equal(torch.cat([part.tokens for part in parts]), batch.tokens)
        assert torch.equal(torch.cat([part.targets for part in parts]), batch.targets)
    for index in range(2):
        held = [data.validation_batch(index, 8, Shard(i, count)) for i, data in enumerate(ranks)]
        expected = whole.validation_batch(index, 8, WHOLE)
        assert torch.equal(torch.cat([part.targets for part in held]), expected.targets)


def test_the_seed_decides_the_order(corpus):
    first, same, other = (rows(opened(corpus, seed=s).train_batch(16, WHOLE)) for s in (3, 3, 4))
    assert first == same
    assert first != other


def test_shares_of_a_batch_that_does_not_divide_over_ranks_differ_by_one(corpus):
    parts = [opened(corpus).train_batch(6, Shard(index, 4)) for index in range(4)]
    assert [part.sequences for part in parts] == [1, 2, 1, 2]
    whole = opened(corpus).train_batch(6, WHOLE)
    assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)


# --- validation -------------------------------------------------------------------------------


def test_the_last_validation_batch_is_padded_with_ignored_rows(corpus):
    data = opened(corpus)
    *full, last = validation(data, sequences=6)
    assert all((batch.targets != IGNORE).all() for batch in full)
    real = data.validation - 6 * len(full)
    assert 0 < real < 6
    assert last.tokens.shape == last.targets.shape == (6, 8)
    assert (last.targets[:real] != IGNORE).all()
    assert (last.targets[real:] == IGNORE).all()
    assert (last.tokens[real:] == 0).all()


def test_a_shard_with_nothing_but_padding_still_gets_its_rows(corpus):
    data = opened(corpus)
    index = data.validation // 32
    batch = data.validation_batch(index, 32, Shard(3, 4))
    assert batch.tokens.shape == (8, 8)
    assert batch.target_tokens() == 0


def test_validation_does_not_move_the_training_position(corpus):
    looked, straight = opened(corpus), opened(corpus)
    for data in (looked, straight):
        data.train_batch(4, WHOLE)
    validation(looked)
    assert rows(looked.train_batch(4, WHOLE)) == rows(straight.train_batch(4, WHOLE))


def test_without_a_held_out_split_there_is_no_validation_batch(corpus):
    assert opened(corpus, validation_fraction=0.0).validation_batch(0, 4, WHOLE) is None


# --- position ---------------------------------------------------------------------------------


def test_a_saved_position_goes_on_with_the_same_batches(corpus):
    data = opened(corpus)
    for _ in range(data.train // 8 - 1):  # the next batches cross into the second epoch
        data.train_batch(8, WHOLE)
    meta = data.meta()
    resumed = opened(corpus)
    resumed.load_meta(meta)
    for _ in range(4):
        assert rows(resumed.train_batch(8, WHOLE)) == rows(data.train_batch(8, WHOLE))


@pytest.mark.parametrize("change", ["content", "name", "length", "seed", "split"])
def test_a_position_in_other_data_is_refused(corpus, change):
    before = opened(corpus).meta()
    options = {"length": {"length": 9}, "seed": {"seed": 4}, "split": {"validation_fraction": 0.3}}
    if change == "content":
        (corpus / "one.txt").write_bytes((corpus / "one.txt").read_bytes()[::-1])
    if change == "name":
        (corpus / "one.txt").rename(corpus / "1.txt")
    data = opened(corpus, **options.get(change, {}))
    with pytest.raises(DataError) as error:
        data.load_meta(before)
    assert before["fingerprint"] in str(error.value)
    assert data.meta()["fingerprint"] in str(error.value)


# --- mistakes ---------------------------------------------------------------------------------


def test_a_missing_path_names_the_nearest_one(corpus):
    assert "no 'ons.txt'" in refusal(corpus / "ons.txt")
    assert "did you mean 'one.txt'?" in refusal(corpus / "ons.txt")
    assert "no 'corpsu' in" in refusal(corpus.parent / "corpsu" / "one.txt")
    assert "did you mean 'corpus'?" in refusal(corpus.parent / "corpsu" / "one.txt")


def test_a_folder_without_matching_files_says_what_it_has(corpus):
    assert "no file with suffix .rs: it has .txt (2); set data.suffixes" in refusal(corpus, suffixes=(".rs",))


def test_an_empty_folder_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "it has no files" in refusal(tmp_path / "empty")


def test_less_than_one_sequence_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("short")
    assert "has 6 tokens in 1 files, but one sequence of 8 needs 9" in refusal(tmp_path / "short.txt")
    (tmp_path / "short.txt").write_text("")
    assert "one sequence of 8 needs 9" in refusal(tmp_path / "short.txt")


def test_a_file_smaller_than_a_batch_is_refused_with_the_numbers(tmp_path):
    (tmp_path / "short.txt").write_text("x" * 100)
    data = opened(tmp_path / "short.txt")
    with pytest.raises(
        DataError, match=r"takes 16 sequences of 8 tokens, but the training data has 11: lower batch"
    ):
        data.train_batch(16, WHOLE)
