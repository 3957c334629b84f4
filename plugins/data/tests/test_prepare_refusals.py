"""``nanotrain data prepare``: what cannot be read or written is named."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from corpora import prepared
from nanotrain_data import unit_writer as module
from source_forms import TEXTS, arrow, corpus, documents_of, lines_of

from nanotrain_core.api import DataError


def refusal(tmp_path, source, **options):
    with pytest.raises(DataError) as caught:
        prepared(tmp_path / "out", source, **options)
    assert not (tmp_path / "out" / "manifest.json").exists()
    return str(caught.value)


def test_a_line_that_is_wrong_is_named_in_whichever_part_it_is(tmp_path):
    path = tmp_path / "bad.jsonl"
    good = lines_of(TEXTS[:40])
    for bad, text in (
        ("{", "no JSON"),
        ('["a"]', "expected a JSON object"),
        ('{"txet": "a"}', "no field 'text' (did you mean 'txet'?); it has txet; --field names another"),
        ('{"text": 1}', "field 'text' is of type int; expected a string"),
        ('{"text": ["a"]}', "field 'text' is of type list; expected a string"),
    ):
        path.write_text(good + bad + "\n" + good)
        for unit in (10**6, 700, 300):
            found = refusal(tmp_path, path, unit_bytes=unit)
            assert f"{path}:41: " in found
            assert text in found


def test_text_that_is_not_utf8_is_refused_wherever_its_file_is_cut(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"a line\n" * 100 + "caf\u00e9\n".encode("latin-1") + b"a line\n" * 100)
    for unit in (10**6, 300):
        assert f"{path}: no UTF-8 at byte 703; expected a text" in refusal(tmp_path, path, unit_bytes=unit)


def test_files_that_end_too_early_are_refused(tmp_path):
    lines = lines_of(TEXTS).encode()
    for name, content in (
        ("cut.jsonl.gz", gzip.compress(lines)[:-20]),
        ("cut.jsonl.zst", zstandard.ZstdCompressor().compress(lines)[:-20]),
        ("none.jsonl.gz", lines),
        ("none.jsonl.zst", lines),
    ):
        (tmp_path / name).write_bytes(content)
        assert f"{tmp_path / name} is damaged" in refusal(tmp_path, tmp_path / name)
    (tmp_path / "bad.parquet").write_bytes(lines)
    assert f"cannot read {tmp_path / 'bad.parquet'}" in refusal(tmp_path, tmp_path / "bad.parquet")


def test_columns_are_named(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"content": ["a", "b"], "id": [1, 2]}), path)
    assert "no column 'text'" in refusal(tmp_path, path)
    assert "it has content, id; --field names another" in refusal(tmp_path, path)
    assert f"{path}, row 0: column 'id' is of type int" in refusal(tmp_path, path, field="id")


def test_sources_that_are_none_are_refused(tmp_path):
    (tmp_path / "corpus").mkdir()
    assert "(did you mean 'corpus'?)" in refusal(tmp_path, tmp_path / "corpsu")
    (tmp_path / "corpus" / "a.html").write_text("a")
    found = refusal(tmp_path, tmp_path / "corpus")
    assert "it has .html (1); --suffixes names others that are text" in found
    assert "'--suffixes .html' reads it as text" in refusal(tmp_path, tmp_path / "corpus" / "a.html")
    (tmp_path / "corpus" / "b.txt").write_text("")
    assert "there is no text in" in refusal(tmp_path, tmp_path / "corpus")


def test_what_cannot_be_written_is_told(tmp_path, monkeypatch):
    source = corpus(tmp_path / "in", "jsonl")
    (tmp_path / "out").write_text("a file")
    assert f"cannot write to {tmp_path / 'out'}: File exists" in refusal(tmp_path, source)
    (tmp_path / "out").unlink()

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_shard", full)
    assert "No space left on device; given again, the command goes on" in refusal(tmp_path, source)


def test_of_several_splits_one_is_to_be_named(tmp_path):
    folder = tmp_path / "dataset"
    folder.mkdir()
    arrow(folder / "train", TEXTS)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    found = refusal(tmp_path, folder)
    assert f"name one of them: {folder / 'train'} or {folder / 'test'}" in found
    prepared(tmp_path / "out", folder / "train")
    assert documents_of(tmp_path / "out") == TEXTS


def test_a_worker_that_is_wrong_is_told_as_one_process_would(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(lines_of(TEXTS) + "{\n")
    assert f"{path}:301: no JSON" in refusal(tmp_path, path, unit_bytes=5000, workers=2)
