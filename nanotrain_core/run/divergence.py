"""Stops a diverged run: too many skipped steps in a row, or non-finite weights at its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import structlog
import torch
import torch.distributed as dist

from nanotrain_core.checkpoint.saver import CheckpointSaver
from nanotrain_core.compose import Run
from nanotrain_core.contracts import Block, TrainState
from nanotrain_core.errors import Diverged, PluginError
from nanotrain_core.layout.initialization import changed_buffers
from nanotrain_core.layout.layout import Span
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import PlacedParameter
from nanotrain_core.monitors.replicas import differing
from nanotrain_core.precision.quantized_storage import PackedWeight, dequantize
from nanotrain_core.run.scalar_state import differing_meta, differing_scalar, digests, scalars_of
from nanotrain_core.run.step_readback import StepFlags

#: Consecutive steps with a non-finite gradient after which a run is stopped. A dynamic loss scale
#: needs up to 24 to reach its floor.
MOST_SKIPPED = 30

#: How far values of ranks that compute the same gradient may be from their mean, relative to its norm. The
#: order of sums on a GPU makes a difference of 1e-6 of an update.
DRIFT = 1e-3


class SkippedSteps:
    """Counts skipped steps in a row; checkpoints contain the count."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def record(self, flags: StepFlags, saves: CheckpointSaver) -> None:
        """Count a step.

        Raises:
            Diverged: the limit is reached, and the save that ``saves`` had begun is complete.
        """
        self.in_a_row = self.in_a_row + 1 if flags.skipped else 0
        if self.in_a_row >= MOST_SKIPPED:
            saves.advance(wait=True)  # on all ranks alike: an intact save may be in progress
            raise Diverged(
                f"step {flags.step}: the gradient norm was {flags.grad_norm} for {MOST_SKIPPED} "
                "steps in a row, which were skipped: the weights are those of the last step not skipped"
            )

    def check_last_steps(self, steps: int, loss_scale: float, *, stopped: bool) -> None:
        """Check the end of a run of this many steps, unless it continues or still calibrates its loss scale.

        ``loss_scale``: that of the last step.

        Raises:
            Diverged: its last steps were skipped.
        """
        if not self.in_a_row or stopped or loss_scale > 1:
            return
        last = (
            f"last {self.in_a_row} of {steps} steps were" if self.in_a_row > 1 else f"last step, {steps}, was"
        )
        raise Diverged(
            f"the {last} skipped, since the gradient norm was not finite: the run has not trained for all of "
            "its steps, and the weights are those of the last step not skipped"
        )


def first_not_finite(blocks: Sequence[Block]) -> str:
    """Return the name of the first block with a NaN or an infinity; empty if there is none."""
    tensors = {block.name: block.tensor for block in blocks if block.tensor.numel()}
    # Eight-bit floats are quantized codes.
    floats = {n: t for n, t in tensors.items() if t.is_floating_point() and t.dtype.itemsize > 1}
    if not floats:
        return ""
    # One kernel for many tensors, and one device synchronization: the largest magnitude shows both.
    plain = {n: t for n, t in floats.items() if not isinstance(t, PackedWeight)}
    packed = {n: t for n, t in floats.items() if n not in plain}  # unpacked one at a time
    largest = [*torch._foreach_norm([*plain.values()], ord=torch.inf)] if plain else []
    largest += [dequantize(tensor).norm(torch.inf) for tensor in packed.values()]
    finite = torch.stack([each.double() for each in largest]).isfinite().tolist()
    return next((name for name, good in zip([*plain, *packed], finite, strict=True) if not good), "")


def not_finite(trained: Sequence[Block], mesh: Mesh, step: int) -> str:
    """Collective. Describe which trained weight is not finite on which rank; empty if none."""
    found = mesh.gather(first_not_finite(trained))
    where = ((name, rank) for rank, name in enumerate(found) if name)
    return next((f"after step {step} {name} is not finite on rank {rank}" for name, rank in where), "")


def differing_weight(placed: Sequence[PlacedParameter], mesh: Mesh) -> str:
    """Collective. Return the name of a weight whose bits differ between ranks that sum its gradient.

    Ranks that compute the same gradient each by itself are not compared: on a GPU the order of some sums is
    not fixed, so that theirs may differ in the last bits. Empty if none differs.
    """
    groups = defaultdict[Span, list[PlacedParameter]](list)
    for each in placed:
        if span := each.placement.sync_span(mesh.layout):
            groups[span].append(each)
    found = ""
    for span in sorted(groups):
        for index in differing(groups[span], span, mesh).nonzero()[:1, 0].tolist():
            found = found or groups[span][index].placement.name
    return next(filter(None, mesh.gather(found)), "")


