"""Files of frozen weights: a save links that of the checkpoint before it, in place of writing it again.

As ``rsync --link-dest`` does: every checkpoint is complete, and those of a run share the bytes on the disk.
A file is linked only if it has what this rank would write. It has boxes with the same names, dtypes and
shapes; nobody has written to the live tensors since it was written, or since they were filled from it, which
torch counts for its own operations (``Tensor._version``); and nobody has written to the file, by its size and
time of last change. Wherever a link is not possible, the file is written.

What damages a linked file damages all checkpoints that have it. So it is written anew once it is
:data:`LONGEST` old: what is damaged after that is not in all of them, and does not stay in new ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import structlog
import torch

from nanotrain_core.api.torch import Block, storage_of
from nanotrain_sharded_ckpt_v2 import folders
from nanotrain_sharded_ckpt_v2.blocks import Tensors, forms_of_tensors
from nanotrain_sharded_ckpt_v2.manifest import File, Manifest, frozen_name, key
from nanotrain_sharded_ckpt_v2.shard import Form

#: Seconds for which a file is linked after it was written, or read and verified.
LONGEST = 24 * 3600.0

#: Address and number of writes of each live tensor, by its key in the file.
Versions = dict[str, tuple[int, int]]


@attrs.define(frozen=True)
class Contents:
    """What a file of frozen weights has."""

    forms: Mapping[str, Form]
    versions: Versions
    since: float
    """When it was written or verified, by the clock ``time.monotonic``."""

    def are_those_of(self, wanted: Contents) -> bool:
        """Return whether a file with these contents may be linked in place of writing ``wanted``."""
        alike = all(self.versions.get(key) == version for key, version in wanted.versions.items())
        return self.forms == wanted.forms and alike and wanted.since - self.since < LONGEST


@attrs.define(frozen=True)
class Written:
    """A file of frozen weights in a checkpoint."""

    path: Path
    file: File
    contents: Contents
    modified: int
    """In nanoseconds."""


class FrozenFiles:
    """The file of this rank's frozen weights that the next save may link."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.name = frozen_name(rank, ranks)
        self._last: Written | None = None
        self._next: Contents | None = None
        """Of the save in progress."""
        self._told = False

    def forget(self) -> None:
        """Have the next save write the file."""
        self._last = None

    def link(self, scratch: Path, tensors: Tensors) -> dict[str, File]:
        """Link the file of the checkpoint before into ``scratch``; empty: ``tensors`` must be written."""
        last, wanted = self._last, Contents(forms_of_tensors(tensors), _versions(tensors), time.monotonic())
        self._next = wanted
        if not tensors or last is None or not last.contents.are_those_of(wanted):
            return {}
        target = scratch / self.name
        try:
            os.link(last.path, target)
            found = target.lstat()
            if (found.st_size, found.st_mtime_ns) == (last.file.bytes, last.modified):
                self._next = attrs.evolve(wanted, since=last.contents.since)
                return {self.name: last.file}
            target.unlink()
            problem = "it was changed after it was written"
        except OSError as error:
            problem = error.strerror or str(error)
        if not self._told:  # once: such as on a file system without hard links
            self._told = True
            log = structlog.get_logger("nanotrain.checkpoint")
            log.warning("frozen weights are written again", not_linked=str(last.path), problem=problem)
        return {}

    def saved(self, path: Path, files: Mapping[str, File]) -> None:
        """Note that the checkpoint ``path`` is in place, with these ``files`` of this rank."""
        if self.name in files and self._next is not None:
            self._note(path / self.name, files[self.name], self._next)

    def loaded(self, path: Path, found: Manifest, blocks: Sequence[Block]) -> None:
        """Note that all files of the checkpoint ``path`` were verified, and have filled ``blocks``."""
        live = {key(each.name, tuple(each.offset)): each.tensor for each in blocks if each.frozen}
        if live and self.name in found.files:
            contents = Contents(folders.forms_of(found)[self.name], _versions(live), time.monotonic())
            self._note(path / self.name, found.files[self.name], contents)

    def _note(self, path: Path, file: File, contents: Contents) -> None:
        try:
            self._last = Written(path, file, contents, path.lstat().st_mtime_ns)
        except OSError:
            self._last = None


def _versions(tensors: Mapping[str, torch.Tensor]) -> Versions:
    stored = {name: storage_of(tensor) for name, tensor in tensors.items()}
    return {name: (tensor.data_ptr(), tensor._version) for name, tensor in stored.items()}
