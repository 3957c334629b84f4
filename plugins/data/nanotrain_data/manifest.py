"""What a prepared folder holds: ``manifest.json``, written last, so that a folder with one is whole.

Its last line is the SHA-256 of all before it, as in checkpoints: a bit that flips in a count or in the token
that ends documents leaves valid JSON, and would be trained with. A manifest without that line is read, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import cattrs
import numpy as np

from nanotrain_core.api import DataError, write_text_atomically
from nanotrain_core.api.text import missing_path

NAME = "manifest.json"
FORMAT = "nanotrain-shards"
VERSION = 1
#: Types that tokens are stored as.
DTYPES = ("uint8", "uint16", "uint32")
#: What to do about a damaged one.
AGAIN = "copy it again, or delete it and run 'nanotrain data prepare' again"
#: What the last line has before the hash, and behind it.
_SEAL, _END = b',\n "sha256": "', b'"\n}\n'


@attrs.define(frozen=True, kw_only=True)
class TokenizerInfo:
    """Which tokenizer made the tokens."""

    kind: str
    """``bytes``, ``huggingface``, ``tiktoken``, ``sentencepiece``; ``unknown``: tokens came without one."""
    name: str
    sha256: str
    """Of its file; of its name, if it has none."""
    file: str | None = None
    """Its copy in the prepared folder."""


@attrs.define(frozen=True, kw_only=True)
class ShardInfo:
    """One shard: files ``NAME.tokens``, ``NAME.offsets`` and ``NAME.hashes``."""

    name: str
    documents: int
    tokens: int
    """The tokens that end documents among them."""
    bytes: int
    """Of the text, as UTF-8; 0 if the tokens came without it."""
    sha256: str
    """Of the file of tokens."""
    offsets_sha256: str
    """Of the file of offsets: int64 [documents + 1], where each document begins, and the end."""
    hashes_sha256: str
    """Of the file that holds a hash for each 64 KiB of tokens."""
    source_sha256: str | None = None
    """Of what was read for it: see ``Unit.sha256``. None: not of this command."""
    answers: int | None = None
    """Of conversations, the stretches of tokens that the assistant wrote: file ``NAME.answers``."""
    answers_sha256: str | None = None
    """Of that file: int64 [answers, 2], where each begins in the shard, and its end."""
    left_out: int = 0
    """Rows whose text is empty or null, or conversations without an answer; none is among the documents."""


@attrs.define(frozen=True, kw_only=True)
class ChatInfo:
    """How conversations became tokens."""

    template: str
    """The name of its file; ``plain``: the form without one."""
    sha256: str
    """Of the templates and the special tokens that they were given."""
    source: str | None = None
    """The template itself; None: the plain form."""
    words: dict[str, str] | None = None
    """The special tokens that it was given, by their names."""
    tool_use: str | None = None
    """The template of conversations with tools; None: the same as that of others."""
    date: str | None = None
    """The day that the templates were told; None: they do not ask."""
    end: int | None = None
    """The token that ends answers of the plain form; None: a template."""


def what_is_left_out(*, of_chat: bool) -> str:
    """Return of what :attr:`Manifest.left_out` is the number."""
    return "conversations without an answer" if of_chat else "rows whose text is empty or null"


@attrs.define(frozen=True, kw_only=True)
class Manifest:
    """A prepared folder."""

    format: str = FORMAT
    version: int = VERSION
    tokenizer: TokenizerInfo
    vocab_size: int
    dtype: str
    """Of the tokens, little-endian."""
    end_of_document: int | None
    """The token that each document ends with; None: they end without one."""
    made_of: str
    """A hash over names and sizes of what was read, and how it was cut into shards."""
    chat: ChatInfo | None = None
    """None: documents are text, of which every token is learned."""
    shards: tuple[ShardInfo, ...]
    empty: tuple[ShardInfo, ...] = ()
    """What no token was made of. They have no files; prepared again, their sources are compared."""

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    @property
    def left_out(self) -> int:
        return sum(shard.left_out for shard in (*self.shards, *self.empty))

    @property
    def digest(self) -> str:
        """A hash over all tokens in their order, and what they mean: the same for equal corpora."""
        form = [self.dtype, self.vocab_size, self.end_of_document, self.tokenizer.sha256]
        known = [*form, *((shard.tokens, shard.sha256) for shard in self.shards)]
        if self.chat:
            known += [
                self.chat.sha256,
                *((shard.offsets_sha256, shard.answers_sha256) for shard in self.shards),
            ]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """Put it in place: the folder is whole from then on."""
        found = attrs.asdict(self, filter=_is_said)
        body = json.dumps(found, indent=1).removesuffix("\n}").encode()
        write_text_atomically(folder / NAME, (body + _SEAL + _hash(body) + _END).decode())


def _is_said(field: attrs.Attribute[Any], value: Any) -> bool:
    """Leave out what is of conversations where there are none."""
    return value != field.default or field.name in ("format", "version", "file")


def stored_dtype(vocab_size: int) -> str:
    """Return the smallest type that holds every token: uint8, uint16 or uint32."""
    return str(np.min_scalar_type(max(vocab_size, 1) - 1))


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a prepared folder.

    Raises:
        DataError: the folder or its manifest is missing, or is not one; shards that were written are counted.
    """
    if not folder.exists():
        raise DataError(missing_path(folder, "data folder"))
    path = folder / NAME
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(_not_prepared(folder)) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    return parse_manifest(str(path), content)


