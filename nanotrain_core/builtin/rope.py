"""Rotary position embedding: turn pairs of numbers of each query and key by the position's angle.

Shapes: B batch, S sequence, H heads, K head size. Number i of a head is paired with number i + K/2
(the "rotate half" order of Llama's public weights).

Source: Su et al., arXiv 2104.09864, equation 34.
"""

from __future__ import annotations

from typing import Any

import torch

#: For each position the cosines of all angles twice over, and their sines, negative in the first half:
#: each [S, 1, K].
Rotation = tuple[torch.Tensor, torch.Tensor]


def rotation(length: int, head_size: int, theta: float, *, like: torch.Tensor) -> Rotation:
    """Return what turns positions 0 to ``length`` - 1, on the device of ``like``.

    Computed anew in every forward pass, which costs little: a buffer would come to life uninitialised
    when a model built on ``meta`` gets its storage, and a table kept from one call to the next would carry
    an inference or a fake tensor into training. Angles are float64, because position times frequency loses
    digits of the angle in float32; the results are float32 (float64 for a float64 model).
    """
    pair_K = torch.arange(0, head_size, 2, dtype=torch.float64, device=like.device)
    position_S = torch.arange(length, dtype=torch.float64, device=like.device)
    angle_S1K = torch.outer(position_S, theta ** (-pair_K / head_size)).unsqueeze(1)
    cos, sin = angle_S1K.cos(), angle_S1K.sin()
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(x_BSHK: torch.Tensor, turn: Rotation) -> torch.Tensor:
    """Return ``x_BSHK`` with each pair turned by its position's angle, in the dtype of ``x_BSHK``."""
    y_BSHK: torch.Tensor = _Rotate.apply(x_BSHK, *turn)  # type: ignore[no-untyped-call]
    return y_BSHK


class _Rotate(torch.autograd.Function):
    """Forward: turn. Backward: turn back, which is cheaper than what autograd would derive."""

    @staticmethod
    def forward(ctx: Any, x_BSHK: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x_BSHK, cos, sin)

    @staticmethod
    def backward(ctx: Any, d_y_BSHK: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turn(d_y_BSHK, cos, -sin), None, None


def _turn(x_BSHK: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Whole heads at a time: on a CPU, arithmetic on half heads, 16 numbers in a row, is slow."""
    wide = x_BSHK.to(cos.dtype)
    other = wide.roll(wide.shape[-1] // 2, dims=-1)
    return other.mul_(sin).addcmul_(wide, cos).to(x_BSHK.dtype)
