"""Output projection and cross-entropy together, a few rows of logits at a time.

The logits of a batch are the largest tensor of a training step: 8192 tokens and a vocabulary of 128k
make 4 GB. Here the projection, the loss and both gradients of a chunk are computed while its logits
are at hand, so that only one chunk of them ever exists; on a CPU the chunk also stays in the cache.

Shapes: T tokens, D width, V vocabulary, C tokens of one chunk.

Source of the idea: Wijmans et al., "Cut your losses", arXiv 2411.09009; Hsu et al., "Liger kernel",
arXiv 2410.10989, section 3.2 (gradients in the forward pass).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from nanotrain_core.batch import IGNORE

#: Logits of one chunk, about, and its fewest tokens: matrix products of fewer rows are slow.
CHUNK = {"cpu": (2**20, 256), "cuda": (2**27, 1024)}


def linear_cross_entropy(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, target_T: torch.Tensor
) -> torch.Tensor:
    """Return the summed cross-entropy of ``hidden_TD @ weight_VD.T`` against ``target_T``, in nats.

    Targets of :data:`~nanotrain_core.batch.IGNORE` add nothing. The sum is float32, or float64 for
    float64 inputs.
    """
    loss: torch.Tensor = _LinearCrossEntropy.apply(hidden_TD, weight_VD, target_T, torch.is_grad_enabled())
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Forward: loss, and its gradients at a loss gradient of 1. Backward: scale them."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: torch.Tensor, weight_VD: torch.Tensor, target_T: torch.Tensor, train: bool
    ) -> torch.Tensor:
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=hidden_TD.device)
        d_hidden_TD = torch.empty_like(hidden_TD) if train else None
        d_weight_VD = torch.zeros_like(weight_VD, dtype=wide) if train else None
        size = _chunk_tokens(weight_VD)
        for start in range(0, len(target_T), size):
            rows = slice(start, start + size)
            hidden_CD = hidden_TD[rows]
            counted_C1 = target_T[rows, None] != IGNORE
            target_C1 = target_T[rows, None] * counted_C1
            log_p_CV = torch.log_softmax(F.linear(hidden_CD, weight_VD), dim=-1, dtype=wide)
            loss -= (log_p_CV.gather(1, target_C1) * counted_C1).sum()
            if d_hidden_TD is not None and d_weight_VD is not None:
                # The gradient of the logits is p - onehot(target); ignored rows are zeroed where they are narrow.
                p_CV = log_p_CV.exp_()
                d_logits_CV = p_CV.scatter_add_(1, target_C1, p_CV.new_full((), -1.0).expand_as(target_C1))
                d_logits_CV = d_logits_CV.to(hidden_TD.dtype)
                torch.mul(d_logits_CV @ weight_VD, counted_C1, out=d_hidden_TD[rows])
                _add_product(d_weight_VD, d_logits_CV.T, hidden_CD * counted_C1)
        if d_hidden_TD is not None and d_weight_VD is not None:
            ctx.save_for_backward(d_hidden_TD, d_weight_VD.to(weight_VD.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, d_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        d_hidden_TD, d_weight_VD = ctx.saved_tensors
        return d_hidden_TD * d_loss, d_weight_VD * d_loss, None, None


def _chunk_tokens(weight_VD: torch.Tensor) -> int:
    logits, tokens = CHUNK.get(weight_VD.device.type, CHUNK["cpu"])
    return max(tokens, logits // len(weight_VD))


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add ``left @ right`` to ``total``, which may be wider than they are."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
