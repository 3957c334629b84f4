"""Data continues past its end on every rank alike, and its position is tied to length and seed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import attrs
import torch

from nanotrain_core.batch import Shard
from nanotrain_core.contracts import Data
from nanotrain_core.errors import DataError, RecipeError
from nanotrain_core.recipe.tree import Selection
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check
from nanotrain_core.testing.checks.data import SEQUENCES, assert_equal, batches, held_out, opened

#: Batches after which data that has not begun again counts as endless.
MOST = 300


def first_epoch(case: Case) -> int:
    """Return how many batches are drawn before sequences repeat; :data:`MOST` if none do."""
    data = opened(case)
    seen: set[tuple[int, ...]] = set()
    for number in range(MOST):
        rows = {tuple(row.tolist()) for row in batches(data, 1)[0, 0]}
        if rows & seen:
            return number
        seen |= rows
    return MOST


def places(epoch: int) -> Iterator[int]:
    """Yield after how many batches to stop: before the end of an epoch, at it, and in the next ones."""
    yield from sorted({max(1, epoch - 1), epoch, epoch + 1, 2 * epoch, 2 * epoch + 1})


@check("data", since="0.2")
def position_in_later_epochs_can_be_put_back(case: Case) -> None:
    """Wherever it stops, in the second epoch too, new data continues with the batch that came next."""
    wanted = [*places(first_epoch(case))]
    old: Data = opened(case)
    metas: dict[int, dict[str, Any]] = {}
    drawn = []
    for number in range(wanted[-1] + 3):
        if number in wanted:
            metas[number] = json.loads(json.dumps(old.meta()))
        drawn.append(batches(old, 1)[0])
    for number, meta in metas.items():
        new = opened(case)
        new.load_meta(meta)
        what = f"batches after going back to where {number} were drawn (an epoch has {wanted[0] + 1} or so)"
        assert_equal(batches(new, 2), torch.stack(drawn[number : number + 2]), what)


@check("data", since="0.2", variants=("2", "3"))
def shards_make_up_later_epochs(case: Case, shards: str) -> None:
    """In the second epoch and the third too, all shards' rows concatenated are what one process sees."""
    count, steps = int(shards), 2 * (first_epoch(case) + 1) + 2
    parts = [batches(opened(case), steps, Shard(index, count)) for index in range(count)]
    joined, whole = torch.cat(parts, dim=2), batches(opened(case), steps)
    for step in range(steps):
        assert_equal(joined[step], whole[step], f"batch {step + 1} from {count} shards against one")


def another_length(case: Case) -> int:
    """Return a token more than the case's sequences have, or twice as many where its check refuses that."""
    length: int = case.recipe().batch.length
    try:
        return case.recipe(batch={"length": length + 1}).batch.length
    except RecipeError:
        return 2 * length


@check("data", since="0.2", variants=("seed", "length"))
def fingerprint_tells(case: Case, which: str) -> None:
    """A position of another seed's order, or in sequences of another length, is refused with a DataError."""
    length = another_length(case) if which == "length" else case.recipe().batch.length
    other: Data = case.build()
    other.open(length=length, seed=7 + (which == "seed"))
    batches_of_other = other.train_batch(SEQUENCES, Shard())
    assert batches_of_other.sequences == SEQUENCES
    meta: dict[str, Any] = json.loads(json.dumps(other.meta()))
    data = opened(case)
    try:
        data.load_meta(meta)
    except DataError:
        return
    raise AssertionError(
        f"a position of another {which} was taken: the fingerprint, {meta.get('fingerprint')!r}, must tell it"
    )


@check("data", since="0.3")
def what_was_trained_on_is_never_held_out(case: Case) -> None:
    """With another value of an option it refuses the position, or holds out nothing that was trained on."""
    data = opened(case)
    tokens = batches(data, first_epoch(case) + 1)[:, 0].flatten(0, 1)
    # A text may occur in both: what was held out before is not held out anew.
    trained = {tuple(row) for row in tokens.tolist()} - held_out(data)
    meta = json.loads(json.dumps(data.meta()))
    settings = case.settings()
    for name, value in other_values(settings):
        try:
            selection = Selection(case.kind, case.use, attrs.evolve(settings, **{name: value}))
            other: Data = case.registry().build(selection)
            other.open(length=case.recipe().batch.length, seed=7)
            other.load_meta(meta)
            shared = held_out(other) & trained  # reading may be what refuses: a token beyond a smaller vocab
        except (DataError, ValueError):
            continue
        assert not shared, (
            f"with {name} = {value} in place of {getattr(settings, name)} it goes on from the position, and "
            f"validates on {len(shared)} sequences that it was trained on: the "
            f"fingerprint, {meta.get('fingerprint')!r}, must tell it"
        )


def other_values(settings: Any) -> Iterator[tuple[str, Any]]:
    """Yield fields of a config that are numbers or booleans, each with a value near its own."""
    for name, value in attrs.asdict(settings, recurse=False).items():
        if isinstance(value, bool):
            yield name, not value
        elif isinstance(value, int):
            yield from ((name, value + 1), (name, value - 1), (name, 2 * value))
        elif isinstance(value, float):
            yield from ((name, value / 2), (name, 2 * value))


_EPOCHS = """
from nanotrain_core.testing import Case
from nanotrain_core.testing.checks.data_epochs import later_epochs
print(later_epochs({case!r}))
"""


@check("data", since="0.2", of_component=True)
def every_process_has_the_same_epochs(case: Case) -> None:
    """A process with another hash seed, so that Python's ``hash`` differs, sees the same three epochs."""
    salt = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    words, around = [sys.executable, "-c", _EPOCHS.format(case=case)], {**os.environ, "PYTHONHASHSEED": salt}
    done = subprocess.run(words, env=around, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr.strip()
    assert done.stdout.split()[-1] == later_epochs(case), (
        f"a process with PYTHONHASHSEED={salt} sees other batches: expected an order that depends on the "
        "seed and on numbers alone, not on hash() of text or on the order of a set"
    )


def later_epochs(case: Case) -> str:
    """Return a digest of all batches up to the third epoch."""
    drawn = batches(opened(case), 2 * (first_epoch(case) + 1) + 2)
    return hashlib.sha256(drawn.numpy().tobytes()).hexdigest()
