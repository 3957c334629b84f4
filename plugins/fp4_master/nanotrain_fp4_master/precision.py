"""The ``fp4_master`` component: selects the storage format and the master of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import attrs
import torch
from torch import nn

from nanotrain_core.api import NanotrainError, lies_in, tagged
from nanotrain_core.api.torch import (
    RANGE,
    DequantizingGEMM,
    GEMMBackend,
    LiveMaster,
    MasterWeight,
    Mesh,
    Passes,
    Piece,
    Placement,
    Precision,
    TorchGEMM,
    cast,
    gemm_parameters,
    unquantized,
    use_gemm,
)
from nanotrain_fp4_master import BLOCKS, FP4MasterConfig, bfloat16, lowbit
from nanotrain_fp4_master.blocks import Format, NF4Blocks, NVFP4Blocks
from nanotrain_fp4_master.noise import Clock, Noise, cut_blocks
from nanotrain_fp4_master.packing import FourBits
from nanotrain_fp4_master.table import Row, lines, of_all_stages, summed

FORMATS = {"nvfp4": NVFP4Blocks, "nf4": NF4Blocks}
LOW_BIT: dict[str, Callable[..., lowbit.Naive]] = {
    "residual": lowbit.Residual,
    "eco": lowbit.Eco,
    "naive": lowbit.Naive,
}
BFLOAT16: dict[str, Callable[[torch.Tensor], MasterWeight]] = {
    "residual": bfloat16.Residual8,
    "remainder": bfloat16.Remainder,
    "naive": bfloat16.Naive,
}


class FP4Master(Precision):
    """See :class:`~nanotrain_core.contracts.Precision`."""

    parameter_dtype = torch.bfloat16
    gradient_dtype = torch.float32

    def __init__(self, config: FP4MasterConfig) -> None:
        self.config = config
        self.passes = Passes()
        self.gemm: GEMMBackend = TorchGEMM()
        self.loss_scale = self.clock = Clock(config.weights)
        self.roles: dict[str, str] = {}
        self.packed: set[str] = set()
        self.rows: list[Row] = []

    def setup(self, seed: int, passes: Passes, gemm: GEMMBackend) -> None:
        """Seed stochastic rounding with the run's seed; keep the run's passes and GEMM backend."""
        self.clock.seed, self.passes, self.gemm = seed, passes, gemm

    def convert(self, part: nn.Module) -> nn.Module:
        """Cast to bfloat16, and note what role each parameter's module has."""
        for prefix, module, found in tagged(part):  # outermost first: the innermost role counts
            for name, _ in module.named_parameters(prefix=prefix):
                self.roles[name] = found.role.name.lower()
        cast(part, self.parameter_dtype)
        if self.config.form in FORMATS and self.config.packed:
            self._unpack_for_products(part)
        return part

    def check_parts(self, parts: Sequence[nn.Module], mesh: Mesh) -> None:
        """Reject patterns that match no parameter, and build the table of all stages. Gathers over pp.

        Raises:
            NanotrainError: a pattern matches nothing; the text has the pattern and the nearest name.
        """
        parameters = [named for part in parts for named in part.named_parameters()]
        names = [name for name, _ in parameters]
        self.rows = of_all_stages(names, self.table(parameters), self.config.keep, mesh)

    def describe(self) -> list[str]:
        """Return lines with the bytes per parameter of weights and masters, by role and in total."""
        return lines(self.rows)

    def _unpack_for_products(self, part: nn.Module) -> None:
        """Make the GEMMs of low-bit weights dequantize them, and record that these weights can be packed."""
        for prefix, module, _ in tagged(part):
            names = {name: f"{prefix}.{name}" if prefix else name for name in gemm_parameters(module)}
            low = {full for name, full in names.items() if self._may_be_packed(full, getattr(module, name))}
            if low:
                use_gemm(module, dict.fromkeys(names, DequantizingGEMM(self.gemm)), self.passes)
                self.packed |= low

    def _may_be_packed(self, name: str, weight: nn.Parameter) -> bool:
        """Return whether a weight gets a low-bit master: not if it is frozen or has another dtype."""
        own = weight.dtype == self.parameter_dtype and weight.requires_grad
        return own and self.is_low(name, weight.dim())

    def packing(self, name: str, parameter: nn.Parameter) -> FourBits | None:
        """Return the format of weights in four bits."""
        return self.four_bits if name in self.packed else None

    def is_low(self, name: str, dimensions: int) -> bool:
        """Return whether a parameter gets the format and variant; without a model, every matrix does."""
        kept = any(lies_in(name, pattern) for pattern in self.config.keep)
        role = self.roles.get(name, "none") if self.roles else self.config.roles[0]
        return not kept and dimensions > 1 and role in self.config.roles

    def master(self, weight: torch.Tensor, piece: Piece) -> MasterWeight:
        """Return the master of a weight, which is rounded to the format.

        Raises:
            NanotrainError: a block would lie on two ranks, or a weight is beyond the largest of the format.
        """
        if weight.dtype != self.parameter_dtype:  # a module keeps it in a dtype of its own
            return LiveMaster(weight)
        if not self.is_low(piece.placement.name, len(piece.placement.global_shape)):
            return bfloat16.Remainder(weight)
        noise = Noise(piece, self.clock, weight.device)
        if self.config.form == "bf16":
            return of_bfloat16(self.config.variant, weight, noise)
        if cut_blocks(piece, self.config.block):
            raise NanotrainError(straddling(piece, self.config))
        form = self.four_bits.form
        check_largest(piece, unquantized(weight), form)
        return LOW_BIT[self.config.variant](weight, form, noise)

    @cached_property
    def four_bits(self) -> FourBits:
        """The format of low-bit weights, if it has four bits."""
        return FourBits(FORMATS[self.config.form](self.config.block))

    def table(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> list[Row]:
        """Return what parameters got, those alike in one row."""
        found = ((self._kind(name, parameter), parameter.numel()) for name, parameter in parameters)
        return summed(Row(role, weights, count, each) for (role, weights, each), count in found)

    def _kind(self, name: str, parameter: torch.Tensor) -> tuple[str, str, float]:
        kept = any(lies_in(name, pattern) for pattern in self.config.keep)
        role = "pattern" if kept else self.roles.get(name, "none")
        if parameter.dtype != self.parameter_dtype:
            return role, str(parameter.dtype).removeprefix("torch."), parameter.dtype.itemsize
        if not parameter.requires_grad:
            return role, "bf16, frozen", 2.0
        if not self.is_low(name, parameter.dim()):
            return role, "bf16 remainder", 4.0
        beside = {"residual": 1.0, "remainder": 2.0}.get(self.config.variant, 0.0)
        weights, held = f"{self.config.form} {self.config.variant}", 2.0
        if name in self.packed:
            held = self.four_bits.width / RANGE
        elif self.config.form in FORMATS:
            weights += ", not packed"
        return role, weights, held + beside


def of_bfloat16(variant: str, weight: torch.Tensor, noise: Noise) -> MasterWeight:
    """Return the master of a weight that is rounded to bfloat16 only."""
    if variant == "eco":
        return bfloat16.Eco(weight, noise)
    return BFLOAT16[variant](weight)


def check_largest(piece: Piece, numbers: torch.Tensor, form: Format) -> None:
    """Reject weights that are too large for any scale of the format, before rounding. Waits for the device.

    Raises:
        NanotrainError: a weight is too large; the text has the parameter and the weight.
    """
    low, high = numbers.aminmax()
    largest = torch.maximum(-low, high).float()
    if form.fit(largest).scales(largest.view(1, 1), None).isnan():
        raise NanotrainError(
            f"{piece.name}: its largest weight is {largest.item():g}, and the largest that its format has is "
            f'{form.codec.LARGEST_WEIGHT:g}: to keep it as it is, precision.keep = ["{piece.placement.name}"]'
        )


def straddling(piece: Piece, config: FP4MasterConfig) -> str:
    """Return an error text: blocks of this piece lie on several ranks; with the nearest valid settings."""
    placement, size = piece.placement, config.block
    remedies = [
        f"{fewer} in place of {ranks} ranks along its axis {axis}"
        for axis, ranks, fewer in largest_whole(placement, size)
    ]
    smaller = [other for other in BLOCKS[config.form] if other < size]
    remedies += [f"precision.block_size = {other}" for other in smaller if not cut(placement, other)][:1]
    remedies.append(f'to keep it, precision.keep = ["{placement.name}"]')
    return (
        f"{piece.name}: blocks of {size} weights that share a scale in {config.form} would lie on several "
        f"ranks: this one holds {tuple(placement.shape)} of {tuple(placement.global_shape)} from "
        f"{tuple(placement.offset)} on. Nearest that does not: {'; or '.join(remedies)}"
    )


def cut(placement: Placement, block: int) -> bool:
    """Return whether the blocks of a tensor that is split so lie on several ranks."""
    return cut_blocks(Piece(nn.Parameter(torch.empty(0)), placement), block)


def largest_whole(placement: Placement, block: int) -> Iterator[tuple[int, int, int]]:
    """Yield each axis, its number of ranks, and the largest lower one that cuts no block, if any."""
    for axis, (length, own) in enumerate(zip(placement.global_shape, placement.shape, strict=True)):
        ranks = length // own
        for fewer in (n for n in range(ranks - 1, 0, -1) if length % n == 0):
            second = attrs.evolve(
                placement,
                shape=replaced(placement.shape, axis, length // fewer),
                offset=replaced(placement.offset, axis, length // fewer if fewer > 1 else 0),
            )
            if not cut(second, block):
                yield axis, ranks, fewer
                break


def replaced(numbers: tuple[int, ...], axis: int, number: int) -> tuple[int, ...]:
    """Return ``numbers`` with another one at ``axis``."""
    return (*numbers[:axis], number, *numbers[axis + 1 :])
