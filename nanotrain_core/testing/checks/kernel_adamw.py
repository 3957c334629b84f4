"""AdamW's step on moments of low precision, where kernels have one, is that of plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from nanotrain_core.contracts import Kernels
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.placement import Piece, Placement
from nanotrain_core.optim import moments
from nanotrain_core.optim.moment_groups import GROUP
from nanotrain_core.optim.moments import FIRST, SECOND, LowPrecisionAdamW
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check
from nanotrain_core.testing.checks.kernels import kernels_of
from nanotrain_core.testing.compare import assert_bitwise

#: By name: the shape of the whole, the range of it that is updated, and its dtype.
MATRICES = {
    "a matrix": ((64, 256), None, torch.float32),
    "a range of a matrix": ((64, 64), (GROUP, 37 * GROUP), torch.float32),
    "one group": ((1, GROUP), None, torch.float32),
    "a matrix in float64": ((8, 64), None, torch.float64),
    "rows that are no groups": ((7, 9), None, torch.float32),
}
VECTORS = {"a vector": ((72,), None, torch.float32)}
#: The learning rate and ``found_inf`` of each step.
STEPS = ((0.01, None), (0.003, None), (0.003, 0.0), (0.003, 1.0), (0.02, None))
ALONE = Layout({"dense": View(("dp",), (1,))})
#: Rounding of a few operations in float32, relative to their inputs.
FINE = 1e-5
#: Largest distance of neighboring codes, relative to the largest moment of their group.
CODE = 0.03


@check("kernels", since="0.3", variants=("bfloat16", "int8", "carried"))
def low_precision_adamw_equals_pytorch(case: Case, form: str) -> None:
    """``low_precision_adamw`` makes the weights and moments of plain PyTorch, to the rounding of float32.

    Of matrices, ranges of them and vectors; ``carried`` is ``int8`` with first moments in bfloat16. A step
    whose ``found_inf`` is 1 changes nothing, and weights that are returned are as they were.
    """
    kernels, draw = kernels_of(case), torch.Generator().manual_seed(1)
    for weights_of, decay in ((MATRICES, 0.1), (VECTORS, 0.0)):
        ours, plain = (adamw(weights_of, form, decay) for _ in range(2))
        for number, (rate, skip) in enumerate(STEPS, start=1):
            gradients = [drawn(weight, draw) for weight in weights(plain)]
            for optimizer in (ours, plain):
                optimizer.param_groups[0]["lr"] = rate
                for weight, gradient in zip(weights(optimizer), gradients, strict=True):
                    weight.grad = gradient * (torch.nan if skip else 1.0)
            names = [f"step {number} of {name}" for name in weights_of]
            assert_same_step(kernels, ours, plain, None if skip is None else torch.tensor(skip), names)


def adamw(described: dict[str, Any], form: str, decay: float) -> LowPrecisionAdamW:
    """Return plain PyTorch's optimizer of such weights, before its first step."""
    random, found = torch.Generator().manual_seed(0), dict[nn.Parameter, Piece]()
    for name, (shape, span, dtype) in described.items():
        # So large that rounding them to float32 shows.
        whole = torch.randn(shape, generator=random).to(dtype) * (100 if dtype == torch.float64 else 1)
        piece = Piece(nn.Parameter(whole), Placement.whole(name, shape, ALONE), span)
        found[nn.Parameter(piece.weight.clone(), requires_grad=False)] = piece
    optimizer = LowPrecisionAdamW([*found], betas=(0.9, 0.95), eps=1e-8, weight_decay=decay)
    kind, carries = ("int8", True) if form == "carried" else (form, False)
    for weight, piece in found.items():
        kept = moments.initial_moments(weight, piece, kind, carries=carries)
        optimizer.state[weight] = {"step": torch.zeros(()), **kept}
    return optimizer


