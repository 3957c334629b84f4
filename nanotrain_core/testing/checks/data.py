"""Data is one stream of global batches, whatever the layout, and can be resumed where it stopped."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from nanotrain_core.batch import IGNORE, Batch, Shard
from nanotrain_core.contracts import ChangesLength, Data
from nanotrain_core.contracts.data import RESERVED_KEYS
from nanotrain_core.errors import DataError
from nanotrain_core.launch.check_inputs import survey_of
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check

SEQUENCES = 8
_SURVEY = """
import sys
from nanotrain_core.launch.check_inputs import survey_of
from nanotrain_core.testing import Case
case = {case!r}
print(survey_of(case.recipe(), case.registry()))
sys.exit("its survey imports torch" if "torch" in sys.modules else 0)
"""
#: A validation batch that is behind the last of any data.
FAR = 10**9


def opened(case: Case, *, seed: int = 7) -> Data:
    """Return the data at its beginning."""
    data: Data = case.build()
    data.open(length=case.recipe().batch.length, seed=seed)
    return data


def batches(data: Data, count: int, shard: Shard = Shard()) -> torch.Tensor:  # noqa: B008 (frozen)
    """Return tokens, targets and a digest of each further tensor of the next training batches.

    [count, 2 or more, rows, S].
    """
    return torch.stack([_both(data.train_batch(SEQUENCES, shard)) for _ in range(count)])


def _both(batch: Batch) -> torch.Tensor:
    assert batch.targets is not None, "a training batch has no targets"
    return torch.stack([batch.tokens, batch.targets, *_digests(batch)])


def _digests(batch: Batch) -> Iterator[torch.Tensor]:
    """Yield for each of the data's own tensors, by name, a number for the values of each row, [rows, S]."""
    for field, axes in (("per_sequence", 1), ("per_token", 2)):
        for name, tensor in sorted(getattr(batch, field).items()):
            shape = batch.tokens.shape[:axes]
            found = tuple(tensor.shape[:axes])
            assert found == shape, f"{field}['{name}'] is {list(tensor.shape)}, expected {[*shape]} and more"
            rows = [zlib.crc32(f"{name} {row.tolist()}".encode()) for row in tensor]
            yield torch.tensor(rows, dtype=torch.int64)[:, None].expand(batch.tokens.shape)


def validation(data: Data, sequences: int, shard: Shard = Shard()) -> list[Batch]:  # noqa: B008 (frozen)
    """Return all validation batches."""
    assert data.validation_batch(FAR, sequences, shard) is None, f"there is a validation batch {FAR}: no end"
    found: list[Batch] = []
    while (batch := data.validation_batch(len(found), sequences, shard)) is not None:
        found.append(batch)
    return found


def held_out(data: Data) -> set[tuple[int, ...]]:
    """Return all validation sequences but the padding."""
    rows = (tuple(row.tolist()) for batch in validation(data, 4) for row in batch.tokens)
    return {row for row in rows if any(row)}


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Compare integer tensors."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    wrong = (actual != expected).sum().item()
    assert wrong == 0, f"{what}: {wrong} of {expected.numel()} tokens differ"


@check("data", since="0.1")
def targets_are_the_next_tokens(case: Case) -> None:
    """Tokens are int64 [B, S] below ``vocab_size``; a position's target is the token after it, or ignored."""
    data, length = opened(case), case.recipe().batch.length
    tokens, targets = batches(data, 1)[0, :2]
    assert tokens.shape == (SEQUENCES, length), (
        f"tokens {tuple(tokens.shape)}, expected {(SEQUENCES, length)}"
    )
    assert tokens.dtype == torch.int64, f"tokens are {tokens.dtype}"
    assert 0 <= tokens.min() <= tokens.max() < data.vocab_size, (
        f"tokens up to {tokens.max()} of {data.vocab_size}"
    )
    predicted = targets[:, :-1] != IGNORE
    assert predicted.any(), "every target is ignored"
    assert_equal(targets[:, :-1][predicted], tokens[:, 1:][predicted], "targets against the tokens after")


@check("data", since="0.1", variants=("2", "3", "4"))
def shards_make_up_the_global_batch(case: Case, shards: str) -> None:
    """Concatenated, the rows of all shards are the global batch that one process sees, step after step."""
    count = int(shards)
    parts = [batches(opened(case), 3, Shard(index, count)) for index in range(count)]
    assert_equal(torch.cat(parts, dim=2), batches(opened(case), 3), f"{count} shards against one")


@check("data", since="0.1", variants=("2", "3", "4"))
def validation_shards_make_up_the_batch(case: Case, shards: str) -> None:
    """So are the rows of the validation batches."""
    expected = [_both(batch) for batch in validation(opened(case), 4)]
    each = [validation(opened(case), 4, Shard(index, int(shards))) for index in range(int(shards))]
    for index, parts in enumerate(zip(*each, strict=True)):
        joined = torch.cat([_both(part) for part in parts], dim=1)
        assert_equal(joined, expected[index], f"validation batch {index} from {shards} shards")


