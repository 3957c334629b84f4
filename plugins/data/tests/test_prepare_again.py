"""``nanotrain data prepare``, given again: the same as a new preparation, whatever changed in its sources."""

import json

import numpy as np
import pytest
from chats import prepared_chats
from corpora import prepared
from nanotrain_data import readers, sources
from nanotrain_data.manifest import read_manifest

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


def test_a_source_that_no_token_was_made_of_is_compared(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    lines = [json.dumps({"text": text, "note": "x" * (9 - len(text))}) + "\n" for text in ("", "y" * 9)]
    for name, line in zip("abc", (lines[1], lines[0], lines[1]), strict=True):
        (folder / f"{name}.jsonl").write_text(line)
    first = prepared(tmp_path / "out", folder, unit_bytes=40)
    assert [shard.name for shard in first.manifest.shards] == ["00000", "00002"]
    assert [shard.name for shard in first.manifest.empty] == ["00001"]
    assert not (tmp_path / "out" / "00001.tokens").exists()
    assert assert_as_new(tmp_path, folder, unit_bytes=40).written == 0
    (folder / "b.jsonl").write_text(lines[1])
    again = assert_as_new(tmp_path, folder, unit_bytes=40)
    assert (again.written, again.changed, again.manifest.documents) == (1, ("b.jsonl",), 3)
    (folder / "a.jsonl").write_text(lines[0])
    again = assert_as_new(tmp_path, folder, unit_bytes=40)
    assert (again.written, again.changed, again.manifest.documents) == (0, ("a.jsonl",), 2)
    assert again.manifest == read_manifest(tmp_path / "out")


def test_conversations_left_out_are_counted_where_a_shard_has_no_other(tmp_path):
    path = tmp_path / "in.jsonl"
    said = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "It is."}]
    asked = [{"messages": some} for some in (said, *[said[:1]] * 9)]
    path.write_text("".join(json.dumps(each) + "\n" for each in asked))
    manifest = prepared_chats(tmp_path / "out", path, unit_bytes=150).manifest
    assert (manifest.documents, manifest.left_out) == (1, 9)
    assert len(manifest.empty) > 1


def test_what_a_command_left_that_was_killed_behind_its_manifest_is_removed(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "some text"}\n' + '{"text": ""}\n' * 9)
    prepared(tmp_path / "out", path, unit_bytes=50)
    for name in ("00000.json", "00001.json", "00001.tokens", "notes.json", "notes.tokens"):
        (tmp_path / "out" / name).write_text("")
    assert prepared(tmp_path / "out", path, unit_bytes=50).written == 0
    for name in ("notes.json", "notes.tokens"):  # of somebody else
        (tmp_path / "out" / name).unlink()
    assert assert_as_new(tmp_path, path, unit_bytes=50).written == 0
