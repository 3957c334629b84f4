"""All-reduces gradients over the ranks with partial gradients, in buckets, overlapped with backward.

Buckets are filled in the order in which backward reaches parameters, last layers first. A bucket's
all-reduce starts when its last gradient has arrived *and* every earlier bucket has started. The ranks
to sum over are read from placements: this code is independent of data parallelism and experts.

Source: bucketing and overlap of Li et al., arXiv 2006.15704, sections 3.2.2 and 3.2.3, with sums instead of
means.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence, Set

import torch
from torch import nn

from nanotrain_core.api import NanotrainError, Span
from nanotrain_core.api.torch import (
    BucketQueue,
    Buffer,
    LocalGradients,
    Mesh,
    Parallel,
    Passes,
    Pending,
    PlacedParameter,
)
from nanotrain_ddp import DataParallelConfig


class Bucket:
    """The gradients of one all-reduce: consecutive ranges of a flat buffer."""

    def __init__(self, parameters: Sequence[nn.Parameter], buffer: Buffer) -> None:
        self.parameters, self.buffer = parameters, buffer
        ranges = torch.split(buffer.flat, [p.numel() for p in parameters])
        self.views = {p: piece.view_as(p) for p, piece in zip(parameters, ranges, strict=True)}
        self.pending: Pending | None = None

    def put(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Copy one gradient into its range."""
        self.views[parameter].copy_(gradient)

    def start(self) -> None:
        """Begin to add up the gradients of this bucket over the ranks of its group."""
        self.pending = self.buffer.all_reduce()

    def wait(self) -> None:
        """Return when the sum is available."""
        assert self.pending is not None
        self.pending()
        self.pending = None


class DataParallel(LocalGradients, Parallel):
    """The ``ddp`` component: a wrapper that does not change the model, and the run's gradient sync.

    The model's placements already say that data ranks hold partial gradients.
    """

    reduces = True

    def __init__(self, config: DataParallelConfig) -> None:
        super().__init__()
        self.config = config
        # Without overlap gradients are copied into their buckets when all are complete.
        self.needs_gradient_hooks = config.overlap
        self.queue: BucketQueue[Bucket] = BucketQueue([])
        self.w_pass: Set[nn.Parameter] | None = None
        """The weights of the last W pass in which gradients became final."""

    def attach(
        self,
        parameters: Sequence[PlacedParameter],
        mesh: Mesh,
        dtype: torch.dtype | None,
        passes: Passes | None = None,
    ) -> None:
        """Assign every parameter with a partial gradient to a bucket. Collective over the run.

        The ranks to sum over are those of its placement's span: of ``dp`` for a replicated layer. The
        all-reduce of a bucket is ``dist.all_reduce(async_op=True)``, or nanotrain-cpu's in shared memory,
        which happens when it is waited for.
        """
        super().attach(parameters, mesh, dtype, passes)
        limit = int(self.config.bucket_mb * 2**20)
        # Parameters that other stages also hold come last: all ranks reach them, in whatever order before.
        groups = sorted(group_parameters(parameters, mesh, dtype, limit), key=lambda g: g[1][0].stages)
        # Other stages wait for a stage's gradients before they reach a tied one: it starts after backward.
        early = sum(not key[0].stages for _, key in groups)
        self.queue = BucketQueue([make_bucket(members, mesh, *key) for members, key in groups], early)

    def on_final_gradient(self, parameter: nn.Parameter) -> None:
        """Copy a gradient into its bucket and start every bucket that is next in order."""
        if parameter not in self.queue.buckets_of:
            return
        if self.passes.computing is not None and self.passes.computing is not self.w_pass:
            self.w_pass = self.passes.computing
            for other in self._in_last_microbatch - self.w_pass:  # theirs came in the B pass
                if self.queue.awaits(other):
                    self._put(other)
        self._put(parameter)
        if self.config.overlap:
            for bucket in self.queue.ready():
                bucket.start()

    def _put(self, parameter: nn.Parameter) -> None:
        """Move this rank's gradient into its bucket; :meth:`gradient` is the sum over ranks.

        Raises:
            NanotrainError: it has been moved before in this step: the all-reduce may have begun without this
                part.
        """
        if not self.queue.awaits(parameter):
            name = next(each.placement.name for each in self.placed if each.parameter is parameter)
            raise NanotrainError(
                f"ddp: autograd completed the gradient of {name} twice in one backward pass, and the second "
                "part would be lost; expected once. If it is used in several activation-checkpointed calls, "
                "pass use_reentrant=False to torch.utils.checkpoint, or set overlap = false for ddp"
            )
        (bucket,) = self.queue.buckets_of[parameter]
        bucket.put(parameter, super().gradient(parameter))
        self.queue.arrived(parameter)
        self.drop(parameter)

    def backward_done(self, parameters: Collection[nn.Parameter]) -> None:
        """Fill in zeros, or what earlier microbatches gave, where the last microbatch gave no gradient."""
        for parameter in parameters:
            if self.queue.awaits(parameter):
                self.on_final_gradient(parameter)

    def finish(self) -> None:
        """Start buckets that backward did not complete, with zeros for missing gradients, and wait."""
        for bucket in self.queue.rest():
            for parameter in tuple(self.queue.missing[bucket]):
                self._put(parameter)
            bucket.start()
        for bucket in self.queue.buckets:
            bucket.wait()
        self.w_pass = None
        super().finish()

    def zero(self) -> None:
        """Clear all gradients; after an interrupted step, also those in buckets."""
        super().zero()
        self.w_pass = None
        self.queue.rewind()
        for bucket in self.queue.buckets:
            bucket.pending = None

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the sum over ranks, a view of a bucket."""
        for bucket in self.queue.buckets_of.get(parameter, ()):
            return bucket.views[parameter]
        return super().gradient(parameter)


#: The common properties of a bucket's members: the ranks to sum over, and the dtype.
Key = tuple[Span, torch.dtype]


def group_parameters(
    parameters: Sequence[PlacedParameter], mesh: Mesh, dtype: torch.dtype | None, limit: int
) -> Iterator[tuple[list[nn.Parameter], Key]]:
    """Yield the members of buckets of at most ``limit`` bytes (or one parameter), last parameters first.

    Parameters that several stages hold come after the others and by name, since stages register them in
    different orders. Parameters whose gradient is complete on this rank are omitted.
    """
    filling: dict[Key, list[nn.Parameter]] = {}
    tied = sorted((p for p in parameters if p.placement.stages), key=lambda p: p.placement.name)
    for placed in (*(p for p in reversed(parameters) if not p.placement.stages), *tied):
        parameter, span = placed.parameter, placed.placement.sync_span(mesh.layout)
        if not span or not parameter.requires_grad:
            continue
        key = (span, dtype or parameter.dtype)
        members = filling.setdefault(key, [])
        size = sum(p.numel() for p in members) + parameter.numel()
        if members and size * key[1].itemsize > limit:
            yield members, key
            filling[key] = members = []
        members.append(parameter)
    for key, members in filling.items():
        yield members, key


def make_bucket(members: Sequence[nn.Parameter], mesh: Mesh, span: Span, dtype: torch.dtype) -> Bucket:
    """Create the bucket of ``members``. Collective."""
    exchange = mesh.exchange_of(span)
    assert exchange is not None, f"summing over {span}, a single rank"
    return Bucket(members, exchange.buffer(sum(p.numel() for p in members), dtype))
