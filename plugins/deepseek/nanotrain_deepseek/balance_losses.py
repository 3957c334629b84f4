"""Load-balancing losses for experts, each computed per sequence and summed over sequences.

f counts choices and has no gradient; P, the mean score, has. Even load gives f = 1 for every expert. V2's
expert-level loss is that of most models: :func:`~nanotrain_core.api.models.load_balancing_loss`.

Shapes: ... sequences, S tokens of one, E experts, K chosen per token, G groups of consecutive experts.

Sources: DeepSeek-V3, arXiv 2412.19437, equations 17 to 20; DeepSeek-V2, arXiv 2405.04434, equations 23 to 31.
"""

from __future__ import annotations

import torch

from nanotrain_core.api.models import expert_share


def sequence_loss(scores_SE: torch.Tensor, best_SK: torch.Tensor) -> torch.Tensor:
    """Return sum of f P with each token's scores divided by their sum. Source: V3, equations 17 to 20.

    f counts each token's ``best_SK``, the experts of its best unbiased scores: neither bias nor groups are
    used.
    """
    f_E = expert_share(scores_SE, best_SK)
    # A token whose scores all underflow to zero must not turn the whole step into NaN.
    total_S1 = scores_SE.sum(-1, keepdim=True).clamp(min=torch.finfo(scores_SE.dtype).tiny)
    p_E = (scores_SE / total_S1).mean(-2)
    return (f_E * p_E).sum()


def device_loss(scores_SE: torch.Tensor, experts_SK: torch.Tensor, devices: int) -> torch.Tensor:
    """Return sum over devices of mean f times summed P of their experts. Source: V2, equations 26 to 28."""
    f_G = torch.unflatten(expert_share(scores_SE, experts_SK), -1, (devices, -1)).mean(-1)
    return (f_G * _device_score(scores_SE, devices)).sum()


def communication_loss(
    scores_SE: torch.Tensor, experts_SK: torch.Tensor, devices: int, limit: int
) -> torch.Tensor:
    """Return the sum over devices of f P, with f over the tokens sent there. Source: V2, equations 29 to 31.

    A token is sent to a device once, however many of its experts are there; to at most ``limit`` devices.
    """
    device_SK = experts_SK // (scores_SE.shape[-1] // devices)
    sent_SG = torch.zeros_like(scores_SE[..., :devices]).scatter(-1, device_SK, 1.0)
    f_G = sent_SG.mean(-2) * (devices / limit)
    return (f_G * _device_score(scores_SE, devices)).sum()


def _device_score(scores_SE: torch.Tensor, devices: int) -> torch.Tensor:
    return torch.unflatten(scores_SE.mean(-2), -1, (devices, -1)).sum(-1)
