"""The data iterator of the step loop: microbatches of this rank, from a data component or a script."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol, TypeGuard

import torch

from nanotrain_core.batch import IGNORE, Batch, Shard
from nanotrain_core.contracts import ChangesLength, CountsHeldOut, Data, Model, SkipsAhead
from nanotrain_core.errors import PluginError, did_you_mean
from nanotrain_core.recipe.tree import BatchConfig, EvaluationConfig
from nanotrain_core.run.skipped_ranges import SkipsRanges
from nanotrain_core.run.upload import Upload


class Feed(Protocol):
    """Microbatches on the run's device."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step of the whole run."""
        ...

    @property
    def length(self) -> int | None:
        """Sequence length in tokens in the next step; None for a script's loader."""
        ...

    tokens: int
    """Tokens that the whole run has trained on since its beginning."""
    tokens_before: int
    """Tokens that the whole run had trained on before the last step."""
    bytes_per_token: float | None
    data: Any
    """The underlying data component or loader, for monitors."""
    skipped: list[tuple[int, int]]
    """Ranges of sequences (for a script's loader: batches), counted from the beginning of the run, that are
    not trained on."""

    def use(self, train: Any, validation: Any, *, go_on: bool) -> None:
        """Set a script's loaders; a recipe's feed has its data already and rejects others.

        Args:
            train: the loader of one call of fit.
            validation: its validation batches.
            go_on: whether the step is beyond the previous call's last one: a checkpoint of a later call was
                loaded, and the position in its loader must be kept.
        """
        ...

    def step_done(self) -> None:
        """Record that the last batch was trained on."""
        ...

    def microbatches(self) -> list[Batch]:
        """Return this rank's shard of the next global batch, on its device.

        Every data-parallel rank gets the same number of microbatches, of ``batch.microbatch`` sequences; the
        last ones may have fewer. Under context parallelism they contain this rank's part of each sequence.
        """
        ...

    def validation(self) -> Iterator[tuple[Batch, int]]:
        """Yield this rank's shard of the validation batches, the same each time.

        Each comes with the number of its tokens, predicted or not, without rows that pad it.
        """
        ...

    def counts(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return the counts by which each loss term of ``batch`` is averaged."""
        ...

    def resize(self, batch: BatchConfig, validated: BatchConfig) -> None:
        """Use batches of this shape from now on, as a phase requires; a script's loader has no phases.

        Args:
            batch: shape of the training batches.
            validated: shape of the validation batches.
        """
        ...

    def of_last(self, steps: int) -> tuple[int, int]:
        """Return which sequences (batches) the last ``steps`` steps used: first, and one past the last."""
        ...

    def meta(self) -> dict[str, Any]: ...

    def load_meta(self, meta: Mapping[str, Any]) -> None: ...


class DataFeed(SkipsRanges):
    """Feeds from a :class:`~nanotrain_core.contracts.Data` component."""

    def __init__(
        self,
        data: Data,
        model: Model,
        batch: BatchConfig,
        evaluation: EvaluationConfig,
        shard: Shard,
        device: torch.device,
        *,
        part: Shard = Shard(),  # noqa: B008 frozen
    ) -> None:
        """Feed this rank.

        Args:
            data: an opened data component.
            model: the model whose loss terms are counted.
            batch: shape of the training batches.
            evaluation: how much to validate.
            shard: this rank's sequences of each batch.
            device: the run's device.
            part: this rank's part of each sequence, where ranks split it.
        """
        self.part = part
        self.data, self._model, self._counted = data, model, False
        self.batch, self.evaluation, self.shard = batch, evaluation, shard
        self._validated = batch
        """Shape of the validation batches: see
        :meth:`~nanotrain_core.phases.timeline.PhaseTimeline.validated_at`."""
        self._set_length = batch.length
        """Length of the sequences that the data returns."""
        self._upload = Upload(device)
        self.bytes_per_token = data.bytes_per_token
        self.skipped: list[tuple[int, int]] = []
        self.tokens = self.tokens_before = 0
        self._open: int | None = None
        """Position of the batch whose step is not done."""
        self._sizes = [(0, batch.sequences)]
        """Batch sizes by first sequence: a resumed run may change the size, and phases do."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step of the whole run, in the next step."""
        return self.batch.tokens

    @property
    def length(self) -> int:
        """Sequence length in tokens in the next step."""
        return self.batch.length

    def counts(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return what the model counts of its loss terms in a batch; those of the first one are validated."""
        found = self._model.loss_counts(batch)
        if not self._counted:
            expect_counts(found, self._model.loss_weights)
            self._counted = True
        return found

    def resize(self, batch: BatchConfig, validated: BatchConfig) -> None:
        """Use batches of this shape from now on."""
        self.batch, self._validated, sequences = batch, validated, batch.sequences
        if self._sizes[-1][0] == self.taken:
            self._sizes.pop()
        # A resume adds nothing: same state, same bytes.
        if not self._sizes or self._sizes[-1][1] != sequences:
            self._sizes.append((self.taken, sequences))

    def use(self, train: Any, validation: Any, *, go_on: bool = False) -> None:
        """Reject loaders: the recipe names the data. The batch of an interrupted step is skipped.

        Raises:
            TypeError: a loader was given.
        """
        if train is not None or validation is not None:
            raise TypeError("this engine was built from a recipe, which names its data: call fit() alone")
        if self._open is not None:
            begin, self._open = self._open, None
            self.skipped.append((begin, self.taken))
            self.tokens = self.tokens_before

    def microbatches(self) -> list[Batch]:
        """Return this rank's shard of the next global batch."""
        while self.is_skipped(self.taken, self.batch.sequences):
            self._leave_out()
        self.tokens_before, self.tokens = self.tokens, self.tokens + self.tokens_per_step
        self._open = self.taken
        return list(self._split(self._take(), self.batch))

    def step_done(self) -> None:
        """The last batch was trained on."""
        self._open = None

    def _split(self, batch: Batch, shape: BatchConfig) -> Iterator[Batch]:
        """Yield microbatches of ``shape.microbatch`` rows, the same number on every data-parallel rank.

        Each has this rank's part of each sequence, where ranks split it.
        """
        count = shape.microbatches(self.shard.count)
        mine = self._upload(batch).part(self.part.index, self.part.count)
        return mine.split(shape.microbatch, count)

    def _take(self) -> Batch:
        """Return this rank's rows of the next global batch: the data component reads no others."""
        self.taken += self.batch.sequences
        self._have_length(self.batch.length)
        batch = self.data.train_batch(self.batch.sequences, self.shard)
        return self._checked("train_batch", batch, self.batch)

    def _leave_out(self) -> None:
        """Advance past the skipped ranges that overlap the next batch, by whole batches."""
        size, here = self.batch.sequences, self.taken
        end = max(end for first, end in self.skipped if first < here + size and here < end)
        if _skips_ahead(self.data):
            left_out = -(-(end - here) // size) * size
            self._have_length(self.batch.length)
            self.data.skip(left_out)
            self.taken += left_out
        else:
            self._take()

    def _have_length(self, length: int) -> None:
        """Make the data return sequences of this length: only called when a batch is taken."""
        if length != self._set_length:
            assert isinstance(self.data, ChangesLength)
            self.data.set_length(length)
            self._set_length = length

    def _checked(self, what: str, batch: Batch, shape: BatchConfig) -> Batch:
        """Reject anything but exactly this rank's rows: it would train on other tokens."""
        wanted = (len(self.shard.rows(shape.sequences)), shape.length)
        for name in ("tokens", "targets"):
            found: Any = getattr(batch, name, None)
            is_tensor = isinstance(found, torch.Tensor)
            form = f"{found.dtype} {list(found.shape)}" if is_tensor else f"of {type(found).__name__}"
            if form != f"torch.int64 {list(wanted)}":
                text = f"{type(self.data).__name__}.{what} returned {name} {form} in a {type(batch).__name__}"
                raise PluginError(f"{text}; expected a Batch of torch.int64 {list(wanted)}, this rank's rows")
        for field, axes in (("per_sequence", wanted[:1]), ("per_token", wanted)):
            for name, own in getattr(batch, field).items():
                sizes = list(own.shape) if isinstance(own, torch.Tensor) else []
                if sizes[: len(axes)] != [*axes]:
                    form = str(sizes or type(own).__name__)
                    text = f"{type(self.data).__name__}.{what} returned {field}['{name}'] of {form}"
                    raise PluginError(f"{text}; expected a tensor [{', '.join(map(str, axes))}, ...]")
        return batch

    def size_before(self, position: int) -> int:
        """Return the size of the batch that ends at ``position``."""
        return next(size for begin, size in reversed(self._sizes) if begin < position)

    def meta(self) -> dict[str, Any]:
        """Return the position in the data and the skipped ranges, as JSON."""
        pairs = {"skipped": self.skipped, "batch_sizes": self._sizes}
        known = {name: [list(pair) for pair in found] for name, found in pairs.items()}
        tokens = {"tokens": self.tokens, "tokens_before": self.tokens_before}
        return {**self.data.meta(), "taken": self.taken, **tokens, **known}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Restore a position."""
        self._open = None
        self.data.load_meta(meta)
        self.taken = int(meta["taken"])
        self.skipped = [(int(first), int(end)) for first, end in meta["skipped"]]
        self.tokens = int(meta["tokens"])
        self.tokens_before = int(meta["tokens_before"])
        self._sizes = [(int(begin), int(size)) for begin, size in meta["batch_sizes"]]
        if self._sizes[-1][1] != self.batch.sequences:
            self._sizes.append((self.taken, self.batch.sequences))

    def validation(self) -> Iterator[tuple[Batch, int]]:
        """Yield this rank's microbatches of ``[evaluation] sequences``, rounded up to whole global batches.

        A global batch is the unit so that every layout evaluates the same sequences.
        """
        shape = self._validated
        self._have_length(shape.length)
        for index in range(-(-self.evaluation.sequences // shape.sequences)):
            if (batch := self.data.validation_batch(index, shape.sequences, self.shard)) is None:
                return
            rows = iter(self._held_out(self._checked("validation_batch", batch, shape), index))
            for mine in self._split(batch, shape):
                yield mine, sum(islice(rows, mine.sequences)) * mine.tokens.shape[1]

    def _held_out(self, batch: Batch, index: int) -> list[bool]:
        """Return for each row of the ``index``-th validation batch whether it is no padding.

        A sequence may have no target, as padding does: rows without targets are taken for padding only where
        the data does not say how many sequences it holds out.
        """
        if isinstance(self.data, CountsHeldOut):
            size = self._validated.sequences
            return [index * size + row < self.data.validation for row in self.shard.rows(size)]
        assert batch.targets is not None
        return (batch.targets != IGNORE).any(1).tolist()


def _skips_ahead(data: Data) -> TypeGuard[SkipsAhead]:
    """Return whether ``data.skip`` advances everything that ``data.train_batch`` does.

    If inherited from a class whose ``train_batch`` a subclass overrides, it may not advance the subclass.
    """
    order = type(data).__mro__
    skip, take = (next((c for c in order if name in vars(c)), object) for name in ("skip", "train_batch"))
    return isinstance(data, SkipsAhead) and order.index(skip) <= order.index(take)


def expect_counts(found: Any, names: Iterable[str]) -> None:
    """Reject counts of loss terms that a model returns of a batch, unless there is a scalar for each.

    Raises:
        PluginError: naming the first that is missing, and the nearest one that is there.
    """
    if not isinstance(found, Mapping):
        text = f"a {type(found).__name__}; expected a mapping from each name in loss_weights to its count"
        raise PluginError(f"the model's loss_counts returned {text}, a scalar tensor")
    for name in names:
        if name not in found:
            near = did_you_mean(name, [*found])
            raise PluginError(f"the model's loss_counts lack '{name}', which loss_weights have{near}")
        count = found[name]
        if isinstance(count, torch.Tensor) and count.dim():
            text = f"a tensor of shape {list(count.shape)} for '{name}'; expected a scalar, their sum"
            raise PluginError(f"the model's loss_counts returned {text}")
