"""The data component ``text``, and the order of sequences that it shares with ``synthetic``."""

import os
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from nanotrain_core.batch import IGNORE, Shard
from nanotrain_core.builtin.configs import TextConfig
from nanotrain_core.data import hashed_tokens
from nanotrain_core.data.documents import Document
from nanotrain_core.data.held_out import Split, held_out
from nanotrain_core.data.text import Text
from nanotrain_core.data.token_cache import TokenCache
from nanotrain_core.data.tokenizers import make_tokenizer
from nanotrain_core.errors import DataError

WHOLE = Shard()


@pytest.fixture
def corpus(tmp_path):
    """2,500 bytes in two files, each four bytes of it different from every other four."""
    text = np.random.default_rng(0).permutation(625).astype(">u4").tobytes()
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    (folder / "one.txt").write_bytes(text[:1000])
    (folder / "sub" / "two.txt").write_bytes(text[1000:])
    return folder


def opened(*paths, length=8, seed=3, **options):
    data = Text(TextConfig(paths=tuple(map(str, paths)), **options))
    data.open(length=length, seed=seed)
    return data


def rows(batch):
    """Each sequence of a batch with its last target, as one tuple of length + 1 tokens."""
    return [
        (*tokens, last)
        for tokens, last in zip(batch.tokens.tolist(), batch.targets[:, -1].tolist(), strict=True)
    ]


def epoch(data):
    return [rows(data.train_batch(1, WHOLE))[0] for _ in range(data.train)]


def validation(data, sequences=4):
    batches = []
    while (batch := data.validation_batch(len(batches), sequences, WHOLE)) is not None:
        batches.append(batch)
    return batches


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


# --- tokenizers -------------------------------------------------------------------------------


@pytest.fixture
def words(tmp_path, monkeypatch):
    """A tokenizer of 300 words, which needs two bytes a token, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    vocab = {"[UNK]": 0, "<|endoftext|>": 1} | {f"w{i}": i for i in range(2, 300)}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.fixture
def sentences(tmp_path):
    folder = tmp_path / "sentences"
    folder.mkdir()
    (folder / "a.txt").write_text(" ".join(f"w{i}" for i in range(2, 200)))
    (folder / "b.txt").write_text(" ".join(f"w{i}" for i in range(200, 300)))
    return folder


def test_a_tokenizer_file_gives_its_tokens_with_its_end_of_text(words, sentences):
    data = opened(sentences, length=16, tokenizer=str(words))
    assert data.tokens.tolist() == [*range(2, 200), 1, *range(200, 300), 1]
    assert data.tokens.dtype == np.uint16
    assert data.vocab_size == 300
    assert data.encode("w7 w250") == [7, 250]
    assert data.decode([7, 250]) == "w7 w250"


def test_few_bytes_are_tokenized_at_a_time_so_that_progress_is_seen(words, monkeypatch):
    monkeypatch.setattr("nanotrain_core.data.tokenizers.TokenizerFile.BYTES", 10)
    documents = [Document(f"{n}.txt", b"w7 " * size) for n, size in enumerate((2, 1, 1, 9, 1))]
    done = []

    @contextmanager
    def show_progress(what, total, unit):
        assert total == sum(len(each.content) for each in documents)
        yield done.append

    monkeypatch.setattr("nanotrain_core.data.tokenizers.show_progress", show_progress)
    pieces = make_tokenizer(str(words))._pieces(documents)
    assert done == [9, 3, 27, 3]
    assert [piece.tolist() for piece in pieces] == [[7] * size + [1] for size in (2, 1, 1, 9, 1)]


def test_bytes_per_token_are_measured_on_the_held_out_text(words, sentences):
    data = opened(sentences, length=16, tokenizer=str(words), validation_fraction=0.5)
    held = torch.cat([batch.targets for batch in validation(data, sequences=data.validation)])
    text = [" ".join(f"w{token}" for token in row if token != 1) for row in held.tolist()]
    assert data.bytes_per_token == pytest.approx(sum(map(len, text)) / held.numel())


def test_bytes_per_token_are_measured_all_over_a_long_split(words, tmp_path):
    """The second half has longer words; there is no space after the last of a sequence's eight."""
    (tmp_path / "a.txt").write_text("w2 " * 10_000)
    (tmp_path / "b.txt").write_text("w200 " * 10_000)
    data = opened(tmp_path / "a.txt", tmp_path / "b.txt", tokenizer=str(words), validation_fraction=0.9)
    assert data.validation > 2 * data.MEASURED
    assert data.bytes_per_token == pytest.approx((3 + 5) / 2 - 1 / 8, abs=0.01)


def test_tokens_come_from_the_cache_the_second_time(words, sentences, monkeypatch):
    first = opened(sentences, length=16, tokenizer=str(words))
    monkeypatch.setattr("nanotrain_core.data.tokenizers.TokenizerFile._pieces", None)
    second = opened(sentences, length=16, tokenizer=str(words))
    assert second.tokens.tolist() == first.tokens.tolist()


@pytest.mark.parametrize("damage", ["flipped", "truncated", "cut within a token", "empty"])
def test_damaged_tokens_in_the_cache_are_made_anew(words, sentences, tmp_path, capfd, damage):
    """They were trained on, under the fingerprint of the whole ones."""
    first = opened(sentences, length=16, tokenizer=str(words)).tokens.tolist()
    (cached,) = (tmp_path / "cache").rglob("*.tokens")
    content = bytearray(cached.read_bytes())
    content[7] ^= 1
    cached.write_bytes(
        {"flipped": content, "truncated": content[:-8], "empty": b""}.get(damage, content[:-1])
    )
    assert opened(sentences, length=16, tokenizer=str(words)).tokens.tolist() == first
    assert damage in ("cut within a token", "empty") or str(cached) in "".join(capfd.readouterr())
    (again,) = (tmp_path / "cache").rglob("*.tokens")
    assert again == cached
    assert np.fromfile(again, np.uint16).tolist() == first


