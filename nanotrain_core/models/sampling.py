"""Sampling of the next token of a text from a model's logits.

Shapes: V vocabulary.

Sources: Fan et al., arXiv 1805.04833, section 5.1 (top-k); Holtzman et al., arXiv 1904.09751, section 3.1
(top-p, or nucleus sampling).
"""

from __future__ import annotations

import torch


def sample_token(
    logits_V: torch.Tensor,
    generator: torch.Generator,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> int:
    """Draw a token from softmax(logits / ``temperature``).

    One random number of the generator decides, in double precision on the CPU: layouts, whose logits differ
    by rounding, draw the same token unless that number lies within rounding of the boundary between two.

    Args:
        logits_V: of all tokens that may be drawn.
        generator: on the CPU.
        temperature: 0 selects the likeliest token.
        top_k: keep this many of the likeliest tokens, and those as likely as the last of them; 0: all.
        top_p: keep the likeliest tokens that together reach this probability; 1: all.
    """
    logits_V = logits_V.to("cpu", torch.float64)
    if temperature == 0:
        return int(logits_V.argmax())
    p_V = torch.softmax((logits_V - logits_V.max()) / temperature, dim=-1)  # even for tiny temperatures
    if 0 < top_k < len(p_V):
        p_V = p_V.where(p_V >= p_V.topk(top_k).values[-1], 0.0)
    if top_p < 1:
        sorted_V, order_V = (p_V / p_V.sum()).sort(descending=True, stable=True)
        likelier_V = sorted_V.cumsum(0) - sorted_V
        p_V = torch.zeros_like(p_V).scatter(0, order_V, sorted_V.where(likelier_V < top_p, 0.0))
    left = p_V.nonzero().squeeze(-1)
    border = p_V[left].cumsum(0)
    place = torch.rand((), dtype=torch.float64, generator=generator) * border[-1]
    return int(left[torch.searchsorted(border, place, right=True).clamp(max=len(left) - 1)])
