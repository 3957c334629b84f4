"""DTensors in a model part, as torch's ``fully_shard`` makes them, expressed as the core's placements.

A wrapper may create some in :meth:`~nanotrain_core.contracts.Parallel.shard`. Their DeviceMesh determines
along which dimensions of the run's layout they are sharded. The core records the local tensor of each and its
position in the whole model; initialization, optimizers, norms, checkpoints and monitors need nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from nanotrain_core.layout.layout import Layout
    from nanotrain_core.layout.placement import Placement, Placements


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Return whether ``tensor`` is a DTensor, without importing their module, which takes a second."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, sharing memory, without a graph; any other tensor unchanged."""
    return tensor.to_local().detach() if is_dtensor(tensor) else tensor


def local_parameter(parameter: nn.Parameter) -> tuple[nn.Parameter, DTensor | None]:
    """Return a parameter that shares the memory of a DTensor's local tensor, and the DTensor.

    Any other parameter is returned unchanged, with None.
    """
    if not is_dtensor(parameter):
        return parameter, None
    return nn.Parameter(local_of(parameter), parameter.requires_grad), parameter


def read_dtensors(parts: Iterable[nn.Module], placements: Placements, layout: Layout) -> None:
    """Record in ``placements`` along which dimensions the DTensors of ``parts`` are sharded.

    Raises:
        ValueError: a DeviceMesh has dimensions that the layout lacks, or other ranks along one; or a DTensor
            is placed in a way that a :class:`Placement` cannot express.
    """
    for part in parts:
        for name, parameter in part.named_parameters():
            if is_dtensor(parameter):
                placements[name] = _placement(parameter, placements[name], layout)


def _placement(tensor: Any, before: Placement, layout: Layout) -> Placement:
    """Return the placement of a DTensor's local tensor, given the placement of the sharded tensor."""
    found, mesh = before, tensor.device_mesh
    for number, (dim, how) in enumerate(zip(mesh.mesh_dim_names or (), tensor.placements, strict=True)):
        size = mesh.size(number)
        if dim not in layout.views[before.view].dims or layout.size(dim) != size:
            known = ", ".join(f"{each} of {layout.size(each)}" for each in layout.views[before.view].dims)
            raise ValueError(
                f"parameter {before.name} is a DTensor along {dim!r} of {size} ranks; expected a DeviceMesh "
                f"with mesh_dim_names of this layout: {known}"
            )
        if how.is_replicate() or dim in before.sharded:
            continue
        if type(how).__name__ != "Shard":
            raise ValueError(
                f"parameter {before.name} is a DTensor placed as {how} along {dim!r}; "
                "expected Shard or Replicate"
            )
        length, index = found.shape[how.dim], mesh.get_local_rank(number)
        chunk = -(-length // size)  # as torch.chunk splits: the last ranks may have fewer, or none
        found = found.cut(how.dim, dim, min(length, chunk * index), min(length, chunk * (index + 1)))
    return found
