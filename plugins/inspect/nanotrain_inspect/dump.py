"""The ``dump`` monitor: tensors of chosen modules at chosen steps, in files or as statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from nanotrain_core.api import NanotrainError, box_slices, did_you_mean, lies_in, write_atomically
from nanotrain_core.api.torch import Block, Monitor, Placement, RunInfo, UpdateReport
from nanotrain_inspect.declared import PLACED, RETURNED
from nanotrain_inspect.steps import Steps

if TYPE_CHECKING:
    from nanotrain_inspect import DumpConfig

Placed = Iterable[tuple[torch.Tensor, Placement]]

#: Most bytes that a rank receives in one round of gathering tensors: every rank receives a whole round.
AT_ONCE = 256 * 1024 * 1024


class TooLarge(NanotrainError):
    """A dump would gather more than its recipe allows."""


class Dump(Monitor):
    """Writes ``dumps/step-00000100/gradients.safetensors`` in the run folder, or publishes statistics.

    Weights, gradients and updates are whole tensors under their global names, the same on every layout.
    Activations are local to each rank: its part of the batch, and of tensors that a wrapper splits, under
    ``layers.0.attn@rank1.microbatch0``; replicas have the same.
    """

    reads_weights = False

    def __init__(self, config: DumpConfig) -> None:
        self.config, self.steps = config, Steps.parse(config.steps)
        self.what = frozenset(config.what)
        self.returned: dict[str, torch.Tensor] = {}
        self.returned_bytes = 0
        """Of all that modules returned in the step: once that is too much, no more of it is kept."""
        self.times: Counter[str] = Counter()
        self.before: list[tuple[torch.Tensor, Placement]] = []

    def on_start(self, run: RunInfo) -> None:
        """Find the modules.

        Raises:
            NanotrainError: a pattern matches none of the model.
        """
        self.run = run
        known = sorted(set().union(*run.mesh.gather({each.placement.name for each in run.placed})))
        for pattern in self.config.modules:
            if not any(lies_in(name, pattern) for name in known):
                modules = sorted({name.rpartition(".")[0] for name in known})
                near = did_you_mean(pattern, modules)
                raise NanotrainError(
                    f"monitor 'dump': no parameter lies in a module '{pattern}'{near}; modules are "
                    f"{', '.join(modules[:8])}, ..."
                )
        if "activations" in self.what:
            run.observe_outputs(self.look, self.config.modules)

    # --- what is looked at -------------------------------------------------------------------

    def look(self, name: str, output: Any) -> None:
        """Keep or measure what a module returned in a logged step."""
        floating = isinstance(output, torch.Tensor) and output.is_floating_point()
        if not floating or self.run.progress.step + 1 not in self.steps:  # progress has what is done
            return
        if self.config.form == "statistics":
            self.run.metrics.statistics(f"dump/activations/{{statistic}}/{name}", output, RETURNED)
            return
        self.returned_bytes += output.nbytes
        if self.returned_bytes > self.config.most_mb * 1e6:
            self.returned.clear()
            return
        self.returned[f"{name}@rank{self.run.rank}.microbatch{self.times[name]}"] = output.clone()
        self.times[name] += 1

    def on_before_update(self, update: UpdateReport) -> None:
        """Dump what the step computed with, and its gradients.

        Raises:
            TooLarge: one of them is more than ``most_mb``.
        """
        returned, self.returned = self.returned, {}
        returned_bytes, self.returned_bytes = self.returned_bytes, 0
        self.times.clear()
        if update.step not in self.steps:
            return
        if "weights" in self.what:
            self._dump(update.step, "weights", self._chosen(self.run.weights()))
        if "gradients" in self.what:
            if self.config.form == "statistics":
                self._publish("gradients", self._chosen(update.placed_gradients()))
            else:
                own = self.run.metrics.measures  # of ranks that hold the same, one sends it
                chosen = (g for g in update.gradients() if self._is_chosen(g.name))
                blocks = (b for g in chosen if own(g.piece.placement) for b in g.blocks())
                self._write(update.step, "gradients", blocks)
        if "activations" in self.what and self.config.form == "tensors":
            shapes = {name: tuple(tensor.shape) for name, tensor in returned.items()}
            zeros = {name: (0,) * len(shape) for name, shape in shapes.items()}
            blocks = (Block(n, shapes[n], zeros[n], tensor) for n, tensor in returned.items())
            self._write(update.step, "activations", blocks, returned_bytes)
        if "updates" in self.what:
            self.before = [
                (tensor.clone(), placement) for tensor, placement in self._chosen(self.run.weights())
            ]

    def on_after_update(self, update: UpdateReport) -> None:
        """Dump by how much weights have changed."""
        before, self.before = self.before, []
        if "updates" in self.what and update.step in self.steps:
            after = self._chosen(self.run.weights())
            changes = [(new - old, p) for (new, p), (old, _) in zip(after, before, strict=True)]
            self._dump(update.step, "updates", changes)

    def _is_chosen(self, name: str) -> bool:
        return any(lies_in(name, pattern) for pattern in self.config.modules)

    def _chosen(self, tensors: Placed) -> Iterator[tuple[torch.Tensor, Placement]]:
        yield from ((tensor, placement) for tensor, placement in tensors if self._is_chosen(placement.name))

    # --- where it goes -----------------------------------------------------------------------

    def _dump(self, step: int, what: str, tensors: Placed) -> None:
        if self.config.form == "statistics":
            self._publish(what, tensors)
        else:
            own = self.run.metrics.measures
            self._write(
                step, what, (Block.of("", t, placement) for t, placement in tensors if own(placement))
            )

    def _publish(self, what: str, tensors: Placed) -> None:
        self.run.metrics.placed(f"dump/{what}/{{statistic}}/{{parameter}}", tensors, PLACED)

    def _write(self, step: int, what: str, blocks: Iterable[Block], size: int | None = None) -> None:
        """Gather the blocks of all ranks on rank 0, and write whole tensors. Collective.

        Args:
            step: that they are of.
            what: the file's name.
            blocks: of this rank.
            size: their bytes, if it has not kept all.

        Raises:
            TooLarge: they are more than ``most_mb``.
        """
        mine = list(blocks)
        sizes = self.run.mesh.gather(sum(block.tensor.nbytes for block in mine) if size is None else size)
        megabytes = sum(sizes) / 1e6
        if megabytes > self.config.most_mb:
            raise TooLarge(
                f"monitor 'dump': {what} of step {step} are {megabytes:,.1f} MB, and most_mb = "
                f'{self.config.most_mb:g}: choose fewer modules, raise it, or set form = "statistics"'
            )
        keeps = self.run.rank == 0 and self.run.folder is not None
        tensors: dict[str, torch.Tensor] = {}
        for block in self._of_all_ranks(mine):
            if keeps:
                put(tensors, block)
        if keeps:
            assert self.run.folder is not None
            path = Path(self.run.folder) / "dumps" / f"step-{step:08}" / f"{what}.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            metadata = {"step": str(step), "what": what, "run": self.run.name}
            ordered = dict(sorted(tensors.items()))
            write_atomically(path, lambda temporary: save_file(ordered, temporary, metadata))

    def _of_all_ranks(self, mine: Sequence[Block]) -> Iterator[Block]:
        """Yield parts of the blocks of all ranks, in rounds that take :data:`AT_ONCE` bytes on each rank."""
        limit = max(1, AT_ONCE // self.run.world_size)
        rounds = list(rounds_of(mine, limit))
        for number in range(max(self.run.mesh.gather(len(rounds)))):
            parts = [_on_host(part) for part in rounds[number]] if number < len(rounds) else []
            for theirs in self.run.mesh.gather(parts):
                yield from theirs


def rounds_of(blocks: Iterable[Block], limit: int) -> Iterator[list[Block]]:
    """Cut blocks into rows, and put these together to lists of about ``limit`` bytes, at least a row each."""
    found: list[Block] = []
    size = 0
    for block in blocks:
        for part in rows_of(block, limit):
            if found and size + part.tensor.nbytes > limit:
                yield found
                found, size = [], 0
            found.append(part)
            size += part.tensor.nbytes
    if found:
        yield found


def rows_of(block: Block, limit: int) -> Iterator[Block]:
    """Yield a block in parts of at most ``limit`` bytes, or of one row."""
    rows = block.tensor.shape[0] if block.tensor.dim() else 0
    if block.tensor.nbytes <= limit or rows <= 1:
        yield block
        return
    each = max(1, rows * limit // block.tensor.nbytes)
    for first in range(0, rows, each):
        offset = (block.offset[0] + first, *block.offset[1:])
        yield Block(block.name, block.global_shape, offset, block.tensor[first : first + each])


def put(tensors: dict[str, torch.Tensor], block: Block) -> None:
    """Write a part of a tensor to where it belongs."""
    if block.name not in tensors:
        tensors[block.name] = torch.empty(block.global_shape, dtype=block.tensor.dtype)
    tensors[block.name][box_slices(block.offset, block.tensor.shape)] = block.tensor


def _on_host(block: Block) -> Block:
    # A view would be sent with all of the memory that it is a part of.
    return Block(block.name, block.global_shape, block.offset, block.tensor.detach().cpu().clone())
