"""Batches from a script's loaders, and how a resumed run restores its position in them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from operator import length_hint
from typing import Any

import attrs
import torch

from nanotrain_core.batch import IGNORE, Batch
from nanotrain_core.errors import CheckpointError, NanotrainError
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.recipe.tree import BatchConfig
from nanotrain_core.run import random_state
from nanotrain_core.run.skipped_ranges import SkipsRanges
from nanotrain_core.run.upload import Upload

Pair = tuple[torch.Tensor, torch.Tensor]
#: Yields ``(inputs, targets)``, two tensors, or :class:`Batch` of no more than these. Targets are at the
#: positions that predict them.
Loader = Iterable[Pair | Batch]


#: For the number of batches of a loader that does not know it.
UNKNOWN = -1
#: What is expected of validation loaders.
AS_MANY = "expected equally many, as a DistributedSampler gives"


class EmptyLoader(ValueError):
    """A loader yields nothing."""


@attrs.define(frozen=True, eq=False)
class Taken:
    """One batch, and the position after it."""

    batch: Batch
    into: int
    """Batches taken from the loader since it was last iterated from its beginning, including this one."""
    epoch: int
    """Number of earlier passes over the loader."""
    begun: Mapping[str, torch.Tensor]
    """Random-number streams just before the current pass over the loader began."""


class LoaderFeed(SkipsRanges):
    """Feeds from a script's loaders, iterating the training loader as often as needed.

    A position is a number of batches into a pass over the loader. To restore it, random-number streams
    are reset to their state when that pass began, the loader is iterated from its beginning and
    that many batches are skipped. A ``DataLoader`` that shuffles then gives the same order, with a
    generator of its own or without, and so does every loader that yields the same whenever it is iterated.
    If it, a sampler or its dataset has ``set_epoch``, as a ``DistributedSampler`` does, it receives the
    number of each pass, from 0.
    """

    bytes_per_token: float | None = None

    def __init__(
        self,
        accumulate: int,
        mesh: Mesh,
        begin: Callable[[], None] = lambda: None,
        evaluating: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Have no loaders yet.

        Args:
            accumulate: batches per step.
            mesh: of the run.
            begin: called at the beginning of each call of fit; it may refuse the call.
            evaluating: the context in which validation batches are evaluated.
        """
        self.evaluating = evaluating
        self.accumulate, self.mesh, self._upload = accumulate, mesh, Upload(mesh.device)
        self.begin = begin
        self.data: Loader | None = None
        self.skipped: list[tuple[int, int]] = []
        self.tokens = self.tokens_before = self.into = self.epoch = 0
        self.begun: Mapping[str, torch.Tensor] = {}
        """Streams at the beginning of the pass that :attr:`into` counts in: see :class:`Taken`."""
        self.restored: Mapping[str, torch.Tensor] = {}
        """Streams of a restored position, until a batch is taken from it."""
        self._tokens = 0
        self._ahead: list[Taken] = []
        """The next step's batches, if their size was already requested."""
        self._before: Mapping[str, torch.Tensor] = {}
        self._after: Mapping[str, torch.Tensor] = {}
        """Streams at the position, and after :attr:`_ahead` was read."""

    def use(self, train: Loader | None, validation: Loader | None, *, go_on: bool = False) -> None:
        """Set the loaders of one call of fit, and begin with them, or keep the position if it goes on.

        Raises:
            TypeError: there is no training loader.
            NanotrainError: the position is in an iterator of which an earlier call has taken batches, or the
                validation loader is an iterator: every evaluation but the first would find nothing.
        """
        if train is None:
            raise TypeError("fit needs a train_loader that yields (inputs, targets)")
        if isinstance(validation, Iterator):
            raise NanotrainError(
                f"the val_loader is a {type(validation).__name__}, which can be iterated only once: each "
                "evaluation iterates it, so that it must be iterable again, as a list or a DataLoader is"
            )
        self.begin()
        if self.restored and train is self.data:
            self._refuse_iterator()
        self.data, self.held_out, self._used = train, validation, False
        if go_on:  # the script may have drawn numbers between its calls, which are in the position already
            random_state.restore(self.restored)
        else:
            self.epoch += self.taken > 0
        self._go_to(self.into if go_on else 0)

    def _go_to(self, into: int) -> None:
        self.into, self._ahead, self._tokens = into, [], 0
        self._batches = self._from(into)

    def _from(self, into: int) -> Iterator[Taken]:
        """Yield batches endlessly, from ``into`` batches into the pass that began with :attr:`begun` on."""
        assert self.data is not None
        self._used = True
        now = random_state.capture(self.mesh.device)
        if into and self.begun:
            self._restore(self.begun)
        epoch = self.epoch
        while True:
            set_epoch(self.data, epoch)
            begun, count = self._capture(), 0
            for count, item in enumerate(self.data, 1):
                if count > into:
                    yield Taken(self._batch(item, "train_loader"), count, epoch, begun)
                elif count == into:
                    random_state.restore(now)
                    self._before = self._streams()
            if count < into:
                raise CheckpointError(
                    f"the train_loader ends after {count} batches and the checkpoint was saved {into} "
                    "batches into it: give fit the loader that the run was begun with"
                )
            if not count:
                raise EmptyLoader("the train_loader yields nothing")
            into, epoch = 0, epoch + 1

    def _streams(self) -> dict[str, torch.Tensor]:
        own = {name: generator.get_state() for name, generator in generators(self.data).items()}
        return {**random_state.capture(self.mesh.device), **own}

    def _set_streams(self, streams: Mapping[str, torch.Tensor]) -> None:
        random_state.restore(streams)
        for name, generator in generators(self.data).items():
            if name in streams:
                generator.set_state(streams[name])

    def _capture(self) -> Mapping[str, torch.Tensor]:
        """Return the streams, and whether the loader has workers that persist."""
        streams = self._streams()
        if getattr(self.data, "persistent_workers", False):
            streams["workers"] = torch.tensor(getattr(self.data, "_iterator", None) is not None)
        return streams

    def _restore(self, streams: Mapping[str, torch.Tensor]) -> None:
        """Restore :meth:`_capture`; first whether there are workers, since beginning them draws a number."""
        loader: Any = self.data
        if "workers" in streams and getattr(loader, "persistent_workers", False):
            if not streams["workers"]:
                loader._iterator = None
            elif getattr(loader, "_iterator", loader) is None:
                iter(loader)
        self._set_streams(streams)

    def _batch(self, item: Pair | Batch, loader: str) -> Batch:
        return self._upload(checked(item, loader))

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the last step or, before the first of a call of fit, of the next, which it reads."""
        if not self._tokens:
            self._look_ahead()
            self._tokens = self._size(self._ahead)
        return self._tokens

    def _look_ahead(self) -> None:
        """Read the next step's batches, and leave random-number streams as they were: there may be no step.

        A resumed script repeats calls of fit whose steps are done. If they changed streams, for example by
        beginning another pass, the next call's loader would have another order.
        """
        self._before = self._streams()
        try:
            self._ahead = self._take()
        except (EmptyLoader, CheckpointError):  # raised when a step needs a batch
            self._batches = self._from(self.into)
        self._after = self._streams()
        self._set_streams(self._before)

    def _read_ahead(self) -> list[Taken]:
        """Return what was read ahead, with its effect on streams, except on those that a monitor has set."""
        now, taken, self._ahead = self._streams(), self._ahead, []
        same = [name for name in self._before if torch.equal(now[name], self._before[name])]
        self._set_streams({name: self._after[name] for name in same})
        return taken

    def _size(self, taken: list[Taken]) -> int:
        return sum(each.batch.tokens.numel() for each in taken) * self.mesh.world_size

    length: int | None = None
    """None: the loader determines the length of sequences."""

    def resize(self, batch: BatchConfig, validated: BatchConfig) -> None:
        """Refuse: the loader determines the batch size."""
        raise NotImplementedError("a script's loader has batches of its own")

    def step_done(self) -> None:
        """Do nothing: each call of fit begins with its loader."""

    def microbatches(self) -> list[Batch]:
        """Return the loader's next batches."""
        taken = self._read_ahead() if self._ahead else self._take()
        while self.is_skipped(self.taken, self.accumulate):
            self.taken += self.accumulate
        self.taken += self.accumulate
        self.into, self.epoch, self.begun = taken[-1].into, taken[-1].epoch, taken[-1].begun
        self._tokens, self.restored = self._size(taken), {}
        self.tokens_before, self.tokens = self.tokens, self.tokens + self._tokens
        return [each.batch for each in taken]

    def _take(self) -> list[Taken]:
        """Return the next step's batches, after those that are skipped."""
        position = self.taken
        while self.is_skipped(position, self.accumulate):
            position += self.accumulate
        left_out = position - self.taken
        return list(itertools.islice(self._batches, left_out, left_out + self.accumulate))

    def validation(self) -> Iterator[tuple[Batch, int]]:
        """Yield all validation batches, each with the number of its tokens: none is padding. Collective.

        Training's random-number streams stay as they are: a loader with persistent workers draws from them
        when it is first iterated, which a resumed run would do again, and one that shares a generator with
        training's whenever it is iterated.

        Raises:
            NanotrainError: ranks have different numbers of them: all ranks evaluate a batch together.
        """
        loader = () if self.held_out is None else self.held_out
        counts = self.mesh.gather(length_hint(loader, UNKNOWN))
        if len({*counts} - {UNKNOWN}) > 1:
            raise NanotrainError(
                f"the validation loaders of ranks 0 to {len(counts) - 1} have {counts} batches: {AS_MANY}"
            )
        streams = self._streams()
        try:
            with nullcontext() if self.held_out is None else self.evaluating():
                for item in self._while_all_have(loader):
                    batch = self._batch(item, "val_loader")
                    yield batch, batch.tokens.numel()
        finally:
            self._set_streams(streams)

    def _while_all_have(self, loader: Loader) -> Iterator[Pair | Batch]:
        """Yield what ``loader`` does; before each item ranks agree that all have one, or that none has."""
        items, end = iter(loader), object()
        for count in itertools.count():
            item: Any = next(items, end)
            has = torch.zeros(self.mesh.world_size, dtype=torch.int32, device=self.mesh.device)
            has[self.mesh.rank] = item is not end
            self.mesh.all_reduce(has)
            ended = [rank for rank, one in enumerate(has.tolist()) if not one]
            if len(ended) == self.mesh.world_size:
                return
            if ended:
                raise NanotrainError(
                    f"the validation loaders of ranks {ended} ended after {count} batches, and those of the "
                    f"other ranks have more: {AS_MANY}"
                )
            yield item

    def counts(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return the number of predicted positions."""
        return {"lm": batch.target_tokens()}

    def size_before(self, position: int) -> int:
        """Return the number of batches of a step."""
        return self.accumulate

    def meta(self) -> dict[str, Any]:
        """Return the position in the loader and the skipped ranges, as JSON."""
        skipped = [list(each) for each in self.skipped]
        place = {"taken": self.taken, "into": self.into, "epoch": self.epoch}
        return {**place, "tokens": self.tokens, "skipped": skipped}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Restore a position.

        Raises:
            NanotrainError: the loader is an iterator that batches were taken from: it cannot be restarted.
        """
        self._refuse_iterator()
        self.taken, self.tokens = int(meta["taken"]), int(meta["tokens"])
        self.skipped = [(int(first), int(end)) for first, end in meta["skipped"]]
        self.epoch = int(meta.get("epoch", 0))
        self._go_to(int(meta["into"]))

    def _refuse_iterator(self) -> None:
        if self._used and isinstance(self.data, Iterator):
            raise NanotrainError(
                f"the train_loader is a {type(self.data).__name__}, which can be iterated only once: to go "
                "back to a checkpoint it must be iterable again, as a list or a DataLoader is"
            )


def checked(item: Any, loader: str) -> Batch:
    """Return what a loader yields as a batch.

    Raises:
        TypeError: it is neither two tensors nor a batch, or has what a script's model does not receive.
    """
    if isinstance(item, Batch):
        for name in ("cache", "whole", "document_starts", "per_sequence", "per_token"):
            if not (getattr(item, name) is None or getattr(item, name) == {}):
                raise TypeError(
                    f"the {loader} yields a Batch with {name}, which a script's model would not receive: it "
                    "is called with tokens alone"
                )
        return item
    if isinstance(item, tuple | list) and [isinstance(each, torch.Tensor) for each in item] == [True, True]:
        return Batch(*item)
    found = type(item).__name__
    if isinstance(item, tuple | list):
        found += f" of {len(item)} ({', '.join(type(each).__name__ for each in item)})"
    raise TypeError(
        f"the {loader} yields a {found}: expected two tensors (inputs, targets), or a Batch; targets that "
        f"are not to be predicted are IGNORE, {IGNORE}"
    )


def holders(loader: Any) -> dict[str, Any]:
    """Return a loader and what determines its order, by the name under which its generator is saved."""
    batches = getattr(loader, "batch_sampler", None)
    return {
        "generator": loader,
        "sampler": getattr(loader, "sampler", None),
        "batch_sampler": batches,
        "batch_sampler.sampler": getattr(batches, "sampler", None),
        "dataset": getattr(loader, "dataset", None),
    }


def set_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch of a loader, or of a ``DataLoader``'s samplers, as ``DistributedSampler`` requires.

    Also that of its dataset, as streaming datasets of Hugging Face that shuffle require.
    """
    for holder in holders(loader).values():
        tell = getattr(holder, "set_epoch", None)
        if callable(tell):
            tell(epoch)


def generators(loader: Any) -> dict[str, torch.Generator]:
    """Return the random-number generators that were passed to a ``DataLoader``, its samplers and dataset."""
    own = {name: getattr(holder, "generator", None) for name, holder in holders(loader).items()}
    return {name: generator for name, generator in own.items() if isinstance(generator, torch.Generator)}
