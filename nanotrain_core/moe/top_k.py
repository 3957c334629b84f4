"""The experts that a router chooses, in plain PyTorch: the definition that kernels are compared with.

Shapes: E experts, K chosen per token, G groups of consecutive experts.

Sources: DeepSeek-V2, arXiv 2405.04434, section 2.2.1 (device-limited routing); DeepSeek-V3, arXiv 2412.19437,
section 2.1.2 (the bias, node-limited routing).
"""

from __future__ import annotations

import torch


def choose_experts(
    scores_E: torch.Tensor,
    bias_E: torch.Tensor | None,
    top_k: int,
    groups: int = 1,
    chosen_groups: int = 1,
) -> torch.Tensor:
    """Return the best ``top_k`` experts of each token [..., K], the best first, int64. It has no gradient.

    Of equal scores any may be chosen.

    Args:
        scores_E: of each token [..., E].
        bias_E: added to the scores, for the choice alone.
        top_k: K, at most the experts of the chosen groups.
        groups: G, a divisor of E.
        chosen_groups: how many groups the experts of a token may come from: its best. A group's score is the
            sum of its best two experts or, without a bias, as in V2, its best.
    """
    scores_E = scores_E.detach() if bias_E is None else scores_E.detach() + bias_E
    if chosen_groups < groups:
        grouped = torch.unflatten(scores_E, -1, (groups, -1))
        group_score = grouped.amax(-1) if bias_E is None else grouped.topk(2, dim=-1).values.sum(-1)
        best = group_score.topk(chosen_groups, dim=-1).indices
        shut_G = torch.ones_like(group_score, dtype=torch.bool).scatter(-1, best, False)
        scores_E = grouped.masked_fill(shut_G.unsqueeze(-1), float("-inf")).flatten(-2)
    return scores_E.topk(top_k, dim=-1).indices
