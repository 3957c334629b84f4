"""A prepared folder of conversations: where each stands, and what of it is learned. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nanotrain_core.api import DataError
from nanotrain_core.api.text import Split, held_out
from nanotrain_data.config import ChatConfig
from nanotrain_data.manifest import Manifest, ShardInfo, read_manifest
from nanotrain_data.packs import Packs, alone, best_fit
from nanotrain_data.verify import damaged_tables, offsets_problem, size_problems
from nanotrain_data.writer import ANSWERS

Integers = npt.NDArray[np.int64]


class Conversations:
    """Of one folder. Tables are mapped into memory, as tokens are."""

    def __init__(self, folder: Path, config: ChatConfig) -> None:
        """Open the tables, and compare them with the manifest.

        Raises:
            DataError: it is no prepared folder, of no conversations, or damaged, by the file's name.
        """
        self.folder, self.config = folder, config
        self.manifest = conversations_in(folder)
        problems = size_problems(folder, self.manifest)
        problems = problems or [line for s in self.manifest.shards for line in damaged_tables(folder, s)]
        if problems:
            raise DataError("\n".join(problems))
        shards = self.manifest.shards
        self._first_conversations = np.cumsum([0, *(shard.documents for shard in shards)])
        self._first_tokens = np.cumsum([0, *(shard.tokens for shard in shards)])
        self._offsets = [self._table(shard, ".offsets") for shard in shards]
        pairs = zip(shards, self._offsets, strict=True)
        if problem := next(filter(None, (offsets_problem(folder, *pair) for pair in pairs)), ""):
            raise DataError(problem)
        self._answers = [self._table(shard, ANSWERS).reshape(-1, 2) for shard in shards]
        count = self.manifest.documents
        self.split = Split(count, held_out(count, config.validation_fraction))

    def _table(self, shard: ShardInfo, suffix: str) -> npt.NDArray[Any]:
        return np.memmap(self.folder / f"{shard.name}{suffix}", "<i8", mode="r").view(np.ndarray)

    def packs(self, length: int, *, validation: bool) -> Packs:
        """Return the sequences of ``length`` positions of a split."""
        split = self.split
        numbers = split.pieces(np.arange(split.held if validation else split.train), validation=validation)
        sizes, learned = self._sizes(length)
        numbers = numbers[learned[numbers]]
        if not self.config.packed:
            return alone(numbers)
        return best_fit(numbers, sizes[numbers], length)

    def left_out(self, length: int) -> int:
        """Return how many are not trained on: too long, or nothing to learn within ``length`` positions."""
        return int((~self._sizes(length)[1]).sum())

    def _sizes(self, length: int) -> tuple[Integers, npt.NDArray[np.bool_]]:
        """Return the positions that each takes, and whether it is trained on: both [conversations].

        Of a longer one the end is cut off; the token behind the last position is predicted all the same.
        """
        tokens = np.concatenate([np.diff(offsets) for offsets in self._offsets])
        firsts = []
        for offsets, answers in zip(self._offsets, self._answers, strict=True):
            first = np.searchsorted(answers[:, 0], offsets[:-1])
            firsts.append(answers[first, 0] - offsets[:-1])  # each has an answer: see write_shard
        learned = np.concatenate(firsts) <= length
        if self.config.too_long == "leave_out":
            learned &= tokens <= length + 1
        return np.minimum(tokens, length), learned

    def place(self, number: int, length: int) -> tuple[int, npt.NDArray[np.bool_]]:
        """Return where a conversation begins among all tokens, and which of its tokens are learned.

        These are at most ``length`` + 1.
        """
        shard = int(np.searchsorted(self._first_conversations, number, side="right")) - 1
        begin, end = self._offsets[shard][number - self._first_conversations[shard] :][:2].tolist()
        learned = np.zeros(min(end - begin, length + 1), np.bool_)
        answers = self._answers[shard]
        first, last = np.searchsorted(answers[:, 0], [begin, end])
        for answer_begin, answer_end in (answers[first:last] - begin).tolist():
            learned[answer_begin:answer_end] = True
        return int(self._first_tokens[shard]) + begin, learned


def nothing_to_learn(path: str, length: int) -> str:
    """Return what to tell of a source without a sequence to train on."""
    return (
        f"{path} has no conversation to train on in which the assistant says something within {length} "
        "tokens: raise batch.length, or prepare more"
    )


def conversations_in(folder: Path) -> Manifest:
    """Return the manifest of a folder of conversations.

    Raises:
        DataError: it is no prepared folder, or one of text.
    """
    manifest = read_manifest(folder)
    if manifest.chat is None:
        raise DataError(
            f"{folder} holds text, of which nothing says who wrote it; expected a folder that "
            "'nanotrain data prepare --chat' wrote, or data.use = 'shards'"
        )
    return manifest
