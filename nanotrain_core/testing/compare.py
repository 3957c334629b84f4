"""Assembles the blocks of all ranks and compares whole tensors, with values in the error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from nanotrain_core.checkpoint.tensor_boxes import box_slices
from nanotrain_core.contracts import Block

Whole = Mapping[str, torch.Tensor]

#: Two float64 runs that add in a different order differ by less.
EXACT = 1e-10

#: Why one process may lack parameters that the ranks have.
ADDED = (
    "; if the wrapper adds these parameters, name their AddedWeights in Component.added: the one "
    "process that it is compared with is then given the wrapper too"
)


def whole(blocks: Iterable[Sequence[Block]], *, atol: float = 1e-12) -> dict[str, torch.Tensor]:
    """Assemble global tensors from the blocks of every rank.

    Raises:
        AssertionError: ranks that hold the same element disagree, or nobody holds one.
    """
    tensors: dict[str, torch.Tensor] = {}
    held: dict[str, torch.Tensor] = {}
    for rank, mine in enumerate(blocks):
        for block in mine:
            target = tensors.setdefault(block.name, torch.zeros(block.global_shape, dtype=block.tensor.dtype))
            seen = held.setdefault(block.name, torch.zeros(block.global_shape, dtype=torch.bool))
            index = box_slices(block.offset, block.tensor.shape)
            overlap = seen[index]
            _same_on_replicas(block, target[index][overlap], block.tensor[overlap], rank, atol)
            target[index], seen[index] = block.tensor, True
    for name, seen in held.items():
        assert seen.all(), f"{name}: no rank holds {(~seen).sum()} of its {seen.numel()} elements"
    return tensors


def _same_on_replicas(block: Block, old: torch.Tensor, new: torch.Tensor, rank: int, atol: float) -> None:
    if old.numel() == 0:
        return
    error = (old.double() - new.double()).abs().max().item()
    assert error <= atol, f"{block.name}: rank {rank} and a rank before it differ by {error:.3g}"


def assert_same(actual: Whole, expected: Whole, what: str, *, atol: float = EXACT, rtol: float = 0.0) -> None:
    """Compare tensors by name.

    Raises:
        AssertionError: names or shapes differ, or a number by more than ``atol + rtol * |expected|``;
            the text has the worst tensor.
    """
    missing, surplus = expected.keys() - actual.keys(), actual.keys() - expected.keys()
    hint = "" if missing else ADDED
    assert not missing | surplus, f"{what}: missing {sorted(missing)}, unexpected {sorted(surplus)}{hint}"
    excess = {name: _excess(actual[name], expected[name], atol, rtol) for name in expected}
    worst = max(excess, key=lambda name: excess[name], default=None)
    if worst is None or excess[worst] <= 0:
        return
    got, want = actual[worst].double().flatten(), expected[worst].double().flatten()
    at = int((got - want).abs().nan_to_num(torch.inf).argmax())
    wrong = sum(value > 0 for value in excess.values())
    raise AssertionError(
        f"{what}: {wrong} of {len(excess)} tensors differ; {worst} is {got[at]:.10g} instead of "
        f"{want[at]:.10g} at element {at} (allowed: {atol:g} + {rtol:g} of the value)"
    )


def _excess(actual: torch.Tensor, expected: torch.Tensor, atol: float, rtol: float) -> float:
    """Return by how much the worst element exceeds its bound: at most 0 if none does."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if not actual.numel():
        return 0.0
    error = (actual.double() - expected.double()).abs() - atol - rtol * expected.double().abs()
    return error.nan_to_num(torch.inf).max().item()


def assert_bitwise(actual: Whole, expected: Whole, what: str) -> None:
    """Compare tensors by name, dtype and every bit."""
    assert_same(actual, expected, what, atol=0.0)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, (
            f"{what}: {name} is {actual[name].dtype}, not {tensor.dtype}"
        )


def assert_numbers(actual: Sequence[float], expected: Sequence[float], what: str, *, atol: float) -> None:
    """Compare two lists of numbers."""
    both = list(zip(actual, expected, strict=True))
    same = all(abs(a - e) <= atol for a, e in both)  # false for nan
    assert same, f"{what}: {list(actual)} instead of {list(expected)} (allowed: {atol:g})"
