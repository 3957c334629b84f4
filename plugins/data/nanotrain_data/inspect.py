"""What ``nanotrain data inspect`` tells of a prepared folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nanotrain_core.api import DataError
from nanotrain_core.api.text import HashedTokens
from nanotrain_data.codecs import Codec, codec_of
from nanotrain_data.manifest import Manifest, ShardInfo, what_is_left_out
from nanotrain_data.verify import offsets_problem
from nanotrain_data.writer import map_tokens

Integers = npt.NDArray[np.int64]

#: Of the lengths of documents.
PERCENTILES = (0, 1, 10, 50, 90, 99, 100)


def summary(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Return what a folder holds, as JSON: lengths are of documents, in tokens."""
    lengths = document_lengths(folder, manifest)
    found = np.percentile(lengths, PERCENTILES, method="nearest").tolist()
    return {
        "folder": str(folder),
        "tokenizer": {"kind": manifest.tokenizer.kind, "name": manifest.tokenizer.name},
        "vocab_size": manifest.vocab_size,
        "dtype": manifest.dtype,
        "end_of_document": manifest.end_of_document,
        "shards": len(manifest.shards),
        "documents": manifest.documents,
        "tokens": manifest.tokens,
        "bytes_of_text": manifest.bytes or None,
        "bytes_per_token": round(manifest.bytes / manifest.tokens, 3) if manifest.bytes else None,
        "length_mean": round(float(lengths.mean()), 1),
        "length_percentiles": {str(at): int(value) for at, value in zip(PERCENTILES, found, strict=True)},
        "digest": manifest.digest,
        "chat_template": manifest.chat.template if manifest.chat else None,
        "answers": sum(shard.answers or 0 for shard in manifest.shards),
        "left_out": manifest.left_out,
    }


def lines(found: dict[str, Any]) -> list[str]:
    """Return a summary as text."""
    lengths = "  ".join(f"p{at} {value}" for at, value in found["length_percentiles"].items())
    name, end = found["tokenizer"]["name"], found["end_of_document"]
    size = found["bytes_of_text"]
    of_text = f", {size:,} bytes of text, {found['bytes_per_token']} a token" if size else ""
    chat = found["chat_template"]
    what = "conversations" if chat else "documents"
    of_chat = [f"answers    {found['answers']:,}; template {chat}"] if chat else []
    rows = what_is_left_out(of_chat=bool(chat))
    left_out = [f"left out   {found['left_out']:,} {rows}"] if found["left_out"] else []
    return [
        f"{found['folder']}: {found['documents']:,} {what}, {found['tokens']:,} tokens{of_text}",
        f"tokenizer  {name} ({found['tokenizer']['kind']}), {found['vocab_size']:,} tokens, "
        f"documents end with {'no token' if end is None else end}",
        f"stored as  {found['dtype']} in {found['shards']:,} shards",
        f"lengths    mean {found['length_mean']:g}  {lengths}",
        *of_chat,
        *left_out,
    ]


def document_lengths(folder: Path, manifest: Manifest) -> Integers:
    """Return the tokens of each document, [documents]."""
    each = [np.diff(_offsets(folder, shard)) for shard in manifest.shards]
    return np.concatenate(each) if each else np.empty(0, np.int64)


def samples(folder: Path, manifest: Manifest, count: int, width: int, seed: int) -> list[str]:
    """Return the beginnings of ``count`` documents that ``seed`` chooses, with their shard and number.

    Raises:
        DataError: tokens are damaged, or the folder has no tokenizer.
    """
    codec = codec_of(folder, manifest)
    ends = np.cumsum([shard.documents for shard in manifest.shards])
    total = int(ends[-1])
    chosen = np.sort(np.random.default_rng(seed).choice(total, min(count, total), replace=False))
    found = []
    for number in chosen.tolist():
        shard = manifest.shards[int(np.searchsorted(ends, number, side="right"))]
        within = number - int(ends[manifest.shards.index(shard)]) + shard.documents
        found.append(_beginning(folder, manifest, shard, within, codec, width))
    return found


def _beginning(
    folder: Path, manifest: Manifest, shard: ShardInfo, number: int, codec: Codec, width: int
) -> str:
    first, end = _offsets(folder, shard)[number : number + 2].tolist()
    path = folder / f"{shard.name}.tokens"
    hashes = path.with_suffix(".hashes").read_bytes()
    tokens = HashedTokens(path, map_tokens(path, manifest.dtype), hashes)[first : min(end, first + width)]
    text = codec.decode(tokens.tolist())[:width]
    return f"{shard.name}, document {number}, {end - first} tokens: {text!r}"


def _offsets(folder: Path, shard: ShardInfo) -> Integers:
    path = folder / f"{shard.name}.offsets"
    try:
        offsets = np.fromfile(path, "<i8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    if problem := offsets_problem(folder, shard, offsets):
        raise DataError(problem)
    return offsets
