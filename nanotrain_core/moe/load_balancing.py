"""The auxiliary loss that balances experts, of each sequence or of the whole batch, summed over sequences.

Shapes: ... sequences, S tokens of one, E experts, K chosen per token.
"""

from __future__ import annotations

import torch


def load_balancing_loss(
    scores_SE: torch.Tensor, experts_SK: torch.Tensor, load_E: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum of E f P over experts, f an expert's share of the choices, P the mean of its scores.

    Even load gives 1 for each sequence. f has no gradient; P has. A sum over sequences is the same on every
    layout, as a product of means over a microbatch, or over a rank's tokens, would not be.

    ``load_E``: the choices that f counts instead of each sequence's own, such as those of a global batch.

    Sources: Fedus et al., arXiv 2101.03961, equations 4 to 6; for K experts per token, DeepSeek-V2, arXiv
    2405.04434, equations 23 to 25; for f of the global batch, Qiu et al., arXiv 2501.11873, equation 3.
    """
    if load_E is None:
        share_E = expert_share(scores_SE, experts_SK)
    else:
        load_E = load_E.to(scores_SE.dtype)
        share_E = load_E * (len(load_E) / load_E.sum())
    return (share_E * scores_SE.mean(-2)).sum()


def expert_share(scores_SE: torch.Tensor, experts_SK: torch.Tensor) -> torch.Tensor:
    """Return E f [..., E]: how often each expert was chosen, divided by the mean; in the scores' dtype."""
    tokens, top_k = experts_SK.shape[-2:]
    choices = experts_SK.flatten(-2)
    counts_E = torch.zeros_like(scores_SE[..., 0, :]).scatter_add(
        -1, choices, torch.ones_like(choices, dtype=scores_SE.dtype)
    )
    return counts_E * (scores_SE.shape[-1] / (top_k * tokens))
