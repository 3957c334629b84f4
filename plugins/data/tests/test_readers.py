"""Documents and conversations of a part of a corpus: what is read of it, and how often."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import chats, write_chats
from nanotrain_data import readers, sources
from nanotrain_data.sources import units_of

from nanotrain_core.api import DataError


def documents(path):
    """Return the documents of a file."""
    parts = [part for unit in units_of([str(path)], (), 10**6) for part in unit.parts]
    return [text for part in parts for text in readers.documents(part, "text")]


def test_lines_before_a_conversation_are_counted_for_an_error_alone(tmp_path, monkeypatch):
    """They are all of the file before it: for each conversation, that is quadratic."""
    real, counted = readers._where, []

    def where(*arguments):
        counted.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(readers, "_where", where)
    monkeypatch.setattr(readers, "CHUNK", 100)  # a place is behind many chunks
    some = chats(20)
    path = write_chats(tmp_path / "in.jsonl", some)
    parts = [part for unit in units_of([str(path)], (), 900) for part in unit.parts]
    assert len(parts) > 3
    found = [each for part in parts for each in readers.conversations(part, "messages")]
    assert [messages for _, messages, _ in found] == some
    assert counted == []
    assert [place() for place, _, _ in found] == [f"{path}:{line}" for line in range(1, 21)]


def test_units_have_as_many_files_as_fit_and_each_size_is_added_once(monkeypatch):
    """For each file, the sizes of those before it had been added up again."""
    added = 0

    class Size(int):
        def __add__(self, other):
            nonlocal added
            added += 1
            return Size(int(self) + int(other))

        __radd__ = __add__

    sizes = [3, 4, 3, 1, 20, 9, 1, *[1] * 100]
    parts = [sources.Part(str(n), str(n), "text", 0, 0, Size(size)) for n, size in enumerate(sizes)]
    monkeypatch.setattr(sources, "_parts", lambda *arguments: parts)
    found = [[int(part.size) for part in unit.parts] for unit in units_of(["in"], (), 10)]
    assert found == [[3, 4, 3], [1], [20], [9, 1], *[[1] * 10] * 10]
    assert added <= 2 * len(sizes)


@pytest.mark.parametrize(
    "wrong", [b"\xed\xa0\x80", b"\xff"], ids=["half of a surrogate pair", "no character"]
)
def test_json_lines_that_are_not_utf8_are_refused(tmp_path, wrong):
    """Only what JSON itself escapes may be half a surrogate pair: see ``readers._sound``."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "one"}\n{"text": "a' + wrong + b'b"}\n')
    with pytest.raises(DataError) as caught:
        documents(path)
    assert f"{path}:2: no UTF-8 at byte 11 of the line" in str(caught.value)


def test_a_byte_order_mark_before_json_lines_is_skipped(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "na\xc3\xafve"}\n{"text": "\\ud83d"}\n')
    assert documents(path) == ["na\u00efve", "\ufffd"]


def test_tables_that_are_not_utf8_are_refused(tmp_path):
    """Arrow takes any bytes for a text."""
    buffers = [None, pa.py_buffer(np.array([0, 1, 4], np.int32)), pa.py_buffer(b"aa\xffb")]
    texts = pa.Array.from_buffers(pa.string(), 2, buffers)
    messages = pa.StructArray.from_arrays([texts, texts], ["role", "content"])
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": texts, "messages": pa.ListArray.from_arrays([0, 1, 2], messages)}), path)
    (unit,) = units_of([str(path)], (), 10**6)
    for found in (readers.documents(unit.parts[0], "text"), readers.conversations(unit.parts[0], "messages")):
        with pytest.raises(
            DataError, match=r"in.parquet, row 1: column '\w+' has no UTF-8 at byte 1 of a text"
        ):
            list(found)
