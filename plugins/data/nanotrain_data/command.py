"""``nanotrain data prepare|inspect|convert|train-tokenizer``: corpora before a run reads them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from nanotrain_core.api import DataError, NanotrainError, positive_int, unsigned_int, usable_processors
from nanotrain_data.manifest import read_manifest, what_is_left_out
from nanotrain_data.sources import TEXT_SUFFIXES

TOKENIZER = "bytes, a tokenizer.json of Hugging Face, a .tiktoken file, or a .model of SentencePiece"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of each of its own commands."""
    commands = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    _add_prepare(commands.add_parser("prepare", help="tokenize text into shards that a run reads"))
    _add_inspect(commands.add_parser("inspect", help="show the contents of a prepared folder"))
    _add_convert(commands.add_parser("convert", help="convert from and to Megatron-LM's .bin and .idx"))
    _add_train(commands.add_parser("train-tokenizer", help="train a tokenizer.json from text"))


def run(args: argparse.Namespace) -> int:
    """Do it."""
    {"prepare": _prepare, "inspect": _inspect, "convert": _convert, "train-tokenizer": _train}[args.what](
        args
    )
    return 0


# --- prepare --------------------------------------------------------------------------------------


def _add_sources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="file or folder: text, JSON lines (both also .gz or .zst), parquet, output of datasets",
    )
    parser.add_argument(
        "--field",
        metavar="NAME",
        help="field of a JSON object, or column of a table (default: text; for conversations: messages)",
    )
    parser.add_argument(
        "--suffixes",
        nargs="+",
        default=list(TEXT_SUFFIXES),
        metavar=".X",
        help=f"suffixes of files that are one document each (default: {' '.join(TEXT_SUFFIXES)})",
    )


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    _add_sources(parser)
    parser.add_argument("--tokenizer", required=True, metavar="T", help=TOKENIZER)
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="output folder for shards")
    parser.add_argument(
        "--workers", type=positive_int, metavar="N", help="processes (default: one for each processor)"
    )
    parser.add_argument(
        "--shard-mb",
        type=positive_int,
        default=256,
        metavar="N",
        help="approximate size of text per shard, in units of 2^20 bytes (default: 256)",
    )
    parser.add_argument(
        "--no-end",
        action="store_true",
        help="do not end documents with the tokenizer's end-of-text token",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help='documents are conversations, for [data] use = "chat": lists of objects with role and content',
    )
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja file, or a tokenizer_config.json; 'plain': none (default: the one next to the tokenizer)",
    )


def _prepare(args: argparse.Namespace) -> None:
    from nanotrain_data.prepare import prepare
    from nanotrain_data.request import Request

    if args.chat_template and not args.chat:
        raise NanotrainError("--chat-template is for conversations: expected --chat beside it")
    if args.chat and args.no_end:
        raise NanotrainError("--no-end is for text: where a turn of a conversation ends its template says")
    request = Request(
        sources=tuple(args.sources),
        tokenizer=args.tokenizer,
        out=args.out,
        field=args.field or ("messages" if args.chat else "text"),
        suffixes=_suffixes(args.suffixes),
        unit_bytes=args.shard_mb * 2**20,
        end_documents=not args.no_end,
        chat=args.chat,
        chat_template=args.chat_template,
    )
    done = prepare(request, args.workers or usable_processors())
    manifest = done.manifest
    kept = len(manifest.shards) - done.written
    there = f", {kept} of them there already" if kept > 0 else ""
    what = "conversations" if manifest.chat else "documents"
    rows = what_is_left_out(of_chat=manifest.chat is not None)
    left_out = f"; {manifest.left_out:,} {rows} left out" if manifest.left_out else ""
    print(
        f"{args.out}: {manifest.documents:,} {what}, {manifest.tokens:,} tokens "
        f"in {len(manifest.shards)} shards{there}{left_out}"
    )
    if done.changed:
        names = ", ".join(done.changed[:5]) + (" and more" if len(done.changed) > 5 else "")
        print(f"read again what is made of {names}: it was prepared of other content")


def _suffixes(given: list[str]) -> tuple[str, ...]:
    for suffix in given:
        if not suffix.startswith(".") or len(suffix) < 2:
            raise NanotrainError(f"--suffixes: expected suffixes such as .txt, got '{suffix}'")
    return tuple(given)


# --- inspect --------------------------------------------------------------------------------------


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="a prepared folder")
    parser.add_argument(
        "--verify", action="store_true", help="read everything, and compare it with its hashes"
    )
    parser.add_argument(
        "--samples",
        type=unsigned_int,
        default=3,
        metavar="N",
        help="number of documents whose beginning is shown (default: 3)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed for their choice (default: 0)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text, without samples")


def _inspect(args: argparse.Namespace) -> None:
    from nanotrain_data.inspect import lines, samples, summary
    from nanotrain_data.verify import damage, size_problems, tokenizer_problems

    manifest = read_manifest(args.folder)
    if args.verify:
        problems = damage(args.folder, manifest) + tokenizer_problems(args.folder, manifest)
    else:
        problems = size_problems(args.folder, manifest)
    if problems:
        raise DataError("\n".join(problems))
    found = summary(args.folder, manifest)
    if args.json:
        print(json.dumps({**found, "verified": args.verify}, indent=1))
        return
    print("\n".join(lines(found)))
    if args.verify:
        print(f"verified   all {len(manifest.shards)} shards are as they were written")
    if args.samples and manifest.tokenizer.kind != "unknown":
        print("\n".join(samples(args.folder, manifest, args.samples, width=80, seed=args.seed)))


# --- convert --------------------------------------------------------------------------------------


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", type=Path, metavar="FROM", help="a prepared folder, or PREFIX of PREFIX.idx"
    )
    parser.add_argument("target", type=Path, metavar="TO", help="PREFIX of files to write, or a new folder")
    parser.add_argument(
        "--tokenizer",
        metavar="T",
        help=f"with which Megatron's tokens were made: {TOKENIZER} (default: not known)",
    )


def _convert(args: argparse.Namespace) -> None:
    from nanotrain_data.megatron import export_folder, import_prefix, prefix_of

    if args.source.is_dir():
        if args.tokenizer:
            raise NanotrainError(f"--tokenizer: {args.source} knows its tokenizer; leave this option out")
        print(export_folder(args.source, prefix_of(args.target)))
    else:
        print(import_prefix(prefix_of(args.source), args.target, args.tokenizer))


# --- train-tokenizer ------------------------------------------------------------------------------


def _add_train(parser: argparse.ArgumentParser) -> None:
    _add_sources(parser)
    parser.add_argument(
        "--vocab", required=True, type=positive_int, metavar="N", help="maximum vocabulary size"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="a tokenizer.json to write")
    parser.add_argument(
        "--mb",
        type=positive_int,
        metavar="N",
        help="read this many 2^20 bytes of text, evenly from all of it (default: all)",
    )


def _train(args: argparse.Namespace) -> None:
    from nanotrain_data.train_tokenizer import train_tokenizer

    size = args.mb * 2**20 if args.mb else None
    field = args.field or "text"
    print(train_tokenizer(args.sources, _suffixes(args.suffixes), field, args.vocab, args.out, size))
