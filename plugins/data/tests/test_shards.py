"""``[data] use = "shards"``: what is read, in which order, and what is refused."""

import hashlib
import json
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import begun, numbered, prepared, texts
from hypothesis import given, settings
from hypothesis import strategies as st
from nanotrain_data.config import ShardsConfig
from nanotrain_data.corpus import OpenShards
from nanotrain_data.manifest import parse_manifest, read_manifest
from nanotrain_data.pieces import source_names
from nanotrain_data.shards import Shards
from nanotrain_data.survey import survey

from nanotrain_core.api import DataError
from nanotrain_core.api.torch import Shard

LENGTH = 16
WHOLE = Shard()


def opened(*paths, length=LENGTH, seed=3, lengths=(), **options):
    return begun(Shards(ShardsConfig(paths=tuple(map(str, paths)), **options)), length, seed, lengths)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Three sources; their tokens begin at 0, 40000 and 80000."""
    root = tmp_path_factory.mktemp("sources")
    sizes = {"large": 5001, "middle": 1501, "small": 301}
    return [numbered(root / name, size, first=40000 * n) for n, (name, size) in enumerate(sizes.items())]


def rows(batch):
    """Each sequence with its last target, [rows][length + 1]."""
    return torch.cat([batch.tokens, batch.targets[:, -1:]], 1).tolist()


def validation(data, sequences=4):
    found = []
    while (batch := data.validation_batch(len(found), sequences, WHOLE)) is not None:
        found.append(batch)
    return [row for batch in found for row in rows(batch) if row[-1] >= 0]


def test_a_sequence_is_consecutive_tokens_of_its_source_across_shards(sources):
    data = opened(*sources)
    ends = {4999, 40000 + 1499, 80000 + 299}
    for _ in range(60):
        for row in rows(data.train_batch(8, WHOLE)):
            assert row == [*range(row[0], row[0] + LENGTH + 1)]
            assert row[0] % 40000 % LENGTH == 0
            assert not ends & set(row[:-1])


def test_an_epoch_has_each_sequence_once_and_what_is_held_out_never(sources):
    data = opened(sources[0], validation_fraction=0.1)
    held = [row[0] for row in validation(data)]
    trained = [rows(data.train_batch(1, WHOLE))[0][0] for _ in range(data.train)]
    assert sorted(held + trained) == [*range(0, 5000 - LENGTH + 1, LENGTH)]
    assert trained != sorted(trained)
    assert len(held) == data.validation == round(0.1 * (5000 // LENGTH))


def test_what_is_held_out_does_not_depend_on_the_seed(sources):
    one, other = (sorted(validation(opened(*sources, seed=seed))) for seed in (1, 2))
    assert one == other


def source_of(row):
    return row[0] // 40000


@pytest.mark.parametrize("weights", [(), (0.6, 0.3, 0.1), (1.0, 1.0, 8.0)])
def test_after_any_number_of_steps_each_source_has_had_its_share(sources, weights):
    data = opened(*sources, weights=weights)
    shares = np.array(weights or [each.split.train for each in data.pieces], float)
    shares /= shares.sum()
    had = np.zeros(3)
    for step in range(1, 121):
        for row in rows(data.train_batch(5, WHOLE)):
            had[source_of(row)] += 1
        assert np.abs(had - shares * 5 * step).max() <= 1
        assert [*data.tokens_by_source().values()] == (had * LENGTH).tolist()
    assert [*data.tokens_by_source()] == ["large", "middle", "small"]


def test_a_source_of_great_weight_begins_again_by_itself(sources):
    data = opened(*sources, weights=(1, 1, 8))
    small = [row[0] for _ in range(50) for row in rows(data.train_batch(8, WHOLE)) if source_of(row) == 2]
    count = data.pieces[2].split.train
    epochs = [small[at : at + count] for at in range(0, len(small) - count, count)]
    assert len(epochs) > 10
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


STEP = st.tuples(st.integers(1, 9), st.sampled_from([8, 16, 32]))


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(STEP, min_size=1, max_size=8),
    stop=st.integers(0, 7),
    ranks=st.integers(1, 5),
    ahead=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_resumed_after_any_step_on_any_ranks_the_same_tokens_follow(sources, steps, stop, ranks, ahead):
    """Of sequences of any length, as phases change it, and however far each reads ahead."""
    lengths = {length for _, length in steps}
    whole = opened(*sources, weights=(5, 3, 2), lengths=lengths, length=steps[0][1], read_ahead=ahead[0])
    expected, metas = [], []
    for count, length in steps:
        metas.append(json.loads(json.dumps(whole.meta())))
        whole.set_length(length)
        expected.append(rows(whole.train_batch(count, WHOLE)))
    stop = min(stop, len(steps) - 1)
    others = []
    for _ in range(ranks):
        other = opened(*sources, weights=(5, 3, 2), lengths=lengths, length=steps[0][1], read_ahead=ahead[1])
        other.load_meta(metas[stop])
        others.append(other)
    for (count, length), wanted in zip(steps[stop:], expected[stop:], strict=True):
        found = []
        for index, other in enumerate(others):
            other.set_length(length)
            found += rows(other.train_batch(count, Shard(index, ranks)))
        assert found == wanted
    assert all(other.tokens_by_source() == whole.tokens_by_source() for other in others)


def test_what_is_left_out_is_not_read_and_not_counted(sources):
    one, other = opened(*sources), opened(*sources)
    one.train_batch(24, WHOLE)
    other.skip(24)
    assert rows(one.train_batch(8, WHOLE)) == rows(other.train_batch(8, WHOLE))
    assert sum(other.tokens_by_source().values()) == 8 * LENGTH


def test_the_position_of_other_data_is_refused(sources):
    meta = opened(*sources, weights=(5, 3, 2)).meta()
    for other in (
        opened(*sources, weights=(5, 3, 1)),
        opened(*sources[:2], weights=(5, 3)),
        opened(*sources, weights=(5, 3, 2), validation_fraction=0.2),
    ):
        with pytest.raises(DataError, match="other data"):
            other.load_meta(meta)


def test_text_comes_back_through_the_copy_of_the_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(texts(50)))
    prepared(tmp_path / "out", tmp_path / "a.txt")
    data = opened(tmp_path / "out")
    (tmp_path / "a.txt").unlink()
    text = data.decode(rows(data.train_batch(1, WHOLE))[0])
    assert text in "\n".join(texts(50)) or "\ufffd" in text
    assert data.encode("naïve") == data.tokenizer_alone().encode("naïve") == [*"naïve".encode()]
    assert data.vocab_size == 256
    assert 0.99 < data.bytes_per_token < 1


# --- damage ---------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    return numbered(tmp_path / "numbers", 3 * 2**15, shards=3)


def damaged(path, byte=7):
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("suffix", [".tokens", ".hashes", ".offsets"])
@pytest.mark.parametrize("how", ["missing", "truncated", "longer"])
def test_a_shard_of_another_size_is_refused_at_the_start_by_name(folder, suffix, how):
    path = folder / f"00001{suffix}"
    content = path.read_bytes()
    path.unlink() if how == "missing" else path.write_bytes(
        content[:-8] if how == "truncated" else content * 2
    )
    with pytest.raises(DataError, match=f"00001{suffix} is {'missing' if how == 'missing' else 'damaged'}"):
        opened(folder)
    found = survey(ShardsConfig(paths=(str(folder),)), LENGTH)
    assert [problem.key for problem in found.problems] == ["data.paths.0"]
    assert f"00001{suffix}" in found.problems[0].message


def read_epoch(data, into):
    for _ in range(data.train):
        into += rows(data.train_batch(1, WHOLE))


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_flipped_bit_is_refused_by_name_before_it_is_trained_on(folder, ahead):
    """A flipped bit shows in no size: what is trained on until then is right, and then the run ends."""
    damaged(folder / "00002.tokens", 70_000)
    data = opened(folder, read_ahead=ahead)
    first = 2 * 2**15 + 2**16 // 4  # of the piece that is damaged
    read = []
    text = "00002.tokens is damaged at byte 65536, and was not trained on"
    with pytest.raises(DataError, match=text.replace(".", "[.]")):
        read_epoch(data, read)
    assert read
    for row in read:
        assert row == [*range(row[0], row[0] + LENGTH + 1)]
        assert row[-1] < first or row[0] >= first + 2**16 // 4


def test_damaged_hashes_are_told_from_damaged_tokens(folder):
    damaged(folder / "00000.hashes")
    data = opened(folder)
    with pytest.raises(DataError, match=r"00000.hashes is damaged"):
        read_epoch(data, [])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda found: found | {"version": 2}, "version 2; expected format 'nanotrain-shards', version 1"),
        (lambda found: found | {"dtype": "float32"}, "dtype 'float32'; expected one of uint8"),
        (lambda found: {k: v for k, v in found.items() if k != "shards"}, "shards"),
        (lambda found: found | {"extra": 1}, "extra"),
        (lambda found: [found], "expected format"),
    ],
)
def test_a_damaged_manifest_is_refused_by_name(folder, change, text):
    path = folder / "manifest.json"
    found = json.loads(path.read_text())
    del found["sha256"]  # as before manifests had a hash
    path.write_text(json.dumps(change(found)))
    with pytest.raises(DataError, match=text) as caught:
        opened(folder)
    assert str(path) in str(caught.value)


def test_any_flipped_bit_of_a_manifest_is_refused_by_name(folder):
    content = bytearray((folder / "manifest.json").read_bytes())
    for place in range(8 * len(content)):
        content[place // 8] ^= 1 << place % 8
        with pytest.raises(DataError, match=r"^here is damaged: .*; copy it again, or delete it and run"):
            parse_manifest("here", bytes(content))
        content[place // 8] ^= 1 << place % 8


def test_a_manifest_of_before_it_had_a_hash_is_read(folder):
    path, found = folder / "manifest.json", read_manifest(folder)
    known = json.loads(path.read_text())
    body, _, _ = path.read_bytes().rpartition(b',\n "sha256": ')
    assert known.pop("sha256") == hashlib.sha256(body).hexdigest()
    path.write_text(json.dumps(known, indent=1) + "\n")
    assert read_manifest(folder) == found


def test_a_folder_that_is_none_is_refused(tmp_path, folder):
    with pytest.raises(DataError, match=r"does not exist: no 'numbres' .* \(did you mean 'numbers'\?\)"):
        opened(tmp_path / "numbres")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="expected a folder that 'nanotrain data prepare' wrote"):
        opened(tmp_path / "empty")
    (folder / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"not prepared to its end: 3 shards.*goes on"):
        opened(folder)


def test_sources_of_different_tokenizers_are_refused(folder, tmp_path):
    (tmp_path / "a.txt").write_text("text " * 100)
    prepared(tmp_path / "bytes", tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"tokens of numbers, and .*bytes of bytes .*expected one tokenizer"):
        opened(folder, tmp_path / "bytes")


def test_too_little_is_refused(folder):
    with pytest.raises(DataError, match="98304 tokens, but one sequence of 98304 needs 98305"):
        opened(folder, length=98304)
    (problem,) = survey(ShardsConfig(paths=(str(folder),)), 98304).problems
    assert problem.key == "batch.length"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"paths": ()}, "names no folder"),
        ({"paths": ("a", "b"), "weights": (1.0,)}, "1 weights for 2 paths"),
        ({"paths": ("a",), "weights": (0.0,)}, "expected a number above 0"),
        ({"paths": ("a",), "weights": (float("nan"),)}, "expected a number above 0"),
    ],
)
def test_a_wrong_table_is_refused(options, text):
    with pytest.raises(ValueError, match=text):
        ShardsConfig(**options)


def test_sources_are_named_by_their_folders():
    assert source_names(["/a/web", "/b/web", "/c/büch er"]) == ["web", "web-1", "b_ch_er"]
    assert source_names(["/a/web-2", "/b/web", "/c/web"]) == ["web-2", "web", "web-3"]


# --- memory ---------------------------------------------------------------------------------------


def test_no_more_files_are_open_than_a_process_may_have(tmp_path, monkeypatch):
    folder = numbered(tmp_path / "many", 4000, shards=40)
    monkeypatch.setattr(OpenShards, "MOST", 5)
    hashed = []
    before = len(open_files())
    data = opened(folder, read_ahead=0)
    for _ in range(30):
        hashed.append(rows(data.train_batch(4, WHOLE)))
        assert len(open_files()) <= before + 5
    assert len(hashed) == 30
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 2 * 256


def open_files():
    return [*Path("/proc/self/fd").iterdir()]


# --- documents ------------------------------------------------------------------------------------


def test_masks_tell_documents_apart_where_the_offsets_do(tmp_path):
    """What a batch says of its documents, against the file of offsets."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts(60)))
    folder = tmp_path / "out"
    prepared(folder, tmp_path / "in.jsonl", unit_bytes=2000)
    data = opened(folder, mask_documents=True, validation_fraction=0.0, length=64)
    offsets, before = [], 0
    for shard in data.corpora[0].manifest.shards:
        offsets += (np.fromfile(folder / f"{shard.name}.offsets", np.int64)[:-1] + before).tolist()
        before += shard.tokens
    tokens = np.concatenate([np.fromfile(path, np.uint8) for path in sorted(folder.glob("*.tokens"))])
    several = 0
    for _ in range(20):
        batch = data.train_batch(2, WHOLE)
        for row, begins in zip(batch.tokens.numpy(), batch.document_starts.tolist(), strict=True):
            (first,) = [at for at in range(0, len(tokens) - 64, 64) if (tokens[at : at + 64] == row).all()]
            starts = [max([first, *(at for at in offsets if at <= first + i)]) - first for i in range(64)]
            assert begins == starts
            several += len(set(starts)) > 1
    assert several > 5


def test_masks_need_a_token_that_ends_documents(folder):
    with pytest.raises(DataError, match="numbers has documents that end with no token, and mask_documents"):
        opened(folder, mask_documents=True)
    (problem,) = survey(ShardsConfig(paths=(str(folder),), mask_documents=True), LENGTH).problems
    assert problem.key == "data.paths"
