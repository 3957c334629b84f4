"""What the step loop eats: this rank's microbatches, from a data component or from a script's loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from nanotrain_core.batch import Batch, Shard
from nanotrain_core.contracts import Data, Model
from nanotrain_core.recipe.tree import BatchConfig, EvaluationConfig


class Feed(Protocol):
    """Microbatches on the run's device."""

    tokens_per_step: int
    """Of the whole run."""
    bytes_per_token: float | None
    data: Any
    """The data component or loader behind it, for monitors."""

    def use(self, train: Any, validation: Any) -> None:
        """Take a script's loaders; a recipe's feed has its data already and refuses others."""
        ...

    def microbatches(self) -> list[Batch]:
        """Return this rank's share of the next global batch."""
        ...

    def validation(self) -> Iterator[Batch]:
        """Yield this rank's share of the validation batches, the same each time."""
        ...

    def counts(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return what each loss term of ``batch`` is averaged over."""
        ...

    def meta(self) -> dict[str, Any]: ...

    def load_meta(self, meta: Mapping[str, Any]) -> None: ...


class DataFeed:
    """Feeds from a :class:`~nanotrain_core.contracts.Data` component."""

    def __init__(
        self,
        data: Data,
        model: Model,
        batch: BatchConfig,
        evaluation: EvaluationConfig,
        shard: Shard,
        device: torch.device,
    ) -> None:
        self.data, self.counts = data, model.loss_counts
        self.batch, self.evaluation, self.shard, self.device = batch, evaluation, shard, device
        self.tokens_per_step = batch.sequences * batch.length
        self.bytes_per_token = data.bytes_per_token
        self.meta, self.load_meta = data.meta, data.load_meta

    def use(self, train: Any, validation: Any) -> None:
        """Refuse loaders: the recipe names the data.

        Raises:
            TypeError: a loader was given.
        """
        if train is not None or validation is not None:
            raise TypeError("this engine was built from a recipe, which names its data: call fit() alone")

    def microbatches(self) -> list[Batch]:
        """Return this rank's share of the next global batch."""
        mine = self.data.train_batch(self.batch.sequences, self.shard).to(self.device)
        return list(mine.split(self.batch.microbatch))

    def validation(self) -> Iterator[Batch]:
        """Yield this rank's microbatches of ``[evaluation] sequences``, rounded up to whole global batches.

        A global batch is the unit so that every layout evaluates the same sequences.
        """
        for index in range(-(-self.evaluation.sequences // self.batch.sequences)):
            batch = self.data.validation_batch(index, self.batch.sequences, self.shard)
            if batch is None:
                return
            yield from batch.to(self.device).split(self.batch.microbatch)
