"""The ``sharded_v2`` checkpoint: coordination of ranks in a save and a load.

A save, in order of execution:

1. All ranks agree which rank writes which box: once, as long as blocks stay the same.
2. Rank 0 creates ``.tmp-<step>-<id>`` and announces it.
3. Each rank links its file of frozen weights from the checkpoint before, copies its shard, writes the copy
   there, hashes it while writing and flushes it to disk: in a thread, while training continues; the next
   update waits for the copy.
4. At a step boundary, once all are done, each reports its files' sizes and hashes, or its error: in that case
   the folder is removed and the save has failed on every rank.
5. Rank 0 writes the manifest and renames the folder: from then on the checkpoint exists.

A load verifies first, with files striped over ranks, plans what to read, and checks every file it will
read. Only when all ranks have succeeded is the first live value overwritten.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import structlog
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from nanotrain_core.api import (
    CheckpointError,
    UnfitCheckpoint,
    newest_evaluated,
    nontrivial_views,
    show_progress,
    unexpected_kinds,
)
from nanotrain_core.api import __version__ as core_version
from nanotrain_core.api.torch import CheckpointReport, Mesh, TrainState
from nanotrain_sharded_ckpt_v2 import ShardedConfig, __version__, blocks, folders, manifest, shard
from nanotrain_sharded_ckpt_v2.assignment import ShardAssigner
from nanotrain_sharded_ckpt_v2.flags import LateFlag
from nanotrain_sharded_ckpt_v2.frozen_files import FrozenFiles
from nanotrain_sharded_ckpt_v2.manifest import File, Manifest, shard_name, streams_name
from nanotrain_sharded_ckpt_v2.object_collectives import (
    agree,
    broadcast_from_first,
    gather_to_first,
)
from nanotrain_sharded_ckpt_v2.save_in_progress import SaveInProgress
from nanotrain_sharded_ckpt_v2.steps_of_all_hosts import once_saved

if TYPE_CHECKING:
    from nanotrain_sharded_ckpt_v2.resharding import ReadPlan


@attrs.define(frozen=True, eq=False)
class ReadableCheckpoint:
    """A checkpoint that every rank is able to read."""

    path: Path
    manifest: Manifest
    reading: ReadPlan
    """Reads of this rank's blocks."""
    streams: Mapping[str, torch.Tensor]
    """This rank's random-number streams."""


