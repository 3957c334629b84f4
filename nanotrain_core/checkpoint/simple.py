"""The ``simple`` format: the whole run in one safetensors file, assembled on rank 0.

Tensors are stored whole under their global names, so any layout can read what any other wrote. This
requires a model that fits into one host's memory; larger ones need a sharded format. The file's metadata
holds the JSON state and a SHA-256 over names, shapes, bytes and state: a damaged file is rejected
before any live state is modified.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from nanotrain_core.builtin.configs import SimpleCheckpointConfig
from nanotrain_core.checkpoint.box_cover import coverage_problem
from nanotrain_core.checkpoint.info import unexpected_kinds
from nanotrain_core.checkpoint.quarantine import on_rank_0, quarantine_checkpoint, set_branch_aside
from nanotrain_core.checkpoint.raw_bytes import raw_bytes
from nanotrain_core.checkpoint.run_state import load_json, newest_evaluated, state_problems
from nanotrain_core.checkpoint.safetensors_files import CODES, DTYPES
from nanotrain_core.checkpoint.simple_damage import FORMAT, damage, digest, names_in, read_header
from nanotrain_core.checkpoint.simple_names import saved_steps, unexpected_entries
from nanotrain_core.checkpoint.tensor_boxes import Box, Shape, box_slices
from nanotrain_core.contracts import Block, CheckpointReport, SavedWeights, TrainState
from nanotrain_core.errors import CheckpointError, UnfitCheckpoint
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.precision.quantized_storage import dequantize
from nanotrain_core.run.files import remove_leftovers, write_atomically
from nanotrain_core.run.progress_bar import show_progress

#: A block's name, its offset, and the shape of the global tensor.
BlockKey = tuple[str, Shape, Shape]
Form = tuple[Shape, torch.dtype]


class SimpleCheckpoint:
    """One safetensors file per checkpoint. See :class:`~nanotrain_core.contracts.Checkpoint`."""

    def __init__(self, config: SimpleCheckpointConfig) -> None:
        self.config = config
        self._complete: list[CheckpointReport] = []

    def open(self, folder: Path, mesh: Mesh) -> None:
        """Use ``folder``, created on the first save; remove what a killed save left."""
        self.folder, self.mesh = folder, mesh
        # Messages use a separate group: torch.distributed in debug mode counts them among collectives.
        self.group = mesh.new_group(range(mesh.world_size), "checkpoint") if mesh.world_size > 1 else None
        on_rank_0(lambda: remove_leftovers(folder), folder, mesh)
        if mesh.rank == 0 and folder.is_dir():
            for entry in unexpected_entries(folder):
                log = structlog.get_logger("nanotrain.checkpoint")
                log.warning("ignoring an entry that is not a checkpoint", entry=str(entry))

    def due(self, step: int) -> bool:
        """Save every ``every`` steps."""
        return bool(self.config.every) and step % self.config.every == 0

    def path(self, step: int) -> Path:
        """Return the path of the checkpoint of ``step``."""
        return self.folder / f"step-{step:08d}.safetensors"

    def steps(self) -> list[int]:
        """Return the saved steps, oldest first."""
        return saved_steps(self.folder)

    # --- save ---------------------------------------------------------------------------------

    def save(self, step: int, state: TrainState) -> None:
        """Gather every block on rank 0, which writes. Fails on all ranks if it fails there."""
        began = time.monotonic()
        streams = of_rank(state.rank_tensors, self.mesh.rank)
        tensors = gather_whole([*state.blocks, *streams], self.mesh, self.group)
        error = None
        if self.mesh.rank == 0:
            try:
                self._write(step, tensors, state.meta)
            except (OSError, SafetensorError) as problem:
                error = f"checkpoint of step {step} could not be written to {self.folder}: {problem}"
        self._agree(error)
        seconds = time.monotonic() - began
        written = [self.path(step)] if self.mesh.rank == 0 else []
        report = CheckpointReport(step, self.path(step), seconds, blocked=seconds, written=written)
        self._complete.append(report)

    def settle(self) -> None:
        """Do nothing: a save is complete when :meth:`save` returns."""

    def advance(self, *, wait: bool) -> Sequence[CheckpointReport]:
        """Return reports of saves since the last call: each was complete when :meth:`save` returned."""
        del wait
        reports, self._complete = self._complete, []
        return reports

    def _write(self, step: int, tensors: dict[str, torch.Tensor], meta: Mapping[str, Any]) -> None:
        text = json.dumps({**meta, "world_size": self.mesh.world_size, "degrees": self.mesh.layout.degrees})
        header = {"format": FORMAT, "state": text, "sha256": digest(tensors.items(), text)}
        metadata = {"nanotrain": json.dumps(header)}  # one key: safetensors writes several in random order
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path(step), lambda path: save_file(tensors, path, metadata))
        if meta.get("skipped_in_a_row"):
            return  # the run may have to go back to an older checkpoint
        there = [saved for saved in self.steps() if saved <= step]
        evaluated = newest_evaluated(there, meta)
        for old in there[: -self.config.keep]:
            if old in evaluated:
                continue
            try:
                self.path(old).unlink(missing_ok=True)
            except OSError as problem:  # this one is saved: an old one that is in use only takes space
                log = structlog.get_logger("nanotrain.checkpoint")
                log.warning("an old checkpoint could not be deleted", problem=str(problem))

    def _agree(self, error: str | None, kind: type[CheckpointError] = CheckpointError) -> None:
        """Raise the first rank's error on every rank."""
        errors = [text for text in self.mesh.gather(error) if text]
        if errors:
            raise kind(errors[0])

    # --- load ---------------------------------------------------------------------------------

    @show_progress("loading a checkpoint")
    def load(self, which: str, state: TrainState) -> TrainState | None:
        """Verify the whole file, check that every block fits, then fill the blocks."""
        path, damaged = self._newest_whole() if which == "latest" else (self._find(which), {})
        if path is None:
            return None
        if which != "latest":
            self._agree("; ".join(damage(path)) if self.mesh.rank == 0 else None)
        with self._opened(path) as file:
            meta = json.loads(read_header(file)["state"])
            state = self.fitted(state, meta)
            names = frozenset(names_in(file))
            wanted = set().union(*self.mesh.gather({block.name for block in state.blocks}))
            kept = [name for name in names if not name.startswith("rng/")]
            problems = unexpected_kinds(kept, wanted)
            problems += [text for block in state.blocks for text in misfit(file, names, block)]
            problems += left_over(kept, wanted)
            state.accept(meta)  # first, since a different model has the clearest error
            more = f" ({len(problems)} in all)" if len(problems) > 1 else ""
            unfit = f"{path} does not fit this run: {problems[0]}{more}" if problems else None
            self._agree(unfit, UnfitCheckpoint)
            on_rank_0(lambda: self._quarantine(damaged), self.folder, self.mesh)
            for block in state.blocks:
                block.tensor.copy_(read_block(file, block))
            same_layout = meta.get("degrees") == self.mesh.layout.degrees
            prefix = f"rng/{self.mesh.rank}/"
            on_rank_0(lambda: set_branch_aside(self.folder, str(path), meta["step"]), self.folder, self.mesh)
            streams = [n.removeprefix(prefix) for n in names if same_layout and n.startswith(prefix)]
            return TrainState(state.blocks, meta, {n: file.get_tensor(prefix + n) for n in streams})

    def fitted(self, state: TrainState, meta: Mapping[str, Any]) -> TrainState:
        """Return the state to fill, for a subclass whose blocks depend on the saved ``meta``."""
        return state

    def _opened(self, path: Path) -> Any:
        """Open a file that rank 0 found intact on every rank, or on none.

        Another host may see another file there: on its own disk, or for a moment on a shared one, where
        a rank may still see a file that has since been set aside.
        """
        file, error, seal = None, "", ""
        try:
            file = safe_open(path, framework="pt")
            seal = read_header(file).get("sha256", "")
        except (OSError, SafetensorError, ValueError) as problem:
            error = f"{path} cannot be read: {problem}"
        everyone = self.mesh.gather((seal, error, str(path)))
        for rank, (theirs, unread, where) in enumerate(everyone):
            if unread:
                raise CheckpointError(f"rank {rank}: {unread}")
            if theirs != everyone[0][0]:
                raise CheckpointError(f"rank {rank}: {where} is another checkpoint there than on rank 0")
        return file

    def _newest_whole(self) -> tuple[Path | None, Mapping[Path, str]]:
        """Return the newest intact file, as rank 0 finds it, and what is wrong with newer ones."""
        found: Path | None = None
        damaged: dict[Path, str] = {}
        for step in reversed(self.steps()) if self.mesh.rank == 0 else ():
            problems = damage(self.path(step))
            if not problems:
                found = self.path(step)
                break
            damaged[self.path(step)] = "; ".join(problems)
        # All damaged ones stay in place: otherwise the next launch would find none, and start from the
        # beginning.
        text = f"no checkpoint in {self.folder} is whole: {next(iter(damaged.values()), '')}"
        self._agree(text if damaged and found is None else None)
        newest: Path | None = self.mesh.gather(found)[0]
        return newest, damaged

    def _quarantine(self, damaged: Mapping[Path, str]) -> None:
        """Rename damaged files, on rank 0, once there is another one to resume from."""
        for path, problem in damaged.items():
            aside = quarantine_checkpoint(path)
            log = structlog.get_logger("nanotrain.checkpoint")
            log.warning("a damaged checkpoint was set aside", problem=problem, now=str(aside))

    def _find(self, which: str) -> Path:
        path, problem = self.path(int(which)) if which.isdecimal() else Path(which), None
        if not path.is_file():
            known = ", ".join(map(str, self.steps())) or "none"
            problem = f"no checkpoint at {path}; steps saved in {self.folder}: {known}"
        lacking = [(rank, text) for rank, text in enumerate(self.mesh.gather(problem)) if text]
        if lacking:  # on all ranks, or on those of a host that has a disk of its own
            rank, text = lacking[0]
            where = "" if len(lacking) == self.mesh.world_size else f"rank {rank}: "
            raise CheckpointError(f"{where}{text}")
        return path

    def verify(self, step: int) -> Sequence[str]:
        """Return what is wrong with the file of ``step``."""
        return damage(self.path(step))


