"""Ring attention: blocks of keys and values travel around the ranks while these compute attention to them.

Each rank has two chunks of a sequence, those whose queries it computes with ``all_gather``: of the chunks 0
to 2R - 1 in order, 2r and 2R - 1 - 2r. The keys and values of both are its block. A block moves to the next
rank by send/recv while attention to it is computed; outputs are merged by their log-sum-exps. Of the four
pairs of a rank's chunks, an earlier and a later one, with those of another rank's block, the causal mask
leaves two, and these whole: both of the earlier keys, if this rank's earlier queries follow them, and
otherwise both of the later queries. So all ranks compute as much in each step, and only the first, with a
rank's own block, has a mask.

In backward blocks travel again. The gradients of a block's keys and values travel behind it, in float32, from
rank to rank, each of which adds its own, and arrive where the block belongs. They follow from the output and
log-sum-exp over all keys, so that blocks need no others.

Shapes: R ranks, B batch, S sequence, s this rank's part of it, n tokens of a block, H query heads, G key and
    value heads, K and V size of a query and of a value.

Sources: Liu et al., arXiv 2310.01889; the balance: Brandon et al., arXiv 2311.09431.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from nanotrain_core.api import NanotrainError
from nanotrain_core.api.torch import Pending
from nanotrain_cp import NO_WINDOW
from nanotrain_cp.all_gather import Halves
from nanotrain_cp.blocks import Mask, attend_block, block_gradients
from nanotrain_cp.collectives import Ranks

Tensor = torch.Tensor


def attend(
    ranks: Ranks,
    length: int,
    attention: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    starts_BS: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Attend with all heads to all tokens; q [B, s, H, K], k, v [B, s, G, ...] and the result are parts.

    ``attention`` is not called: it returns no log-sum-exp.
    """
    if window is not None and window < length:
        raise NanotrainError(f"cp: communication = {NO_WINDOW}")
    ring = Ring(ranks, length, q.shape[-1] ** -0.5 if scale is None else scale, starts_BS)
    y: Tensor = _Ring.apply(q, k, v, ring)  # type: ignore[no-untyped-call]
    return y


def _any(*each: slice) -> bool:
    """Return whether no slice is empty: a chunk of a part with a single token may be."""
    return all(x.start < x.stop for x in each)


