"""``nanotrain data prepare``: what is read, and the same bytes however often it is interrupted."""

import contextlib
import fcntl
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import prepared, texts
from nanotrain_data import inspect, prepare, readers, sources
from nanotrain_data import unit_writer as module
from nanotrain_data.manifest import read_manifest
from nanotrain_data.sources import units_of
from nanotrain_data.verify import damage
from source_forms import TEXTS, corpus, documents_of, lines_of

from nanotrain_core.api import DataError
from nanotrain_core.cli import main


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


FORMS = ["txt", "jsonl", "jsonl.gz", "jsonl.zst", "parquet", "datasets"]


@pytest.mark.parametrize("form", FORMS)
def test_every_document_of_every_form_arrives_in_order(tmp_path, form):
    """Cut into many shards, of which no document is in two, and none in none."""
    source = corpus(tmp_path / "in", form)
    manifest = prepared(tmp_path / "out", source, unit_bytes=3000).manifest
    assert documents_of(tmp_path / "out") == TEXTS
    assert manifest.documents == len(TEXTS)
    assert manifest.bytes == sum(len(text.encode()) for text in TEXTS) == manifest.tokens - len(TEXTS)
    assert len(manifest.shards) >= {"jsonl.gz": 1, "jsonl.zst": 1, "datasets": 2}.get(form, 4)


