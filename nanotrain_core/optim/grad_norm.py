"""Gradient norm and clipping: the 2-norm of a whole model's gradient, from every rank's blocks of it.

Computed from placements, so it is the same value on every layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import Placement

#: The number of squares that are summed in their own dtype before float64 is used. A CPU adds them
#: sequentially: over 22 million in float32 it loses 0.2%, over 134 million 2.8%, and the clipped norm is too
#: large. A GPU adds in parallel.
LONGEST_SUM = 2**16


class GlobalNorm:
    """The 2-norm of a whole model's gradient, from every rank's blocks of it, in each step.

    A block held by n ranks counts 1/n on each, so one sum over the world counts every element once,
    whatever the layout. The result is bitwise equal on every rank.
    """

    def __init__(self, placements: Sequence[Placement], mesh: Mesh) -> None:
        """``placements``: those of the blocks passed to :meth:`of`, in that order."""
        self.mesh = mesh
        self.held_by: dict[int, list[int]] = {}
        """Block indices by the number of ranks that hold the block."""
        for number, placement in enumerate(placements):
            self.held_by.setdefault(placement.replicas(mesh.layout), []).append(number)

    def of(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """All-reduce the squared norms, and return the norm.

        Returns:
            A float64 scalar on the mesh's device, whatever the gradients' dtype: some ranks may have none.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for replicas, numbers in self.held_by.items():
            blocks = chunks_for_norm(gradients[number] for number in numbers)
            total += torch.stack(norms(blocks)).double().square().sum() / replicas
        self.mesh.all_reduce(total)
        return total.sqrt()


def norms(blocks: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the 2-norm of each block as a scalar, in float32 for 16-bit blocks: float16 would overflow."""
    wide = [torch.promote_types(block.dtype, torch.float32) for block in blocks]
    if all(block.dtype == dtype for block, dtype in zip(blocks, wide, strict=True)):
        return list(torch._foreach_norm(blocks))  # a few kernels for all of them
    return [torch.linalg.vector_norm(block, dtype=dtype) for block, dtype in zip(blocks, wide, strict=True)]


def global_norm(gradients: Iterable[tuple[torch.Tensor, Placement]], mesh: Mesh) -> torch.Tensor:
    """All-reduce and return the norm of all gradients of the run, float64. See :class:`GlobalNorm`."""
    pairs = list(gradients)
    return GlobalNorm([placement for _, placement in pairs], mesh).of([gradient for gradient, _ in pairs])


def chunks_for_norm(gradients: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return all elements of ``gradients`` in chunks that their device sums accurately."""
    found: list[torch.Tensor] = []
    for gradient in gradients:
        if gradient.is_cpu and gradient.numel() > LONGEST_SUM:
            found.extend(gradient.reshape(-1).unsafe_split(LONGEST_SUM))
        else:  # tensors transposed in memory would be summed in that order
            found.append(gradient if gradient.is_contiguous() else gradient.reshape(-1))
    return found


def named_norms(
    gradients: Iterable[tuple[torch.Tensor, Placement]], names: Sequence[str], mesh: Mesh
) -> list[float]:
    """All-reduce: return the 2-norm of each named tensor's gradient, from every rank's blocks or ranges.

    Like :func:`global_norm`, but separately for each name.

    Args:
        gradients: of this rank.
        names: of the whole model, the same on every rank.
        mesh: of the run.
    """
    position = {name: number for number, name in enumerate(names)}
    totals = torch.zeros(len(names), dtype=torch.float64, device=mesh.device)
    for gradient, placement in gradients:
        squares = torch.stack(norms(chunks_for_norm([gradient]))).double().square()
        totals[position[placement.name]] += squares.sum() / placement.replicas(mesh.layout)
    mesh.all_reduce(totals)
    found: list[float] = totals.sqrt().tolist()
    return found


def clip_factor(norm: torch.Tensor, limit: float, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the clip coefficient, in (0, 1], that reduces the global gradient norm to at most ``limit``.

    Args:
        norm: of all gradients of the run, a scalar.
        limit: 0 disables clipping, and the coefficient is 1.
        gradients: at least one of them, for the dtype of the returned scalar tensor: that dtype, or float32
            if that has higher precision.
    """
    norm = norm.to(torch.promote_types(torch.float32, gradients[0].dtype))
    return (limit / (norm + 1e-6)).clamp(max=1.0) if limit else torch.ones_like(norm)
