"""``nanotrain data prepare``: text to shards of tokens, by many processes, the same bytes for any number.

A unit of the corpus becomes a shard, with a record beside it (``NAME.json``) of what it was made of. The
manifest is written last and takes the place of the records. What is interrupted goes on: a shard whose record
is as it was written, and whose hashes are right, is kept.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from nanotrain_core.api import DataError, remove_leftovers, show_progress, write_atomically
from nanotrain_data.codecs import Codec, describe_codec, open_codec
from nanotrain_data.conversations import ConversationCodec, open_conversation_codec
from nanotrain_data.manifest import (
    NAME,
    ChatInfo,
    Manifest,
    ShardInfo,
    TokenizerInfo,
    read_manifest,
    stored_dtype,
)
from nanotrain_data.request import Request
from nanotrain_data.sources import units_of
from nanotrain_data.unit_writer import (
    Task,
    cannot_write,
    digest_of,
    read_record,
    record,
    write_all,
    write_record,
)
from nanotrain_data.verify import damage, tokenizer_problems
from nanotrain_data.writer import ANSWERS, SUFFIXES, file_sha256


@attrs.define(frozen=True)
class Prepared:
    """What was done."""

    manifest: Manifest
    written: int
    """Shards that were written, of those in the manifest; the others were there already."""
    changed: tuple[str, ...] = ()
    """Sources of shards that were there already, and were written again: they hold something else now."""


def prepare(request: Request, workers: int) -> Prepared:
    """Write what is not there yet.

    Raises:
        DataError: a source cannot be read, the tokenizer is missing, or the folder holds something else.
    """
    codec = open_codec(request.tokenizer)
    tokenizer = describe_codec(request.tokenizer)
    conversations = _conversations(request, codec)
    chat = _chat_info(conversations, codec)
    if chat:
        request = attrs.evolve(request, date=chat.date)  # which all processes tell, also after midnight
    units = units_of(request.sources, request.suffixes, request.unit_bytes)
    end = codec.separator if request.end_documents and not chat else None
    form = [tokenizer.sha256, stored_dtype(codec.vocab_size), end, request.field]
    form += [chat.sha256] if chat else []
    made_of = digest_of([form, [[part.identity for part in unit.parts] for unit in units]])
    try:
        request.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(request.out, error) from None
    tasks = [
        Task(number, unit, digest_of([form, [part.identity for part in unit.parts]]))
        for number, unit in enumerate(units)
    ]
    with _alone(request.out):
        remove_leftovers(request.out)
        there = (
            _of_manifest(request.out, made_of, tasks)
            if (request.out / NAME).exists()
            else _of_records(request.out, tasks)
        )
        known = _unchanged(there, workers)
        changed = {part.name for task in there.keys() - known for part in task.unit.parts}
        if (request.out / NAME).exists():
            manifest = read_manifest(request.out)
            if len(known) == len(tasks) and not tokenizer_problems(request.out, manifest):
                _remove_records(request.out, manifest)  # which an interrupted command left
                return Prepared(manifest, 0)
            _open_again(request, known)
        _refuse_strangers(request.out, tokenizer)
        _copy_tokenizer(request, tokenizer)
        made = write_all(request, [task for task in tasks if task not in known], workers)
        of_number = {**{task.number: info for task, info in known.items()}, **made}
        infos = [of_number[number] for number in sorted(of_number)]
        manifest = Manifest(
            tokenizer=tokenizer,
            vocab_size=codec.vocab_size,
            dtype=stored_dtype(codec.vocab_size),
            end_of_document=end,
            made_of=made_of,
            chat=chat,
            shards=tuple(info for info in infos if info.tokens),
            empty=tuple(info for info in infos if not info.tokens),
        )
        if not manifest.shards:
            what = "answer of an assistant" if chat else "text"
            raise DataError(f"there is no {what} in {', '.join(request.sources)}")
        manifest.write(request.out)
        _remove_records(request.out, manifest)
    written = sum(info.tokens > 0 for info in made.values())
    return Prepared(manifest, written, tuple(sorted(changed)))


def _conversations(request: Request, codec: Codec) -> ConversationCodec | None:
    if not request.chat:
        return None
    date = request.date or _date_of(request.out)
    return open_conversation_codec(codec, request.tokenizer, request.chat_template, date)


def _chat_info(chat: ConversationCodec | None, codec: Codec) -> ChatInfo | None:
    if chat is None:
        return None
    template = chat.template
    if template is None:
        return ChatInfo(template="plain", sha256=digest_of("plain"), end=codec.separator)
    return ChatInfo(
        template=template.name,
        sha256=template.sha256,
        source=template.source,
        words=dict(template.words),
        tool_use=template.tool_use,
        date=template.date,
    )


def example_of_text(text: Path, folder: Path) -> Mapping[str, Any]:
    """Prepare a small text, its bytes as tokens: see ``Component.example_of_text``."""
    prepare(Request(sources=(str(text),), tokenizer="bytes", out=folder, unit_bytes=2**11), workers=1)
    return {"paths": [str(folder)]}


def example_of_streaming(text: Path, folder: Path) -> Mapping[str, Any]:
    """Return the same as a URL, through a cache that holds a few of its shards."""
    example_of_text(text, folder / "prepared")
    return {"urls": [f"file://{folder}/prepared"], "cache": str(folder / "cache"), "cache_gb": 1e-5}


# --- the folder -----------------------------------------------------------------------------------


def _of_records(out: Path, tasks: Sequence[Task]) -> dict[Task, ShardInfo]:
    """Return shards that an interrupted command wrote for the same tasks, if they are as it left them."""
    return {task: info for task in tasks if (info := _recorded(out, task)) is not None}


def _recorded(out: Path, task: Task) -> ShardInfo | None:
    known = read_record(record(out, task.number))
    if known is None or known["made_of"] != task.digest:
        return None
    try:
        info = ShardInfo(**known["shard"])
        hashes = [info.sha256, info.offsets_sha256, info.hashes_sha256]
        suffixes = [*SUFFIXES]
        if info.answers_sha256 is not None:
            hashes, suffixes = [*hashes, info.answers_sha256], [*suffixes, ANSWERS]
        found = [file_sha256(out / f"{info.name}{suffix}") for suffix in suffixes]
    except (OSError, TypeError):  # of another version's fields
        return None
    return info if found == hashes else None


def _of_manifest(out: Path, made_of: str, tasks: Sequence[Task]) -> dict[Task, ShardInfo]:
    """Return the shards of a folder that was prepared before, of the same tasks.

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
    named = {shard.name: shard for shard in (*manifest.shards, *manifest.empty)}
    return {task: named[task.name] for task in tasks if task.name in named}


