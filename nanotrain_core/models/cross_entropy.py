"""Output projection and cross-entropy together, a few rows of logits at a time.

The logits of a batch are the largest tensor of a training step: 8192 tokens and a vocabulary of 128k
make 4 GB. Here the projection, the loss and both gradients of a chunk are computed while its logits
are at hand, so that only one chunk of them ever exists.

Shapes: T tokens, D width, V vocabulary, C tokens of one chunk, P columns of logits that are stored.

Source of the idea: Hsu et al., "Liger kernel", arXiv 2410.10989, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import attrs
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from nanotrain_core.batch import IGNORE

#: Takes logits [C, V], which it may use up, and targets [C]. Returns the summed loss, and what then makes the
#: gradient of the logits.
ChunkLoss = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, Callable[[], torch.Tensor]]]


class MatMul(Protocol):
    """Multiplies two matrices. Nothing here is differentiable."""

    def __call__(
        self, left: torch.Tensor, right: torch.Tensor, total: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``left @ right``, or add it to ``total``, which may have a wider dtype, and return that."""
        ...


def matmul(left: torch.Tensor, right: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
    """See :class:`MatMul`.

    What is added to a wider total is not rounded before: a sum over thousands of tokens does not fit into
    float16 at all. A GPU multiplies narrow numbers into float32; a CPU widens float16, and rounds bfloat16.
    """
    if total is None:
        return left @ right
    if left.is_cuda and left.dtype != total.dtype and not torch.compiler.is_compiling():
        return total.add_(torch.mm(left, right, out_dtype=total.dtype))
    if left.dtype == torch.float16:
        left, right = left.to(total.dtype), right.to(total.dtype)
    if left.dtype == total.dtype:
        return total.addmm_(left, right)
    return total.add_(left @ right)


@attrs.define(frozen=True)
class Chunks:
    """How logits are cut."""

    logits: int = 2**27
    """Of one chunk, about."""
    tokens: int = 1024
    """The fewest of one chunk: matrix products of few rows are slow."""

    def of(self, tokens: int, columns: int) -> list[slice]:
        """Return the rows of one chunk after another, whose logits have so many columns."""
        size = max(self.tokens, self.logits // columns)
        return [slice(start, start + size) for start in range(0, max(tokens, 1), size)]


#: Of a device with much memory.
LARGE = Chunks()


def cross_entropy(
    logits_CV: torch.Tensor, target_C: torch.Tensor
) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """Return the summed loss of a chunk, and what makes the gradient of its logits: a :data:`ChunkLoss`.

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


def linear_cross_entropy(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_T: torch.Tensor,
    loss: ChunkLoss = cross_entropy,
    columns: int | None = None,
    chunks: Chunks = LARGE,
    matmul: MatMul = matmul,
    multiple: int = 1,
) -> torch.Tensor:
    """Return the summed cross-entropy of ``hidden_TD @ weight_VD.T`` against ``target_T``, in nats.

    Targets of :data:`~nanotrain_core.batch.IGNORE` add nothing. The sum is float32, or float64 for
    float64 inputs.

    Args:
        hidden_TD: what the last norm returned.
        weight_VD: of the output projection.
        target_T: the next tokens.
        loss: in place of cross-entropy over these V logits, as where ranks share the vocabulary.
        columns: of logits that a chunk is sized for, V by default: ranks whose ``loss`` talks must name the
            same number.
        chunks: how large they are.
        matmul: makes the three matrix products of each chunk.
        multiple: matrix products are made of so many columns of logits, or twice as many, and so on: a GPU's
            kernels for 50,257 columns take several times as long as those for 50,304. ``loss`` sees V.
    """
    slices = chunks.of(len(target_T), columns or len(weight_VD))
    missing = -len(weight_VD) % multiple
    if torch.is_grad_enabled():
        total: torch.Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
            hidden_TD, weight_VD, target_T, loss, slices, matmul, missing
        )
        return total
    weight_PD = _pad_rows(weight_VD, missing)
    logits = (matmul(hidden_TD[rows], weight_PD.T)[:, : len(weight_VD)] for rows in slices)
    return torch.stack(
        [loss(each, target_T[rows])[0] for each, rows in zip(logits, slices, strict=True)]
    ).sum()


class _ChunkedLoss(torch.autograd.Function):
    """Forward: the loss, and its gradients for a loss gradient of 1. Backward: scale them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        target_T: torch.Tensor,
        loss: ChunkLoss,
        slices: list[slice],
        matmul: MatMul,
        missing: int,
    ) -> torch.Tensor:
        size = len(weight_VD)
        weight_PD = _pad_rows(weight_VD, missing)
        d_hidden_TD = torch.empty_like(hidden_TD)
        d_weight_PD = torch.zeros_like(weight_PD, dtype=wide_dtype(weight_VD))
        losses = []
        for rows in slices:
            hidden_CD = hidden_TD[rows]
            logits_CP = matmul(hidden_CD, weight_PD.T)
            chunk, gradient = loss(logits_CP[:, :size], target_T[rows])
            losses.append(chunk)
            d_logits_CP = _cast_and_pad(gradient(), hidden_CD.dtype, missing)
            d_hidden_TD[rows] = matmul(d_logits_CP, weight_PD)
            matmul(d_logits_CP.T, hidden_CD, d_weight_PD)
        ctx.save_for_backward(d_hidden_TD, d_weight_PD[:size])
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # The sum over tokens stays wide until it is divided by their number: float16 could not hold it. The
        # gradient of the weight is added to others as wide as it is; where none is wide, autograd rounds it.
        d_hidden_TD, d_weight_VD = ctx.saved_tensors
        return d_hidden_TD * d_loss.to(d_hidden_TD.dtype), d_weight_VD * d_loss, None, None, None, None, None


def _pad_rows(weight_VD: torch.Tensor, missing: int) -> torch.Tensor:
    """Return ``weight_VD`` with so many rows of zeros more [P, D]."""
    return F.pad(weight_VD, (0, 0, 0, missing)) if missing else weight_VD


def _cast_and_pad(d_logits_CV: torch.Tensor, dtype: torch.dtype, missing: int) -> torch.Tensor:
    """Return the gradient of logits in ``dtype`` with so many columns of zeros more [C, P], in one pass."""
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