def parse_manifest(path: str, data: bytes) -> Manifest:
    """Return the manifest that was read from ``path``, which messages name.

    Raises:
        DataError: it is none, or damaged.
    """
    body, seal, tail = data.rpartition(_SEAL)
    if seal and tail != _hash(body) + _END:
        raise DataError(f"{path} is damaged: its bytes do not match its SHA-256; {AGAIN}")
    try:
        content = json.loads(body + b"\n}" if seal else data)
    except ValueError as error:
        raise DataError(f"{path} is damaged: no JSON ({error}); {AGAIN}") from None
    return _structured(path, content)


def _hash(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()


def _not_prepared(folder: Path) -> str:
    done = len(list(folder.glob("[0-9]*.tokens"))) if folder.is_dir() else 0
    if done:
        return (
            f"{folder} is not prepared to its end: {done} shards, but no {NAME}; "
            "run 'nanotrain data prepare' again with the same arguments, and it goes on"
        )
    return f"{folder} has no {NAME}; expected a folder that 'nanotrain data prepare' wrote"


def _structured(path: str, content: Any) -> Manifest:
    known = content if isinstance(content, dict) else {}
    if known.get("format") != FORMAT or known.get("version") != VERSION:
        found = f"format {known.get('format')!r}, version {known.get('version')!r}"
        raise DataError(f"{path}: {found}; expected format '{FORMAT}', version {VERSION}")
    try:
        manifest = cattrs.Converter(forbid_extra_keys=True).structure(content, Manifest)
    except Exception as error:  # cattrs raises groups of whatever a value's type raises
        problems = "; ".join(cattrs.transform_error(error, path="manifest"))
        raise DataError(f"{path} is damaged: {problems}; {AGAIN}") from None
    if manifest.dtype not in DTYPES:
        raise DataError(f"{path}: dtype '{manifest.dtype}'; expected one of {', '.join(DTYPES)}")
    if any(Path(name).name != name for name in _files(manifest)):
        raise DataError(f"{path} names files outside of its folder")
    return manifest


def _files(manifest: Manifest) -> Iterator[str]:
    """Yield what becomes names of files, here or in a cache."""
    yield manifest.tokenizer.file or "none"
    yield manifest.tokenizer.sha256
    for shard in manifest.shards:
        yield from (shard.name, shard.sha256)
