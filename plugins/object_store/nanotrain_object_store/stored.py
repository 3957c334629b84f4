"""What a checkpoint in the store is: its marker, which names its files with sizes and hashes. Torch-free.

::

    <prefix>/OWNER.json                                which run has the prefix
    <prefix>/step-00001200-5f0c3b1a/step-00001200/...  the checkpoint as it is on the disk, a folder or a file
    <prefix>/step-00001200-5f0c3b1a/COMPLETE.json      the marker, written last

What has no marker is no checkpoint. Each upload has a folder of its own, so that what is left of one is never
mixed with another. What is read is checked as if a stranger had written it: names decide which files are
written on the machine that resumes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import attrs

from nanotrain_core.api import CheckpointError, load_json

FORMAT, VERSION = "nanotrain-object-store", 1
MARKER = "COMPLETE.json"
#: What the marker of a checkpoint is called whose run went back before it and left its branch.
LEFT = "SUPERSEDED.json"
#: Largest marker that is read: a million files.
LARGEST = 256 * 2**20

_ENTRY = re.compile(r"step-(\d{8,12})-([0-9a-f]{8})")
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_HASH = re.compile(r"[0-9a-f]{64}")


@attrs.define(frozen=True)
class Sent:
    """One file."""

    bytes: int
    sha256: str


@attrs.define(frozen=True, kw_only=True)
class Stored:
    """One complete checkpoint."""

    entry: str
    """Its folder in the store."""
    step: int
    run: str
    name: str
    """Of the folder or file on the disk: ``step-00001200``, ``step-00001200.safetensors``."""
    folder: bool
    files: Mapping[str, Sent]
    """By name within the folder; of a file, its own."""

    def key(self, file: str) -> str:
        """Return the object that a file is."""
        return f"{self.entry}/{self.name}/{file}" if self.folder else f"{self.entry}/{file}"

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for file in self.files.values())

    def text(self) -> bytes:
        """Return the marker, which ends with a hash of all before it."""
        files = {name: attrs.asdict(file) for name, file in sorted(self.files.items())}
        table = {"format": FORMAT, "version": VERSION, "run": self.run, "step": self.step}
        body = json.dumps({**table, "name": self.name, "folder": self.folder, "files": files}, indent=0)[:-2]
        return f'{body},\n"sha256": "{sha256(body.encode()).hexdigest()}"\n}}\n'.encode()


def entry_of(name: str) -> str | None:
    """Return the folder of a checkpoint that an object is in; None if it is in none."""
    entry = name.partition("/")[0]
    return entry if _ENTRY.fullmatch(entry) and "/" in name else None


def step_of(entry: str) -> int:
    """Return the step in the name of a checkpoint's folder."""
    found = _ENTRY.fullmatch(entry)
    assert found is not None
    return int(found[1])


def parse(data: bytes, entry: str) -> Stored:
    """Return what a marker says, checked.

    Raises:
        CheckpointError: naming it, and what of it cannot be.
    """
    at = f"{entry}/{MARKER}"
    try:
        if len(data) > LARGEST:
            raise ValueError(f"it has more than {LARGEST} bytes")
        text = data.decode()
        body, _, seal = text.rpartition(',\n"sha256": "')
        if seal != f'{sha256(body.encode()).hexdigest()}"\n}}\n':
            raise ValueError("its hash is not that of its text: it is cut short, or was changed")
        found = load_json(text)
        problem = next(_problems(found, entry), None)
        if problem:
            raise ValueError(problem)
    except ValueError as problem:
        raise CheckpointError(f"{at} is no marker of a checkpoint: {problem}") from None
    files = {name: Sent(file["bytes"], file["sha256"]) for name, file in found["files"].items()}
    known = {key: found[key] for key in ("step", "run", "name", "folder")}
    return Stored(entry=entry, files=files, **known)


def _problems(found: Any, entry: str) -> Iterator[str]:
    if not isinstance(found, dict):
        yield "expected a table"
    elif (found.get("format"), found.get("version")) != (FORMAT, VERSION):
        yield f"format {found.get('format')!r}, version {found.get('version')!r}; expected {FORMAT} {VERSION}"
    elif type(found.get("step")) is not int or found["step"] != step_of(entry):
        yield f"step {found.get('step')!r}; expected {step_of(entry)}"
    elif not isinstance(found.get("run"), str) or type(found.get("folder")) is not bool:
        yield "run or folder is missing; expected a text, and true or false"
    elif not is_local_name(found.get("name"), found["step"]):
        yield f"name {found.get('name')!r}; expected step-{found['step']:08d}, with or without a suffix"
    elif not isinstance(found.get("files"), dict) or not found["files"]:
        yield "it names no files"
    else:
        yield from _file_problems(found)


def _file_problems(found: Mapping[str, Any]) -> Iterator[str]:
    if not found["folder"] and [*found["files"]] != [found["name"]]:
        yield f"it is of one file; expected files to name {found['name']} alone"
    for name, file in found["files"].items():
        if not is_plain(name):
            yield f"file {name[:80]!r}; expected plain names without folders above them"
        elif not isinstance(file, dict) or not _is_sent(file.get("bytes"), file.get("sha256")):
            yield f"file {name!r} has not its bytes and SHA-256"


def _is_sent(nbytes: Any, digest: Any) -> bool:
    size = type(nbytes) is int and 0 <= nbytes < 2**53
    return size and isinstance(digest, str) and _HASH.fullmatch(digest) is not None


def is_plain(name: str) -> bool:
    """Return whether a file's name leads to nowhere but into its own folder, at most four folders down."""
    parts = name.split("/")
    return len(parts) <= 4 and all(map(_PLAIN.fullmatch, parts))


def is_local_name(name: Any, step: int) -> bool:
    """Return whether a checkpoint of ``step`` may be called so on the disk."""
    return (
        isinstance(name, str) and re.fullmatch(rf"step-{step:08d}(\.[A-Za-z0-9]{{1,20}})?", name) is not None
    )


def find_local(folder: Path, step: int) -> Path | None:
    """Return the checkpoint of ``step`` in a folder on the disk, of any format; None if there is none."""
    there = sorted(folder.glob(f"step-{step:08d}*")) if folder.is_dir() else []
    return next((path for path in there if is_local_name(path.name, step) and not path.is_symlink()), None)


def hashed(path: Path, alive: Callable[[], object] = lambda: None) -> Sent:
    """Return size and SHA-256 of a file, read once; call ``alive`` after each piece."""
    digest, size = sha256(), 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            size += len(piece)
            alive()
    return Sent(size, digest.hexdigest())
