"""Token dispatch to experts on other ranks: dispatch, compute, combine. No token is dropped.

With ep = 4, rank e holds the experts [e E/4, (e+1) E/4) whole. With etp = 2 each of those is sharded along
its width over two ranks, which both compute on all the rows that either of them received::

    sort rows by expert            on the rank that has the tokens
    all-to-all over ep             each row to the rank of its etp coordinate that holds its expert
    gather over etp                the rows of all ranks that share these experts
    permute, compute, permute      grouped by expert, as one rank alone would have them
    sum over etp, scatter          partial sums of sliced experts; every rank keeps its own rows
    all-to-all over ep             back
    weigh and add                  in the router's order, as on one rank

Sources: Shazeer et al., arXiv 1701.06538, section 3.1 (experts over ranks); DeepSeek-V2, arXiv 2405.04434,
section 2.2 (fine-grained experts); Liu et al., arXiv 2504.14960 (the fold of ep and etp over dense ranks).

Shapes: T tokens of this rank, K experts chosen for each, N = T K rows, M rows that this rank computes,
E experts, L = E / ep experts on this rank, D width, P = ep, Q = etp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import attrs
import torch
from torch import nn

from nanotrain_core.api.torch import (
    Compute,
    Exchange,
    Mesh,
    Routing,
    dispatch_codec,
    invert_permutation,
    ops_of,
    sort_by_expert,
)
from nanotrain_ep_deepseek.exchange import (
    AllToAll,
    ByteCounter,
    OverlappedDispatch,
    Permute,
    combine_rows,
    dispatch_rows,
)


class Experts(Protocol):
    """The interface of a module of role EXPERTS; see :class:`nanotrain_core.layout.roles.Role`."""

    compute: Compute


@attrs.define(frozen=True, eq=False)
class DispatchPlan:
    """The row counts that ranks send each other, for one pass of one layer."""

    dispatch: AllToAll | None
    """All-to-all over ep; None if that is one rank."""
    gather: AllToAll | None
    """All-gather over etp: this rank's rows to all others; None if that is one rank."""
    order_M: torch.Tensor
    """Sorts the received rows by expert."""
    inverse_M: torch.Tensor
    """The inverse of that permutation."""
    counts_L: torch.Tensor
    """Rows of each of this rank's experts."""


