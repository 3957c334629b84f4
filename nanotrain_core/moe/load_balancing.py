"""The auxiliary loss that balances experts, computed per sequence and summed over sequences.

Shapes: ... sequences, S tokens of one, E experts, K chosen per token.
"""

from __future__ import annotations

import torch


def load_balancing_loss(scores_SE: torch.Tensor, experts_SK: torch.Tensor) -> torch.Tensor:
    """Return the sum of E f P over experts, f an expert's share of the choices, P the mean of its scores.

    Even load gives 1 for each sequence. f has no gradient; P has. A sum over sequences is the same on every
    layout, as a product of means over a microbatch, or over a rank's tokens, would not be.

    Sources: Fedus et al., arXiv 2101.03961, equations 4 to 6; for K experts per token, DeepSeek-V2, arXiv
    2405.04434, equations 23 to 25.
    """
    return (expert_share(scores_SE, experts_SK) * scores_SE.mean(-2)).sum()


def expert_share(scores_SE: torch.Tensor, experts_SK: torch.Tensor) -> torch.Tensor:
    """Return E f [..., E]: how often each expert was chosen, divided by the mean; in the scores' dtype."""
    tokens, top_k = experts_SK.shape[-2:]
    choices = experts_SK.flatten(-2)
    counts_E = torch.zeros_like(scores_SE[..., 0, :]).scatter_add(
        -1, choices, torch.ones_like(choices, dtype=scores_SE.dtype)
    )
    return counts_E * (scores_SE.shape[-1] / (top_k * tokens))