def _unchanged(there: Mapping[Task, ShardInfo], workers: int) -> dict[Task, ShardInfo]:
    """Return which of the shards that are there were made of what their sources hold now.

    Sources are read for it: a file may change and keep its size, and an archive or a copy its time too.
    """
    found = {}
    total = sum(task.unit.size for task in there)
    with (
        show_progress("comparing sources", total, "B") as advance,
        ThreadPoolExecutor(max(workers, 1)) as pool,
    ):
        for (task, info), now in zip(there.items(), pool.map(_hash_of, there), strict=True):
            advance(task.unit.size)
            if info.source_sha256 == now:
                found[task] = info
    return found


def _hash_of(task: Task) -> str:
    return task.unit.sha256()


def _open_again(request: Request, known: Mapping[Task, ShardInfo]) -> None:
    """Make a folder unfinished, in which some shards are to be written again: interrupted, it goes on."""
    for task, info in known.items():
        write_record(request, task, info)
    (request.out / NAME).unlink()


def _date_of(out: Path) -> str | None:
    """Return the day that templates were told so far: a preparation that goes on tells the same."""
    if (out / NAME).exists():
        chat = read_manifest(out).chat
        return chat.date if chat else None
    for path in sorted(out.glob("[0-9]*.json")):
        if (known := read_record(path)) is not None:
            date: str | None = known["date"]
            return date
    return None


def _refuse_strangers(out: Path, tokenizer: TokenizerInfo) -> None:
    """Keep from writing among files that are not of a preparation."""
    ours = {*SUFFIXES, ANSWERS, ".json"}
    for path in sorted(out.iterdir()):
        if not (path.suffix in ours and path.stem.isdigit()) and path.name not in (LOCK, tokenizer.file):
            raise DataError(f"{out} holds {path.name}, which is of no preparation; expected a new folder")


def _copy_tokenizer(request: Request, tokenizer: TokenizerInfo) -> None:
    if tokenizer.file is not None:
        content = Path(request.tokenizer).read_bytes()
        write_atomically(request.out / tokenizer.file, lambda path: path.write_bytes(content))


def _remove_records(out: Path, manifest: Manifest) -> None:
    """Remove what the manifest does not name: records, and shards of an earlier cut of the corpus."""
    named = {shard.name for shard in manifest.shards}
    for path in out.iterdir():
        if path.name == manifest.tokenizer.file or not path.stem.isdigit():
            continue
        of_shard = path.suffix in (*SUFFIXES, ANSWERS)
        if path.suffix == ".json" or (of_shard and path.stem not in named):
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
