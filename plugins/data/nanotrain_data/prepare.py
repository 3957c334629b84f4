"""``nanotrain data prepare``: text to shards of tokens, by many processes, the same bytes for any number.

A unit of the corpus becomes a shard, with a record beside it (``NAME.json``) of what it was made of. The
manifest is written last and takes the place of the records. What is interrupted goes on: a shard whose record
and hashes are right is kept.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from nanotrain_core.api import (
    DataError,
    remove_leftovers,
    working,
    write_atomically,
    write_text_atomically,
)
from nanotrain_data.codecs import describe_codec, open_codec
from nanotrain_data.manifest import NAME, Manifest, ShardInfo, TokenizerInfo, read_manifest, stored_dtype
from nanotrain_data.readers import documents
from nanotrain_data.sources import TEXT_SUFFIXES, Unit, units_of
from nanotrain_data.verify import damage
from nanotrain_data.writer import SUFFIXES, Document, file_sha256, shard_name, write_shard

#: Documents and characters that are tokenised at a time, which bounds memory.
DOCUMENTS, CHARACTERS = 256, 2**22


@attrs.define(frozen=True, kw_only=True)
class Request:
    """What is to be prepared."""

    sources: tuple[str, ...]
    tokenizer: str
    """``bytes``, or the file of a tokenizer."""
    out: Path
    field: str = "text"
    """Where the text is in a JSON object or a table."""
    suffixes: tuple[str, ...] = TEXT_SUFFIXES
    """Files that are a document each."""
    unit_bytes: int = 2**28
    """Of text that becomes one shard, about."""
    end_documents: bool = True
    """Whether each document ends with the tokenizer's token for it, if it has one."""


@attrs.define(frozen=True)
class Prepared:
    """What was done."""

    manifest: Manifest
    written: int
    """Shards that were written, of those in the manifest; the others were there already."""


def prepare(request: Request, workers: int) -> Prepared:
    """Write what is not there yet.

    Raises:
        DataError: a source cannot be read, the tokenizer is missing, or the folder holds something else.
    """
    codec = open_codec(request.tokenizer)
    tokenizer = describe_codec(request.tokenizer)
    units = units_of(request.sources, request.suffixes, request.unit_bytes)
    end = codec.separator if request.end_documents else None
    form = [tokenizer.sha256, stored_dtype(codec.vocab_size), end, request.field]
    made_of = _digest([form, [[part.identity for part in unit.parts] for unit in units]])
    try:
        request.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(request.out, error) from None
    with _alone(request.out):
        remove_leftovers(request.out)
        if (request.out / NAME).exists():
            return Prepared(_finished(request.out, made_of), 0)
        _refuse_strangers(request.out, tokenizer)
        _copy_tokenizer(request, tokenizer)
        todo = [
            _Task(n, unit, _digest([form, [attrs.astuple(part) for part in unit.parts]]))
            for n, unit in enumerate(units)
        ]
        known = {task.number: found for task in todo if (found := _kept(request.out, task)) is not None}
        made = _write_all(request, [task for task in todo if task.number not in known], workers)
        shards = {**known, **made}
        manifest = Manifest(
            tokenizer=tokenizer,
            vocab_size=codec.vocab_size,
            dtype=stored_dtype(codec.vocab_size),
            end_of_document=end,
            made_of=made_of,
            shards=tuple(shards[number] for number in sorted(shards) if shards[number].tokens),
        )
        if not manifest.shards:
            raise DataError(f"there is no text in {', '.join(request.sources)}")
        manifest.write(request.out)
        _remove_records(request.out, manifest)
    return Prepared(manifest, len(made))


def example_of_text(text: Path, folder: Path) -> Mapping[str, Any]:
    """Prepare a small text, its bytes as tokens: see ``Component.example_of_text``."""
    prepare(Request(sources=(str(text),), tokenizer="bytes", out=folder, unit_bytes=2**11), workers=1)
    return {"paths": [str(folder)]}


# --- one unit -------------------------------------------------------------------------------------


@attrs.define(frozen=True)
class _Task:
    number: int
    unit: Unit
    digest: str
    """Over all that decides the shard's bytes."""


class _Writer:
    """Writes shards, in this process or in one of many."""

    def __init__(self, request: Request, done: Any) -> None:
        self.request, self.codec, self._done = request, open_codec(request.tokenizer), done
        self.end = self.codec.separator if request.end_documents else None

    def write(self, task: _Task) -> ShardInfo:
        out, name = self.request.out, shard_name(task.number)
        try:
            info = write_shard(out, name, stored_dtype(self.codec.vocab_size), self._documents(task.unit))
            record = {"made_of": task.digest, "shard": attrs.asdict(info)}
            write_text_atomically(_record(out, task.number), json.dumps(record))
        except OSError as error:
            raise _cannot_write(out, error) from None
        return info

    def _documents(self, unit: Unit) -> Iterator[Document]:
        end = [] if self.end is None else [self.end]
        for part in unit.parts:
            told = 0.0
            for texts, size in _batches(documents(part, self.request.field)):
                for text, tokens in zip(texts, self.codec.encode_batch(texts), strict=True):
                    yield tokens + end, len(text.encode())
                now = min(part.size, told + size)
                self._advance(now - told)
                told = now
            self._advance(part.size - told)

    def _advance(self, size: float) -> None:
        with self._done.get_lock():
            self._done.value += size


