"""Rotary position embedding: turn pairs of numbers of each query and key by the position's angle.

Shapes: B batch, S sequence, H heads, K head size, P = K/2 pairs. Number i of a head is paired with number
i + P (the "rotate half" order of Llama's public weights).

Source: Su et al., arXiv 2104.09864, equation 34.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from nanotrain_core.builtin.configs import RopeScalingConfig

#: For each position the cosines of all angles twice over, and their sines, negative in the first half:
#: each [S, 1, K]. :func:`nanotrain_core.models.ops.rope` turns queries and keys by them.
Rotation = tuple[torch.Tensor, torch.Tensor]


def frequencies(
    head_size: int, theta: float, scaling: RopeScalingConfig | None = None, *, device: torch.device
) -> torch.Tensor:
    """Return radians per position of each pair [K/2], float64.

    ``scaling`` slows down pairs that hardly turn over the original length; those that turn often tell
    neighbours apart, and stay. Its form is that of Llama 3.1 (Meta's ``apply_scaling``).
    """
    pair_P = torch.arange(0, head_size, 2, dtype=torch.float64, device=device)
    plain_P = theta ** (-pair_P / head_size)
    if scaling is None:
        return plain_P
    turns_P = scaling.original_length * plain_P / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_P = ((turns_P - low) / (high - low)).clamp(0.0, 1.0)
    return plain_P * kept_P + plain_P / scaling.factor * (1 - kept_P)


def rotation(
    length: int, frequency_P: torch.Tensor, *, like: torch.Tensor, magnitude: float = 1.0
) -> Rotation:
    """Return what turns positions 0 to ``length`` - 1 by ``frequency_P`` [K/2], on its device.

    Computed anew in every forward pass, which costs little: a buffer would come to life uninitialised
    when a model built on ``meta`` gets its storage, and a table kept from one call to the next would carry
    an inference or a fake tensor into training. Angles are float64, because position times frequency loses
    digits of the angle in float32; the results are float32 (float64 where ``like`` is), times ``magnitude``.
    """
    position_S = torch.arange(length, dtype=torch.float64, device=frequency_P.device)
    angle_S1P = torch.outer(position_S, frequency_P).unsqueeze(1)
    cos, sin = angle_S1P.cos() * magnitude, angle_S1P.sin() * magnitude
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)
