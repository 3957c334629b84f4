"""The head of a language model: output projection fused with the loss.

Shapes: B batch, S sequence, D width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from nanotrain_core.models.ops import TORCH_OPS, Ops


class Head(nn.Module):
    """Output projection and next-token loss: one module, so that logits can be sharded over the vocabulary.

    It owns its weight [V, D], or receives the embedding's at every call when they are tied.
    """

    weight: nn.Parameter | None
    """[V, D]; None: tied to the embedding's."""

    def __init__(self, vocab: int, width: int, *, tied: bool, ops: Ops = TORCH_OPS) -> None:
        super().__init__()
        self.ops = ops
        """The functions that it is computed with."""
        self.register_parameter("weight", None if tied else nn.Parameter(torch.empty(vocab, width)))

    def forward(
        self, x_BSD: torch.Tensor, targets_BS: torch.Tensor | None, table_VD: torch.Tensor | None
    ) -> torch.Tensor:
        """Return logits [B, S, V], or with targets the summed cross-entropy, a scalar."""
        weight_VD = self.weight if table_VD is None else table_VD
        assert weight_VD is not None
        if targets_BS is None:
            return F.linear(x_BSD, weight_VD)
        return self.ops.linear_cross_entropy(x_BSD.flatten(0, 1), weight_VD, targets_BS.flatten())
