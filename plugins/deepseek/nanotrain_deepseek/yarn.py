"""RoPE for part of a head, extended to longer sequences by YaRN if the recipe says so.

Shapes: S sequence, P rotary elements of a head. Element i is paired with element i + P/2.

Sources: Su et al., arXiv 2104.09864, equation 34; Peng et al. (YaRN), arXiv 2309.00071, sections 3.2 to
3.4; its ramp over rounded pair numbers and its two scales are those of DeepSeek-V2, arXiv 2405.04434,
section 3.1.4.
"""

from __future__ import annotations

import torch

from nanotrain_core.api import yarn_magnitude
from nanotrain_core.api.torch import Rotation, rope_frequencies, rope_rotation, yarn_frequencies
from nanotrain_deepseek.config import DeepSeekConfig


def rotation(length: int, config: DeepSeekConfig, *, like: torch.Tensor, start: int = 0) -> Rotation:
    """Return the rotation of ``length`` positions from ``start``: cosines, signed sines, each [S, 1, P]."""
    magnitude = config.yarn.magnitude if config.yarn else 1.0
    inv_freq_P = frequencies(config, device=like.device)
    return rope_rotation(length, inv_freq_P, like=like, magnitude=magnitude, start=start)


def softmax_scale(config: DeepSeekConfig) -> float:
    """Return the factor of attention scores: 1 / sqrt of the head's size, and YaRN's temperature."""
    scale: float = config.qk_size**-0.5
    if config.yarn is None:
        return scale
    temperature = yarn_magnitude(config.yarn.factor, config.yarn.mscale_all_dim)
    return scale * temperature * temperature


def frequencies(config: DeepSeekConfig, *, device: torch.device) -> torch.Tensor:
    """Return radians per position of each pair [P/2], float64."""
    size, theta, yarn = config.rope_size, config.rope_theta, config.yarn
    plain = rope_frequencies(size, theta, device=device)
    if yarn is None:
        return plain
    return yarn_frequencies(
        plain, theta, yarn.factor, yarn.original_length, beta_fast=yarn.beta_fast, beta_slow=yarn.beta_slow
    )
