"""The data component ``text`` with a tokenizer: its tokens, their cache, and mistakes in its file."""

import json
import os
import resource
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from opened_text import opened, refusal, validation
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, Unigram, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Metaspace, Whitespace, WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from nanotrain_core.data import hashed_tokens
from nanotrain_core.data.documents import Document
from nanotrain_core.data.token_cache import TokenCache
from nanotrain_core.data.tokenizers import make_tokenizer
from nanotrain_core.errors import DataError


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


def test_text_that_is_not_utf8_is_refused_but_has_bytes(words, sentences):
    (sentences / "b.txt").write_bytes("caf\u00e9".encode("latin-1"))
    text = "b.txt: no UTF-8 at byte 3; expected a text"
    assert text in refusal(sentences, length=16, tokenizer=str(words))
    assert 0xE9 in opened(sentences, length=16).tokens


def byte_level():
    made = Tokenizer(BPE())
    made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return made, {"initial_alphabet": ByteLevel.alphabet()}


def sentence_piece():
    """With a token for each byte of characters that the vocabulary lacks, as Llama 2's."""
    made = Tokenizer(BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = Metaspace(prepend_scheme="never", split=False)
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(parts)
    return made, {"special_tokens": ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]}


@pytest.mark.parametrize("kind", [byte_level, sentence_piece])
def test_bytes_of_tokens_are_those_of_the_text_wherever_it_is_cut(tmp_path, kind):
    """Bits per byte were up to 3% too low: a character that was cut at a sequence's end counted 6 bytes."""
    text = "".join(chr(0x4E00 + n * n % 2003) + " is" * (n % 3 == 0) for n in range(400))
    made, options = kind()
    made.train_from_iterator([text[:150]], BpeTrainer(vocab_size=600, show_progress=False, **options))
    described = json.loads(made.to_str())
    # The trainer takes tokens of bytes as special ones, which in Llama's they are not.
    described["added_tokens"] = [each for each in described["added_tokens"] if "<0x" not in each["content"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    tokenizer = make_tokenizer(str(tmp_path / "tokenizer.json"))
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    for length in (1, 7, len(tokens)):
        cut = [tokens[begin : begin + length] for begin in range(0, len(tokens), length)]
        assert sum(map(tokenizer.byte_count, cut)) == len(text.encode())


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
    monkeypatch.setattr(hashed_tokens, "BLOCK_BYTES", 64)
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
    with pytest.raises(
        DataError, match=r"\.tokens are damaged at byte 0, and were deleted: start again"
    ) as told:
        opened(sentences, length=16, tokenizer=str(words)).tokens.tolist()
    assert told.value.restart_helps
    assert opened(sentences, length=16, tokenizer=str(words)).tokens.tolist()[:3] == [2, 3, 4]


def test_tokens_that_found_no_space_do_not_come_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokens = np.arange(30_000, dtype=np.uint16)
    cache, before = TokenCache("text", tokens.dtype), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (tokens.nbytes - 2, before[1]))
    cache.write(tokens)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert cache.read() is None
    cache.write(tokens)
    assert cache.read().tolist() == tokens.tolist()


def test_changed_text_does_not_come_from_the_cache(words, sentences):
    opened(sentences, length=16, tokenizer=str(words))
    (sentences / "a.txt").write_text("w5 " * 100)
    assert opened(sentences, length=16, tokenizer=str(words)).tokens[:100].tolist() == [5] * 100


def test_without_a_place_to_cache_in_tokenizing_still_works(words, sentences, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(opened(sentences, length=16, tokenizer=str(words)).tokens) == 300


# --- mistakes ---------------------------------------------------------------------------------


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


@pytest.mark.parametrize("special", [["<eos>"], ["<eos>", "</s>"], []])
def test_a_special_token_ends_documents_before_an_ordinary_one_of_such_a_name(tmp_path, special):
    """Gemma has <eos>, and among its ordinary tokens </s>, a tag of HTML that pages have in their middle."""
    tokenizer = Tokenizer(WordLevel({"<eos>": 0, "</s>": 1, "w": 2}, unk_token="w"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_tokens(["</s>"])
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = make_tokenizer(str(tmp_path / "tokenizer.json"))
    assert ours.separator == (0 if special == ["<eos>"] else 1)


def unigram():
    scores = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, "\u2581a": -2.0, "\u2581": -3.0, "b": -3.0}
    scores |= dict.fromkeys("a</s>", -4.0)
    model, cut = Unigram([*scores.items()], unk_id=2), Metaspace()
    return model, cut, {"a": [3], "</s>": [4, 7, 8, 9, 10], "b": [4, 5], "?": [4, 2]}


def merging():
    pieces = ["<unk>", "</s>", "<", "/", "s", ">", "</", "s>", "a", "b"]
    merges = [("<", "/"), ("s", ">"), ("</", "s>")]
    model = BPE({piece: n for n, piece in enumerate(pieces)}, merges, unk_token="<unk>")
    return model, WhitespaceSplit(), {"a": [8], "</s>": [6, 7], "b": [9], "?": [0]}


def word_level():
    model = WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="<unk>")
    return model, WhitespaceSplit(), {"a": [2], "</s>": [0], "b": [3], "?": [0]}


@pytest.mark.parametrize("kind", [unigram, merging, word_level])
def test_a_special_token_that_is_a_piece_of_the_model_is_text_too(tmp_path, kind):
    """Unigram prefers it to all other readings: a page of HTML ended T5's document in its middle."""
    model, cut, words = kind()
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = cut
    tokenizer.add_special_tokens(["<unk>", "</s>", "<extra>"])
    tokenizer.add_tokens(["<think>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = make_tokenizer(str(tmp_path / "tokenizer.json"))
    assert ours.encode("a </s> b ?") == [token for word in words.values() for token in word]
    assert ours.encode_batch(["b"]) == [words["b"]]
    assert ours.separator == ours.encode_special("</s>")[-1] == tokenizer.token_to_id("</s>")
    assert ours.encode("<think>")[-1] == ours.vocab_size - 1 == tokenizer.token_to_id("<think>")
    assert ours.decode([tokenizer.token_to_id("b")]) == "b"


def test_dropout_of_a_tokenizer_file_is_for_its_training(tmp_path):
    """Each process would have other tokens, under one fingerprint."""
    tokenizer, options = byte_level()
    tokenizer.train_from_iterator(["hello world"] * 9, BpeTrainer(show_progress=False, **options))
    tokenizer.model.dropout = 0.5
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = make_tokenizer(str(tmp_path / "tokenizer.json"))
    assert len({tuple(ours.encode("hello world" * n)) for n in [9] * 20}) == 1
    assert len(ours.encode_special("hello")) == 1


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


def test_a_missing_tokenizer_file_names_the_nearest_one(sentences, words):
    message = refusal(sentences, tokenizer=str(words.with_name("tokeniser.json")))
    assert "tokenizer " in message
    assert "did you mean 'tokenizer.json'?" in message


def test_a_file_that_is_no_tokenizer_is_refused(sentences):
    assert "is not a tokenizer.json" in refusal(sentences, tokenizer=str(sentences / "a.txt"))


def test_the_missing_package_tokenizers_is_named(sentences, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "pip install nanotrain-core[tokenizers]" in refusal(sentences, tokenizer=str(words))