def misfit(file: Any, names: frozenset[str], block: Block) -> Iterator[str]:
    """Yield why a saved tensor cannot fill ``block``."""
    if block.name not in names:
        yield f"it has no tensor {block.name}"
        return
    saved = file.get_slice(block.name)
    if tuple(saved.get_shape()) != tuple(block.global_shape):
        yield f"{block.name} has shape {tuple(saved.get_shape())}, expected {tuple(block.global_shape)}"
    kept, wanted = saved.get_dtype(), CODES.get(block.tensor.dtype)
    if wanted and kept != wanted:  # rounding it would silently change the run
        yield f"{block.name} is kept in {kept}, expected {wanted}"


def left_over(names: Iterable[str], wanted: set[str]) -> list[str]:
    """Return which saved tensors this run would drop, such as moments of a parameter no longer trained."""
    return [f"it holds {name}, which this run has no place for" for name in sorted({*names} - wanted)]


def read_block(file: Any, block: Block) -> torch.Tensor:
    """Read the range of a saved tensor that ``block`` covers."""
    if not block.global_shape:
        return file.get_tensor(block.name)  # type: ignore[no-any-return]
    return file.get_slice(block.name)[box_slices(block.offset, block.tensor.shape)]  # type: ignore[no-any-return]


# --- weights alone ------------------------------------------------------------------------------


