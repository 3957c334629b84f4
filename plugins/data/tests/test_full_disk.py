"""A disk that is full, for a moment or longer, is told: no shard or export lacks what it says it has."""

import json
import resource
from contextlib import contextmanager

import numpy as np
import pytest
from corpora import numbered, prepared
from nanotrain_data import megatron
from nanotrain_data.writer import Document, seal_shard, write_shard

from nanotrain_core.api import DataError


@contextmanager
def full_at(size):
    """No file of this process grows beyond ``size``, as on a disk without space."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("chat", [False, True])
def test_a_shard_is_not_written_with_zeros_for_what_found_no_space(tmp_path, chat):
    def documents():
        for number in range(200):
            made = Document(np.full(1000, number + 1), 1000, ((0, 1000),))
            if not 50 <= number < 100:
                yield made
                continue
            with full_at(40_000):
                yield made

    with pytest.raises(OSError, match="File too large"):
        write_shard(tmp_path, "00000", "uint16", documents(), chat=chat)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("size", [5000, 100_000, 110_800])
def test_a_corpus_without_space_is_not_prepared(tmp_path, size):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(8000)))
    with (
        full_at(size),
        pytest.raises(DataError, match=r"cannot write to .*; given again, the command goes on"),
    ):
        prepared(tmp_path / "out", source)
    assert not (tmp_path / "out/manifest.json").exists()
    assert prepared(tmp_path / "out", source).manifest.tokens == 110_890


def test_an_export_without_space_is_not_written(tmp_path):
    numbered(tmp_path / "in", 9000)
    with full_at(35_000), pytest.raises(OSError, match="File too large"):
        megatron.export_folder(tmp_path / "in", tmp_path / "out")
    assert not [*tmp_path.glob("out*")]


@pytest.mark.parametrize("end", [999, 1001])
def test_a_shard_with_other_tokens_than_were_written_is_not_sealed(tmp_path, end):
    (tmp_path / "00000.tokens").write_bytes(np.arange(1000, dtype="<u2").data)
    with pytest.raises(OSError, match=r"00000\.tokens does not hold what was written to it"):
        seal_shard(tmp_path, "00000", "uint16", np.array([0, end]))
    with pytest.raises(OSError, match=r"00000\.tokens does not hold what was written to it"):
        seal_shard(tmp_path, "00000", "uint16", np.array([0, 1000]), meant="0" * 64)
