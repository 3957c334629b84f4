"""Writes the units of a corpus as shards, in this process or in many."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import attrs

from nanotrain_core.api import DataError, show_progress, write_text_atomically
from nanotrain_data.chat_template import Message, Tools
from nanotrain_data.codecs import open_codec
from nanotrain_data.conversations import open_conversation_codec
from nanotrain_data.manifest import ShardInfo, stored_dtype
from nanotrain_data.readers import conversations, documents
from nanotrain_data.request import Request
from nanotrain_data.sources import Part, Unit
from nanotrain_data.writer import Document, shard_name, write_shard

T = TypeVar("T")
#: Documents and characters that are tokenized at a time, which bounds memory.
DOCUMENTS, CHARACTERS = 256, 2**22


@attrs.define(frozen=True)
class Task:
    """A shard to be written."""

    number: int
    unit: Unit
    digest: str
    """Over all that decides the shard's bytes, but for what its files hold."""

    @property
    def name(self) -> str:
        return shard_name(self.number)


def record(out: Path, number: int) -> Path:
    """Return the file that says what a shard was made of, until the manifest does."""
    return out / f"{shard_name(number)}.json"


def write_record(request: Request, task: Task, info: ShardInfo) -> None:
    """Say of a shard that it is whole."""
    known = {"made_of": task.digest, "shard": attrs.asdict(info), "date": request.date}
    sealed = {**known, "sha256": digest_of(known)}
    write_text_atomically(record(request.out, task.number), json.dumps(sealed))


def read_record(path: Path) -> dict[str, Any] | None:
    """Return what :func:`write_record` wrote; None if there is nothing, or it is not as it was written."""
    try:
        known = json.loads(path.read_bytes())
        return known if known.pop("sha256") == digest_of(known) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def digest_of(value: Any) -> str:
    """Return a SHA-256 over a value as JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def cannot_write(out: Path, error: OSError) -> DataError:
    """Return what to tell when a folder cannot be written to."""
    return DataError(f"cannot write to {out}: {error.strerror or error}; given again, the command goes on")


class _Writer:
    """Writes shards, in this process or in one of many."""

    def __init__(self, request: Request, done: Any) -> None:
        self.request, self.codec, self._done = request, open_codec(request.tokenizer), done
        self.end = [] if self.codec.separator is None or not request.end_documents else [self.codec.separator]
        if request.chat:
            self.chat = open_conversation_codec(
                self.codec, request.tokenizer, request.chat_template, request.date
            )

    def write(self, task: Task) -> ShardInfo:
        """Write one shard, and its record."""
        out, chat, dtype = self.request.out, self.request.chat, stored_dtype(self.codec.vocab_size)
        try:
            of_source = task.unit.sha256()
            made = self._conversations if chat else self._texts
            documents = chain.from_iterable(map(made, task.unit.parts))
            info = write_shard(out, task.name, dtype, documents, chat=chat)
            info = attrs.evolve(info, source_sha256=of_source)
            write_record(self.request, task, info)
        except OSError as error:
            raise cannot_write(out, error) from None
        return info

    def _texts(self, part: Part) -> Iterator[Document | None]:
        end = "\0" if self.end and self.request.tokenizer == "bytes" else None
        for texts in self._batches(part, documents(part, self.request.field, end), len):
            for text, tokens in zip(texts, self.codec.encode_batch(texts), strict=True):
                yield Document(tokens + self.end, len(text.encode())) if text else None

    def _conversations(self, part: Part) -> Iterator[Document | None]:
        for some in self._batches(part, conversations(part, self.request.field), _characters):
            for where, messages, tools in some:
                try:
                    made = self.chat.encode(messages, tools)
                except ValueError as error:
                    raise DataError(f"{where()}: field '{self.request.field}' {error}") from None
                yield Document(made.tokens, made.bytes, made.answers) if made.answers else None

    def _batches(self, part: Part, found: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
        """Yield some at a time, and tell how far the part is read."""
        told = 0.0
        some: list[T] = []
        size = 0
        for each in found:
            some.append(each)
            size += size_of(each)
            if len(some) == DOCUMENTS or size >= CHARACTERS:
                yield some
                now = min(part.size, told + size)
                self._advance(now - told)
                told, some, size = now, [], 0
        if some:
            yield some
        self._advance(part.size - told)

    def _advance(self, size: float) -> None:
        with self._done.get_lock():
            self._done.value += size


def _characters(conversation: tuple[Callable[[], str], list[Message], Tools]) -> int:
    return sum(len(message.get("content", "")) for message in conversation[1])


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


def _write_in_worker(task: Task) -> ShardInfo:
    assert _writer is not None
    return _writer.write(task)


def write_all(request: Request, tasks: Sequence[Task], workers: int) -> dict[int, ShardInfo]:
    context = multiprocessing.get_context("spawn")
    done = context.Value("d", 0.0)
    total = sum(task.unit.size for task in tasks)
    workers = min(workers, len(tasks))
    with show_progress("tokenizing", total, "B") as advance:
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
                "a process that tokenizes was killed, perhaps for want of memory: run the command again, and "
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
