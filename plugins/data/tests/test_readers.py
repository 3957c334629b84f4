"""Documents and conversations of a part of a corpus: what is read of it, and how often."""

from chats import chats, write_chats
from nanotrain_data import readers
from nanotrain_data.sources import units_of


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