@check("data", since="0.1")
def same_seed_same_batches(case: Case) -> None:
    """The same seed gives the same batches, another seed others."""
    assert_equal(batches(opened(case), 3), batches(opened(case), 3), "two runs with one seed")
    one, other = batches(opened(case), 3), batches(opened(case, seed=8), 3)
    assert not torch.equal(one, other), "seeds 7 and 8 give the same batches"


@check("data", since="0.1")
def batches_differ(case: Case) -> None:
    """The stream advances: consecutive batches are not the same."""
    first, second = batches(opened(case), 2)
    assert not torch.equal(first, second), "the first two batches are equal"


@check("data", since="0.1")
def position_can_be_put_back(case: Case) -> None:
    """After ``load_meta(meta())``, through JSON, new data continues with the batch that came next."""
    old = opened(case)
    batches(old, 3)
    meta: dict[str, Any] = json.loads(json.dumps(old.meta()))
    expected = batches(old, 3)
    new = opened(case)
    new.load_meta(meta)
    assert_equal(batches(new, 3), expected, "batches after going back to step 3")


@check("data", since="0.2")
def position_is_of_this_data(case: Case) -> None:
    """``meta`` has a ``fingerprint`` and no key of the core's; with another fingerprint it is refused."""
    data = opened(case)
    meta: dict[str, Any] = json.loads(json.dumps(data.meta()))
    taken = sorted(RESERVED_KEYS & meta.keys())
    assert not taken, f"meta has the keys {', '.join(taken)}, under which the core keeps numbers of its own"
    assert meta.get("fingerprint"), f"meta has no fingerprint: {meta}"
    try:
        data.load_meta({**meta, "fingerprint": "of other data"})
    except DataError:
        return
    raise AssertionError(
        "load_meta went to a position in other data, by its fingerprint, without a DataError"
    )


@check("data", since="0.1")
def validation_does_not_advance(case: Case) -> None:
    """Validation and ``meta`` do not move the training stream."""
    data = opened(case)
    first = batches(data, 1)
    validation(data, 4)
    data.meta()
    assert_equal(torch.cat([first, batches(data, 1)]), batches(opened(case), 2), "batches around validation")


@check("data", since="0.1")
def validation_has_one_order(case: Case) -> None:
    """Validation batches are the same each time, and do not depend on what was trained on."""
    data = opened(case)
    first = [_both(batch) for batch in validation(data, 4)]
    batches(data, 2)
    again = [_both(batch) for batch in validation(data, 4)]
    assert first, "there is no validation batch"
    assert_equal(torch.stack(again), torch.stack(first), "validation, a second time")


@check("data", since="0.1")
def validation_is_never_trained_on(case: Case) -> None:
    """No validation sequence is among the sequences of the first 32 training batches.

    Short sequences of few different tokens may be there by chance: a hundred times as many as expected may.
    """
    data = opened(case)
    validated, tokens = held_out(data), batches(data, 32)[:, 0].flatten(0, 1)
    trained = {tuple(row) for row in tokens.tolist()}
    shared = validated & trained
    by_chance = len(validated) * len(trained) * chance_of_equal(tokens)
    assert len(shared) <= 100 * by_chance, (
        f"{len(shared)} of {len(validated)} validation sequences were trained on: {min(shared)}"
    )


def chance_of_equal(tokens: torch.Tensor) -> float:
    """Estimate the probability that two unrelated sequences like the rows of ``tokens`` [N, S] are equal.

    As if each token depended on the one before it only: that of equal first tokens, times that of equal next
    ones after equal ones for each further token. Both are shares of equal pairs in the sample.
    """
    one = _equal_pairs(tokens.flatten()[:, None])
    two = _equal_pairs(torch.stack((tokens[:, :-1], tokens[:, 1:]), dim=-1).flatten(0, 1))
    return one * (two / one) ** (tokens.shape[1] - 1) if one else 0.0


def _equal_pairs(rows: torch.Tensor) -> float:
    """Return which share of the pairs of different rows are equal."""
    counts, n = torch.unique(rows, dim=0, return_counts=True)[1].double(), len(rows)
    return float((counts * (counts - 1)).sum()) / max(1, n * (n - 1))


@check("data", since="0.1")
def last_validation_batch_is_padded(case: Case) -> None:
    """Every validation batch is full; padding has ignored targets, so each size predicts the same tokens."""
    data = opened(case)
    counts = {}
    for size in (1, 3, 4):
        found = validation(data, size)
        sizes = {batch.sequences for batch in found}
        assert sizes == {size}, f"asked for batches of {size}, got {sizes}"
        counts[size] = sum(int(batch.target_tokens()) for batch in found)
    assert len(set(counts.values())) == 1, f"predicted tokens by size of batch: {counts}"


