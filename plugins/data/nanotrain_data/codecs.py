"""Tokenizers by name: ``bytes``, Hugging Face ``tokenizer.json``, tiktoken and SentencePiece files."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs

from nanotrain_core.api import DataError, did_you_mean
from nanotrain_core.api.text import TextCodec, make_tokenizer, missing_path
from nanotrain_data.manifest import NAME, Manifest, TokenizerInfo

# Contractions, words, numbers, punctuation, space: how text is cut before its parts become tokens, as
# tiktoken_ext/openai_public.py has it, which cannot be asked without a download.
_R50K = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"""
    r"""|\s*[\r\n]|\s+(?!\S)|\s"""
)
_O200K = "|".join(
    [
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)


@attrs.define(frozen=True)
class _Encoding:
    """What a file of tiktoken does not say itself."""

    pattern: str
    end_of_text: int
    vocab_size: int


#: Encodings of tiktoken by the name of their file.
ENCODINGS = {
    "r50k_base": _Encoding(_R50K, 50256, 50257),
    "p50k_base": _Encoding(_R50K, 50256, 50281),
    "cl100k_base": _Encoding(_CL100K, 100257, 100277),
    "o200k_base": _Encoding(_O200K, 199999, 200019),
}


class Codec(TextCodec, Protocol):
    """A tokenizer that many texts are given at a time."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, none added."""
        ...


class Tiktoken:
    """An encoding of OpenAI's tiktoken, from a file that was downloaded."""

    def __init__(self, path: Path) -> None:
        known = ENCODINGS.get(path.stem)
        if known is None:
            raise DataError(
                f"tokenizer {path}: a file of tiktoken does not say how text is cut, so it must be called "
                f"after its encoding: {', '.join(f'{name}.tiktoken' for name in ENCODINGS)}"
                f"{did_you_mean(path.stem, list(ENCODINGS))}"
            )
        try:
            import tiktoken
        except ImportError:
            raise _needs("tiktoken", path) from None
        try:
            ranks = _ranks(path.read_bytes())
            special = {"<|endoftext|>": known.end_of_text}
            self._encoding = tiktoken.Encoding(
                path.stem, pat_str=known.pattern, mergeable_ranks=ranks, special_tokens=special
            )
        except (ValueError, KeyError) as error:
            raise DataError(f"{path} is not a file of tiktoken: {error}") from None
        self.vocab_size = max(known.vocab_size, max(ranks.values(), default=0) + 1)
        self.separator: int | None = known.end_of_text

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; what looks like a special token is text."""
        return list(self._encoding.encode_ordinary(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with U+FFFD where bytes are no UTF-8 or tokens stand for none."""
        return b"".join(map(self._bytes_of, tokens)).decode(errors="replace")

    def _bytes_of(self, token: int) -> bytes:
        try:
            return bytes(self._encoding.decode_single_token_bytes(token))
        except KeyError:
            return b"\xff"


def _ranks(content: bytes) -> dict[bytes, int]:
    """Return the rank of each token, of a line for each: the token in base64, a space, its rank.

    tiktoken's own reader keeps what it once read from a path, and returns that when the file has changed.

    Raises:
        ValueError: a line is none of these.
    """
    lines = (line.split() for line in content.splitlines() if line)
    return {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}


class SentencePiece:
    """A model of SentencePiece."""

    def __init__(self, path: Path) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            raise _needs("sentencepiece", path) from None
        try:
            self._model: Any = SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise DataError(f"{path} is not a model of SentencePiece: {error}") from None
        self.vocab_size: int = self._model.get_piece_size()
        end = self._model.eos_id()
        self.separator: int | None = end if end >= 0 else None

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, none added."""
        return list(self._model.encode(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self._model.decode(list(tokens)))


def open_codec(name: str) -> Codec:
    """Return the tokenizer of that name: ``bytes``, or a file of which the suffix says the kind.

    Raises:
        DataError: the file is missing or not of its kind, or the package is that reads it.
    """
    kind = kind_of(name)
    if kind in ("bytes", "huggingface"):
        return make_tokenizer(name)
    path = Path(name)
    if not path.is_file():
        raise DataError(f"tokenizer {path} is a folder" if path.exists() else missing_path(path, "tokenizer"))
    return Tiktoken(path) if kind == "tiktoken" else SentencePiece(path)


def kind_of(name: str) -> str:
    """Return which kind of tokenizer a name is of."""
    if name == "bytes":
        return "bytes"
    return {".tiktoken": "tiktoken", ".model": "sentencepiece"}.get(Path(name).suffix, "huggingface")


def describe_codec(name: str) -> TokenizerInfo:
    """Return what a manifest says of a tokenizer that can be opened.

    Its copy has its name, which says the encoding of a file of tiktoken, unless a folder has files called so.
    """
    if name == "bytes":
        return TokenizerInfo(kind="bytes", name=name, sha256=hashlib.sha256(name.encode()).hexdigest())
    path = Path(name)
    file = re.sub(r"[^\w.-]", "_", path.name)
    if file == NAME or Path(file).stem.isdigit():  # of the manifest, or of a shard's record
        file = f"tokenizer-{file}"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return TokenizerInfo(kind=kind_of(name), name=path.name, sha256=digest, file=file)


def codec_of(folder: Path, manifest: Manifest) -> Codec:
    """Return the tokenizer that a prepared folder holds a copy of, with the folder's end of texts or answers.

    Models of the folder have learned that token, though the file may be read to have another today.

    Raises:
        DataError: as :func:`open_codec`; the folder has none, or another file than its manifest says.
    """
    info = manifest.tokenizer
    if info.file is None:
        if info.kind == "bytes":
            return open_codec("bytes")
        raise DataError(f"{folder} holds tokens of a tokenizer that it does not know, so it has no text")
    path = folder / info.file
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() != info.sha256:
        raise DataError(f"{path} is not the tokenizer that the tokens of {folder} were made with")
    codec = open_codec(str(path))
    end = manifest.chat.end if manifest.chat else manifest.end_of_document
    if end is not None:
        codec.separator = end  # type: ignore[misc]  # which the protocol lets callers only read
    return codec


def _needs(package: str, path: Path) -> DataError:
    return DataError(
        f"the tokenizer {path} needs the package {package}: pip install nanotrain-data[{package}]"
    )