def drawn(weight: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Return a gradient whose elements are of very different sizes in every group, zeros at its beginning."""
    sizes = 10 ** (5 * torch.rand(weight.shape, generator=draw) - 4)
    gradient = torch.randn(weight.shape, generator=draw) * sizes
    gradient.view(-1)[: GROUP // 2] = 0.0
    return gradient.to(weight.dtype)


def weights(optimizer: LowPrecisionAdamW) -> list[torch.Tensor]:
    """Return the weights of its only group."""
    found: list[torch.Tensor] = optimizer.param_groups[0]["params"]
    return found


def tensors(optimizer: LowPrecisionAdamW, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a weight and its state by name: the live tensors."""
    return {"weight": weight.detach(), **optimizer.state[weight]}


@torch.no_grad()
def assert_same_step(
    kernels: Kernels,
    ours: LowPrecisionAdamW,
    plain: LowPrecisionAdamW,
    found_inf: torch.Tensor | None,
    names: Sequence[str],
) -> None:
    """Take a step with both, compare what the kernels updated, and have them go on from plain PyTorch's.

    Raises:
        AssertionError: with the first weight or moment that differs.
    """
    mine, live = weights(ours), [tensors(ours, weight) for weight in weights(ours)]
    before = [{name: tensor.clone() for name, tensor in each.items()} for each in live]
    states = [ours.state[weight] for weight in mine]
    others = [*kernels.low_precision_adamw(mine, states, ours.param_groups[0], found_inf)]
    left = {id(weight) for weight in others}
    assert len(left) == len(others), "low_precision_adamw returned a weight twice"
    assert left <= {id(weight) for weight in mine}, "low_precision_adamw returned what is none of the weights"
    plain.found_inf = found_inf
    plain.step()
    for what, weight, kept, old, other in zip(names, mine, live, before, weights(plain), strict=True):
        state, expected = ours.state[weight], tensors(plain, other)
        assert all(state.get(name) is kept[name] for name in kept.keys() - {"weight"}), (
            f"{what}: its state was replaced; expected to be written in place"
        )
        if id(weight) in left:
            assert_bitwise(
                kept, old, f"{what}, which low_precision_adamw returned for plain PyTorch to update"
            )
        elif found_inf is not None and found_inf:
            assert_bitwise(kept, old, f"{what}, which must change nothing as found_inf is 1")
        else:
            assert_same_update(kept, old, expected, other.grad, ours.param_groups[0]["lr"], what)
        for name, tensor in expected.items():
            kept[name].copy_(tensor)
        weight.grad = other.grad = None


def assert_same_update(
    got: dict[str, torch.Tensor],
    old: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    gradient: torch.Tensor | None,
    rate: float,
    what: str,
) -> None:
    """Compare a weight, its moments and its count of steps with plain PyTorch's after a step.

    Few moments lie so near to the middle of two codes that rounding decides between them.

    Raises:
        AssertionError: with the largest difference.
    """
    assert got["step"].equal(expected["step"]), (
        f"{what}: its step is {got['step'].item()}, expected {expected['step'].item()}"
    )
    weight, wanted = got["weight"].double(), expected["weight"].double()
    update = (wanted - old["weight"].double()).abs()
    rounding = 4 * torch.finfo(got["weight"].dtype).eps * old["weight"].double().abs()
    assert_within(weight, wanted, FINE * (update + rate) + rounding, 0, f"{what}: the weight")
    assert gradient is not None
    g = gradient.double().abs()
    for name, added in ((FIRST, g), (SECOND, g * g)):
        have, want, was = (moments.load(each, name, torch.float64) for each in (got, expected, old))
        fine = FINE * (was.abs() + added)
        if name not in got:
            largest = want.abs().view(-1, GROUP).amax(dim=1, keepdim=True)
            coarse = CODE * largest.expand(-1, GROUP).reshape(want.shape)
        else:
            coarse = want.abs() * torch.finfo(got[name].dtype).eps
        rounded = name not in got or got[name].dtype == torch.bfloat16
        few = 2 * GROUP + want.numel() // 100 if rounded else 0
        assert_within(have, want, fine, few, f"{what}: {name}")
        assert_within(have, want, fine + coarse, 0, f"{what}: {name}")


def assert_within(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor, few: int, what: str) -> None:
    """Raise an AssertionError if more than ``few`` elements differ by more than their bound."""
    away = (got - want).abs()
    beyond = ~(away <= bound)
    count = int(beyond.sum())
    assert count <= few, (
        f"{what} differs from plain PyTorch's in {count} of {got.numel()} elements; allowed: {few}; "
        f"the furthest is {float((away - bound).nan_to_num(torch.inf).max()):.3g} beyond its bound"
    )