def _changes_length(case: Case) -> bool:
    return "changes_length" in case.component().provides


def opened_for(case: Case, lengths: Sequence[int]) -> Any:
    """Return the data at its beginning, ready for sequences of all these lengths, the first one set."""
    data: Any = case.build()
    assert isinstance(data, ChangesLength), "it provides changes_length, but lacks a method of ChangesLength"
    data.expect_lengths(lengths)
    data.open(length=lengths[0], seed=7)  # type: ignore[attr-defined]
    return data


def cut(tokens: torch.Tensor, length: int) -> list[tuple[int, ...]]:
    """Return the rows of ``tokens`` split into pieces of that length."""
    return [tuple(row) for row in tokens.reshape(-1, length).tolist()]


def lengths_of(case: Case) -> tuple[int, int]:
    """Return the recipe's length and twice that."""
    length = case.recipe().batch.length
    return length, 2 * length


@check("data", since="0.2", applies=_changes_length)
def length_can_change(case: Case) -> None:
    """After ``set_length`` sequences of both splits have that length; targets follow their tokens."""
    first, second = lengths_of(case)
    data = opened_for(case, (first, second))
    batches(data, 2)
    data.set_length(second)
    tokens, targets = batches(data, 1)[0, :2]
    assert tokens.shape == (SEQUENCES, second), f"tokens {tuple(tokens.shape)} after set_length({second})"
    predicted = targets[:, :-1] != IGNORE
    assert_equal(targets[:, :-1][predicted], tokens[:, 1:][predicted], "targets against the tokens after")
    shapes = {tuple(batch.tokens.shape) for batch in validation(data, 4)}
    assert shapes == {(4, second)}, f"validation batches are {shapes} after set_length({second})"


@check("data", since="0.2", applies=_changes_length)
def to_set_a_length_does_not_advance(case: Case) -> None:
    """After another length, validation and the first one again, the batch comes that would have come."""
    first, second = lengths_of(case)
    data, other = opened_for(case, (first, second)), opened_for(case, (first, second))
    assert_equal(batches(data, 3), batches(other, 3), "batches before")
    data.set_length(second)
    validation(data, 4)
    data.set_length(first)
    assert_equal(batches(data, 2), batches(other, 2), "batches after set_length there and back")


@check("data", since="0.2", applies=_changes_length, variants=("before", "after"))
def position_holds_at_any_length(case: Case, when: str) -> None:
    """A position, saved ``before`` or ``after`` the length changes, continues like an uninterrupted run."""
    first, second = lengths_of(case)
    old = opened_for(case, (first, second))
    batches(old, 3)
    if when == "after":
        old.set_length(second)
        batches(old, 1)
    meta: dict[str, Any] = json.loads(json.dumps(old.meta()))
    old.set_length(second)
    expected = batches(old, 2)
    for length in (first, second):
        new = opened_for(case, (first, second))
        new.set_length(length)
        new.load_meta(meta)
        new.set_length(second)
        assert_equal(batches(new, 2), expected, f"batches after going back with length {length} set")


@check("data", since="0.2", applies=_changes_length)
def what_is_held_out_at_one_length_is_trained_on_at_none(case: Case) -> None:
    """Split into the shorter length, nothing held out at one length is trained on at the other."""
    first, second = lengths_of(case)
    data = opened_for(case, (first, second))
    held, trained = {}, {}
    for length in (first, second):
        data.set_length(length)
        held[length] = {row for batch in validation(data, 4) for row in cut(batch.tokens, first) if any(row)}
        trained[length] = {row for tokens in batches(data, 32)[:, 0] for row in cut(tokens, first)}
    for one, other in ((first, second), (second, first)):
        shared = held[one] & trained[other]
        text = f"{len(shared)} of {len(held[one])} stretches of {first} tokens"
        assert not shared, f"{text} are held out at length {one} and trained on at {other}: {min(shared)}"


@check("data", since="0.2", applies=lambda case: case.component().survey is not None)
def survey_is_true(case: Case) -> None:
    """Its ``survey``, without torch and before anything is opened, agrees with the opened data."""
    code = _SURVEY.format(case=case)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr.strip()
    found, data = survey_of(case.recipe(), case.registry()), opened(case)
    assert not found.problems, f"it finds problems, but the data can be opened: {found.problems}"
    assert found.vocab in (None, data.vocab_size), f"it says {found.vocab} tokens, not {data.vocab_size}"
    enough = found.train is None or found.train >= SEQUENCES
    assert enough, (
        f"it says that there are {found.train} to train on, but a batch of {SEQUENCES} can be taken"
    )
    targets = (batch.targets for batch in validation(data, SEQUENCES))
    held = sum(int((rows != IGNORE).any(dim=1).sum()) for rows in targets if rows is not None)
    assert found.validation in (None, held), f"it says that {found.validation} are held out, not {held}"
