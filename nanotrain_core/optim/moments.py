"""Low-precision optimizer states: AdamW's moments in float32, in bfloat16, or companded to 8 bits.

They are dequantized to the master's dtype, updated by the usual kernel, and quantized again (rounding to
nearest), in waves: only the moments of some pieces are dequantized at any time. The run's kernels may have
one that does all of this at once.

``bfloat16`` is DeepSeek-V3's choice. It has 8 significant bits, so a relative change below 2^-9 to 2^-8 is
rounded away. One step changes the second moment by at most 1 - beta2 of its value when gradients are steady
or shrinking: at beta2 = 0.999 that change is always lost, in ``bfloat16`` and in ``int8``, whose scale is
rounded up. Hence beta2 above 0.99 is refused with both
(:func:`~nanotrain_core.optim.moment_groups.check_moments`).

``int8`` is FlashOptim's: groups of 32 consecutive elements of a row share a scale, and moments are companded
before they are rounded, since most are far below their group's largest: the first to 2x / (1 + |x|), the
second to its root. There are two differences. Scales are bfloat16, rounded up, so that nothing is clipped and
the second moment's need no root. And a nonzero second moment never becomes 0, by which the update would be
divided; it is taken as 1/255 of the root of its group's largest, so that the update is too small, not far too
large.

Groups lie in rows of the global tensor, so they are the same on every layout, and codes and scales are
resharded between layouts bit by bit. Tensors whose rows are not a multiple of a group keep float32 moments,
and so do vectors, such as the weights of norms: they are small, and may be split anywhere.

Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.3; Gonzalez Ortiz et al., "FlashOptim", arXiv 2602.23349,
section 3.2.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from nanotrain_core.contracts import Kernels
from nanotrain_core.errors import NanotrainError, expect_result
from nanotrain_core.layout.placement import Piece
from nanotrain_core.optim.fused_adamw import fused_adamw
from nanotrain_core.optim.master_shards import waves
from nanotrain_core.optim.moment_groups import GROUP

FIRST, SECOND = "exp_avg", "exp_avg_sq"
CODE, SCALE = "_code", "_scale"

State = dict[str, torch.Tensor]


def initial_moments(weight: torch.Tensor, piece: Piece, dtype: str, *, carries: bool) -> State:
    """Return both moments of a piece at zero.

    Args:
        weight: as the optimizer sees it, in its dtype.
        piece: its position in the global tensor.
        dtype: the key ``optimizer.moment_dtype``.
        carries: whether the first moment carries rounding errors, for which eight bits are too few.

    Raises:
        NanotrainError: a group would be split between ranks.
    """
    if dtype == "float32" or (dtype == "int8" and not in_groups(piece)):
        return {name: torch.zeros_like(weight) for name in (FIRST, SECOND)}
    narrow = {name: torch.zeros_like(weight, dtype=torch.bfloat16) for name in (FIRST, SECOND)}
    if dtype == "bfloat16":
        return narrow
    first = {FIRST: narrow[FIRST]} if carries else empty_codes(FIRST, torch.int8, weight)
    return {**first, **empty_codes(SECOND, torch.uint8, weight)}


def empty_codes(name: str, dtype: torch.dtype, weight: torch.Tensor) -> State:
    """Return codes for as many elements as there are weights, and a scale for each group, all zero."""
    shape = [*weight.shape[:-1], weight.shape[-1] // GROUP]
    return {
        f"{name}{CODE}": torch.zeros_like(weight, dtype=dtype),
        f"{name}{SCALE}": torch.zeros(shape, dtype=torch.bfloat16, device=weight.device),
    }


def in_groups(piece: Piece) -> bool:
    """Return whether the global tensor has rows, of whole groups.

    Raises:
        NanotrainError: they do, but this rank's part of a row does not.
    """
    placement = piece.placement
    if len(placement.global_shape) < 2 or placement.global_shape[-1] % GROUP:
        return False
    if placement.shape[-1] % GROUP or placement.offset[-1] % GROUP:
        ranks, groups = placement.global_shape[-1] // placement.shape[-1], placement.global_shape[-1] // GROUP
        fewer = max(n for n in range(1, ranks) if groups % n == 0)
        raise NanotrainError(
            f"{placement.name}: with optimizer.moment_dtype = 'int8' {GROUP} neighbors in a row share a "
            f"scale, but its rows of {placement.global_shape[-1]} are split over {ranks} ranks; expected at "
            f"most {fewer}, or 'bfloat16'"
        )
    return True


def grouped(piece: Piece) -> Piece:
    """Return the placement of a piece's scales, in a tensor with rows :data:`GROUP` times shorter."""
    placement = piece.placement

    def shorter(numbers: tuple[int, ...]) -> tuple[int, ...]:
        return (*numbers[:-1], numbers[-1] // GROUP)

    names = ("global_shape", "shape", "offset")
    shapes: dict[str, Any] = {name: shorter(getattr(placement, name)) for name in names}
    span = piece.span and (piece.span[0] // GROUP, piece.span[1] // GROUP)
    return attrs.evolve(piece, placement=attrs.evolve(placement, **shapes), span=span)


def load(state: State, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a moment in ``dtype``: the live tensor if it is stored in it."""
    if name in state:
        return state[name].to(dtype)
    code, scale = state[name + CODE], state[name + SCALE]
    blocks = code.view(-1, GROUP).float()
    wide = expand_first(blocks) if name == FIRST else expand_second(blocks)
    return wide.mul_(scale.view(-1, 1)).view(code.shape).to(dtype)


def store(state: State, name: str, value: torch.Tensor, unless: torch.Tensor | None = None) -> None:
    """Store a moment, rounded to nearest; keep the old value if ``unless``, a scalar on the device, is 1."""
    if name in state:
        state[name].copy_(value)
        return
    code, scale = state[name + CODE], state[name + SCALE]
    blocks = value.float().view(-1, GROUP)
    largest = rounded_up(blocks.abs().amax(dim=1, keepdim=True))
    ratio = blocks / torch.where(largest == 0, 1.0, largest)
    compressed = compress_first(ratio) if name == FIRST else compress_second(ratio)
    for kept, new in ((code, compressed), (scale, largest)):
        value = new.view(kept.shape).to(kept.dtype)
        kept.copy_(value if unless is None else torch.where(unless == 1, kept, value))


def load_all(states: list[State], name: str, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a moment of several weights, each in its weight's dtype, as :func:`load` does."""
    if not all(name in s and s[name].dtype != w.dtype for s, w in zip(states, weights, strict=True)):
        return [load(state, name, weight.dtype) for state, weight in zip(states, weights, strict=True)]
    found = [torch.empty_like(s[name], dtype=w.dtype) for s, w in zip(states, weights, strict=True)]
    torch._foreach_copy_(found, [state[name] for state in states])
    return found


def store_all(
    states: list[State], name: str, values: list[torch.Tensor], unless: torch.Tensor | None
) -> None:
    """Store a moment of several weights, as :func:`store` does."""
    if all(name in state for state in states):
        torch._foreach_copy_([state[name] for state in states], values)
        return
    for state, value in zip(states, values, strict=True):
        store(state, name, value, unless)


def rounded_up(positive: torch.Tensor) -> torch.Tensor:
    """Return ``positive`` rounded up to bfloat16 values, in float32."""
    return ((positive.contiguous().view(torch.int32) + 0xFFFF) >> 16 << 16).view(torch.float32)


def compress_first(ratio: torch.Tensor) -> torch.Tensor:
    """Return codes -127 to 127 for values between -1 and 1."""
    return (ratio * (2 * 127) / (1 + ratio.abs())).round_()


def expand_first(code: torch.Tensor) -> torch.Tensor:
    """Invert :func:`compress_first`."""
    return code / (2 * 127 - code.abs())


def compress_second(ratio: torch.Tensor) -> torch.Tensor:
    """Return codes 0 to 255 for values between 0 and 1; only 0 has code 0."""
    return (ratio.sqrt() * 255).round_().maximum((ratio > 0).float())


def expand_second(code: torch.Tensor) -> torch.Tensor:
    """Invert :func:`compress_second`. On CUDA torch multiplies by 1 / a Python number: this divides."""
    return (code / code.new_full((), 255)).square_()


class LowPrecisionAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` with moments of lower precision than the weight."""

    found_inf: torch.Tensor | None = None
    """1 on the device if the step must change nothing, as in torch's fused optimizers."""

    def __init__(self, groups: Any, *, kernels: Kernels | None = None, **options: Any) -> None:
        super().__init__(groups, **options)
        self.kernels = kernels or Kernels()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every weight that has a gradient. No closure is called."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            states = [self.state[weight] for weight in weights]
            others = self.kernels.low_precision_adamw(weights, states, group, self.found_inf)
            who = f"kernels {type(self.kernels).__name__}"
            for wave in waves(expect_result(who, "low_precision_adamw", others, list)):
                self._update(wave, group)

    def _update(self, weights: list[torch.Tensor], group: dict[str, Any]) -> None:
        states = [self.state[weight] for weight in weights]
        first, second = (load_all(states, name, weights) for name in (FIRST, SECOND))
        gradients, steps = [weight.grad for weight in weights], [state["step"] for state in states]
        fused_adamw(weights, gradients, first, second, steps, group, self.found_inf)
        store_all(states, FIRST, first, self.found_inf)
        store_all(states, SECOND, second, self.found_inf)
