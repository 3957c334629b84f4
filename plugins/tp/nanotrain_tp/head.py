"""Output projection and cross-entropy with the vocabulary split over ranks; logits never meet.

Each rank computes the logits of its own tokens of the vocabulary, a chunk of rows at a time. All that
ranks tell each other of a row is its largest logit, the sum of exponentials relative to that, and the
target's logit from whoever has it. As on one process, both gradients are computed while a chunk's
logits are at hand.

Ranks' parts of the vocabulary may differ by one in size.

Shapes: T tokens, D width, V this rank's part of the vocabulary, C tokens of one chunk, R ranks.

Sources: the vocabulary-parallel loss of Shoeybi et al., arXiv 1909.08053, section 3; the combination of
partial sums of exponentials of Milakov and Gimelshein, arXiv 1805.02867, equation 4.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs
import torch
import torch.nn.functional as F

from nanotrain_core.api.torch import IGNORE, TORCH, Ops, Placement, share_of, wide_dtype
from nanotrain_tp.collectives import Ranks


@attrs.define(frozen=True)
class Rows:
    """The tokens of the vocabulary that this rank has the rows of."""

    first: int
    vocabulary: int
    """Of all ranks together."""

    @classmethod
    def of(cls, placement: Placement) -> Rows:
        """Return those of a split table."""
        return cls(placement.offset[0], placement.global_shape[0])

    def most(self, ranks: Ranks) -> int:
        """Return how many the rank with the most has."""
        return -(-self.vocabulary // ranks.size)

    def pad(self, logits: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """Return ``logits`` [..., V] with as many columns as the rank with the most has."""
        return F.pad(logits, (0, self.most(ranks) - logits.shape[-1]))

    def join(self, padded: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """Return all ranks' padded logits, side by side, as those of the whole vocabulary."""
        most = self.most(ranks)
        shares = [share_of(self.vocabulary, index, ranks.size) for index in range(ranks.size)]
        kept = [padded.narrow(-1, most * index, end - begin) for index, (begin, end) in enumerate(shares)]
        return torch.cat(kept, dim=-1)


def split_cross_entropy(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_T: torch.Tensor,
    rows: Rows,
    ranks: Ranks,
    ops: Ops = TORCH,
) -> torch.Tensor:
    """Return the summed cross-entropy of whole tokens, in nats: the same bits on every rank.

    The gradient of ``hidden_TD`` is partial: what this rank's tokens of the vocabulary add to it.
    Targets of :data:`~nanotrain_core.batch.IGNORE` add nothing. The sum is float32, or float64 for
    float64 inputs.

    Raises:
        IndexError: a target is not in the vocabulary of all ranks together.
    """
    wrong = ((target_T < 0) & (target_T != IGNORE)) | (target_T >= rows.vocabulary)
    if torch.compiler.is_compiling():
        torch._assert_async(~wrong.any(), f"a target is not in the vocabulary of {rows.vocabulary}")
    elif wrong.device.type == "cpu" and wrong.any():
        raise IndexError(f"target {int(target_T[wrong][0])} is not in the vocabulary of {rows.vocabulary}")
    loss = partial(_cross_entropy, rows=rows, ranks=ranks)
    return ops.linear_cross_entropy(hidden_TD, weight_VD, target_T, loss=loss, columns=rows.most(ranks))


def _cross_entropy(
    logits_CV: torch.Tensor, target_C: torch.Tensor, rows: Rows, ranks: Ranks
) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """All-gather three numbers per token and rank: return the summed loss of a chunk, the same on every rank.

    With it comes what makes the gradient of this rank's logits, without a collective.
    """
    ignored_C, at_C = target_C == IGNORE, _local(target_C, logits_CV.shape[1], rows.first)
    loss_C, softmax_CV = _softmax(logits_CV, at_C, ranks)
    loss = loss_C.masked_fill(ignored_C, 0.0).sum()
    return loss, partial(_subtract_onehot_, softmax_CV, at_C, ignored_C)


def _local(target_C: torch.Tensor, count: int, first: int) -> torch.Tensor:
    """Return targets as rows of this rank's weight [C], -1 where another rank has them or nobody."""
    mine = (target_C >= first) & (target_C < first + count)
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
