"""Data goes on past its end on every rank alike, and knows itself by length and seed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch

from nanotrain_core.batch import Shard
from nanotrain_core.contracts import Data
from nanotrain_core.errors import DataError
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check
from nanotrain_core.testing.checks.data import SEQUENCES, assert_equal, batches, opened

#: Batches after which data that has not begun again counts as endless.
MOST = 300


def first_epoch(case: Case) -> int:
    """Return how many batches are drawn before sequences come again; :data:`MOST` if none do."""
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
    """Wherever it stops, in the second epoch too, new data goes on with the batch that came next."""
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
    """In the second epoch and the third too, all shards' rows side by side are what one process sees."""
    count, steps = int(shards), 2 * (first_epoch(case) + 1) + 2
    parts = [batches(opened(case), steps, Shard(index, count)) for index in range(count)]
    joined, whole = torch.cat(parts, dim=2), batches(opened(case), steps)
    for step in range(steps):
        assert_equal(joined[step], whole[step], f"batch {step + 1} from {count} shards against one")


@check("data", since="0.2", variants=("seed", "length"))
def fingerprint_tells(case: Case, which: str) -> None:
    """A position of another seed's order, or in sequences of another length, is refused with a DataError."""
    length = case.recipe().batch.length
    other: Data = case.build()
    other.open(length=length + (which == "length"), seed=7 + (which == "seed"))
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
