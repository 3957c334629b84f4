"""Tokenizers of every kind, against the libraries whose files they are."""

import base64
import builtins
import json
import os
import sys

import attrs
import pytest
import sentencepiece
import tiktoken
import tiktoken_ext.openai_public
from chats import chats, prepared_chats, tokenizer_folder, write_chats
from corpora import prepared, texts
from nanotrain_data import codecs
from nanotrain_data.chat import Chat
from nanotrain_data.codecs import ENCODINGS, codec_of, open_codec
from nanotrain_data.config import ChatConfig, ShardsConfig
from nanotrain_data.manifest import read_manifest
from nanotrain_data.shards import Shards
from nanotrain_data.train_tokenizer import END, train_tokenizer
from nanotrain_data.verify import tokenizer_problems
from tokenizers import Tokenizer

from nanotrain_core.api import DataError
from nanotrain_core.api.text import make_tokenizer

TEXT = "Zwölf naïve Boxkämpfer 🙂 don't jump 12345 times!\n\n  def f(x):\n\treturn x"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(400)))
    return path


@pytest.fixture(scope="module")
def files(corpus, tmp_path_factory):
    """A tokenizer of each kind that has a file."""
    folder = tmp_path_factory.mktemp("tokenizers")
    train_tokenizer([str(corpus)], (), "text", 400, folder / "tokenizer.json", None)
    ranks = [bytes([n]) for n in range(256)] + [b"al", b"be", b"alp", b"ta", b"beta"]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(ranks)]
    (folder / "cl100k_base.tiktoken").write_text("\n".join(lines) + "\n")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts(400)),
        model_prefix=str(folder / "pieces"),
        vocab_size=76,
        minloglevel=2,
    )
    return folder


def reference(files, name):
    """Return what the library itself encodes a text to, how many tokens it has, and which ends a text."""
    if name == "tokenizer.json":
        tokenizer = Tokenizer.from_file(str(files / name))
        return lambda text: tokenizer.encode(text).ids, tokenizer.get_vocab_size(), 0
    if name == "pieces.model":
        model = sentencepiece.SentencePieceProcessor(model_file=str(files / name))
        return model.encode, model.vocab_size(), model.eos_id()
    lines = (line.split() for line in (files / name).read_bytes().splitlines())
    encoding = tiktoken.Encoding(
        "cl100k_base",
        pat_str=PATTERNS["cl100k_base"],
        mergeable_ranks={base64.b64decode(token): int(rank) for token, rank in lines},
        special_tokens={"<|endoftext|>": 100257},
    )
    return encoding.encode, 100277, 100257


def published():
    """Return what tiktoken publishes of each encoding, without the download."""
    found = {}
    for name in ENCODINGS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiktoken_ext.openai_public, "load_tiktoken_bpe", lambda *args, **options: {})
            found[name] = getattr(tiktoken_ext.openai_public, name)()
    return found


PATTERNS = {name: found["pat_str"] for name, found in published().items()}
NAMES = ["tokenizer.json", "pieces.model", "cl100k_base.tiktoken"]


def test_encodings_of_tiktoken_are_those_that_it_publishes():
    for name, found in published().items():
        ours = ENCODINGS[name]
        assert ours.pattern == found["pat_str"]
        assert ours.end_of_text == found["special_tokens"]["<|endoftext|>"]
        largest = found.get("explicit_n_vocab", max(found["special_tokens"].values()) + 1)
        assert ours.vocab_size == largest


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_library(files, name):
    codec = open_codec(str(files / name))
    encode, vocab, end = reference(files, name)
    some = [TEXT, "", *texts(20, seed=5)]
    assert codec.encode_batch(some) == [encode(text) for text in some] == [codec.encode(t) for t in some]
    assert (codec.vocab_size, codec.separator) == (vocab, end)
    if name != "pieces.model":  # which normalizes spaces, and has no token for what it never saw
        assert codec.decode(codec.encode(TEXT)) == TEXT
    assert codec.decode([codec.vocab_size - 2]) is not None


