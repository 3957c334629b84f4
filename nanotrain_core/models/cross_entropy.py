"""Fused output projection and cross-entropy, a few rows of logits at a time.

The logits of a batch are the largest tensor of a training step: 8192 tokens and a vocabulary of 128k
take 4 GB. Here the projection, the loss and both gradients of a chunk are computed while its logits
exist, so that only one chunk of them exists at a time.

Shapes: T tokens, D width, V vocabulary, or this rank's shard of it, C tokens of one chunk, P columns of
    logits that are stored, R ranks that shard the vocabulary.

Source of the idea: Hsu et al., "Liger kernel", arXiv 2410.10989, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import attrs
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from nanotrain_core.batch import IGNORE


@dataclass(frozen=True)
class SplitVocabulary:
    """A rank's shard of the output projection, as the loss over all shards requires it."""

    first: int
    """The token of the first row of this rank's shard."""
    most: int
    """Rows of the rank that has the most: all ranks derive the same chunks from it."""
    gather: Callable[[torch.Tensor], torch.Tensor]
    """All-gather: takes this rank's [1, C, 3], returns those of all ranks [R, C, 3].

    The three numbers are those of :func:`combine`. Called for chunks in the order of their rows.
    """


class ChunkLoss(Protocol):
    """Computes the loss of one chunk of logits."""

    def __call__(
        self,
        logits_CP: torch.Tensor,
        target_C: torch.Tensor,
        columns: int,
        split: SplitVocabulary | None,
        *,
        gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the summed loss, and with ``gradient`` its gradient for the logits [C, P] in their dtype.

        Args:
            logits_CP: may be overwritten.
            target_C: the next tokens.
            columns: how many columns are logits, V; in the others the gradient is 0.
            split: None: this rank has the whole vocabulary. Otherwise the loss is over all ranks' shards.
            gradient: whether to compute it.
        """
        ...


class MatMul(Protocol):
    """Multiplies two matrices. Nothing here is differentiable."""

    def __call__(
        self, left: torch.Tensor, right: torch.Tensor, total: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``left @ right``, or ``total`` with it added, which may have a dtype of higher precision."""
        ...


def matmul(left: torch.Tensor, right: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply as plain PyTorch does: see :class:`MatMul`.

    A float16 product that is added to a higher-precision total is computed in the total's dtype, since a sum
    over thousands of tokens overflows float16. A product of bfloat16 is rounded before it is added.
    """
    if total is None:
        return left @ right
    if left.dtype == torch.float16:
        left, right = left.to(total.dtype), right.to(total.dtype)
    if left.dtype == total.dtype:
        return total.addmm_(left, right)
    return total.add_(left @ right)


@attrs.define(frozen=True)
class Chunks:
    """How logits are split into chunks."""

    logits: int = 2**27
    """Approximate number of logits in a chunk."""
    tokens: int = 1024
    """Minimum tokens of a chunk: matrix products with few rows are slow."""

    def of(self, tokens: int, columns: int) -> list[slice]:
        """Return the row slices of consecutive chunks of logits with this many columns."""
        size = max(self.tokens, self.logits // columns)
        return [slice(start, start + size) for start in range(0, max(tokens, 1), size)]


#: Chunks for a device with much memory.
LARGE = Chunks()

#: Rows of hidden-state gradients converted to float32 at a time.
WIDE_ROWS = 1024


def cross_entropy(
    logits_CP: torch.Tensor,
    target_C: torch.Tensor,
    columns: int,
    split: SplitVocabulary | None = None,
    *,
    gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the loss of a chunk and the gradient of its logits: a :class:`ChunkLoss`.

    Numerators of the softmax overwrite logits of float32 or wider: torch's log_softmax computes the
    same in less code but allocates new storage for every chunk.
    """
    wide_CV = logits_CP[:, :columns].to(wide_dtype(logits_CP))
    at_C1, mine_C1 = locate(target_C, columns, split.first if split else None)
    largest_C1 = wide_CV.amax(dim=1, keepdim=True)
    at_target_C1 = wide_CV.gather(1, at_C1).masked_fill_(~mine_C1, 0.0)
    exp_CV = wide_CV.sub_(largest_C1).exp_()
    own_C3 = torch.cat((largest_C1, exp_CV.sum(dim=1, keepdim=True), at_target_C1), dim=1)
    all_C3 = combine(split.gather(own_C3.unsqueeze(0))) if split else own_C3
    loss = loss_of(all_C3, target_C)
    if not gradient:
        return loss, None
    exp_CV.mul_(softmax_scale(own_C3, all_C3, target_C))
    exp_CV.scatter_add_(1, at_C1, -mine_C1.to(exp_CV.dtype))
    return loss, _cast_and_pad(exp_CV, logits_CP.dtype, logits_CP.shape[1] - columns)


def locate(target_C: torch.Tensor, columns: int, first: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the column of each target [C, 1], and whether it is on this rank [C, 1].

    For a target that is not, or that is ignored, column 0. If the vocabulary is not sharded, ``first`` is
    None, and an invalid target is left unchanged, so that indexing with it fails.
    """
    if first is None:
        mine_C = target_C != IGNORE
        return torch.where(mine_C, target_C, 0).unsqueeze(1), mine_C.unsqueeze(1)
    mine_C = (target_C >= first) & (target_C < first + columns)
    return torch.where(mine_C, target_C - first, 0).unsqueeze(1), mine_C.unsqueeze(1)


def combine(each_RC3: torch.Tensor) -> torch.Tensor:
    """Return each row's largest logit, the sum of exponentials relative to it, and the target's logit [C, 3].

    Each rank computes these from its own logits. Source: Milakov and Gimelshein, arXiv 1805.02867, equation
    4.
    """
    largest_RC, sums_RC, at_target_RC = each_RC3.unbind(-1)
    top_C = largest_RC.amax(dim=0)
    total_C = (sums_RC * (largest_RC - top_C).exp()).sum(dim=0)
    return torch.stack((top_C, total_C, at_target_RC.sum(dim=0)), dim=-1)


def loss_of(all_C3: torch.Tensor, target_C: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses of rows that are not ignored, from the result of :func:`combine`."""
    top_C, total_C, at_target_C = all_C3.unbind(-1)
    return (total_C.log() + top_C - at_target_C).masked_fill(target_C == IGNORE, 0.0).sum()


def softmax_scale(own_C3: torch.Tensor, all_C3: torch.Tensor, target_C: torch.Tensor) -> torch.Tensor:
    """Return the factor that turns this rank's exponentials into a softmax [C, 1]; 0 if ignored."""
    scale_C = (own_C3[:, 0] - all_C3[:, 0]).exp() / all_C3[:, 1]
    return (scale_C * (target_C != IGNORE)).unsqueeze(1)


def linear_cross_entropy(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_T: torch.Tensor,
    split: SplitVocabulary | None = None,
    chunks: Chunks = LARGE,
    matmul: MatMul = matmul,
    multiple: int = 1,
    loss: ChunkLoss = cross_entropy,
) -> torch.Tensor:
    """Return the summed cross-entropy of ``hidden_TD @ weight_VD.T`` against ``target_T``, in nats.

    Targets of :data:`~nanotrain_core.batch.IGNORE` are not counted. The sum is float32, or float64 for
    float64 inputs.

    Args:
        hidden_TD: output of the last norm.
        weight_VD: of the output projection.
        target_T: the next tokens.
        split: set if ranks shard the vocabulary: the loss is over all shards, each gradient is this rank's.
        chunks: their sizes.
        matmul: computes the three matrix products of each chunk.
        multiple: matrix products use this many columns of logits, or a multiple of it: a GPU's kernels for
            50,257 columns take several times as long as those for 50,304.
        loss: computes each chunk's loss: a compiled run has it in one graph.
    """
    slices = chunks.of(len(target_T), split.most if split else len(weight_VD))
    missing = -len(weight_VD) % multiple
    if torch.is_grad_enabled():
        total: torch.Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
            hidden_TD, weight_VD, target_T, loss, split, slices, matmul, missing
        )
        return total
    weight_PD, V = _pad_rows(weight_VD, missing), len(weight_VD)
    losses = [
        loss(matmul(hidden_TD[rows], weight_PD.T), target_T[rows], V, split, gradient=False)[0]
        for rows in slices
    ]
    return torch.stack(losses).sum()


class _ChunkedLoss(torch.autograd.Function):
    """Forward: the loss, and its gradients for an output gradient of 1. Backward: scale them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        target_T: torch.Tensor,
        loss: ChunkLoss,
        split: SplitVocabulary | None,
        slices: list[slice],
        matmul: MatMul,
        missing: int,
    ) -> torch.Tensor:
        size = len(weight_VD)
        weight_PD = _pad_rows(weight_VD, missing)
        d_hidden_TD = torch.empty_like(hidden_TD)
        trained = ctx.needs_input_grad[1]
        d_weight_PD = torch.zeros_like(weight_PD, dtype=wide_dtype(weight_VD)) if trained else None
        losses = []
        for rows in slices:
            hidden_CD = hidden_TD[rows]
            logits_CP = matmul(hidden_CD, weight_PD.T)
            chunk, d_logits_CP = loss(logits_CP, target_T[rows], size, split, gradient=True)
            assert d_logits_CP is not None
            losses.append(chunk)
            d_hidden_TD[rows] = matmul(d_logits_CP, weight_PD)
            if d_weight_PD is not None:
                matmul(d_logits_CP.T, hidden_CD, d_weight_PD)
        ctx.save_for_backward(d_hidden_TD, None if d_weight_PD is None else d_weight_PD[:size])
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # The sum over tokens stays in float32 or wider until divided by their number: float16 would overflow.
        # The weight's gradient is added to others of its dtype; if none is float32, autograd rounds it.
        d_hidden_TD, d_weight_VD = ctx.saved_tensors
        d_weight_VD = None if d_weight_VD is None else d_weight_VD * d_loss
        return times(d_hidden_TD, d_loss), d_weight_VD, *(None,) * 6


def times(d_hidden_TD: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return ``d_hidden_TD`` times a scalar, which is not rounded to its dtype first.

    Torch would round it: in bfloat16 all gradients below the head would be off by up to 0.4%, all by the same
    factor in a step, since 1 / count is rarely exact in eight bits. As a matrix the factor keeps its dtype: a
    GPU converts in registers, in one kernel, and a CPU in memory, which takes less for some rows at a time.
    """
    out_TD = torch.empty_like(d_hidden_TD)
    size = WIDE_ROWS if d_hidden_TD.is_cpu else max(len(d_hidden_TD), 1)
    for rows, into in zip(torch.split(d_hidden_TD, size), torch.split(out_TD, size), strict=True):
        torch.mul(rows, factor.view(1, 1), out=into)
    return out_TD


def _pad_rows(weight_VD: torch.Tensor, missing: int) -> torch.Tensor:
    """Return ``weight_VD`` padded with this many rows of zeros [P, D]."""
    return F.pad(weight_VD, (0, 0, 0, missing)) if missing else weight_VD


def _cast_and_pad(d_logits_CV: torch.Tensor, dtype: torch.dtype, missing: int) -> torch.Tensor:
    """Return the gradient of logits in ``dtype``, padded with columns of zeros [C, P], in one pass."""
    if not missing:
        return d_logits_CV.to(dtype)
    rows, columns = d_logits_CV.shape
    d_logits_CP = d_logits_CV.new_empty(rows, columns + missing, dtype=dtype)
    d_logits_CP[:, :columns] = d_logits_CV
    d_logits_CP[:, columns:] = 0.0
    return d_logits_CP


def wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which softmax and sums over tokens are computed."""
    return torch.promote_types(tensor.dtype, torch.float32)
