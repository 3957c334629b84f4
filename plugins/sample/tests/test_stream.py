"""Pieces of text add up to the whole, whatever tokens characters are made of."""

import pytest
from nanotrain_sample.stream import Stream

from nanotrain_core.data.tokenizers import Bytes


def space_between(tokens):
    """Decode as SentencePiece does: a word begins with a space, but for the first."""
    return " ".join(f"w{token}" for token in tokens)


@pytest.mark.parametrize("text", ["plain", "naïve café", "漢字 and 🙂🙃", "e\u0301"])
def test_characters_of_several_bytes_are_told_whole(text):
    stream, tokens = Stream(Bytes().decode, Bytes().encode("é")), Bytes().encode(text)
    pieces = [stream.more(token) for token in tokens]
    assert "".join(pieces) + stream.rest() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_characters_that_never_become_whole_are_told_at_the_end():
    stream = Stream(Bytes().decode, [])
    assert [stream.more(token) for token in "é".encode()[:1]] == [""]
    assert stream.rest() == "\ufffd"


def test_how_a_token_is_written_may_depend_on_the_one_before():
    stream = Stream(space_between, [1, 2])
    assert [stream.more(3), stream.more(4), stream.more(5)] == [" w3", " w4", " w5"]
