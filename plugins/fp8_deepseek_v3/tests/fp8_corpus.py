"""Arrays of numbers that are difficult to round."""

import ml_dtypes
import numpy as np
from nanotrain_fp8_deepseek_v3.formats import TILE


def every_exponent(rows, columns):
    """Numbers of all sizes, subnormal ones of float32 among them."""
    rng = np.random.default_rng(0)
    exponents = rng.integers(-149, 127, (rows, columns)).astype(np.float64)
    return rng.choice([-1.0, 1.0], (rows, columns)) * rng.uniform(1, 2, exponents.shape) * 2.0**exponents


def on_the_grid(rows, columns):
    """Every number of the format, and every middle between two, where rounding must go to the even one."""
    numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    numbers = np.sort(numbers[np.isfinite(numbers)])
    both = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2])
    wanted = np.resize(both, (rows, columns))
    wanted[:, ::TILE] = 448.0  # have a scale of one in tiles along rows
    return wanted


def normal(rows, columns):
    return np.random.default_rng(1).normal(size=(rows, columns))


def with_outliers(rows, columns):
    x = normal(rows, columns)
    x[:, columns // 2] *= 1e4
    x[rows // 2] *= 1e-6
    return x


def not_finite(rows, columns):
    x = normal(rows, columns)
    x[0, 0], x[rows // 2, columns - 1], x[rows - 1, columns // 2] = np.inf, -np.inf, np.nan
    return x


CORPUS = {
    "normal": normal,
    "every_exponent": every_exponent,
    "on_the_grid": on_the_grid,
    "outliers": with_outliers,
    "not_finite": not_finite,
    "zeros": lambda rows, columns: np.zeros((rows, columns)),
    "equal": lambda rows, columns: np.full((rows, columns), -0.3),
    "largest": lambda rows, columns: np.full((rows, columns), np.finfo(np.float32).max),
    "smallest": lambda rows, columns: np.full((rows, columns), 2.0**-149),
}
