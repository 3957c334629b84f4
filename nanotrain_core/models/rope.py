"""Rotary position embedding: rotate pairs of elements of each query and key by the position's angle.

Shapes: B batch, S sequence, H heads, K head size, P = K/2 pairs. Element i of a head is paired with element i
    + P (the "rotate half" order of Llama's public weights).

Source: Su et al., arXiv 2104.09864, equation 34. Methods that extend it to longer sequences name their own
    source; they compute the same as ``modeling_rope_utils`` of Hugging Face's transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from nanotrain_core.builtin.transformer_config import RopeScalingConfig

#: For each position the cosines of all angles twice, and their sines, negative in the first half:
#: each [S, 1, K]. :func:`nanotrain_core.models.ops.rope` rotates queries and keys by them.
Rotation = tuple[torch.Tensor, torch.Tensor]


def rope_frequencies(
    head_size: int,
    theta: float,
    scaling: RopeScalingConfig | None = None,
    *,
    length: int = 0,
    device: torch.device,
) -> torch.Tensor:
    """Return radians per position of each pair [K/2], float64.

    Args:
        scaling: the method that extends them to longer sequences.
        length: sequence length, on which those of ``dynamic`` depend.
    """
    pair_P = torch.arange(0, head_size, 2, dtype=torch.float64, device=device)
    inv_freq_P = theta ** (-pair_P / head_size)
    return inv_freq_P if scaling is None else SCALINGS[scaling.type](inv_freq_P, theta, scaling, length)


def linear(inv_freq_P: torch.Tensor, factor: float) -> torch.Tensor:
    """Slow all pairs down by position interpolation. Source: Chen et al., arXiv 2306.15595, equation 4."""
    return inv_freq_P / factor


def dynamic(inv_freq_P: torch.Tensor, factor: float, original_length: int, length: int) -> torch.Tensor:
    """Increase the base with the sequence length, beyond the original length.

    The base becomes theta (factor length / original_length - (factor - 1)) ** (K / (K - 2)): the fastest pair
    is unchanged. Source: Peng et al. (YaRN), arXiv 2309.00071, section 3.3 ("Dynamic NTK").
    """
    size = 2 * len(inv_freq_P)
    grown = factor * max(length, original_length) / original_length - (factor - 1)
    pair_P = torch.arange(0, size, 2, dtype=torch.float64, device=inv_freq_P.device)
    return inv_freq_P * grown ** (-pair_P / (size - 2))


def llama3(
    inv_freq_P: torch.Tensor,
    factor: float,
    original_length: int,
    low_freq_factor: float,
    high_freq_factor: float,
) -> torch.Tensor:
    """Slow down low-frequency pairs; high-frequency pairs, which distinguish neighbors, are unchanged.

    Source: ``apply_scaling`` of Meta's Llama 3.1.
    """
    turns_P = original_length * inv_freq_P / (2 * math.pi)
    kept_P = ((turns_P - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0)
    return inv_freq_P * kept_P + inv_freq_P / factor * (1 - kept_P)


def yarn_frequencies(
    inv_freq_P: torch.Tensor,
    theta: float,
    factor: float,
    original_length: int,
    *,
    beta_fast: float,
    beta_slow: float,
    truncate: bool = True,
) -> torch.Tensor:
    """Slow down pairs by their number of rotations over the original length, along a linear ramp over pairs.

    Source: Peng et al. (YaRN), arXiv 2309.00071, section 3.2.

    Args:
        truncate: round the ends of the ramp to whole pairs.
    """
    size = 2 * len(inv_freq_P)

    def turning(times: float) -> float:
        return size * math.log(original_length / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = turning(beta_fast), turning(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    number_P = torch.arange(size // 2, dtype=torch.float64, device=inv_freq_P.device)
    slowed_P = ((number_P - first) / ((last - first) or 1e-3)).clamp(0.0, 1.0)
    return inv_freq_P * (1 - slowed_P) + inv_freq_P / factor * slowed_P


#: ``type`` of a scaling -> its frequencies, from the unscaled ones, the base, the scaling and the length.
SCALINGS: Mapping[str, Callable[[torch.Tensor, float, RopeScalingConfig, int], torch.Tensor]] = {
    "linear": lambda inv_freq_P, theta, s, length: linear(inv_freq_P, s.factor),
    "dynamic": lambda inv_freq_P, theta, s, length: dynamic(inv_freq_P, s.factor, s.original_length, length),
    "llama3": lambda inv_freq_P, theta, s, length: llama3(
        inv_freq_P, s.factor, s.original_length, s.low_freq_factor, s.high_freq_factor
    ),
    "yarn": lambda inv_freq_P, theta, s, length: yarn_frequencies(
        inv_freq_P,
        theta,
        s.factor,
        s.original_length,
        beta_fast=s.beta_fast,
        beta_slow=s.beta_slow,
        truncate=s.truncate,
    ),
}


def rope_rotation(
    length: int, inv_freq_P: torch.Tensor, *, like: torch.Tensor, magnitude: float = 1.0, start: int = 0
) -> Rotation:
    """Return the rotation of ``length`` positions from ``start`` on by ``inv_freq_P`` [K/2], on its device.

    Recomputed in every forward pass, which costs little: a buffer would be uninitialized
    when a model built on ``meta`` gets its storage, and a table cached between calls would carry
    an inference or a fake tensor into training. Angles are float64, because position times frequency loses
    precision in float32; the results are float32 (float64 where ``like`` is), times ``magnitude``.
    """
    position_S = torch.arange(start, start + length, dtype=torch.float64, device=inv_freq_P.device)
    angle_S1P = torch.outer(position_S, inv_freq_P).unsqueeze(1)
    cos, sin = angle_S1P.cos() * magnitude, angle_S1P.sin() * magnitude
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)