def _batches(texts: Iterator[str]) -> Iterator[tuple[list[str], int]]:
    some: list[str] = []
    size = 0
    for text in texts:
        some.append(text)
        size += len(text)
        if len(some) == DOCUMENTS or size >= CHARACTERS:
            yield some, size
            some, size = [], 0
    if some:
        yield some, size


_writer: _Writer | None = None
"""Of a worker process."""


def _begin(request: Request, done: Any) -> None:
    global _writer  # noqa: PLW0603 a process pool has no other place for what its workers keep
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each processor already
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C waits for no shard to be whole
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _writer = _Writer(request, done)


def _end_with_parent() -> None:
    """End this process when the command that started it is gone, however that ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _write_in_worker(task: _Task) -> ShardInfo:
    assert _writer is not None
    return _writer.write(task)


def _write_all(request: Request, tasks: Sequence[_Task], workers: int) -> dict[int, ShardInfo]:
    context = multiprocessing.get_context("spawn")
    done = context.Value("d", 0.0)
    total = sum(task.unit.size for task in tasks)
    workers = min(workers, len(tasks))
    with working("tokenising", total, "B") as advance:
        if workers <= 1:
            writer = _Writer(request, _Told(advance))
            return {task.number: writer.write(task) for task in tasks}
        pool = ProcessPoolExecutor(workers, context, _begin, (request, done))
        try:
            futures = {pool.submit(_write_in_worker, task): task.number for task in tasks}
            made: dict[int, ShardInfo] = {}
            told = 0.0
            waiting: set[Future[ShardInfo]] = set(futures)
            while waiting:
                ended, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                made |= {futures[future]: future.result() for future in ended}
                now = done.value
                advance(now - told)
                told = now
            return made
        except BrokenProcessPool:
            raise DataError(
                "a process that tokenises was killed, perhaps for want of memory: run the command again, and "
                "it goes on; fewer --workers take less"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


class _Told:
    """Stands in for a number shared between processes, where there is one."""

    def __init__(self, advance: Any) -> None:
        self._advance = advance

    @contextmanager
    def get_lock(self) -> Iterator[None]:
        yield

    @property
    def value(self) -> float:
        return 0.0

    @value.setter
    def value(self, more: float) -> None:
        self._advance(more)


# --- the folder -----------------------------------------------------------------------------------


def _record(out: Path, number: int) -> Path:
    return out / f"{shard_name(number)}.json"


def _kept(out: Path, task: _Task) -> ShardInfo | None:
    """Return a shard that an interrupted command wrote, if its files are those of its record."""
    try:
        record = json.loads(_record(out, task.number).read_bytes())
        info = ShardInfo(**record["shard"])
        hashes = (info.sha256, info.offsets_sha256, info.hashes_sha256)
        found = tuple(file_sha256(out / f"{info.name}{suffix}") for suffix in SUFFIXES)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return info if record["made_of"] == task.digest and found == hashes else None


def _finished(out: Path, made_of: str) -> Manifest:
    """Return the manifest of a folder that was prepared before, of the same.

    Raises:
        DataError: it is of something else, or its shards are damaged.
    """
    manifest = read_manifest(out)
    if manifest.made_of != made_of:
        raise DataError(
            f"{out} holds what other sources, another tokenizer or other options made; "
            "expected a folder that is new or holds the same: name another, or delete it"
        )
    problems = damage(out, manifest)
    if problems:
        raise DataError("\n".join([*problems, f"delete {out} and prepare it again"]))
    return manifest


def _refuse_strangers(out: Path, tokenizer: TokenizerInfo) -> None:
    """Keep from writing among files that are not of a preparation."""
    ours = {*SUFFIXES, ".json"}
    for path in sorted(out.iterdir()):
        if not (path.suffix in ours and path.stem.isdigit()) and path.name not in (LOCK, tokenizer.file):
            raise DataError(f"{out} holds {path.name}, which is of no preparation; expected a new folder")


def _copy_tokenizer(request: Request, tokenizer: TokenizerInfo) -> None:
    if tokenizer.file is not None:
        content = Path(request.tokenizer).read_bytes()
        write_atomically(request.out / tokenizer.file, lambda path: _write(path, content))


def _remove_records(out: Path, manifest: Manifest) -> None:
    """Remove what the manifest does not name: records, and shards of an earlier cut of the corpus."""
    named = {shard.name for shard in manifest.shards}
    for path in out.iterdir():
        record = path.suffix == ".json" and path.stem.isdigit()
        if record or (path.suffix in SUFFIXES and path.stem not in named):
            path.unlink()


LOCK = ".lock"


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Keep a second command out of the folder.

    Raises:
        DataError: one is at work there.
    """
    with (out / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"another 'nanotrain data' writes to {out}: wait for its end") from None
        except OSError:
            pass  # a file system without locks
        yield


def _cannot_write(out: Path, error: OSError) -> DataError:
    return DataError(f"cannot write to {out}: {error.strerror or error}; given again, the command goes on")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
