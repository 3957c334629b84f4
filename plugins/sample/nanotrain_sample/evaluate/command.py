"""``nanotrain eval PATH``: validation loss of a run, perplexity of files, tasks of ``lm_eval``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from nanotrain_core.api import (
    NanotrainError,
    Resolution,
    load_plugins,
    plugin_arguments,
    positive_int,
    unsigned_int,
)
from nanotrain_sample.options import add_layout_options, add_weights


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_weights(parser)
    about = "score a UTF-8 file instead of the run's validation split; may be repeated"
    parser.add_argument("--text", action="append", default=[], metavar="FILE", help=about)
    about = "a task or group of lm_eval, or a task's YAML file; may be repeated"
    parser.add_argument("--task", action="append", default=[], metavar="NAME", help=about)
    parser.add_argument("--tasks-from", metavar="FOLDER", help="folder with further tasks of lm_eval")
    about = "examples before each question (default: the task's)"
    parser.add_argument("--few-shot", type=unsigned_int, metavar="N", help=about)
    parser.add_argument(
        "--limit", type=positive_int, metavar="N", help="maximum number of questions per task"
    )
    about = "tokens that the model reads at once (default: the training length)"
    parser.add_argument("--length", type=positive_int, metavar="N", help=about)
    about = "tokens of a file scored per window of --length; the others are context (default: all)"
    parser.add_argument("--stride", type=positive_int, metavar="N", help=about)
    add_layout_options(parser, example="evaluation.sequences=512", otherwise="tables")


def run(args: argparse.Namespace) -> int:
    """Evaluate, on this process or on ranks that it starts."""
    plugins = plugin_arguments(args)
    registry = load_plugins(block=plugins.blocked, local=plugins.local)
    scores = bool(args.text or args.task)
    only_with = {"--length": args.length, "--stride": args.stride, "--tokenizer": args.tokenizer}
    if given := [name for name, value in only_with.items() if value is not None and not scores]:
        raise NanotrainError(f"{given[0]} is for --text and --task: a run's validation split is as it was")
    of_tasks = {"--tasks-from": args.tasks_from, "--few-shot": args.few_shot, "--limit": args.limit}
    if given := [name for name, value in of_tasks.items() if value is not None and not args.task]:
        raise NanotrainError(f"{given[0]} is for --task: name one, such as --task hellaswag")
    for path in args.text:
        if not Path(path).is_file():
            what = "is a folder; expected a file" if Path(path).is_dir() else "there is no such file"
            raise NanotrainError(f"--text {path}: {what}")

    from nanotrain_sample.evaluate.generation import special_token
    from nanotrain_sample.evaluate.job import Asked, ScoreJob, ValidationJob
    from nanotrain_sample.evaluate.tasks import check_installed
    from nanotrain_sample.ranks import ForwardJob, degrees_of, run_on_ranks
    from nanotrain_sample.source import find, fitting_codec, note_length, prefix_of

    if args.task:
        check_installed()
    degrees = degrees_of(args.degree)
    # The validation split is tokenized by the run's own data: no tokenizer of its own need be known.
    source = find(Path(args.path), args.step, args.tokenizer if scores else "bytes", registry)
    if not scores and "data" not in source.tables:
        raise NanotrainError(f"{args.path} holds weights alone, of no run: name files with --text, or tasks")

    def job_of(recipe: str, found: Resolution) -> ForwardJob:
        common: dict[str, Any] = {"recipe": recipe, "overrides": tuple(args.set), "plugins": plugins}
        common["weights"] = str(source.path)
        if not scores:
            return ValidationJob(
                **common,
                tokenizer=None,
                fingerprint=source.fingerprint,
                lengths=source.lengths,
                json=args.json,
            )
        codec = fitting_codec(found, source.tokenizer)  # refuses one that does not fit, before ranks start
        model = registry.build(found.recipe.model)
        length = length_of(args.length, source.length, model.max_length)
        note_length("windows have", length, source.length, model.max_length)
        asked = Asked(
            texts=tuple(args.text),
            tasks=tuple(args.task),
            task_folder=args.tasks_from,
            few_shot=args.few_shot,
            limit=args.limit,
            length=length,
            stride=stride_of(args.stride, length),
            prefix=prefix_of(source, codec, found),
            ends=source.ends,
            bos=special_token(codec, source.bos) if source.bos else None,
            json=args.json,
        )
        return ScoreJob(**common, tokenizer=source.tokenizer, asked=asked)

    return run_on_ranks(job_of, source, degrees, args.set, registry, scores=not scores, plugins=plugins)


def length_of(given: int | None, trained: int | None, limit: int | None) -> int:
    """Return how many tokens the model reads at once.

    Raises:
        NanotrainError: more than its positions, or nothing says.
    """
    length = given or trained or limit
    if length is None:
        raise NanotrainError("these weights do not say how long their sequences were: give --length N")
    if limit is not None and length > limit:
        raise NanotrainError(f"--length {length}: the model reads at most {limit} (model.max_length)")
    return length


def stride_of(given: int | None, length: int) -> int:
    """Return how many tokens a window scores.

    Raises:
        NanotrainError: more than it has.
    """
    if given is not None and given > length:
        raise NanotrainError(
            f"--stride {given}: a window has {length} tokens (--length); expected at most that"
        )
    return given or length
