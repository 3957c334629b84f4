"""A weight that the precision stores packed is saved as values, and loaded into its packed storage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs
import torch

from nanotrain_core.contracts import Block, Checkpoint, TrainState
from nanotrain_core.layout.ranges import RANGE
from nanotrain_core.precision.quantized_storage import PackedWeight, dequantize, storage_of
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check
from nanotrain_core.testing.compare import assert_bitwise
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.saving import load, named, numbered, open_state, temporary_folder


class Sixteenths:
    """Multiples of 1/16 from -8 to 7.9375, a byte each."""

    name, width = "sixteenths", RANGE

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def rounded(self, numbers: torch.Tensor) -> torch.Tensor:
        """Round to nearest."""
        return (numbers * 16).round().clamp(-128, 127) / 16

    def pack(self, numbers_n: torch.Tensor) -> torch.Tensor:
        """Return rows of integers with an offset of 128."""
        rows = numbers_n.new_zeros(-(-len(numbers_n) // RANGE) * RANGE)
        rows[: len(numbers_n)] = numbers_n
        return (rows * 16 + 128).to(torch.uint8).view(-1, RANGE)

    def unpack(self, rows_UW: torch.Tensor) -> torch.Tensor:
        """Return the values in the dtype of the weights."""
        return (rows_UW.to(self.dtype).flatten() - 128) / 16


@check("checkpoint", since="0.3")
def packed_weights_come_back(case: Case) -> None:
    """A packed weight is saved as its values at ``save``; loaded, it has them, and so has a plain one."""
    with temporary_folder() as folder:
        saved = run_ranks(save_packed, case.world_size, case, folder)
        packed = run_ranks(load_packed, case.world_size, case, folder)
        plain = run_ranks(load, case.world_size, case, folder, "1")
    for number, wanted in enumerate(saved):
        assert_bitwise(packed[number], wanted, f"packed weights of rank {number}")
        found = plain[number]
        assert found is not None, f"rank {number} found no checkpoint after a save"
        assert_bitwise(named(found.blocks), wanted, f"weights that are not packed, of rank {number}")


def open_packed(case: Case, folder: Path, seed: int) -> tuple[Checkpoint, TrainState]:
    """Return the case's checkpoint and a state whose weights are packed, those with a full row or more."""
    checkpoint, state = open_state(case, folder)
    blocks = [_packed(block) for block in numbered(state, seed).blocks]
    return checkpoint, attrs.evolve(state, blocks=blocks, meta={**state.meta, "step": seed})


def _packed(block: Block) -> Block:
    if "/" in block.name or block.tensor.numel() < RANGE:
        return block
    packing = Sixteenths(block.tensor.dtype)
    return attrs.evolve(block, tensor=PackedWeight.of(block.tensor, packing, trained=False))


def save_packed(case: Case, folder: Path) -> dict[str, torch.Tensor]:
    """Save, and change all storage as soon as that is allowed; return the values at the save."""
    checkpoint, state = open_packed(case, folder, 1)
    values = values_of(state.blocks)
    checkpoint.save(1, state)
    checkpoint.settle()
    for block in state.blocks:
        storage_of(block.tensor).fill_(1)
    checkpoint.advance(wait=True)
    return values


def load_packed(case: Case, folder: Path) -> dict[str, torch.Tensor]:
    """Load into packed weights with other values, and return theirs."""
    checkpoint, state = open_packed(case, folder, 2)
    checkpoint.load("1", state)
    return values_of(state.blocks)


def values_of(blocks: Sequence[Block]) -> dict[str, torch.Tensor]:
    """Return a copy of a rank's values, by name and offset."""
    return {name: dequantize(tensor).clone() for name, tensor in named(blocks).items()}