class ShardedCheckpoint:
    """See :class:`~nanotrain_core.contracts.Checkpoint`."""

    def __init__(self, config: ShardedConfig) -> None:
        self.config = config
        self.log = structlog.get_logger("nanotrain.checkpoint")
        self._saving: SaveInProgress | None = None
        self._copies = blocks.Copies()

    def open(self, folder: Path, mesh: Mesh) -> None:
        """Use ``folder``, created on the first save; remove what a killed save left."""
        self.folder, self.mesh = folder, mesh
        # A restart from memory loads nothing, and must not postpone a save by `every_minutes` each time.
        self._last_save = time.monotonic() - (folders.age(folder) if mesh.rank == 0 else 0.0)
        self._nothing_loaded = True
        self._verified: dict[int, Mapping[str, File]] = {}
        self._restored: set[int] = set()
        self._saving = None
        self._assigner = ShardAssigner(mesh, link_frozen=self.config.link_frozen)
        self._frozen = FrozenFiles(mesh.rank, mesh.world_size)
        self._late, self._writing = LateFlag(mesh), LateFlag(mesh)
        self._on_first(lambda: folders.clear_leftovers(folder))
        if mesh.rank == 0:
            for entry in folders.unexpected_entries(folder):
                self.log.warning("ignoring an entry that is not a checkpoint", entry=str(entry))

    def due(self, step: int) -> bool:
        """Save every ``every`` steps, and when ``every_minutes`` have elapsed on rank 0.

        On a GPU the latter is known one step later, so that the host need not wait for the device.
        """
        if self.config.every and step % self.config.every == 0:
            return True
        if not self.config.every_minutes:
            return False
        late = time.monotonic() - self._last_save >= 60 * self.config.every_minutes
        return bool(self._late.any(late and self.mesh.rank == 0))

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, oldest first."""
        return folders.steps(self.folder)

    def verify(self, step: int) -> Sequence[str]:
        """Read all of the checkpoint of ``step``, and return what is wrong with it."""
        problems = folders.damage(folders.step_folder(self.folder, step), full=True)
        if problems:  # which others share, perhaps
            self._frozen.forget()
        return problems

    # --- save ---------------------------------------------------------------------------------

    def save(self, step: int, state: TrainState) -> None:
        """Agree on the shards and begin to write this rank's."""
        assert self._saving is None, "a save is on its way: advance(wait=True) first"
        began = self._last_save = time.monotonic()
        self._late.forget()
        self._writing.forget()
        assignment = self._assigner.assign(state.blocks)
        scratch: Path = self._on_first(lambda: folders.make_scratch(self.folder, step))
        state = attrs.evolve(state)  # which copies meta: it is written later
        saving = SaveInProgress(step, self.mesh.rank, scratch, state, began, old=self._retire_old(state.meta))
        shares = {shard_name(self.mesh.rank): blocks.chosen(state.blocks, assignment.mine)}
        frozen = blocks.chosen(state.blocks, assignment.frozen)
        saving.files = self._frozen.link(scratch, frozen)
        if not saving.files:
            shares[self._frozen.name] = frozen
        if self.config.asynchronous:
            saving.write_in_thread(shares, self._copies)
        else:
            saving.write(shares)
        saving.blocked = time.monotonic() - began
        self._saving = saving

    def _on_first(self, act: Callable[[], Any]) -> Any:
        """Broadcast: modify the folder on rank 0 and return the result everywhere, or fail everywhere."""
        problem, outcome = "", None
        if self.mesh.rank == 0:
            try:
                outcome = act()
            except OSError as error:
                problem = f"{self.folder} cannot be written: {error.strerror or error}"
        agree(problem, self.mesh)
        return broadcast_from_first(outcome, self.mesh)

    def settle(self) -> None:
        """Wait until this rank's shard is copied."""
        if self._saving is not None:
            self._saving.settle()

    def advance(self, *, wait: bool) -> Sequence[CheckpointReport]:
        """Publish the save in progress, if every rank has written its shard."""
        saving = self._saving
        if saving is None:
            return ()
        began = time.monotonic()
        if wait:
            saving.join()
        if not wait and self._writing.any(saving.busy) is not False:
            saving.blocked += time.monotonic() - began
            return ()
        self._saving = None
        path = self._publish(saving)
        now = time.monotonic()
        names = [*saving.files, *([manifest.NAME] if self.mesh.rank == 0 else [])]
        blocked, written = saving.blocked + now - began, [path / name for name in names]
        return [CheckpointReport(saving.step, path, now - saving.began, blocked, written)]

    def _publish(self, saving: SaveInProgress) -> Path:
        """Move the checkpoint into place, or remove its files."""
        everyone = gather_to_first(saving.files, self.mesh)
        try:
            agree(saving.error, self.mesh)
            problem = ""
            try:
                if everyone:
                    files = {name: file for files in everyone for name, file in files.items()}
                    text = manifest.write(self._manifest(saving, files))
                    folders.publish(saving.scratch, text, saving.step)
                    self._verified[saving.step] = files
            except OSError as error:
                problem = f"step {saving.step} could not be put in place in {self.folder}: {error}"
            agree(problem, self.mesh)
        except CheckpointError:
            if self.mesh.rank == 0:
                shutil.rmtree(saving.scratch, ignore_errors=True)
            raise
        path = folders.step_folder(self.folder, saving.step)
        self._frozen.saved(path, saving.files)
        return path

    def _manifest(self, saving: SaveInProgress, files: dict[str, File]) -> Manifest:
        earlier = [step for step in self.steps() if step < saving.step]
        previous = folders.seal(folders.step_folder(self.folder, earlier[-1])) if earlier else None
        core, torch_version = core_version, str(torch.__version__)
        return Manifest(
            step=saving.step,
            versions={
                "nanotrain-core": core,
                "torch": torch_version,
                "nanotrain-sharded-ckpt-v2": __version__,
            },
            world_size=self.mesh.world_size,
            layout=self.mesh.layout.sizes,
            previous=previous,
            meta=saving.state.meta,
            tensors=self._assigner.assigned.tensors,
            files=dict(sorted(files.items())),
        )

    def _retire_old(self, meta: Mapping[str, Any]) -> list[Path]:
        """On rank 0, rename what retention does not keep, for the thread to delete. It may fail.

        After skipped steps it keeps everything: the run may have to go back to an older checkpoint.
        """
        gone: list[Path] = []
        if self.mesh.rank or meta.get("skipped_in_a_row"):
            return gone
        try:
            stay = {*self._restored, *newest_evaluated(self.steps(), meta)}
            for step in folders.expendable(self.folder, self.config.keep, stay, self._verified):
                gone.append(folders.retire(self.folder, step))
        except OSError as error:
            self.log.warning("old checkpoints could not be deleted", problem=str(error))
        return gone

    # --- load ---------------------------------------------------------------------------------

    @show_progress("loading a checkpoint")
    def load(self, which: str, state: TrainState) -> TrainState | None:
        """Verify, plan, check, then fill the blocks."""
        if self._nothing_loaded:  # the time since the checkpoint was saved is not in the state
            self._last_save, self._nothing_loaded = time.monotonic(), False
        self._frozen.forget()  # what is live will be another's, or the checkpoint is damaged
        found, damaged = self._newest_whole(state) if which == "latest" else (self._named(which, state), {})
        if found is None:
            return None
        saved = found.manifest
        self._quarantine(damaged)
        self._fill(found.reading)
        own = found.path.resolve().parent == self.folder.resolve()
        left = (step for step in self.steps() if step > saved.step or not own)
        aside = self._on_first(lambda: folders.set_aside(self.folder, [*left]))
        if aside and self.mesh.rank == 0:
            self.log.warning("checkpoints of an abandoned branch were set aside", now=str(aside))
        if own:
            self._restored.add(saved.step)
            if self.config.verify == "full":
                self._verified[saved.step] = saved.files
                self._frozen.loaded(found.path, saved, state.blocks)
        return TrainState(state.blocks, saved.meta, found.streams)

    def _fill(self, reading: ReadPlan) -> None:
        """Overwrite live tensors, or fail on every rank."""
        problem = ""
        try:
            reading.fill()
        except CheckpointError as error:
            problem = str(error)
        agree(problem, self.mesh)

    def _streams(
        self, path: Path, saved: Manifest, wanted: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return this rank's streams if the layout is the same: otherwise they are meaningless."""
        name = streams_name(self.mesh.rank)
        if nontrivial_views(saved.layout) != self.mesh.layout.degrees or name not in saved.files:
            return {}
        shard.read_header(path / name)
        try:
            found: dict[str, torch.Tensor] = load_file(path / name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path / name} cannot be read: {error}") from None
        for stream in found.keys() & wanted.keys():
            form, expected = ((t.dtype, tuple(t.shape)) for t in (found[stream], wanted[stream]))
            if form != expected:
                raise CheckpointError(f"{path / name}: {stream} is {form}, expected {expected}")
        return found

    def _named(self, which: str, state: TrainState) -> ReadableCheckpoint:
        """Return exactly the requested checkpoint."""
        path = folders.step_folder(self.folder, int(which)) if which.isdecimal() else Path(which)
        problem = ""
        if self.mesh.rank == 0 and not (path / manifest.NAME).is_file():
            known = ", ".join(map(str, self.steps())) or "none"
            problem = f"no checkpoint at {path}; steps saved in {self.folder}: {known}"
        agree(problem, self.mesh)
        found, problems = self._open(path, state)
        if found is None:
            raise CheckpointError("; ".join(problems))
        return found

    def _newest_whole(self, state: TrainState) -> tuple[ReadableCheckpoint | None, dict[int, str]]:
        """Return the newest checkpoint that all ranks can read, and what is wrong with newer ones."""
        damaged: dict[int, str] = {}
        there = once_saved(self.folder, self.mesh)
        for step in reversed(there):
            path = folders.step_folder(self.folder, step)
            found, problems = self._open(path, state)
            if found is None:  # again: a rank's file system may have failed for a moment (ESTALE, EIO)
                found, problems = self._open(path, state)
            if found is not None:
                return found, damaged
            damaged[step] = "; ".join(problems)
        if damaged:  # all stay in place: otherwise the next launch would find none
            raise CheckpointError(f"no checkpoint in {self.folder} is whole: {damaged[there[-1]]}")
        return None, damaged

    def _quarantine(self, damaged: Mapping[int, str]) -> None:
        """Rename damaged checkpoints, once there is another one to resume from."""
        for step, problem in damaged.items():
            now = self._on_first(partial(folders.quarantine, self.folder, step))
            if self.mesh.rank == 0:
                self.log.warning("a damaged checkpoint was set aside", problem=problem, now=str(now))

    def _open(self, path: Path, state: TrainState) -> tuple[ReadableCheckpoint | None, Sequence[str]]:
        """Return what to read, if every rank can read its part, otherwise what is wrong: on all ranks alike.

        Raises:
            UnfitCheckpoint: it is intact, but does not fit ``state``.
        """
        # torch's planner, with DTensor, takes a second to import; neither a dry run nor a save uses it.
        from nanotrain_sharded_ckpt_v2.resharding import ReadPlan, misfits

        saved, problems = self._examine(path)
        if saved is None:
            return None, problems
        state.accept(saved.meta)  # first, since a different model has the clearest error
        everyone = gather_to_first({block.name for block in state.blocks}, self.mesh)
        wanted: Collection[str] = set().union(*everyone) if everyone else saved.tensors
        unfit = [*unexpected_kinds(saved.tensors, wanted), *misfits(saved, state.blocks, wanted)]
        more = f" ({len(unfit)} in all)" if len(unfit) > 1 else ""
        text = f"{path} does not fit this run: {unfit[0]}{more}" if unfit else ""
        agree(text, self.mesh, UnfitCheckpoint)
        found, problem = None, ""
        try:
            reading = ReadPlan(path, saved, state.blocks)
            streams = self._streams(path, saved, state.rank_tensors)
            found = ReadableCheckpoint(path, saved, reading, streams)
        except CheckpointError as error:
            problem = str(error)
        problems = [f"rank {rank}: {text}" for rank, text in enumerate(self.mesh.gather(problem)) if text]
        return (None if problems else found), problems

    def _examine(self, path: Path) -> tuple[Manifest | None, Sequence[str]]:
        """Return the manifest if all is well, otherwise None and what is wrong: the same on every rank.

        Rank 0 reads the manifest for all; each rank verifies its share of the files.
        """
        text, problem, other_format, saved = "", "", "", None
        if self.mesh.rank == 0:
            try:
                text = manifest.read_text(path)
                saved = manifest.parse(text, path)
                folders.check_folder(path, saved)
            except manifest.OtherFormat as error:  # it is not damaged, but of another format version
                other_format = str(error)
            except (CheckpointError, OSError) as error:
                problem = str(error)
        agree(other_format, self.mesh)
        text, problem = broadcast_from_first((text, problem), self.mesh)
        if problem:
            return None, [problem]
        saved = saved or manifest.parse(text, path)
        apart = manifest.apart(path, text)
        told = [f"rank {self.mesh.rank}: {apart}"] if apart else []
        mine = list(saved.files.items())[self.mesh.rank :: self.mesh.world_size]
        full = self.config.verify == "full"
        files = mine if self.config.verify != "none" else []
        found = [shard.damage(path, name, file, full=full) for name, file in files]
        everyone = self.mesh.gather(told + [problem for problem in found if problem])
        problems = [problem for said in everyone for problem in said]
        return (None if problems else saved), problems
