"""Output projection and cross-entropy together, a few rows of logits at a time.

The logits of a batch are the largest tensor of a training step: 8192 tokens and a vocabulary of 128k
make 4 GB. Here the projection, the loss and both gradients of a chunk are computed while its logits
are at hand, so that only one chunk of them ever exists; on a CPU the chunk also stays in the cache.

Shapes: T tokens, D width, V vocabulary, C tokens of one chunk.

Source of the idea: Hsu et al., "Liger kernel", arXiv 2410.10989, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from nanotrain_core.batch import IGNORE
from nanotrain_core.models.linear import matmul

#: Logits of one chunk, about, and its fewest tokens: matrix products of few rows are slow.
CHUNK = {"cpu": (2**20, 128), "cuda": (2**27, 1024)}


#: Takes logits [C, V], which it may use up, and targets [C]. Returns the summed loss, and what then makes the
#: gradient of the logits.
ChunkLoss = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, Callable[[], torch.Tensor]]]


def linear_cross_entropy(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, target_T: torch.Tensor
) -> torch.Tensor:
    """Return the summed cross-entropy of ``hidden_TD @ weight_VD.T`` against ``target_T``, in nats.

    Targets of :data:`~nanotrain_core.batch.IGNORE` add nothing. The sum is float32, or float64 for
    float64 inputs.
    """
    return chunked_loss(hidden_TD, weight_VD, target_T, _cross_entropy, len(weight_VD))


def chunked_loss(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, target_T: torch.Tensor, loss: ChunkLoss, columns: int
) -> torch.Tensor:
    """Return the sum of ``loss`` over chunks of the logits ``hidden_TD @ weight_VD.T``.

    ``columns`` of logits are what a chunk is sized for: ranks whose ``loss`` talks must name the same number.
    """
    chunks = row_chunks(len(target_T), columns, weight_VD.device)
    if torch.is_grad_enabled():
        total: torch.Tensor = _ChunkedLoss.apply(hidden_TD, weight_VD, target_T, loss, chunks)  # type: ignore[no-untyped-call]
        return total
    return torch.stack([loss(F.linear(hidden_TD[c], weight_VD), target_T[c])[0] for c in chunks]).sum()


class _ChunkedLoss(torch.autograd.Function):
    """Forward: the loss, and its gradients for a loss gradient of 1. Backward: scale them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        target_T: torch.Tensor,
        loss: ChunkLoss,
        chunks: Sequence[slice],
    ) -> torch.Tensor:
        d_hidden_TD = torch.empty_like(hidden_TD)
        d_weight_VD = torch.empty_like(weight_VD, dtype=wide_dtype(weight_VD))
        if not len(target_T):
            d_weight_VD.zero_()
        losses = []
        for rows in chunks:
            hidden_CD = hidden_TD[rows]
            logits_CV = matmul(hidden_CD, weight_VD.T)
            chunk, gradient = loss(logits_CV, target_T[rows])
            losses.append(chunk)
            d_logits_CV = logits_CV.copy_(gradient())
            d_hidden_TD[rows] = matmul(d_logits_CV, weight_VD)
            _add_product_(d_weight_VD, d_logits_CV.T, hidden_CD, first=not rows.start)
        ctx.save_for_backward(d_hidden_TD, d_weight_VD)
        ctx.weight_dtype = weight_VD.dtype
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # The sum over tokens stays wide until it is divided by their number: float16 could not hold it.
        d_hidden_TD, d_weight_VD = ctx.saved_tensors
        return d_hidden_TD.mul_(d_loss), d_weight_VD.mul_(d_loss).to(ctx.weight_dtype), None, None, None


def row_chunks(tokens: int, columns: int, device: torch.device) -> list[slice]:
    """Return the rows of one chunk after another, whose logits have so many columns."""
    logits, fewest = CHUNK.get(device.type, CHUNK["cuda"])
    size = max(fewest, logits // columns)
    return [slice(start, start + size) for start in range(0, tokens, size)]


def wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which softmax and sums over tokens are computed."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _cross_entropy(
    logits_CV: torch.Tensor, target_C: torch.Tensor
) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """Return the summed loss of a chunk, and what makes the gradient of its logits.

    Numerators of the softmax take the place of logits that are wide enough: torch's log_softmax says the
    same in fewer words but fills new storage for every chunk.
    """
    wide_CV = logits_CV.to(wide_dtype(logits_CV))
    largest_C1 = wide_CV.amax(dim=1, keepdim=True)
    at_target_C1 = wide_CV.gather(1, _index(target_C))
    exp_CV = wide_CV.sub_(largest_C1).exp_()
    total_C1 = exp_CV.sum(dim=1, keepdim=True)
    nll_C1 = total_C1.log() + largest_C1 - at_target_C1
    loss = nll_C1.squeeze(1).masked_fill(target_C == IGNORE, 0.0).sum()
    return loss, partial(_d_logits_, exp_CV, total_C1, target_C)


def _d_logits_(exp_CV: torch.Tensor, total_C1: torch.Tensor, target_C: torch.Tensor) -> torch.Tensor:
    """Turn numerators in place into the gradient of the logits: softmax - onehot, 0 in ignored rows."""
    counted_C1 = (target_C != IGNORE).unsqueeze(1).to(exp_CV.dtype)
    exp_CV.mul_(counted_C1 / total_C1)
    return exp_CV.scatter_add_(1, _index(target_C), -counted_C1)


def _index(target_C: torch.Tensor) -> torch.Tensor:
    """Return targets [C, 1] to index with: a valid one where ignored, so that any other wrong one fails."""
    return torch.where(target_C == IGNORE, 0, target_C).unsqueeze(1)


def _add_product_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, first: bool) -> None:
    """Add ``left @ right`` to ``total``, which may have a wider dtype; the ``first`` takes its place.

    A sum over thousands of tokens does not fit into float16, so that product is computed wide.
    """
    if left.dtype == torch.float16:
        left, right = left.to(total.dtype), right.to(total.dtype)
    if left.dtype == total.dtype:
        matmul(left, right, total, add=not first)
    elif first:
        total.copy_(matmul(left, right))
    else:
        total.add_(matmul(left, right))