class Dispatcher:
    """Runs one module's experts on the ranks that hold them. Replaces the module's forward."""

    def __init__(self, experts: int, mesh: Mesh) -> None:
        """``experts``: E, of the whole layer."""
        self.experts = experts
        self.ep, self.etp = (mesh.size(dim) for dim in ("ep", "etp"))
        self.ep_group, self.etp_group = mesh.exchange("ep"), mesh.exchange("etp")
        self.ep_rank, self.etp_rank = mesh.coordinate("ep"), mesh.coordinate("etp")
        self.rows = 0
        """M of the last pass."""
        self.counter = ByteCounter()

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to other ranks in training: see :class:`nanotrain_core.moe.routing.CountsBytes`."""
        return self.counter.sent

    @bytes_sent.setter
    def bytes_sent(self, sent: int) -> None:
        self.counter.sent = sent

    def __call__(self, module: nn.Module, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Return the weighted sums [..., D] of the experts' outputs for this rank's tokens x [..., D].

        Collective over ep and etp, in backward too, even for a rank without tokens or without rows.
        """
        order_N, counts_E = sort_by_expert(routing.experts, self.experts)
        back_N, chosen = invert_permutation(order_N), routing.experts.shape[-1]
        ops = ops_of(module)
        rows_ND = ops.permute(x.flatten(0, -2), order_N, back_N, chosen)
        outputs_ND = self.run(
            module, rows_ND, self.plan(counts_E, counted=module.training), routing.meanwhile
        )
        return ops.unpermute(outputs_ND, order_N, back_N, routing.weights.flatten(0, -2)).view_as(x)

    def plan(self, counts_E: torch.Tensor, *, counted: bool = True) -> DispatchPlan:
        """All-to-all counts over ep, then over etp, and copy them to the host.

        The only host synchronization: the host must know the split sizes of what follows. Bytes
        of a pass that is not ``counted``, such as an evaluation, are not included in :attr:`bytes_sent`.
        """
        counter = self.counter if counted else ByteCounter()
        sent_PL = counts_E.view(self.ep, -1)
        received_PL = sent_PL
        if self.ep_group is not None:
            received_PL = self.ep_group.all_to_all(torch.empty_like(sent_PL), sent_PL)()
        arrivals_QPL = received_PL[None]
        if self.etp_group is not None:
            same_QPL = received_PL.repeat(self.etp, 1, 1)
            arrivals_QPL = self.etp_group.all_to_all(torch.empty_like(same_QPL), same_QPL)()
        on_host = torch.cat([sent_PL.sum(1)[None], arrivals_QPL.sum(2)]).tolist()
        sent, arrivals = on_host[0], on_host[1:]
        mine, everyones = arrivals[self.etp_rank], [sum(rows) for rows in arrivals]
        self.rows = sum(everyones)
        order_M = sort_arrivals(arrivals_QPL, self.rows)
        return DispatchPlan(
            dispatch=self._all_to_all(self.ep_group, sent, mine, self.ep_rank, counter),
            gather=self._all_to_all(
                self.etp_group, [sum(mine)] * self.etp, everyones, self.etp_rank, counter
            ),
            order_M=order_M,
            inverse_M=invert_permutation(order_M),
            counts_L=arrivals_QPL.sum((0, 1)),
        )

    @staticmethod
    def _all_to_all(
        group: Exchange | None, sent: list[int], received: list[int], own: int, counter: ByteCounter
    ) -> AllToAll | None:
        return AllToAll(group, sent, received, own, counter) if group else None

    def run(
        self,
        module: nn.Module,
        rows: torch.Tensor,
        plan: DispatchPlan,
        meanwhile: Callable[[], object] | None = None,
    ) -> torch.Tensor:
        """Return the outputs [N, D] of rows [N, D], both sorted by expert.

        ``meanwhile`` is called while rows are in flight; its backward pass runs while their gradients are.
        """
        codec = dispatch_codec(module)
        if plan.dispatch:
            dispatch = OverlappedDispatch(plan.dispatch, codec)
            handle = dispatch.begin(rows)
            if meanwhile is not None:
                meanwhile()
            rows = dispatch.end(handle)
        if plan.gather:
            rows = dispatch_rows(rows.repeat(self.etp, 1), plan.gather, codec)
        rows = Permute.apply(rows, plan.order_M, plan.inverse_M)  # type: ignore[no-untyped-call]
        anchor = anchor_of(module, rows)
        rows = cast(Experts, module).compute(rows, plan.counts_L)
        rows = Permute.apply(rows, plan.inverse_M, plan.order_M)  # type: ignore[no-untyped-call]
        if plan.gather:
            partial = combine_rows(rows, plan.gather.reversed(), codec, anchor)
            rows = partial.unflatten(0, (self.etp, -1)).sum(0)  # type: ignore[no-untyped-call]
        if plan.dispatch:
            rows = combine_rows(rows, plan.dispatch.reversed(), codec, anchor)
        return rows


def sort_arrivals(arrivals_QPL: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the order [M] that groups rows by expert; they arrive by (etp, ep) source and then expert."""
    sources, experts = arrivals_QPL.shape[0] * arrivals_QPL.shape[1], arrivals_QPL.shape[2]
    labels = torch.arange(experts, device=arrivals_QPL.device).repeat(sources)
    return labels.repeat_interleave(arrivals_QPL.flatten(), output_size=rows).argsort(stable=True)


def anchor_of(module: nn.Module, rows: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor that keeps combine in the graph even if ``compute`` is not in it; None: no grad."""
    if rows.requires_grad:
        return rows
    return next((p for p in module.parameters() if p.requires_grad), None)
