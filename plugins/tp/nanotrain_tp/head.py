"""Output projection and cross-entropy with the vocabulary split over ranks; logits never meet.

Each rank computes the logits of its own tokens of the vocabulary, a chunk of rows at a time. All that
ranks tell each other of a row is its largest logit, the sum of exponentials relative to that, and the
target's logit from whoever has it. As on one process, both gradients are computed while a chunk's
logits are at hand.

Shapes: T tokens, D width, V this rank's part of the vocabulary, C tokens of one chunk, R ranks.

Sources: the vocabulary-parallel loss of Shoeybi et al., arXiv 1909.08053, section 3; the combination of
partial sums of exponentials of Milakov and Gimelshein, arXiv 1805.02867, equation 4.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from nanotrain_core.batch import IGNORE
from nanotrain_core.builtin.cross_entropy import add_product_, row_chunks, wide_dtype
from nanotrain_core.builtin.linear import matmul
from nanotrain_tp.collectives import Ranks


def split_cross_entropy(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, target_T: torch.Tensor, ranks: Ranks
) -> torch.Tensor:
    """Return the summed cross-entropy of whole tokens, in nats: the same bits on every rank.

    The gradient of ``hidden_TD`` is partial: what this rank's tokens of the vocabulary add to it.
    Targets of :data:`~nanotrain_core.batch.IGNORE` add nothing. The sum is float32, or float64 for
    float64 inputs.

    Raises:
        IndexError: a target is not in the vocabulary of all ranks together.
    """
    vocabulary = len(weight_VD) * ranks.size
    wrong = ((target_T < 0) & (target_T != IGNORE)) | (target_T >= vocabulary)
    if wrong.device.type == "cpu" and wrong.any():
        raise IndexError(f"target {int(target_T[wrong][0])} is not in the vocabulary of {vocabulary}")
    if torch.is_grad_enabled():
        loss: torch.Tensor = _SplitCrossEntropy.apply(hidden_TD, weight_VD, target_T, ranks)  # type: ignore[no-untyped-call]
        return loss
    losses = []
    for rows in row_chunks(target_T, weight_VD):
        loss_C, _ = _softmax(
            F.linear(hidden_TD[rows], weight_VD), _local(target_T[rows], weight_VD, ranks), ranks
        )
        losses.append(loss_C.masked_fill(target_T[rows] == IGNORE, 0.0).sum())
    return torch.stack(losses).sum()


class _SplitCrossEntropy(torch.autograd.Function):
    """Forward: the loss, and its gradients for a loss gradient of 1. Backward: scale them.

    Forward all-gathers three numbers per token and rank. Backward has no collective.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: torch.Tensor, weight_VD: torch.Tensor, target_T: torch.Tensor, ranks: Ranks
    ) -> torch.Tensor:
        d_hidden_TD = torch.empty_like(hidden_TD)
        d_weight_VD = torch.zeros_like(weight_VD, dtype=wide_dtype(weight_VD))
        losses = []
        for rows in row_chunks(target_T, weight_VD):
            hidden_CD, ignored_C = hidden_TD[rows], target_T[rows] == IGNORE
            logits_CV = matmul(hidden_CD, weight_VD.T)
            at_C = _local(target_T[rows], weight_VD, ranks)
            loss_C, softmax_CV = _softmax(logits_CV, at_C, ranks)
            losses.append(loss_C.masked_fill(ignored_C, 0.0).sum())
            d_logits_CV = logits_CV.copy_(_subtract_onehot_(softmax_CV, at_C, ignored_C))
            d_hidden_TD[rows] = matmul(d_logits_CV, weight_VD)
            add_product_(d_weight_VD, d_logits_CV.T, hidden_CD)
        ctx.save_for_backward(d_hidden_TD, d_weight_VD)
        ctx.weight_dtype = weight_VD.dtype
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_hidden_TD, d_weight_VD = ctx.saved_tensors
        return d_hidden_TD * d_loss, (d_weight_VD * d_loss).to(ctx.weight_dtype), None, None


def _local(target_C: torch.Tensor, weight_VD: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return targets as rows of this rank's weight [C], -1 where another rank has them or nobody."""
    first, rows = ranks.index * len(weight_VD), len(weight_VD)
    mine = (target_C >= first) & (target_C < first + rows)
    return torch.where(mine, target_C - first, -1)


def _softmax(logits_CV: torch.Tensor, at_C: torch.Tensor, ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
    """All-gather: return each row's loss [C] and this rank's part [C, V] of its softmax.

    The softmax takes the place of logits that are wide enough.
    """
    wide_CV = logits_CV.to(wide_dtype(logits_CV))
    largest_C1 = wide_CV.amax(dim=1, keepdim=True)
    at_target_C1 = wide_CV.gather(1, at_C.clamp(min=0).unsqueeze(1)).masked_fill_(at_C.unsqueeze(1) < 0, 0.0)
    exp_CV = wide_CV.sub_(largest_C1).exp_()
    mine_1C3 = torch.cat((largest_C1, exp_CV.sum(dim=1, keepdim=True), at_target_C1), dim=1).unsqueeze(0)
    largest_RC, sums_RC, at_target_RC = ranks.all_gather(mine_1C3, 0).unbind(-1)
    top_C = largest_RC.amax(dim=0)
    total_C = (sums_RC * (largest_RC - top_C).exp_()).sum(dim=0)
    loss_C = total_C.log() + top_C - at_target_RC.sum(dim=0)
    scale_C1 = (largest_C1 - top_C.unsqueeze(1)).exp_() / total_C.unsqueeze(1)
    return loss_C, exp_CV.mul_(scale_C1)


def _subtract_onehot_(softmax_CV: torch.Tensor, at_C: torch.Tensor, ignored_C: torch.Tensor) -> torch.Tensor:
    """Turn a softmax in place into the gradient of the logits, 0 in ignored rows."""
    softmax_CV.masked_fill_(ignored_C.unsqueeze(1), 0.0)
    ones_C1 = (at_C >= 0).to(softmax_CV.dtype).unsqueeze(1)
    return softmax_CV.scatter_add_(1, at_C.clamp(min=0).unsqueeze(1), -ones_C1)
