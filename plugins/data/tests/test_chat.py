"""``[data] use = "chat"``: what is learned, how conversations share sequences, and what is refused."""

import json
import shutil
from itertools import pairwise

import attrs
import numpy as np
import pytest
import torch
from chats import chats, plain, prepared_chats, write_chats
from corpora import begun, prepared, texts
from hypothesis import given, settings
from hypothesis import strategies as st
from nanotrain_data.chat import Chat
from nanotrain_data.config import ChatConfig, ShardsConfig
from nanotrain_data.manifest import read_manifest
from nanotrain_data.megatron import export_folder
from nanotrain_data.packs import best_fit
from nanotrain_data.shards import Shards
from nanotrain_data.survey import survey, survey_chat
from nanotrain_data.verify import damage
from nanotrain_data.writer import seal_shard

from nanotrain_core.api import DataError
from nanotrain_core.api.torch import IGNORE, Shard
from nanotrain_core.cli import main

LENGTH = 160
WHOLE = Shard()
CHATS = chats(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("chats")
    prepared_chats(root / "prepared", write_chats(root / "in.jsonl", CHATS), unit_bytes=9000)
    return root / "prepared"


def opened(*paths, length=LENGTH, seed=3, lengths=(), **options):
    return begun(Chat(ChatConfig(paths=tuple(map(str, paths)), **options)), length, seed, lengths)


def expected(messages, length, too_long):
    """Return what a conversation is read and predicted as, by definition; None: not at all."""
    tokens, learned = plain(messages)
    if too_long == "leave_out" and len(tokens) > length + 1:
        return None
    targets = [t if learn else IGNORE for t, learn in zip(tokens[1:], learned[1:], strict=True)] + [IGNORE]
    tokens, targets = tokens[:length], targets[:length]
    return (tuple(tokens), tuple(targets)) if any(t != IGNORE for t in targets) else None


def conversations_of(batch, packed):
    """Return tokens and targets of each conversation of a batch; padding has no byte of a heading."""
    found = []
    for row in range(batch.sequences):
        tokens, targets = batch.tokens[row].tolist(), batch.targets[row].tolist()
        edges = sorted({*batch.document_starts[row].tolist(), len(tokens)}) if packed else [0, len(tokens)]
        if not packed:
            padding = len(tokens) - len(bytes(tokens).rstrip(b"\0"))
            end = len(tokens) - padding + (padding > 0 and tokens[-padding - 1] != 0)
            edges = [0, end]
        for begin, end in pairwise(edges):
            if any(tokens[begin:end]):
                found.append((begin, tokens[begin:end], targets[begin:end]))
            else:
                assert set(targets[begin:end]) == {IGNORE}
    return found


@pytest.mark.parametrize("too_long", ["cut", "leave_out"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("length", [160, 60])
def test_an_epoch_has_each_conversation_once_whole_and_only_answers_are_learned(
    folder, packed, too_long, length
):
    data = opened(folder, packed=packed, too_long=too_long, length=length, validation_fraction=0.1)
    batches = [data.train_batch(1, WHOLE) for _ in range(data.train)]
    held = [data.validation_batch(n, 1, WHOLE) for n in range(data.validation)]
    found = [each for batch in (*batches, *held) for each in conversations_of(batch, packed)]
    wanted = [made for messages in CHATS if (made := expected(messages, length, too_long))]
    assert sorted((tuple(tokens), tuple(targets)) for _, tokens, targets in found) == sorted(wanted)
    assert len(wanted) < len(CHATS) or length == 160
    held_out = {tuple(tokens) for batch in held for _, tokens, _ in conversations_of(batch, packed)}
    assert 0 < len(held_out) <= 30
    assert survey_chat(data.config, length).train == data.train
    if packed and length == 160:
        assert data.train < 0.8 * len(wanted)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=40), st.integers(12, 20))
def test_packs_have_each_conversation_once_and_few_sequences(sizes, length):
    numbers = np.arange(len(sizes)) + 100
    packs = best_fit(numbers, np.array(sizes), length)
    used = [sum(sizes[n - 100] for n in packs.of(number)) for number in range(len(packs))]
    assert sorted(packs.members.tolist()) == numbers.tolist()
    assert max(used) <= length
    assert all(one + other > length for one, other in pairwise(sorted(used)[:2]))  # none can be joined


def test_the_longest_are_packed_first():
    """In the order given, 3 3 would share a sequence, and the others would not fit."""
    sizes = np.array([3, 3, 7, 7])
    packs = best_fit(np.arange(4), sizes, 10)
    assert [sorted(sizes[packs.of(number)]) for number in range(len(packs))] == [[3, 7], [3, 7]]


def test_a_batch_of_all_ranks_is_that_of_one_and_resumes_anywhere(folder):
    whole = opened(folder, seed=5, lengths=(80, 160), read_ahead=0)
    steps = [(4, 160), (3, 160), (5, 80), (2, 80), (4, 160)]
    metas, batches = [], []
    for count, length in steps:
        metas.append(json.loads(json.dumps(whole.meta())))
        whole.set_length(length)
        batches.append(whole.train_batch(count, WHOLE))
    for stop in range(len(steps)):
        others = [opened(folder, seed=5, lengths=(80, 160), read_ahead=n) for n in range(3)]
        for index, other in enumerate(others):
            other.load_meta(metas[stop])
            for (count, length), batch in zip(steps[stop:], batches[stop:], strict=True):
                other.set_length(length)
                rows = Shard(index, 3).rows(count)
                found = other.train_batch(count, Shard(index, 3))
                for part in ("tokens", "targets", "document_starts"):
                    assert torch.equal(getattr(found, part), getattr(batch, part)[rows.start : rows.stop])


def test_conversations_in_which_nobody_answers_are_left_out_and_counted(tmp_path):
    silent = [{"role": "user", "content": "hello?"}]
    empty = [{"role": "user", "content": "say nothing"}, {"role": "assistant", "content": ""}]
    source = write_chats(tmp_path / "in.jsonl", [silent, *CHATS[:20], silent, empty])
    manifest = prepared_chats(tmp_path / "out", source, unit_bytes=1500).manifest
    assert (manifest.documents, manifest.left_out) == (21, 2)
    data = opened(tmp_path / "out", validation_fraction=0.0, packed=False)
    found = {tuple(t) for n in range(21) for _, t, _ in conversations_of(data.train_batch(1, WHOLE), False)}
    assert tuple(plain(empty)[0]) in found  # that an answer may be empty is learned


def test_sources_of_text_and_other_tokenizers_are_refused(folder, tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(texts(50)))
    prepared(tmp_path / "text", tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"text holds text, .*'nanotrain data prepare --chat' wrote"):
        opened(tmp_path / "text")
    (problem,) = survey_chat(ChatConfig(paths=(str(tmp_path / "text"),)), LENGTH).problems
    assert problem.key == "data.paths.0"
    with pytest.raises(DataError, match="no conversation to train on in which the assistant says something"):
        opened(folder, length=20)
    (problem,) = survey_chat(ChatConfig(paths=(str(folder),)), 20).problems
    assert problem.key == "batch.length"


@pytest.fixture(scope="module")
def short_and_long(tmp_path_factory):
    """Two folders: in the second one nobody answers within 60 tokens."""
    root = tmp_path_factory.mktemp("sources")
    for name, asked in (("short", ""), ("long", "x" * 100)):
        said = ([("user", f"{asked}{n}"), ("assistant", f"{n}")] for n in range(20))
        made = [[{"role": role, "content": text} for role, text in messages] for messages in said]
        prepared_chats(root / name, write_chats(root / f"{name}.jsonl", made))
    return root / "short", root / "long"


@pytest.mark.parametrize("weights", [(), (0.5, 0.5)])
def test_a_length_that_leaves_a_source_without_sequences_is_refused(short_and_long, weights):
    """Of whichever phase. Blended, what it has none of would be asked for without end."""
    wanted = r"long has no conversation to train on in which the assistant says something within 60 tokens"
    with pytest.raises(DataError, match=wanted):
        opened(*short_and_long, length=160, lengths=(160, 60), weights=weights)
    data = opened(*short_and_long, length=160, weights=weights)
    with pytest.raises(DataError, match=wanted):
        data.set_length(60)


def test_sources_without_weights_are_the_same_data_at_whichever_length_they_are_opened(
    folder, short_and_long
):
    """``nanotrain eval`` opens a run's data with the last length, and compares."""
    sources = (folder, short_and_long[0])
    alone = [opened(*sources, length=length).fingerprint for length in (80, 160)]
    both = [opened(*sources, length=length, lengths=(80, 160)).fingerprint for length in (80, 160)]
    assert both == [alone[1]] * 2
    assert alone[0].partition("blended")[2][:9] != alone[1].partition("blended")[2][:9]


def test_conversations_are_no_text_to_others(folder, tmp_path):
    """Without the mask prompts would be learned."""
    config = ShardsConfig(paths=(str(folder),))
    wanted = r"prepared holds conversations, .*data\.use = 'chat'"
    with pytest.raises(DataError, match=wanted):
        begun(Shards(config), LENGTH, 3, ())
    (problem,) = survey(config, LENGTH).problems
    assert problem.key == "data.paths"
    with pytest.raises(DataError, match=wanted):
        export_folder(folder, tmp_path / "out")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("suffix", [".answers", ".offsets"])
def test_damaged_tables_are_refused_by_name(folder, tmp_path, suffix):
    out = tmp_path / "copy"
    out.mkdir()
    for path in folder.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    content = bytearray((out / f"00001{suffix}").read_bytes())
    content[8] ^= 1
    (out / f"00001{suffix}").write_bytes(content)
    with pytest.raises(DataError, match=f"00001{suffix} is damaged: its SHA-256 is another"):
        opened(out)
    assert damage(out, read_manifest(out)) == [f"{out / f'00001{suffix}'} is damaged: its SHA-256 is another"]
    (out / f"00001{suffix}").write_bytes(content[:-8])
    with pytest.raises(DataError, match=f"00001{suffix} is damaged: it has"):
        opened(out)


def test_a_shard_that_was_cut_short_before_its_hashes_were_made_is_refused_by_name(folder, tmp_path, capsys):
    """A run ended with an IndexError; behind a shard that is not the last it read another conversation."""
    manifest = read_manifest(folder)
    for name in (manifest.shards[0].name, manifest.shards[-1].name):
        out = tmp_path / name
        shutil.copytree(folder, out)
        path = out / f"{name}.tokens"
        path.write_bytes(path.read_bytes()[:-300])
        whole = np.fromfile(path.with_suffix(".offsets"), "<i8")
        (old,) = (shard for shard in manifest.shards if shard.name == name)
        cut = seal_shard(out, name, manifest.dtype, np.array([*whole[:-1], old.tokens - 300]))
        path.with_suffix(".offsets").write_bytes(whole.tobytes())
        found = attrs.evolve(old, tokens=cut.tokens, sha256=cut.sha256, hashes_sha256=cut.hashes_sha256)
        shards = [found if shard is old else shard for shard in manifest.shards]
        attrs.evolve(manifest, shards=tuple(shards)).write(out)
        text = rf"{name}.tokens is damaged, .* {old.tokens - 300} tokens, .* end at token {old.tokens};"
        with pytest.raises(DataError, match=text):
            opened(out)
        assert main(["data", "inspect", str(out), "--verify"]) == 2
        assert f"{name}.tokens is damaged, or its .offsets" in capsys.readouterr().err


def test_other_ways_to_read_the_same_folder_are_other_data(folder):
    meta = opened(folder).meta()
    for options in ({"packed": False}, {"too_long": "leave_out"}, {"validation_fraction": 0.2}):
        with pytest.raises(DataError, match="other data"):
            opened(folder, **options).load_meta(meta)