class Ring:
    """The blocks of sequences of one length, and this rank's place among the ranks that they travel over."""

    def __init__(self, ranks: Ranks, length: int, scale: float, starts_BS: Tensor | None) -> None:
        self.ranks, self.scale, self.starts_BS = ranks, scale, starts_BS
        self.halves, self.edges = Halves(ranks, length), ranks.edges(length)
        self.last = ranks.size - 1
        """Number of the last step: in each, this rank has one block."""

    # --- which tokens a rank has --------------------------------------------------------------

    def source(self, step: int) -> int:
        """Return the rank whose block is here in a step: first this rank's own, then the one's before it."""
        return (self.ranks.index - step) % self.ranks.size

    def own_is_earlier(self, rank: int) -> bool:
        """Return whether the chunk of a rank's own part is the earlier one of its block."""
        return 2 * rank <= self.last

    def earlier(self, rank: int) -> int:
        """Return the number of a rank's earlier chunk."""
        return min(2 * rank, 2 * self.last + 1 - 2 * rank)

    def chunks(self, rank: int) -> tuple[range, range]:
        """Return the tokens of a rank's block: of its earlier and of its later chunk."""
        (begin, end), (first, last) = self.edges[rank], self.edges[self.last - rank]
        own, other = range(begin, begin + (end - begin + 1) // 2), range(last - (last - first) // 2, last)
        return (own, other) if self.own_is_earlier(rank) else (other, own)

    def seen(self, step: int, device: torch.device) -> tuple[slice, slice, Mask | None]:
        """Return which queries of this rank see which keys of the block that is here in a step.

        In the first step those up to their own, in others all of them; the mask is for documents.
        """
        rank, source = self.ranks.index, self.source(step)
        own, block = self.chunks(rank), self.chunks(source)
        queries, keys = (slice(0, len(a) + len(b)) for a, b in (own, block))
        if self.earlier(source) < self.earlier(rank):
            keys = slice(0, len(block[0]))
        elif step:
            queries = slice(len(own[0]), queries.stop)
        if self.starts_BS is None:
            return queries, keys, None
        at_S, at_T = (
            torch.cat([torch.arange(each.start, each.stop, device=device) for each in chunks])
            for chunks in (own, block)
        )
        return queries, keys, Mask(at_S[queries], at_T[keys], self.starts_BS[:, at_S[queries]])

    # --- communication ------------------------------------------------------------------------

    def begin_enter(self, x: Tensor) -> Pending:
        """Begin to turn this rank's part x [B, s, ...] into its chunks [B, n, ...]."""
        own, other = x[:, : self.halves.kept], x[:, self.halves.kept :]
        pending = self.halves.begin_swap(other, self.halves.received)
        if self.own_is_earlier(self.ranks.index):
            return lambda: torch.cat((own, pending()), 1)
        return lambda: torch.cat((pending(), own), 1)

    def begin_leave(self, x: Tensor) -> Pending:
        """Begin to turn this rank's chunks x [B, n, ...] into its part [B, s, ...]."""
        if self.own_is_earlier(self.ranks.index):
            own, other = x[:, : self.halves.kept], x[:, self.halves.kept :]
        else:
            other, own = x[:, : self.halves.received], x[:, self.halves.received :]
        pending = self.halves.begin_swap(other, self.halves.sent)
        return lambda: torch.cat((own, pending()), 1)

    def begin_shift(self, x: Tensor, step: int) -> Pending:
        """Begin to send what is of this step's block to the next rank, and to receive it of the next step's.

        The call that waits for it lets go of what was sent.
        """
        tokens = sum(map(len, self.chunks(self.source(step + 1))))
        begun = [self.ranks.exchange.shift(x.new_empty(len(x), tokens, *x.shape[2:]), x)]

        def arrived() -> Tensor:
            return begun.pop()()

        return arrived


class _Ring(torch.autograd.Function):
    """Attention of a part of sequences. One function, so that all ranks communicate in the same order."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        begun = [ring.begin_enter(x) for x in (q, torch.cat((k, v), -1))]
        q, own = (pending() for pending in begun)
        block, out_BnHV, lse_BHn = own, q.new_empty(0), q.new_empty(0)
        for step in range(ring.last + 1):
            coming = ring.begin_shift(block, step) if step < ring.last else None
            queries, keys, mask = ring.seen(step, q.device)
            if _any(queries, keys):
                out, lse = attend_block(q[:, queries], block[:, keys], ring.scale, mask, causal=step == 0)
                if step == 0:  # of every query; copies, since selective recomputation stores the results
                    out_BnHV, lse_BHn = out.to(lse.dtype, copy=True), lse.clone()
                else:
                    _merge(out_BnHV[:, queries], lse_BHn[..., queries], out, lse)
            if coming is not None:
                block = coming()
        out = out_BnHV.to(q.dtype)
        ctx.ring, ctx.sizes = ring, (k.shape[-1], v.shape[-1])
        ctx.save_for_backward(q, own, out, lse_BHn)
        return ring.begin_leave(out)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        q, own, out, lse_BHn = ctx.saved_tensors
        ring, block, d_out = ctx.ring, own, ctx.ring.begin_enter(d_y)()
        d_q, d_block = (torch.zeros_like(x, dtype=lse_BHn.dtype) for x in (q, own))
        d_coming: Pending | None = None
        for step in range(ring.last + 1):
            coming = ring.begin_shift(block, step) if step < ring.last else None
            queries, keys, mask = ring.seen(step, q.device)
            found = None
            if _any(queries, keys):
                of_queries = d_out[:, queries], q[:, queries], out[:, queries], lse_BHn[..., queries]
                found = block_gradients(*of_queries, block[:, keys], ring.scale, mask, causal=step == 0)
            if d_coming is not None:
                d_block = d_coming()  # what the ranks before this one have added up
            if found is not None:
                d_q[:, queries] += found[0]
                d_block[:, keys] += found[1]
            d_coming = ring.begin_shift(d_block, step)
            if coming is not None:
                block = coming()
        assert d_coming is not None
        begun = [ring.begin_leave(x.to(q.dtype)) for x in (d_q, d_coming())]
        d_q, d_kv = (pending() for pending in begun)
        return d_q, *torch.split(d_kv, ctx.sizes, -1), None


def _merge(out_BnHV: Tensor, lse_BHn: Tensor, more_BnHV: Tensor, more_lse_BHn: Tensor) -> None:
    """Merge attention to some keys, in place, with that to others; of the former each query sees one."""
    both_BHn = torch.logaddexp(lse_BHn, more_lse_BHn)
    share, more_share = (
        (lse - both_BHn).exp().transpose(1, 2).unsqueeze(-1) for lse in (lse_BHn, more_lse_BHn)
    )
    out_BnHV.mul_(share).add_(more_BnHV * more_share)
    lse_BHn.copy_(both_BHn)
