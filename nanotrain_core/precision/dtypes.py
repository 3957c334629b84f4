"""Casts a model, except parameters that must keep their dtype."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

_ATTRIBUTE = "nanotrain_kept"

M = TypeVar("M", bound=nn.Module)


def keep_dtype(module: M, *names: str) -> M:
    """Make every precision leave these parameters of ``module`` in the dtype they were built with.

    For state that is not a weight, such as a router's bias: its steps are too small for bfloat16.
    """
    setattr(module, _ATTRIBUTE, frozenset(names) | getattr(module, _ATTRIBUTE, frozenset()))
    return module


def kept_dtypes(part: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtype of every parameter below ``part`` that :func:`keep_dtype` was called for, by name."""
    return {
        name: parameter.dtype
        for prefix, module in part.named_modules()
        for name, parameter in module.named_parameters(prefix, recurse=False)
        if name.rpartition(".")[2] in getattr(module, _ATTRIBUTE, ())
    }


def cast(part: M, dtype: torch.dtype) -> M:
    """Cast every floating-point parameter below ``part``, on ``meta``, except those of :func:`keep_dtype`."""
    kept = kept_dtypes(part)
    for name, parameter in part.named_parameters():
        if name not in kept and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return part
