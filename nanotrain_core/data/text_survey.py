"""Surveys a text corpus without reading all of it. Never imports torch."""

from __future__ import annotations

from nanotrain_core.builtin.configs import TextConfig
from nanotrain_core.data.documents import Source, fingerprint, sources
from nanotrain_core.data.held_out import held_out
from nanotrain_core.data.survey import Survey
from nanotrain_core.errors import DataError, Problem

#: Bytes of text up to which tokens are counted by running the tokenizer: more would take too long.
SMALL = 2**21


def survey(config: TextConfig, length: int, longest: int = 0) -> Survey:
    """Return the vocabulary and the sequences of ``length`` tokens, as far as known: see Component.survey.

    Args:
        config: of the component.
        length: sequence length in tokens.
        longest: length of the run's longest sequence; 0: all have the same length.
    """
    longest = max(longest, length, config.piece_length)
    problems = []
    found = sources(config.paths, config.suffixes)
    sizes = []
    for number, source in enumerate(found):
        try:
            sizes += source.sizes()
        except DataError as error:
            problems.append(Problem(f"data.paths.{number}" if config.paths else "data", str(error)))
    tokens: int | None = sum(size + 1 for size in sizes)
    vocab = 256  # bytes, plus an end token per document
    if config.tokenizer != "bytes":
        try:
            vocab, tokens = tokenized(config.tokenizer, found, small=not problems and sum(sizes) <= SMALL)
        except DataError as error:
            return Survey(problems=(*problems, Problem("data.tokenizer", str(error))))
    if config.mask_documents and not problems and not ends_documents(config.tokenizer):
        text = f"tokenizer {config.tokenizer} has no token that ends documents, by which they are told apart"
        return Survey(vocab=vocab, problems=(Problem("data.mask_documents", text),))
    if problems or tokens is None:
        return Survey(vocab=vocab, problems=problems)
    count = max(0, (tokens - 1) // longest)
    held = held_out(count, config.validation_fraction)
    if not count:
        text = (
            f"a sequence takes {longest + 1} tokens, but the text has {tokens}: add text or lower the length"
        )
        return Survey(vocab=vocab, problems=(Problem("batch.length", text),))
    each = longest // length
    return Survey(vocab=vocab, train=each * (count - held), validation=each * held)


def ends_documents(name: str) -> bool:
    """Return whether a tokenizer has an end-of-document token."""
    from nanotrain_core.data.tokenizers import make_tokenizer

    return make_tokenizer(name).separator is not None


def tokenized(name: str, found: list[Source], *, small: bool) -> tuple[int, int | None]:
    """Return the size of a tokenizer's vocabulary, and the number of tokens if the text is small.

    Raises:
        DataError: see :func:`~nanotrain_core.data.tokenizers.make_tokenizer`.
    """
    from nanotrain_core.data.tokenizers import make_tokenizer

    tokenizer = make_tokenizer(name)
    if not small:
        return tokenizer.vocab_size, None
    documents = [document for source in found for document in source.documents()]
    return tokenizer.vocab_size, len(tokenizer.tokenize(documents, fingerprint(documents)))
