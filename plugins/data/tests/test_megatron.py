"""``.bin`` and ``.idx`` of Megatron-LM, against its own layout: megatron/core/datasets/indexed_dataset.py."""

import json
import struct
from itertools import pairwise

import numpy as np
import pytest
from corpora import prepared, texts
from nanotrain_data import megatron
from nanotrain_data.manifest import read_manifest

from nanotrain_core.api import DataError

CODES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def write(prefix, documents, code=8, modes=False):
    """Write documents, each a list of sequences, as Megatron's builder and ``_IndexWriter`` do."""
    sequences = [np.array(sequence, CODES[code]) for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    pointers = [sum(lengths[:number]) * CODES[code]().itemsize for number in range(len(lengths))]
    ends = np.cumsum([0, *map(len, documents)])
    prefix.with_name(prefix.name + ".bin").write_bytes(b"".join(s.tobytes(order="C") for s in sequences))
    with prefix.with_name(prefix.name + ".idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00")
        file.write(struct.pack("<Q", 1))
        file.write(struct.pack("<B", code))
        file.write(struct.pack("<Q", len(lengths)))
        file.write(struct.pack("<Q", len(ends)))
        file.write(np.array(lengths, dtype=np.int32).tobytes(order="C"))
        file.write(np.array(pointers, dtype=np.int64).tobytes(order="C"))
        file.write(np.array(ends, dtype=np.int64).tobytes(order="C"))
        if modes:
            file.write(np.zeros(len(lengths), np.int8).tobytes())


def read(prefix):
    """Return the documents, each a list of sequences, as ``_IndexReader`` and ``_MMapBinReader`` do."""
    index = prefix.with_name(prefix.name + ".idx").read_bytes()
    content = prefix.with_name(prefix.name + ".bin").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, documents = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1
    lengths = np.frombuffer(index, np.int32, sequences, 34)
    pointers = np.frombuffer(index, np.int64, sequences, 34 + lengths.nbytes)
    ends = np.frombuffer(index, np.int64, documents, 34 + lengths.nbytes + pointers.nbytes)
    assert len(index) == 34 + lengths.nbytes + pointers.nbytes + ends.nbytes
    some = [
        np.frombuffer(content, CODES[code], length, pointer).tolist()
        for length, pointer in zip(lengths, pointers, strict=True)
    ]
    return [some[begin:end] for begin, end in pairwise(ends)]


def documents_of(folder):
    manifest = read_manifest(folder)
    found = []
    for shard in manifest.shards:
        tokens = np.fromfile(folder / f"{shard.name}.tokens", manifest.dtype)
        offsets = np.fromfile(folder / f"{shard.name}.offsets", np.int64)
        found += [tokens[begin:end].tolist() for begin, end in pairwise(offsets)]
    return found


def test_what_is_exported_is_what_megatron_reads_and_comes_back(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(200)))
    first = prepared(tmp_path / "first", source, unit_bytes=4000).manifest
    told = megatron.export_folder(tmp_path / "first", tmp_path / "deep" / "out.v1")
    assert "200 documents" in told
    found = read(tmp_path / "deep" / "out.v1")
    assert [[*text.encode(), 0] for text in texts(200)] == [sequence for (sequence,) in found]
    megatron.import_prefix(tmp_path / "deep" / "out.v1", tmp_path / "again", "bytes")
    again = read_manifest(tmp_path / "again")
    assert documents_of(tmp_path / "again") == documents_of(tmp_path / "first")
    assert (again.vocab_size, again.dtype, again.end_of_document) == (256, "uint8", 0)
    assert again.tokenizer == first.tokenizer