@pytest.mark.parametrize("name", NAMES)
def test_a_prepared_folder_has_its_tokenizer_in_it(files, corpus, tmp_path, name):
    prepared(tmp_path / "out", corpus, tokenizer=files / name)
    manifest = read_manifest(tmp_path / "out")
    encode, vocab, end = reference(files, name)
    assert manifest.tokens == sum(len(encode(text)) + 1 for text in texts(400))
    assert (manifest.vocab_size, manifest.end_of_document) == (vocab, end)
    data = Shards(ShardsConfig(paths=(str(tmp_path / "out"),)))
    data.open(length=8, seed=0)
    assert data.encode("alpha beta") == encode("alpha beta")
    copy = tmp_path / "out" / manifest.tokenizer.file
    assert copy.read_bytes() == (files / name).read_bytes()
    copy.write_bytes(copy.read_bytes() + b"\n")
    with pytest.raises(DataError, match="is not the tokenizer that the tokens of"):
        codec_of(tmp_path / "out", manifest)


def test_tokens_are_of_the_file_that_is_there_now(files, tmp_path, monkeypatch):
    """tiktoken's reader keeps files by their path, in all processes: one that was replaced had no effect."""
    path = tmp_path / "cl100k_base.tiktoken"
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    path.write_bytes((files / path.name).read_bytes())
    assert open_codec(str(path)).encode("A") == [65]
    ranks = (f"{base64.b64encode(bytes([n])).decode()} {255 - n}\n" for n in range(256))
    path.write_text("".join(ranks))
    assert open_codec(str(path)).encode("A") == [255 - 65]


@pytest.mark.parametrize("name", ["32000.json", "00000.json", "manifest.json", "mine.tokens"])
def test_a_tokenizer_that_is_called_as_a_file_of_the_folder_is_kept(files, corpus, tmp_path, name):
    path, out = tmp_path / name, tmp_path / "out"
    path.write_bytes((files / "tokenizer.json").read_bytes())
    manifest = prepared(out, corpus, tokenizer=path, unit_bytes=9000).manifest
    copy = out / manifest.tokenizer.file
    assert copy.read_bytes() == path.read_bytes()
    assert codec_of(out, manifest).encode("alpha") == open_codec(str(path)).encode("alpha")
    assert tokenizer_problems(out, manifest) == []
    copy.unlink()
    (line,) = tokenizer_problems(out, manifest)
    assert line == f"{copy} is missing; copy {name} there, or prepare the folder again"
    again = prepared(out, corpus, tokenizer=path, unit_bytes=9000)
    assert (again.manifest, again.written) == (manifest, 0)
    assert copy.read_bytes() == path.read_bytes()


def test_a_folder_that_lost_such_a_tokenizer_gets_it_again(files, corpus, tmp_path):
    """It was deleted as the record of a shard."""
    path, out = tmp_path / "00000.json", tmp_path / "out"
    path.write_bytes((files / "tokenizer.json").read_bytes())
    manifest = prepared(out, corpus, tokenizer=path, unit_bytes=9000).manifest
    (out / manifest.tokenizer.file).unlink()
    attrs.evolve(manifest, tokenizer=attrs.evolve(manifest.tokenizer, file=path.name)).write(out)
    assert prepared(out, corpus, tokenizer=path, unit_bytes=9000).manifest == manifest
    assert not (out / "00000.json").exists()
    assert codec_of(out, manifest).vocab_size == manifest.vocab_size


def ending_otherwise(name):
    """Open a tokenizer as a version did that took another of its tokens for the end of a text."""
    codec = make_tokenizer(name)
    codec.separator = 7
    return codec


@pytest.mark.parametrize("made", ["text", "text without ends", "chats", "templated"])
def test_the_end_of_texts_is_that_of_the_folder(corpus, tmp_path, monkeypatch, made):
    """A model has learned that one: with another, it would not stop, nor begin where documents do."""
    path, out = tokenizer_folder(tmp_path), tmp_path / "out"
    own = open_codec(str(path)).separator
    with monkeypatch.context() as patch:
        patch.setattr(codecs, "make_tokenizer", ending_otherwise)
        if made.startswith("text"):
            prepared(out, corpus, tokenizer=path, end_documents=made == "text")
        else:
            template = {} if made == "templated" else {"chat_template": "plain"}
            prepared_chats(out, write_chats(tmp_path / "in.jsonl", chats(9)), tokenizer=path, **template)
    manifest = read_manifest(out)
    if made.startswith("chats"):
        assert manifest.chat.end == 7
        asked = [{"role": "user", "content": "Hi"}]
        assert Chat(ChatConfig(paths=(str(out),))).answer_prompt(asked)[1] == {7}
    kept = made in ("text", "chats")
    assert own not in (7, None)
    assert Shards(ShardsConfig(paths=(str(out),))).tokenizer_alone().separator == (7 if kept else own)


