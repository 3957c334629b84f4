"""``nanotrain data prepare``, given again: the same as a new preparation, whatever changed in its sources."""

import json

import numpy as np
import pytest
from corpora import prepared
from nanotrain_data import readers, sources

# --- sources that changed and kept their sizes ----------------------------------------------------


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def assert_as_new(tmp_path, source, **options):
    """Prepare again, and anew; return what was done."""
    done = prepared(tmp_path / "out", source, **options)
    prepared(tmp_path / "new", source, **options)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "new")
    return done


def test_the_end_of_a_line_that_reaches_over_the_edge_of_shards_is_compared(tmp_path):
    """It is of the shard in which the line begins."""
    path = tmp_path / "in.jsonl"
    lines = [json.dumps({"text": f"{n} " + "x" * 60}) + "\n" for n in range(13)]
    path.write_text("".join(lines))
    first = prepared(tmp_path / "out", path, unit_bytes=300).manifest
    edge = path.stat().st_size // len(first.shards)
    content = bytearray(path.read_bytes())
    at = content.index(b'"}\n', edge)
    assert 0 < at - edge < 60
    content[at - 1] = ord("y")
    path.write_bytes(content)
    assert assert_as_new(tmp_path, path, unit_bytes=300).written == 2


@pytest.mark.parametrize(("before", "after"), [("\n", " "), (" ", "\n")])
def test_whether_a_line_begins_at_the_edge_of_shards_is_compared(tmp_path, monkeypatch, before, after):
    """The byte before tells: without it a line would be in both shards, or in none."""
    monkeypatch.setitem(sources.LARGEST_WHOLE, "text", 64)
    monkeypatch.setattr(readers, "LARGEST", 64)
    path = tmp_path / "in.txt"
    text = "".join(f"line {n:03d}\n" for n in range(24))
    for end in (before, after):
        path.write_text(text[:71] + end + text[72:])
        if end == before:
            prepared(tmp_path / "out", path, unit_bytes=72)
    assert_as_new(tmp_path, path, unit_bytes=72)
    tokens = [np.fromfile(file, np.uint8) for file in sorted((tmp_path / "out").glob("*.tokens"))]
    assert len(tokens) == 3
    assert np.concatenate(tokens).tobytes().replace(b"\0", b"").decode() == path.read_text()