def test_tokens_are_compared_once_for_a_host_and_then_where_they_are_read(tmp_path, monkeypatch):
    """All of them were hashed at each start by each rank, which takes minutes for 100 GB."""
    hashed, real = [], hashed_tokens._hash
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hashed_tokens, "PIECE", 64)
    monkeypatch.setattr(hashed_tokens, "_hash", lambda piece: hashed.append(bytes(piece)) or real(piece))
    cache = TokenCache("text", np.dtype(np.uint16))
    cache.write(np.arange(1000, dtype=np.uint16))
    (path,) = tmp_path.rglob("*.tokens")

    def compared(places=()):
        """Return the pieces that are compared at a start, and then to read some rows."""
        hashed.clear()
        found = cache.read()
        if len(places):
            assert found[places].tolist() == places.tolist()
        return [int.from_bytes(piece[:2], "little") // 32 for piece in hashed]

    rows = np.array([[40, 41, 42], [63, 64, 65], [999, 998, 997]])
    assert compared() == []
    assert compared(rows) == [1, 2, 31]
    path.touch()  # as if somebody had written to it
    assert compared(rows) == [*range(32)]
    assert compared(rows) == [1, 2, 31]


def test_a_bit_that_flips_behind_the_back_of_the_file_system_is_not_trained_on(words, sentences, tmp_path):
    opened(sentences, length=16, tokenizer=str(words))
    (cached,) = (tmp_path / "cache").rglob("*.tokens")
    before = cached.stat()
    content = bytearray(cached.read_bytes())
    content[500] ^= 4
    with cached.open("r+b") as file:
        file.write(content)
    os.utime(cached, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataError, match=r"\.tokens are damaged at byte 0, and were deleted: start again"):
        opened(sentences, length=16, tokenizer=str(words)).tokens.tolist()
    assert opened(sentences, length=16, tokenizer=str(words)).tokens.tolist()[:3] == [2, 3, 4]


def test_changed_text_does_not_come_from_the_cache(words, sentences):
    opened(sentences, length=16, tokenizer=str(words))
    (sentences / "a.txt").write_text("w5 " * 100)
    assert opened(sentences, length=16, tokenizer=str(words)).tokens[:100].tolist() == [5] * 100


def test_without_a_place_to_cache_in_tokenizing_still_works(words, sentences, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(opened(sentences, length=16, tokenizer=str(words)).tokens) == 300


# --- mistakes ---------------------------------------------------------------------------------


def refusal(*paths, **options):
    with pytest.raises(DataError) as error:
        opened(*paths, **options)
    return str(error.value)


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


def test_a_tokenizer_file_that_truncates_and_pads_cuts_no_document(words, tmp_path):
    """Files of fine-tuned models often say so; padding would also depend on what shares a batch."""
    cut = Tokenizer.from_file(str(words))
    cut.enable_truncation(2)
    cut.enable_padding(length=9)
    cut.save(str(tmp_path / "cut.json"))
    plain, whole = make_tokenizer(str(words)), make_tokenizer(str(tmp_path / "cut.json"))
    texts = ["w2 w3 w4 w5", "w6"]
    assert whole.encode_batch(texts) == [whole.encode(text) for text in texts] == [[2, 3, 4, 5], [6]]
    assert plain.encode_batch(texts) == whole.encode_batch(texts)


def test_a_special_token_that_a_document_writes_of_is_text(words, tmp_path):
    """Else a page about tokenizers would end in its middle, and what it says of chats would begin turns."""
    tokenizer = Tokenizer.from_file(str(words))
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>"])
    tokenizer.save(str(tmp_path / "special.json"))
    ours = make_tokenizer(str(tmp_path / "special.json"))
    text = "w2 <|endoftext|> w3 <|im_start|>"
    plain = make_tokenizer(str(words)).encode(text)
    assert ours.encode(text) == plain
    assert ours.encode_batch([text, "w4"]) == [plain, [4]]
    assert ours.separator == tokenizer.token_to_id("<|endoftext|>")
    assert ours.separator in tokenizer.encode(text).ids  # what the library does unless it is told
    assert ours.encode_special(text) == tokenizer.encode(text).ids
    assert ours.encode(text) == plain


@pytest.mark.parametrize(
    ("template", "prefix"), [("<bos> $A", (9,)), ("<bos> $A <eos>", (9,)), ("$A <eos>", ()), ("$A", ())]
)
def test_the_prefix_is_what_a_tokenizer_puts_before_a_text(tmp_path, template, prefix):
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "one": 1, "<bos>": 9, "<eos>": 8}, unk_token="<unk>"))
    special = [("<bos>", 9), ("<eos>", 8)]
    tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    made = make_tokenizer(str(tmp_path / "tokenizer.json"))
    assert made.prefix == prefix
    assert made.encode("one") == [1]


def test_a_missing_tokenizer_file_names_the_nearest_one(corpus, words):
    message = refusal(corpus, tokenizer=str(words.with_name("tokeniser.json")))
    assert "tokenizer " in message
    assert "did you mean 'tokenizer.json'?" in message


def test_a_file_that_is_no_tokenizer_is_refused(corpus):
    assert "is not a tokenizer.json" in refusal(corpus, tokenizer=str(corpus / "one.txt"))


def test_the_missing_package_tokenizers_is_named(corpus, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "pip install nanotrain-core[tokenizers]" in refusal(corpus, tokenizer=str(words))
