"""Weights in DeepSeek-V3's release format: E4M3, with a scale per block of 128 x 128 elements.

Source: DeepSeek-V3's own ``README_WEIGHTS.md``, "FP8 Weight Documentation": element times scale of its block,
    which its own tools also round to bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nanotrain_core.checkpoint.safetensors_files import Shards
from nanotrain_core.errors import CheckpointError
from nanotrain_core.hf.mapping import HFError

E4M3 = "F8_E4M3"
SCALE = "_scale_inv"
"""Suffix of the name of a weight's scales. Despite this name, elements are multiplied by them."""
_SCALES = ("F32", "BF16", "F16", "F8_E8M0")
"""Dtypes of scales whose values are the scales themselves; integers would be their exponents."""


class BlockScaled:
    """The tensors of a folder, with those in E4M3 dequantized as they are read.

    Raises:
        CheckpointError: a tensor in E4M3 lacks its scales, or they have another shape or dtype.
        HFError: ``options`` specifies another format than blocks of E4M3.
    """

    def __init__(self, folder: Path, shards: Shards, options: Mapping[str, Any]) -> None:
        self._shards, self._block = shards, _block_size(options)
        narrow = [name for name, code in shards.dtypes.items() if code == E4M3]
        problem = next((text for name in narrow for text in _misfit(name, shards, self._block)), None)
        if problem:
            raise CheckpointError(f"{folder}: {problem}")
        self._narrow = frozenset(narrow)
        scales = {name + SCALE for name in narrow}
        kept = [name for name in shards.shapes if name not in scales]
        self.shapes = {name: shards.shapes[name] for name in kept}
        self.dtypes = {name: "BF16" if name in self._narrow else shards.dtypes[name] for name in kept}

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Return a block of a tensor; only the scales that it needs are read."""
        found = self._shards.read(name, index)
        if name not in self._narrow:
            return found
        parts = list(zip(index, self._block, strict=True))
        spans = tuple(slice(part.start // size, -(-part.stop // size)) for part, size in parts)
        scale = self._shards.read(name + SCALE, spans).float()
        for axis, (part, size) in enumerate(parts):
            each = torch.arange(part.start, part.stop) // size - part.start // size
            scale = scale.index_select(axis, each)
        return found.float().mul_(scale).bfloat16()


def _block_size(options: Mapping[str, Any]) -> tuple[int, int]:
    if not isinstance(options, Mapping):
        raise HFError(f"config.json: quantization_config is {options!r}; expected a table")
    method, form = options.get("quant_method"), options.get("fmt", "e4m3")
    size = options.get("weight_block_size")
    sizes = size if isinstance(size, list) and len(size) == 2 else [0]
    if method != "fp8" or form != "e4m3" or any(type(each) is not int or each < 1 for each in sizes):
        raise HFError(
            f"it is quantized ({method}); only fp8 in e4m3 with weight_block_size, as DeepSeek-V3 was "
            "released, can be read: convert it to bfloat16 with its own tools first"
        )
    return sizes[0], sizes[1]


def _misfit(name: str, shards: Shards, block: tuple[int, int]) -> Iterator[str]:
    shape = shards.shapes[name]
    wanted = tuple(-(-size // of) for size, of in zip(shape, block, strict=False))
    found = shards.shapes.get(name + SCALE)
    if found != wanted or len(shape) != len(block):
        scales = f"its scales {name + SCALE} have shape {found}, expected {wanted}"
        yield f"{name} is stored as {E4M3} in shape {shape}: {scales}"
    elif (code := shards.dtypes[name + SCALE]) not in _SCALES:
        yield f"{name + SCALE} has scales stored as {code}; only {', '.join(_SCALES)} can be read"