def open_simple_weights(path: Path) -> SavedWeights | None:
    """Open a checkpoint, or the newest of a run folder, for its weights; None if it has another format."""
    folders = (path, path / "checkpoints")
    files = [folder / f"step-{step:08d}.safetensors" for folder in folders for step in saved_steps(folder)]
    path = files[-1] if files else path
    if not path.is_file() or path.suffix != ".safetensors":
        return None
    try:
        file = safe_open(path, framework="pt")
        header = read_header(file)
        if header.get("format") != FORMAT:
            return None
        meta = load_json(header["state"])
        if problems := state_problems(meta):
            raise CheckpointError(f"{path}: {'; '.join(problems)}")
        if "model" not in meta:
            raise CheckpointError(f"{path} does not say of which model its weights are")
        weights, averages = SimpleWeights(path, file), SimpleWeights(path, file, "ema/")
        return SavedWeights(meta["model"], weights, meta.get("step"), meta.get("recipe", ""), averages)
    except (OSError, SafetensorError, KeyError, ValueError) as problem:
        raise CheckpointError(f"{path} is damaged: {problem}") from None


class SimpleWeights:
    """See :class:`~nanotrain_core.contracts.WeightReader`."""

    def __init__(self, path: Path, file: Any, kind: str = "") -> None:
        self.path, self.file, self.kind = path, file, kind
        names = [name.removeprefix(kind) for name in names_in(file) if name.startswith(kind)]
        saved = {name: file.get_slice(kind + name) for name in names if "/" not in name}
        self.shapes = {name: tuple(tensor.get_shape()) for name, tensor in saved.items()}
        self.dtypes = {name: DTYPES[tensor.get_dtype()] for name, tensor in saved.items()}

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Return one block."""
        name = self.kind + name
        found = self.file.get_slice(name)[index] if index else self.file.get_tensor(name)
        return found  # type: ignore[no-any-return]

    def damage(self) -> Sequence[str]:
        """Compare all bytes with their SHA-256."""
        return damage(self.path)


# --- gathering blocks -----------------------------------------------------------------------


def gather_whole(
    blocks: Sequence[Block], mesh: Mesh, group: dist.ProcessGroup | None
) -> dict[str, torch.Tensor]:
    """Gather on rank 0: return every whole tensor, on the CPU; an empty dict on other ranks.

    For equal blocks the lowest rank's is used. Ranks above 0 send theirs one by one, in one order.
    """
    mine = {(b.name, tuple(b.offset), tuple(b.global_shape)): b.tensor.detach() for b in blocks}
    forms: list[dict[BlockKey, Form]] = [{key: (tuple(t.shape), t.dtype) for key, t in mine.items()}]
    if mesh.world_size > 1:
        own, forms = forms[0], [{}] * mesh.world_size
        dist.all_gather_object(forms, own)
    owners: dict[BlockKey, int] = {}
    for rank, theirs in enumerate(forms):
        for key in theirs:
            owners.setdefault(key, rank)
    check_coverage(owners, forms)
    whole: dict[str, torch.Tensor] = {}
    for key, owner in owners.items():
        if owner and mesh.rank == owner:
            # As bytes: NCCL lacks some dtypes.
            dist.send(raw_bytes(dequantize(mine[key]).to(mesh.p2p_device)), dst=0, group=group)
        elif mesh.rank == 0:
            form = forms[owner][key]
            put(whole, key, receive(form, owner, mesh, group) if owner else dequantize(mine[key]))
    return whole


def check_coverage(owners: Mapping[BlockKey, int], forms: Sequence[Mapping[BlockKey, Form]]) -> None:
    """Reject blocks that leave a gap in a tensor, or overlap: a placement is wrong.

    Raises:
        CheckpointError: naming the tensor.
    """
    parts: dict[tuple[str, Shape], list[Box]] = defaultdict(list)
    for (name, offset, shape), owner in owners.items():
        parts[name, shape].append((offset, forms[owner][name, offset, shape][0]))
    for (name, shape), boxes in parts.items():
        if problem := coverage_problem(shape, boxes):
            raise CheckpointError(f"the blocks of {name} are not the whole tensor: {problem}")


def receive(form: Form, source: int, mesh: Mesh, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Receive one block."""
    shape, dtype = form
    buffer = torch.empty(shape, dtype=dtype, device=mesh.p2p_device)
    dist.recv(raw_bytes(buffer), src=source, group=group)
    return buffer


def put(whole: dict[str, torch.Tensor], key: BlockKey, tensor: torch.Tensor) -> None:
    """Copy one block into its whole tensor."""
    name, offset, shape = key
    if tuple(tensor.shape) == shape:
        whole[name] = tensor.cpu().contiguous()
        return
    target = whole.setdefault(name, torch.empty(shape, dtype=tensor.dtype))
    target[box_slices(offset, tensor.shape)] = tensor.cpu()


def of_rank(streams: Mapping[str, torch.Tensor], rank: int) -> list[Block]:
    """Return a rank's own tensors as blocks under ``rng/<rank>/``."""
    return [Block(f"rng/{rank}/{name}", tuple(t.shape), (0,) * t.dim(), t) for name, t in streams.items()]