def test_lines_are_in_the_part_in_which_they_begin_wherever_it_is_cut(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text(lines_of(TEXTS[:20]) + "\n\n" + lines_of(TEXTS[20:30]).rstrip())
    size = path.stat().st_size
    for unit in [*range(60, 400, 7), size - 1, size, size + 1]:
        units = units_of([str(path)], (), unit)
        parts = [part for each in units for part in each.parts]
        assert [text for part in parts for text in readers.documents(part, "text")] == TEXTS[:30]


def test_a_large_file_of_text_is_cut_behind_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LARGEST_WHOLE", {"text": 400, "lines": 0})
    monkeypatch.setattr(readers, "LARGEST", 400)
    text = "\n".join(f"line {number} " + "x" * (number % 90) for number in range(200))
    (tmp_path / "book.txt").write_text(text)
    (tmp_path / "book.txt.gz").write_bytes(gzip.compress(text.encode()))
    for name, unit in (("book.txt", 900), ("book.txt", 10**6), ("book.txt.gz", 10**6)):
        out = tmp_path / f"{name}-{unit}"
        prepared(out, tmp_path / name, unit_bytes=unit)
        found = documents_of(out)
        assert "".join(found) == text
        assert len(found) > 10
        assert all(part.endswith("\n") for part in found[:-1])
        assert max(map(len, found)) <= 400 + 100


def test_any_number_of_workers_writes_the_same_bytes(tmp_path):
    source = corpus(tmp_path / "in", "jsonl")
    for workers in (1, 2):
        prepared(tmp_path / f"out{workers}", source, workers=workers, unit_bytes=8000)
    assert files_of(tmp_path / "out1") == files_of(tmp_path / "out2")
    assert len(files_of(tmp_path / "out1")) > 10


def test_half_a_surrogate_pair_is_no_end_of_the_world(tmp_path):
    """JSON may escape what UTF-8 cannot have, and scraped text does."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud83db"}\n{"text": "\\ud83d\\ude42"}\n')
    prepared(tmp_path / "out", path)
    assert documents_of(tmp_path / "out") == ["a\ufffdb", "\U0001f642"]


class Interrupted(Exception):
    pass


def interrupted(monkeypatch, after):
    """Have the writer of shards stop within the shard behind ``after`` whole ones."""
    real, count = module.write_shard, 0

    def write_shard(folder, name, dtype, documents, **options):
        nonlocal count
        count += 1
        if count > after:
            (folder / f".{name}.tokens.77.tmp").write_bytes(b"half a shard")
            raise Interrupted
        return real(folder, name, dtype, documents, **options)

    monkeypatch.setattr(module, "write_shard", write_shard)


@pytest.mark.parametrize("damaged", ["", ".tokens", ".offsets", ".hashes", ".json"])
def test_an_interrupted_one_goes_on_and_keeps_only_shards_that_are_right(tmp_path, monkeypatch, damaged):
    source, out = corpus(tmp_path / "in", "jsonl"), tmp_path / "out"
    whole = prepared(tmp_path / "whole", source, unit_bytes=6000).manifest
    with monkeypatch.context() as patched:
        interrupted(patched, after=3)
        with pytest.raises(Interrupted):
            prepared(out, source, unit_bytes=6000)
    assert not (out / "manifest.json").exists()
    if damaged:
        content = bytearray((out / f"00001{damaged}").read_bytes())
        content[len(content) // 2] ^= 8
        (out / f"00001{damaged}").write_bytes(content)
    again = prepared(out, source, unit_bytes=6000)
    assert again.written == len(whole.shards) - (2 if damaged else 3)
    assert files_of(out) == files_of(tmp_path / "whole")


@pytest.mark.parametrize("edit", [{"documents": 1}, {"bytes": 7}, None])
def test_a_record_that_was_edited_is_not_believed(tmp_path, monkeypatch, edit):
    """Its numbers, which no hash of the shard tells, were in the manifest. None: its hash is missing."""
    source, out = corpus(tmp_path / "in", "jsonl"), tmp_path / "out"
    with monkeypatch.context() as patched:
        interrupted(patched, after=2)
        with pytest.raises(Interrupted):
            prepared(out, source, unit_bytes=6000)
    known = json.loads((out / "00001.json").read_text())
    if edit:
        known["shard"] |= edit
    else:
        del known["sha256"]
    (out / "00001.json").write_text(json.dumps(known))
    again = prepared(out, source, unit_bytes=6000)
    assert again.written == len(again.manifest.shards) - 1
    prepared(tmp_path / "whole", source, unit_bytes=6000)
    assert files_of(out) == files_of(tmp_path / "whole")


def test_a_source_that_changed_meanwhile_is_read_again(tmp_path, monkeypatch):
    source, out = corpus(tmp_path / "in", "txt"), tmp_path / "out"
    with monkeypatch.context() as patched:
        interrupted(patched, after=3)
        with pytest.raises(Interrupted):
            prepared(out, source, unit_bytes=3000)
    time.sleep(0.01)
    changed = TEXTS[0].replace("0", "1", 1)
    (source / "000.txt").write_text(changed, newline="")
    prepared(out, source, unit_bytes=3000)
    assert documents_of(out) == [changed, *TEXTS[1:]]


@pytest.mark.parametrize("form", ["jsonl", "txt"])
def test_a_source_that_changed_and_kept_size_and_time_is_prepared_again(tmp_path, form):
    """As archives and copies have it. Shards of what did not change are left as they are."""
    source, out = corpus(tmp_path / "in", form), tmp_path / "out"
    first = prepared(out, source, unit_bytes=3000).manifest
    path = source / "000.txt" if form == "txt" else source
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(TEXTS[0][:4].encode(), b"1" + TEXTS[0][1:4].encode(), 1))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    again = prepared(out, source, unit_bytes=3000)
    assert path.name in again.changed
    assert documents_of(out) == [TEXTS[0].replace("0", "1", 1), *TEXTS[1:]]
    assert again.written == 1
    assert again.manifest.shards[1:] == first.shards[1:]
    assert prepared(out, source, unit_bytes=3000) == prepare.Prepared(again.manifest, 0)


def test_what_is_whole_is_verified_and_left(tmp_path):
    source, out = corpus(tmp_path / "in", "jsonl"), tmp_path / "out"
    prepared(out, source, unit_bytes=6000)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir() if path.name != ".lock"}
    assert prepared(out, source, unit_bytes=6000).written == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    with pytest.raises(DataError, match="another tokenizer or other options made"):
        prepared(out, source, unit_bytes=7000)
    content = bytearray((out / "00001.tokens").read_bytes())
    content[0] ^= 1
    (out / "00001.tokens").write_bytes(content)
    with pytest.raises(DataError, match=r"00001.tokens is damaged at byte 0 or behind it"):
        prepared(out, source, unit_bytes=6000)
    assert damage(out, read_manifest(out)) == [f"{out / '00001.tokens'} is damaged at byte 0 or behind it"]


def test_two_commands_do_not_write_to_one_folder(tmp_path):
    source, out = corpus(tmp_path / "in", "jsonl"), tmp_path / "out"
    out.mkdir()
    with (out / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another 'nanotrain data' writes to"):
            prepared(out, source)
    assert prepared(out, source).written == 1


def test_a_folder_of_other_files_is_not_written_to(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    with pytest.raises(DataError, match=r"holds thesis.tex, which is of no preparation"):
        prepared(out, corpus(tmp_path / "in", "jsonl"))


def test_documents_may_end_without_a_token(tmp_path):
    source = corpus(tmp_path / "in", "jsonl")
    manifest = prepared(tmp_path / "out", source, end_documents=False).manifest
    assert manifest.end_of_document is None
    tokens = np.fromfile(tmp_path / "out" / "00000.tokens", np.uint8)
    assert tokens.tobytes().decode() == "".join(TEXTS)


def of_session(session):
    """Return the processes of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, its = stat.read_text().rpartition(")")[2].split()[:4]
            found += [stat.parent.name] if int(its) == session and state != "Z" else []
    return found


@pytest.mark.full
@pytest.mark.parametrize("how", ["the command is killed", "Ctrl-C"])
def test_ended_in_its_middle_it_goes_on_to_the_same_bytes(tmp_path, how):
    """Its workers do not live on, and Ctrl-C does not wait for what they are at."""
    source = tmp_path / "in.jsonl"
    source.write_text(lines_of(texts(20_000, seed=2)))
    words = [*COMMAND, "data", "prepare", str(source), "--tokenizer", "bytes", "--workers", "2"]
    words += ["--shard-mb", "1", "--out"]
    subprocess.run([*words, tmp_path / "whole"], check=True, capture_output=True)
    out = tmp_path / "out"
    command = subprocess.Popen([*words, out], stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not [*out.glob("*.json")]:
        time.sleep(0.005)
    if how == "Ctrl-C":
        os.killpg(command.pid, signal.SIGINT)
    else:
        command.kill()
    told = command.communicate(timeout=20)[1]
    assert "Traceback" not in told
    assert command.returncode == (130 if how == "Ctrl-C" else -signal.SIGKILL)
    until = time.monotonic() + 10
    while left := of_session(command.pid):
        assert time.monotonic() < until, left
        time.sleep(0.05)
    subprocess.run([*words, out], check=True, capture_output=True)
    assert files_of(out) == files_of(tmp_path / "whole")


#: As a terminal's shell gives it: pytest may itself run with Ctrl-C ignored.
COMMAND = [
    sys.executable,
    "-c",
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from nanotrain_core.cli import main; sys.exit(main())",
]


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_rows_without_a_text_are_left_out_as_empty_ones_are_and_counted(tmp_path, name, capsys):
    path, texts = tmp_path / name, ["a", None, "", "b"]
    if name.endswith(".jsonl"):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        pq.write_table(pa.table({"text": texts}), path)
    arguments = [str(path), "--tokenizer", "bytes", "--workers", "1", "--out", str(tmp_path / "out")]
    assert main(["data", "prepare", *arguments]) == 0
    left_out = "2 rows whose text is empty or null"
    assert f"2 documents, 4 tokens in 1 shards; {left_out} left out" in capsys.readouterr().out
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.documents, manifest.left_out) == (2, 2)
    assert f"left out   {left_out}" in inspect.lines(inspect.summary(tmp_path / "out", manifest))
