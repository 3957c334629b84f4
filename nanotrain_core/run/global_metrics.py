"""Values that all ranks of a run need: global metrics and stop requests. All functions are collective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import PlacedParameter
from nanotrain_core.run.stop import StopRequest


def sum_over_data(
    values: torch.Tensor, mesh: Mesh, *, once_per_pipeline: bool = False, extra_sums: Sequence[float] = ()
) -> torch.Tensor:
    """All-reduce over the world values that differ between data ranks, each replica once, in float64.

    Args:
        values: this rank's, [N].
        mesh: of the run.
        once_per_pipeline: count one stage only: batch statistics are the same on all. Losses differ by stage
            and are summed.
        extra_sums: M values that are summed over all ranks, replicas included.

    Returns:
        [N + M], on the mesh's device.
    """
    mine = values.to(mesh.device, torch.float64, non_blocking=True)
    if not mesh.is_first_replica(once_per_pipeline=once_per_pipeline):
        mine = torch.zeros_like(mine)
    more = torch.tensor(list(extra_sums), dtype=torch.float64)  # on the device the host would wait for it
    total = torch.cat([mine, more.to(mesh.device, non_blocking=True)])
    mesh.all_reduce(total)
    return total


def global_counts(
    batch_counts: Sequence[Mapping[str, torch.Tensor]], names: Sequence[str], mesh: Mesh, stop: StopRequest
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Sum the counts that each loss term is averaged over, over all microbatches of all data ranks.

    All ranks' stop requests are sent with them, so that ranks stop after the same step.

    Args:
        batch_counts: the counts of each of this rank's microbatches, by loss term.
        names: the loss terms.
        mesh: of the run.
        stop: this rank's requests.

    Returns:
        The counts, float64 scalars of at least 1; this rank's own, [N], which may be 0; and the sums over
        ranks of :meth:`StopRequest.flags`.
    """
    zero = torch.zeros((), dtype=torch.float64)
    own = torch.stack([sum((counts[name] for counts in batch_counts), start=zero) for name in names])
    summed = sum_over_data(own, mesh, once_per_pipeline=True, extra_sums=stop.flags())
    counts = summed[: len(names)].clamp(min=1)
    return dict(zip(names, counts.unbind(), strict=True)), own, summed[len(names) :]


def agree_now(stop: StopRequest, mesh: Mesh) -> None:
    """All-reduce the ranks' requests immediately, as each training step does."""
    flags = torch.tensor(stop.flags(), dtype=torch.float64, device=mesh.device)
    mesh.all_reduce(flags)
    stop.agree(flags.tolist())


def folder_lost(stop: StopRequest, mesh: Mesh) -> bool:
    """Collective, before anything is written to the run folder. Return whether rank 0 finds it gone.

    In this case the run stops.
    """
    lost: bool = mesh.gather(mesh.rank == 0 and stop.folder_gone is not None and stop.folder_gone())[0]
    if lost:
        stop.reason = "lost"
    return lost


def bubble(idle: float, owners: Sequence[int], mesh: Mesh) -> float | None:
    """Return the mean fraction of the step that pipeline ranks waited, where the host waits at all."""
    if len(set(owners)) == 1 or mesh.device.type != "cpu":
        return None
    total = torch.tensor(idle, dtype=torch.float64)
    mesh.all_reduce(total)
    return total.item() / mesh.world_size


def expert_load(loads: Iterable[torch.Tensor], mesh: Mesh) -> float:
    """Return the load of the busiest expert divided by the mean, in the worst layer of the whole model."""
    worst = torch.zeros(1, dtype=torch.float64, device=mesh.device)
    for load in loads:
        worst = torch.maximum(worst, load.max() / load.double().mean().clamp(min=1e-9))
    mesh.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def count_parameters(placed: Iterable[PlacedParameter], mesh: Mesh) -> int:
    """Count the whole model's parameters from every rank's blocks."""
    mine = sum(p.parameter.numel() / p.placement.replicas(mesh.layout) for p in placed)
    total = torch.tensor(mine, dtype=torch.float64, device=mesh.device)
    mesh.all_reduce(total)
    return round(total.item())