@pytest.mark.parametrize("code", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("modes", [False, True])
def test_what_megatron_writes_is_read(tmp_path, monkeypatch, code, modes):
    """Documents of several sequences, empty ones, and shards that hold whole documents."""
    documents = [[[1, 2], [3]], [[4]], [[]], [[5, 6, 7, 8, 9, 100], []], [], [[7], [], [8, 9]]]
    monkeypatch.setattr(megatron, "SHARD_TOKENS", 5)
    write(tmp_path / "data", documents, code, modes)
    megatron.import_prefix(tmp_path / "data", tmp_path / "out", None)
    joined = [[token for sequence in document for token in sequence] for document in documents]
    assert documents_of(tmp_path / "out") == [document for document in joined if document]
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.vocab_size, manifest.dtype, manifest.tokenizer.kind) == (101, "uint8", "unknown")
    assert [shard.tokens for shard in manifest.shards] == [4, 6, 3]


def test_the_end_is_known_if_every_document_has_it(tmp_path):
    for name, documents, end in (
        ("all", [[[5, 0]], [[7], [8, 0], []]], 0),
        ("some", [[[5, 0]], [[7, 8]]], None),
    ):
        write(tmp_path / name, documents)
        megatron.import_prefix(tmp_path / name, tmp_path / f"{name}-out", "bytes")
        assert read_manifest(tmp_path / f"{name}-out").end_of_document == end


def test_tokens_of_32_bits_are_int32_for_megatron(tmp_path):
    write(tmp_path / "data", [[[70_000, 3]]], code=4)
    megatron.import_prefix(tmp_path / "data", tmp_path / "out", None)
    assert read_manifest(tmp_path / "out").dtype == "uint32"
    megatron.export_folder(tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back.idx").read_bytes() == (tmp_path / "data.idx").read_bytes()
    assert (tmp_path / "back.bin").read_bytes() == (tmp_path / "data.bin").read_bytes()


def refusal(tmp_path, name="data", tokenizer=None):
    with pytest.raises(DataError) as caught:
        megatron.import_prefix(tmp_path / name, tmp_path / "out", tokenizer)
    return str(caught.value)


def test_what_is_damaged_is_refused_by_name(tmp_path):
    write(tmp_path / "data", [[[1, 2, 300]], [[4]]])
    index, content = (tmp_path / "data.idx").read_bytes(), (tmp_path / "data.bin").read_bytes()
    assert "data.bin has token 300, but bytes has 256" in refusal(tmp_path, tokenizer="bytes")
    assert "(did you mean 'data.idx'?)" in refusal(tmp_path, "daat")
    (tmp_path / "data.bin").write_bytes(content[:-2])
    assert "data.bin is damaged: it has 6 bytes, and its index ends at 8" in refusal(tmp_path)
    (tmp_path / "data.bin").unlink()
    assert "no 'data.bin'" in refusal(tmp_path)
    (tmp_path / "data.bin").write_bytes(content)
    for damaged, text in (
        (index[:-1], "data.idx is damaged: it has 81 bytes, and its counts need 82"),
        (b"MMIDIDY" + index[7:], "data.idx is no index of Megatron-LM"),
        (index[:9] + struct.pack("<Q", 2) + index[17:], "version 2, code 8; expected version 1"),
        (index[:17] + b"\x07" + index[18:], "version 1, code 7"),
        (index[:-8] + struct.pack("<q", 1), "its documents do not follow one another"),
        (b"", "no index of Megatron-LM"),
    ):
        (tmp_path / "data.idx").write_bytes(damaged)
        assert text in refusal(tmp_path)
    assert not (tmp_path / "out").exists()
    write(tmp_path / "minus", [[[-1, 2]]], code=4)
    assert "minus.bin has token -1: expected numbers from 0 on" in refusal(tmp_path, "minus")


def test_nothing_is_overwritten(tmp_path):
    write(tmp_path / "data", [[[1, 2]]])
    megatron.import_prefix(tmp_path / "data", tmp_path / "out", None)
    assert "is not empty: name another folder" in refusal(tmp_path)
    with pytest.raises(DataError, match=r"data.bin is there: name another, or delete it"):
        megatron.export_folder(tmp_path / "out", tmp_path / "data")
