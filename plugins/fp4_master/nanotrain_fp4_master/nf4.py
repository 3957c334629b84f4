"""NF4: the sixteen quantiles of a normal distribution, and one scale for a block of 64: 4.5 bits a weight.

The levels are asymmetric, seven below zero and eight above it, so that 0 and both ends are exact.
A block's scale is its largest magnitude.

Source: Dettmers et al., "QLoRA", arXiv 2305.14314, section 3 and appendix E. Unlike there, scales
are bfloat16 numbers instead of float32 numbers quantized to eight bits, and so are weights.
"""

from __future__ import annotations

from functools import cache

import torch

BLOCK = 64
LARGEST = 1.0
#: Largest bfloat16 number.
LARGEST_WEIGHT = (2 - 2.0**-7) * 2.0**127
#: The published table: quantiles of a normal distribution, divided by the outermost, in float32.
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@cache
def tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the levels [16], the middles between them [15], and half of each level's wider gap [16]."""
    levels = torch.tensor(LEVELS, dtype=torch.float32)
    exact = (levels[1:].double() + levels[:-1].double()) / 2
    middles = exact.float()  # if rounded up, the middle itself would be nearer to the level above
    middles = torch.where(middles > exact, middles.nextafter(torch.tensor(-2.0)), middles)
    gaps = torch.nn.functional.pad(levels.diff(), (1, 1))
    wider = torch.maximum(gaps[1:], gaps[:-1]) / 2
    return levels.to(device), middles.to(device), wider.to(device)


def nearest_codes(x: torch.Tensor) -> torch.Tensor:
    """Return the index, int32, of the level nearest to each of ``x``; at a midpoint the lower one."""
    _, middles, _ = tables(x.device)
    return torch.bucketize(x, middles, out_int32=True)


def to_codes(x: torch.Tensor) -> torch.Tensor:
    """Return the 4-bit codes of numbers next to levels, uint8."""
    return nearest_codes(x).to(torch.uint8)


def from_codes(codes: torch.Tensor) -> torch.Tensor:
    """Return the levels of 4-bit codes, float32."""
    return tables(codes.device)[0][codes.int()]


#: Bytes that a block's scale takes, in the form of :func:`to_bytes`.
SCALE_BYTES = 2


def to_bytes(scales: torch.Tensor) -> torch.Tensor:
    """Return scales [N, 1], bfloat16 numbers, as bytes [N, 2]."""
    return scales.bfloat16().contiguous().view(torch.uint8)


def from_bytes(stored: torch.Tensor) -> torch.Tensor:
    """Undo :func:`to_bytes`: float32."""
    return stored.contiguous().view(torch.bfloat16).float()


def nearest(x: torch.Tensor) -> torch.Tensor:
    """Round to levels."""
    return tables(x.device)[0][nearest_codes(x)]


def neighbors(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the levels below and above ``x``; one that is a level itself is the lower one."""
    levels = tables(x.device)[0]
    below = torch.bucketize(x, levels[1:-1], right=True, out_int32=True)
    return levels[below], levels[below + 1]


def half_gap(x: torch.Tensor) -> torch.Tensor:
    """Return half of the wider gap beside each level."""
    return tables(x.device)[2][nearest_codes(x)]
