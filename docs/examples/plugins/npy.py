"""Tokens in a .npy file: an array of whole numbers, read by memory map and never loaded whole."""

from pathlib import Path

import attrs

from nanotrain_core.api import Component, DataError, Problem, Range, Survey, hookimpl, path_field


@attrs.define(frozen=True, kw_only=True)
class NpyConfig:
    """`[data] use = "npy"`."""

    path: str = path_field()
    """The file, as `numpy.save` writes it: tokens one after the other."""
    vocab: int = attrs.field(default=256, validator=Range(2))
    """Tokens are below it."""
    validation: float = attrs.field(default=0.05, validator=Range(0.0, 0.5))
    """Share of the sequences, the last ones, that is held out."""


@hookimpl
def nanotrain_register_data(register):
    register(
        Component(
            name="npy",
            config=NpyConfig,
            factory=f"{__name__}:build",
            summary="tokens in a .npy file",
            survey=f"{__name__}:survey",
            example_of_text=f"{__name__}:example",
        )
    )


def example(text, folder):
    """Write the bytes of a text as tokens, for `nanotrain conformance`; return the keys that name them."""
    import numpy as np

    path = Path(folder, "tokens.npy")
    np.save(path, np.frombuffer(Path(text).read_bytes(), dtype=np.uint8))
    return {"path": str(path), "vocab": 256}


def opened(config):
    """Return the tokens as a memory map, [N]; DataError if they are none."""
    import numpy as np

    if not Path(config.path).is_file():
        raise DataError(f"there is no file {config.path}")
    try:
        tokens = np.load(config.path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"{config.path}: expected an array of numpy.save: {error}") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        found = f"{tokens.dtype} of shape {tokens.shape}"
        raise DataError(f"{config.path}: expected whole numbers in one dimension, got {found}")
    return tokens


def split(config, tokens, length):
    """Return how many sequences of `length` + 1 tokens there are to train on, and held out."""
    count = (len(tokens) - 1) // length  # neighbors share a token: the last target is the next first input
    held_out = int(count * config.validation)
    return count - held_out, held_out


def survey(config, length):
    """Return how many sequences there are, or what is wrong, before any rank starts."""
    try:
        train, held_out = split(config, opened(config), length)
    except DataError as error:
        return Survey(problems=[Problem("data.path", str(error))])
    return Survey(vocab=config.vocab, train=train, validation=held_out)


def build(config):
    import hashlib

    import numpy as np

    from nanotrain_core.api.torch import SequenceData

    class Npy(SequenceData):
        vocab_size, bytes_per_token = config.vocab, None

        def open(self, *, length, seed):
            self.tokens = opened(config)
            self.length = length
            train, held_out = split(config, self.tokens, length)
            self.first_held_out = train
            ends = np.concatenate([self.tokens[:4096], self.tokens[-4096:]]).tobytes()
            mark = f"{len(self.tokens)} tokens, {hashlib.sha256(ends).hexdigest()[:12]}, {held_out} held out"
            self.prepare(length=length, seed=seed, train=train, validation=held_out, fingerprint=mark)

        def read_sequences(self, numbers, *, validation):
            first = (numbers + (self.first_held_out if validation else 0)) * self.length
            found = self.tokens[first[:, None] + np.arange(self.length + 1)].astype(np.int64)
            if found.size and not 0 <= found.min() <= found.max() < config.vocab:
                raise DataError(f"{config.path}: token {found.max()}; expected 0 to {config.vocab - 1}")
            return found

        def describe(self):
            return f"{len(self.tokens)} tokens of {config.path}"

        def encode(self, text):
            """Read `text` as token numbers: the tokenizer that made the file is not known."""
            return [int(word) for word in text.split()]

        def decode(self, tokens):
            return " ".join(map(str, tokens))

    return Npy()