def drifted_apart(placed: Sequence[PlacedParameter], mesh: Mesh) -> str:
    """Collective. Return which weight has drifted apart on ranks that compute its gradient each by itself.

    They compute the same one, up to rounding, unless a wrapper takes a partial gradient for complete. Ranks
    that sum it are not compared: some optimizers let these differ between the steps that average them.
    Empty if none has.
    """
    groups = defaultdict[str, list[PlacedParameter]](list)
    for each in placed:
        for dim in sorted(each.placement.same):
            if mesh.size(dim) > 1:
                groups[dim].append(each)
    found = [(0.0, "")]
    for dim in sorted(groups):
        for index in differing(groups[dim], Span((dim,)), mesh).nonzero()[:, 0].tolist():
            each = groups[dim][index]
            distance = _distance(each.parameter.detach(), mesh, dim)
            found.append((distance, f"{each.placement.name} has drifted apart on ranks along {dim}"))
    _, farthest = max(mesh.gather(max(found)))  # others follow from it
    return str(farthest)


@torch.no_grad()
def _distance(weight: torch.Tensor, mesh: Mesh, dim: str) -> float:
    """Collective along ``dim``. Return how far ranks' values are apart; not above 0: as rounding explains."""
    if not weight.is_floating_point() or weight.dtype.itemsize == 1:  # quantized codes
        return 0.0
    own = weight.to(torch.promote_types(weight.dtype, torch.float32))
    mean = own / mesh.size(dim)
    mesh.all_reduce(mean, dim)
    relative = (own - mean).norm() / mean.norm()
    most = (relative - max(DRIFT, 2 * torch.finfo(weight.dtype).eps)).nan_to_num(0.0).reshape(1)
    mesh.all_reduce(most, dim, op=dist.ReduceOp.MAX)
    return float(most.item())


def may_save(run: Run, state: TrainState, step: int, saves: CheckpointSaver, *, last: bool) -> bool:
    """Collective. Return whether all trained weights are finite, so that they may be saved.

    A save that is not the last is postponed: the monitor ``guard`` may still roll back to a checkpoint.

    Raises:
        Diverged: they are not, and this is the last save.
        PluginError: training changed a buffer on any rank, which checkpoints omit, or :func:`compare_ranks`
            raised it before the run's first save. On all ranks alike.
    """
    gathered = run.mesh.gather(changed_buffers(run.stages.values(), run.placements))
    if changed := sorted({name for names in gathered for name in names}):
        saves.advance(wait=True)  # on all ranks alike: an intact save may be in progress
        raise PluginError(
            f"buffer {changed[0]} changed in training: make it a parameter with requires_grad=False"
        )
    blocks = zip(run.placed, state.blocks, strict=False)  # weights come first
    trained = [block for placed, block in blocks if placed.parameter.requires_grad]
    problem = not_finite(trained, run.mesh, step)
    if problem and last:
        saves.advance(wait=True)  # on all ranks alike: an intact save may be in progress
        raise Diverged(
            f"{problem}, so this step was not saved: continue from an older checkpoint with --resume STEP "
            "and a lower learning rate, or use the monitor guard, which rolls back automatically"
        )
    if problem and run.mesh.rank == 0:
        structlog.get_logger("nanotrain.checkpoint").warning("nothing is saved for now", problem=problem)
    if not problem and not saves.begun:  # once: a postponed save is tried again after each step
        compare_ranks(run, state, step)
    return not problem


def compare_ranks(run: Run, state: TrainState, step: int) -> None:
    """Collective. Compare what ranks should have alike, as a checkpoint keeps that of one of them.

    Weights that differ are a warning.

    Raises:
        PluginError: a scalar of the state or ``meta`` of data, loss scale or optimizer differs. On all ranks
            alike.
    """
    data = run.model is not None
    gathered = run.mesh.gather((scalars_of(state.blocks), digests(state.meta, data=data)))
    scalars, metas = zip(*gathered, strict=True)
    if differs := differing_scalar(scalars) or differing_meta(metas):
        raise PluginError(differs)
    if (apart := drifted_apart(run.placed, run.mesh)) and run.mesh.rank == 0:
        structlog.get_logger("nanotrain.checkpoint").warning(
            f"{apart}, which as placed compute the same gradient of it, and a checkpoint has that of one of "
            "them: if a rank's gradient is partial, expected the wrapper that added the weight, or made it "
            "partial, to place it with .sum_over(dim)",
            step=step,
        )
    if (name := differing_weight(run.placed, run.mesh)) and run.mesh.rank == 0:
        structlog.get_logger("nanotrain.checkpoint").warning(
            "a weight differs between ranks that sum its gradient, and a checkpoint has that of one of them: "
            "a resumed run is not the same run; the monitor replicas says when they begin to differ",
            weight=name,
        )
