"""``nanotrain data train-tokenizer``: a byte-level BPE as GPT-2's, by Hugging Face tokenizers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from nanotrain_core.api import DataError, show_progress, write_atomically, write_problem
from nanotrain_data.readers import documents
from nanotrain_data.sources import Unit, units_of

#: What a tokenizer has at the least: the bytes, and the token that ends a document.
LEAST = 257
END = "<|endoftext|>"
#: Bytes of text that are taken or left out as a whole where not all is read.
UNIT = 2**22


def train_tokenizer(
    sources: Sequence[str], suffixes: Sequence[str], field: str, vocab: int, out: Path, size: int | None
) -> str:
    """Write a ``tokenizer.json`` of at most ``vocab`` tokens, and return what was written.

    Token 0 is ``<|endoftext|>``; then come the bytes, so that any text can be tokenized.

    Args:
        sources: as of ``prepare``.
        suffixes: of files that are a document each.
        field: of JSON lines or tables.
        vocab: tokens.
        out: the file.
        size: bytes of text to read, about, spread evenly over the sources; None: all.

    Raises:
        DataError: ``tokenizers`` is missing, a source cannot be read, ``vocab`` is too small, or there
            can be no file ``out``.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise DataError("train-tokenizer needs the package: pip install nanotrain-data[tokenizers]") from None
    if vocab < LEAST:
        raise DataError(f"--vocab {vocab}: expected at least {LEAST}, the 256 bytes and {END}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise DataError(f"--out {out}: {out.parent} cannot be made: {problem.strerror}") from None
    if obstacle := write_problem(out):
        raise DataError(f"--out {out}: {obstacle}")
    units = chosen(units_of(sources, suffixes, UNIT), size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with show_progress("reading text", sum(unit.size for unit in units), "B") as advance:
        tokenizer.train_from_iterator(_texts(units, field, advance), trainer)
    write_atomically(out.resolve(), lambda path: tokenizer.save(str(path)))
    return f"{out}: {tokenizer.get_vocab_size():,} tokens, made from {sum(u.size for u in units):,} bytes"


def chosen(units: Sequence[Unit], size: int | None) -> list[Unit]:
    """Return units of ``size`` bytes or so in all, spread evenly; at least one, if there is one."""
    total = sum(unit.size for unit in units)
    if size is None or total <= size:
        return list(units)
    count = max(1, round(len(units) * size / total))
    return [units[(2 * number + 1) * len(units) // (2 * count)] for number in range(count)]


def _texts(units: Sequence[Unit], field: str, advance: object) -> Iterator[str]:
    assert callable(advance)
    for unit in units:
        for part in unit.parts:
            yield from filter(None, documents(part, field))
            advance(part.size)
