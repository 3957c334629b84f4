"""NVFP4 and NF4 as they are published, with numpy and ml_dtypes, and numbers that are hard to round."""

from typing import NamedTuple

import ml_dtypes
import numpy as np

#: QLoRA, arXiv 2305.14314, appendix E, in float32.
NF4_LEVELS = np.array(
    [
        [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453],
        [-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0],
        [0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224],
        [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
    ],
    dtype=np.float32,
).ravel()
RANDOM = np.random.default_rng(5)


def outliers(rows=9):
    """Return normal numbers with every seventh column a thousand times as large."""
    found = RANDOM.standard_normal((rows, 48)) * 0.05
    found[:, ::7] *= 1000
    return found


CORPUS = {
    "zeros": np.zeros(32),
    "negative zeros": -np.zeros(16),
    "normal": RANDOM.standard_normal(4096),
    "tiny": RANDOM.standard_normal(256) * 1e-30,
    "float32 subnormals": RANDOM.standard_normal(64) * 1e-41,
    "bfloat16 subnormals": RANDOM.standard_normal(64) * 1e-39,
    "many sizes": RANDOM.standard_normal(1024) * np.repeat(np.logspace(-9, 1, 64), 16),
    "below all scales": np.concatenate([np.full(16, 1.0), RANDOM.standard_normal(16) * 1e-8]),
    "beside the smallest scale": np.concatenate(
        [[6.0] + [0.0] * 15, *([x * 2.0**-14 * 6] + [0.5 * x * 2.0**-14] * 15 for x in (0.9, 0.96, 0.97, 1))]
    ),
    "outlier column": outliers(),
    "all equal": np.full(80, -0.3),
    "one alone": np.array([0.7]),
    "odd length": RANDOM.standard_normal(333),
    "ragged last block": RANDOM.standard_normal((5, 13)),
    "ties": np.array(
        [6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -5, -3.5, -2.5, -1.75, -1.25, -0.75, -0.25, 4.0]
    ),
    "levels": np.tile(NF4_LEVELS, 4),
    "middles of levels": np.array([*np.convolve(NF4_LEVELS, [0.5, 0.5], "valid"), 1.0] * 4),
    "largest": np.concatenate([[672.0, -336.0, 696.0], RANDOM.standard_normal(61) * 100]),
    "above the largest": np.concatenate([[3000.0], RANDOM.standard_normal(31), [-697.0] * 3]),
    "beside large": np.concatenate([[3e5], RANDOM.standard_normal(63) * 1e-2]),
    "largest bfloat16": np.concatenate([[3.3895314e38, -1.0], RANDOM.standard_normal(62)]),
    "largest float32": np.array([3.4028235e38, -3.4028235e38, 1.0, 0.0] * 4),
    "infinity": np.array([np.inf, 1.0, -np.inf, 0.0] * 8),
    "beside infinity": np.concatenate([[np.inf], RANDOM.standard_normal(63) * 1e-2]),
    "nan": np.concatenate([[np.nan], np.full(15, 2.0), RANDOM.standard_normal(48)]),
}
CORPUS = {name: numbers.astype(np.float32) for name, numbers in CORPUS.items()}


class Rounded(NamedTuple):
    """Blocks of B numbers, as a format has them."""

    codes: np.ndarray
    """[N, B], uint8."""
    scales: np.ndarray
    """[N, 1], in the format's type, without the tensor's."""
    numbers: np.ndarray
    """[N, B], float32: what codes and scales mean. NaN in blocks whose scale is none."""


def blocks_of(x, size):
    """Return numbers as float32 blocks, the last one filled with zeros."""
    flat = x.astype(np.float32).ravel()
    return np.pad(flat, (0, -len(flat) % size)).reshape(-1, size)


def largest_of(blocks):
    return np.abs(blocks).max(axis=-1, keepdims=True)


@np.errstate(all="ignore")
def nvfp4(blocks, tensor_scale):
    """Return blocks of 16 under a float32 scale of the tensor: arXiv 2509.25149, appendix B."""
    tensor_scale = np.float32(tensor_scale)
    scales = (largest_of(blocks) / np.float32(6) / tensor_scale).astype(ml_dtypes.float8_e4m3fn)
    whole = scales.astype(np.float32) * tensor_scale
    ratio = np.clip(blocks / np.where(whole == 0, np.float32(1), whole), -6, 6)
    ratio = np.where(np.isnan(whole), np.float32(0), ratio).astype(ml_dtypes.float4_e2m1fn)
    return Rounded(ratio.view(np.uint8), scales, ratio.astype(np.float32) * whole)


@np.errstate(all="ignore")
def nf4(blocks, scale_type=np.float32):
    """Return blocks after QLoRA: every level is tried, in float64; of two as near it is the lower one."""
    scales = largest_of(blocks).astype(scale_type)
    whole = scales.astype(np.float32)
    ratio = (blocks / np.where(whole == 0, np.float32(1), whole)).astype(np.float64)
    ratio = np.where(np.isfinite(whole), ratio, 0.0)
    codes = np.abs(ratio[..., None] - NF4_LEVELS).argmin(axis=-1).astype(np.uint8)
    whole = np.where(np.isfinite(whole), whole, np.float32(np.nan))
    return Rounded(codes, scales, NF4_LEVELS[codes] * whole)


def usual_tensor_scale(blocks):
    """Return NVFP4's published scale of a tensor: the largest weight is 6 x 448 of it."""
    return np.abs(blocks).max() / np.float32(6 * 448)
