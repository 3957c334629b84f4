"""The data a step trains on, and the shard of it that one rank sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import attrs
import torch
import torch.nn.functional as F

from nanotrain_core.layout.ranges import shard_range
from nanotrain_core.models.cache import Cache, LayerCache

#: A target with this value is neither predicted nor counted.
IGNORE = -100


@attrs.define(frozen=True, eq=False)
class Batch:
    """Token sequences and the target of each position, both int64 [B, S]."""

    tokens: torch.Tensor
    """Tokens of this rank, int64 [B, S]."""
    targets: torch.Tensor | None = None
    """The next token at each position, or :data:`IGNORE`. None asks the model for logits."""
    cache: Cache | None = None
    """During text generation: what the model's layers have cached of the preceding tokens, of which there are
    :attr:`start`. None: there are no preceding tokens."""
    whole: Batch | None = None
    """The whole sequences, where ranks split each of them (context parallelism) and these tokens are this
    rank's part. None: these tokens are whole sequences."""
    first: int = 0
    """Position of the first token in :attr:`whole`."""
    document_starts: torch.Tensor | None = None
    """For each token of the whole sequences, the position at which its document begins, int64 [B, length]: a
    token attends only to tokens of its own document. None: to all before it."""
    per_sequence: Mapping[str, torch.Tensor] = attrs.field(factory=dict)
    """Tensors of the data's own by name, [B, ...] of any dtype: one entry a sequence, such as a reward."""
    per_token: Mapping[str, torch.Tensor] = attrs.field(factory=dict)
    """Likewise [B, S, ...], one entry for each token, such as the logits of a teacher. A batch that does not
    come from the data, as in text generation and ``nanotrain plan``, has neither."""

    @property
    def start(self) -> int:
        """The position of the first token in its sequence."""
        return self.first if self.cache is None else self.cache.start

    @property
    def length(self) -> int:
        """Tokens of a whole sequence, of which this rank may have a part."""
        return self.tokens.shape[1] if self.whole is None else self.whole.tokens.shape[1]

    def cache_of(self, layer: str) -> LayerCache | None:
        """Return the cache of the layer of this name; None without a cache, as in training."""
        return None if self.cache is None else self.cache.layer(layer)

    @property
    def document_positions(self) -> torch.Tensor | None:
        """Return these tokens' positions within their documents, int64 [B, S]; None without documents."""
        if self.document_starts is None:
            return None
        first, size = self.first, self.tokens.shape[1]
        at_S = torch.arange(first, first + size, device=self.document_starts.device)
        return at_S - self.document_starts[:, first : first + size]

    @property
    def sequences(self) -> int:
        return self.tokens.shape[0]

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return the batch with ``change`` applied to all its tensors, also to those of :attr:`whole`."""
        return Batch(
            change(self.tokens),
            None if self.targets is None else change(self.targets),
            whole=None if self.whole is None else self.whole._each(change),
            first=self.first,
            document_starts=None if self.document_starts is None else change(self.document_starts),
            per_sequence={name: change(tensor) for name, tensor in self.per_sequence.items()},
            per_token={name: change(tensor) for name, tensor in self.per_token.items()},
        )

    def to(self, device: torch.device) -> Batch:
        """Return the batch on ``device``. A copy to a device is asynchronous; a copy to the host is complete
        on return, because code that reads it there does not wait for a stream."""
        overlaps = device.type != "cpu"
        return self._each(lambda tensor: tensor.to(device, non_blocking=overlaps))

    def clone(self) -> Batch:
        """Return a copy in memory of its own."""
        return self._each(torch.clone)

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors of the batch, including those of :attr:`whole`, always in the same order."""
        own = [each for each in (self.tokens, self.targets, self.document_starts) if each is not None]
        own += [named[name] for named in (self.per_sequence, self.per_token) for name in sorted(named)]
        return own if self.whole is None else [*own, *self.whole.tensors()]

    def pinned(self) -> Batch:
        """Return it in pinned memory, from which a GPU copies asynchronously."""
        return self._each(lambda tensor: tensor.pin_memory())

    def part(self, index: int, count: int) -> Batch:
        """Return the ``index``-th of ``count`` consecutive parts of each sequence.

        The lengths of the parts differ by at most one token. With one part: the batch itself.
        """
        if count == 1:
            return self
        begin, end = shard_range(self.tokens.shape[1], index, count)

        def cut(whole_BS: torch.Tensor) -> torch.Tensor:
            return whole_BS[:, begin:end].contiguous()

        return Batch(
            cut(self.tokens),
            None if self.targets is None else cut(self.targets),
            whole=self,
            first=begin,
            document_starts=self.document_starts,
            per_sequence=self.per_sequence,
            per_token={name: cut(tensor) for name, tensor in self.per_token.items()},
        )

    def shifted(self, depth: int) -> Batch:
        """Return the tokens and targets ``depth`` positions after these, of the same shape.

        Past the end of a sequence: token 0 and :data:`IGNORE`, and zeros in :attr:`per_token`. For a part,
        those that follow it in its sequence, even if they are on other ranks: a model must not shift a batch
        by itself. Where documents are masked from one another, also :data:`IGNORE` where the later token
        belongs to another document.
        """
        known = self if self.whole is None else self.whole
        begin, size = self.first + depth, self.tokens.shape[1]

        def shift(whole_BS: torch.Tensor, filling: int) -> torch.Tensor:
            there = whole_BS[:, begin : begin + size]
            sides = (0, 0) * (there.dim() - 2) + (0, size - there.shape[1])  # from the last axis to S
            return F.pad(there, sides, value=filling)

        targets = None if known.targets is None else shift(known.targets, IGNORE)
        if targets is not None and self.document_starts is not None:
            own_BS = self.document_starts[:, self.first : self.first + size]
            targets = targets.masked_fill(shift(self.document_starts, -1) != own_BS, IGNORE)
        later = {name: shift(tensor, 0) for name, tensor in known.per_token.items()}
        return Batch(shift(known.tokens, 0), targets, per_sequence=self.per_sequence, per_token=later)

    def split(self, size: int, count: int | None = None) -> Iterator[Batch]:
        """Yield consecutive microbatches of ``size`` sequences; the last may be smaller.

        ``count``: exactly this many, at most the number of sequences; the last ones may then be smaller.
        """
        count, end = -(-self.sequences // size) if count is None else count, 0
        for to_come in reversed(range(count)):
            start, end = end, min(end + size, self.sequences - to_come)
            rows = slice(start, end)
            yield self._each(lambda tensor, rows=rows: tensor[rows])  # type: ignore[misc]

    def padded(self, rows: int) -> Batch:
        """Return it with this many sequences: those added are zeros, with ignored targets."""
        missing = rows - self.sequences
        if missing == 0:
            return self
        full = self._each(lambda each: torch.cat((each, each.new_zeros(missing, *each.shape[1:]))))
        if full.targets is not None:
            full.targets[-missing:] = IGNORE
        return full

    def target_tokens(self) -> torch.Tensor:
        """Return how many positions are predicted, a scalar on the batch's device."""
        if self.targets is None:
            raise ValueError("a batch without targets has nothing to count")
        return (self.targets != IGNORE).sum()


@attrs.define(frozen=True)
class Shard:
    """The consecutive rows of every global batch that belong to this rank: shard ``index`` of ``count``."""

    index: int = 0
    count: int = 1

    def rows(self, sequences: int) -> range:
        """Return this shard's rows of a global batch of ``sequences``: shard sizes differ by at most one."""
        return range(*shard_range(sequences, self.index, self.count))