def test_a_folder_without_its_shards_still_has_its_tokenizer(tmp_path):
    """To write text takes nothing else."""
    path, out = tokenizer_folder(tmp_path), tmp_path / "out"
    source = write_chats(tmp_path / "in.jsonl", chats(9))
    found = prepared_chats(out, source, tokenizer=path, chat_template="plain").manifest
    (out / "00000.answers").unlink()
    assert codec_of(out, found).separator == found.chat.end


def test_a_tokenizer_is_made_of_text_and_reads_any(corpus, tmp_path):
    told = train_tokenizer([str(corpus)], (), "text", 300, tmp_path / "a" / "tokenizer.json", None)
    assert "300 tokens" in told
    codec = open_codec(str(tmp_path / "a" / "tokenizer.json"))
    assert codec.vocab_size == 300
    assert codec.separator == Tokenizer.from_file(str(tmp_path / "a" / "tokenizer.json")).token_to_id(END)
    never_seen = "Ω ≈ ключ\x00\x7f"
    assert codec.decode(codec.encode(never_seen)) == never_seen
    assert len(codec.encode("alpha beta")) < len("alpha beta")
    train_tokenizer([str(corpus)], (), "text", 300, tmp_path / "b.json", None)
    assert (tmp_path / "b.json").read_bytes() == (tmp_path / "a" / "tokenizer.json").read_bytes()


def test_a_tokenizer_that_cannot_be_made_is_refused(corpus, tmp_path):
    with pytest.raises(DataError, match="expected at least 257"):
        train_tokenizer([str(corpus)], (), "text", 256, tmp_path / "a.json", None)
    with pytest.raises(DataError, match=r"--out .*: expected a file, this is a folder"):
        train_tokenizer([str(corpus)], (), "text", 300, tmp_path, None)
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe: expected a file, this is a device, pipe or socket"):
        train_tokenizer([str(corpus)], (), "text", 300, tmp_path / "pipe", None)
    with pytest.raises(DataError, match="file/t cannot be made: Not a directory"):
        train_tokenizer([str(corpus)], (), "text", 300, tmp_path / "file" / "t" / "t.json", None)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("mine.tiktoken", "", "must be called after its encoding: r50k_base.tiktoken, "),
        ("cl100k.tiktoken", "", "(did you mean 'cl100k_base'?)"),
        ("o200k_base.tiktoken", "no ranks here", "is not a file of tiktoken"),
        ("a.model", "no pieces", "is not a model of SentencePiece"),
        ("a.json", "{}", "is not a tokenizer.json of Hugging Face"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, name, content, text):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        open_codec(str(tmp_path / name))
    assert text in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["pieces.model", "cl100k_base.tiktoken"])
def test_a_missing_package_is_named(files, monkeypatch, name):
    package = {"pieces.model": "sentencepiece"}.get(name, "tiktoken")
    real = builtins.__import__

    def absent(module, *args):
        if module.partition(".")[0] == package:
            raise ImportError(module)
        return real(module, *args)

    monkeypatch.setattr(builtins, "__import__", absent)
    monkeypatch.delitem(sys.modules, package)
    with pytest.raises(DataError, match=f"pip install nanotrain-data\\[{package}\\]"):
        open_codec(str(files / name))


def test_a_missing_file_is_named(files):
    for wrong, right in (("piece.model", "pieces.model"), ("tokeniser.json", "tokenizer.json")):
        with pytest.raises(DataError, match=f"did you mean '{right}'"):
            open_codec(str(files / wrong))


def test_a_text_with_the_byte_that_ends_documents_is_refused(tmp_path):
    """A document had ended in its middle, and its mask with it."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in ("one", "tw\0o"))
    for name, content, where in (
        ("a.jsonl", lines, ":2: field 'text'"),
        ("a.txt", "a line\n" * 100 + "tw\0o", ": the text at byte 0"),
    ):
        path = tmp_path / name
        path.write_text(content)
        with pytest.raises(DataError) as caught:
            prepared(tmp_path / "out", path)
        text = r"has the character '\x00', with which this tokenizer ends documents: remove it, take another"
        assert f"{path}{where} {text}" in str(caught.value)
        prepared(tmp_path / f"{name} without ends", path, end_documents=False)
