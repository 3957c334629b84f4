"""The base of recipes: how the operands of a layer are rounded, and what multiplies them.

A family of recipes (tiles, MX, NVFP4) is one subclass, which names its emulation, the operands that a monitor
counts, and the tensor cores that it needs; its other backends stand in ``families``. All else is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol, Self

import torch

from nanotrain_core.api.torch import GEMMBackend, PreparesWeights, QuantizedActivations
from nanotrain_fp8_deepseek_v3.operand_cache import OperandCache
from nanotrain_fp8_deepseek_v3.units import Units

if TYPE_CHECKING:
    from nanotrain_fp8_deepseek_v3.gemm import Emulation

#: Operands: of y = x W^T and dx = dy W, and of dW = dy^T x if it is rounded otherwise there.
X, W, DY, X_OF_DW, DY_OF_DW = "x", "W", "dy", "x of dW", "dy of dW"
#: Of dx, where the weight is rounded otherwise than for y.
W_OF_DX = "W of dx"


class Rounded(Protocol):
    """A rounded operand."""

    def at_largest(self) -> torch.Tensor:
        """Return which codes are the format's largest number, with either sign. Call it before ``values``."""
        ...

    def values(self) -> torch.Tensor:
        """Return the values, float32."""
        ...


class Recipe:
    """How the operands of one layer are rounded. Hashable: backends cache by it."""

    COMPARED: ClassVar = True
    """Whether torch's GEMMs of them are compared with the emulation before they are used: no test of this
    project has run them on a device."""

    @property
    def units(self) -> Units:
        """The tensor cores that multiply these operands."""
        raise NotImplementedError

    @property
    def key(self) -> str:
        """The recipe as the key of an operator in a graph, without what does not affect products."""
        raise NotImplementedError

    @classmethod
    def of_key(cls, key: str) -> Self:
        """Return the recipe of a key."""
        raise NotImplementedError

    @property
    def operands(self) -> tuple[str, ...]:
        """The rounded operands, one for each rounding."""
        raise NotImplementedError

    def round(self, operand: str, x: torch.Tensor) -> tuple[torch.Tensor, Rounded]:
        """Return what is rounded of one of :attr:`operands`, and the result. ``x`` is of one weight."""
        raise NotImplementedError

    def emulated(self, cache: OperandCache | None = None) -> Emulation:
        """Return the emulation, which is the reference, outside graphs."""
        raise NotImplementedError


class LowBitGEMM(QuantizedActivations, PreparesWeights, GEMMBackend):
    """A backend that rounds the operands of its GEMMs according to a recipe."""

    recipe: Recipe
