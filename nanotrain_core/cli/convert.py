"""``nanotrain convert SOURCE OUT``: convert weights to and from Hugging Face's format."""

from __future__ import annotations

import argparse
from pathlib import Path

from nanotrain_core.cli.argument_types import real_number
from nanotrain_core.cli.common import add_plugin_options, plugin_arguments
from nanotrain_core.errors import Exit
from nanotrain_core.registry.registry import load_plugins

DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a Hugging Face folder, a checkpoint, a run folder, or the output of this command",
    )
    parser.add_argument("out", metavar="OUT", help="a new folder")
    parser.add_argument(
        "--to",
        metavar="FORM",
        help="names and config to write, huggingface or nanotrain; default: nanotrain's for a Hugging Face "
        "source, else Hugging Face's. Or a form of what a wrapper of the run has added to the model, such as "
        "peft, of lora's adapters",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of all weights; default: unchanged")
    parser.add_argument(
        "--shard-gb",
        type=real_number("a number of gigabytes above 0", lambda size: size > 0),
        default=5.0,
        metavar="GB",
        help="maximum size of one file (default: 5)",
    )
    add_plugin_options(parser)


def run(args: argparse.Namespace) -> int:
    """Convert, and report what was written."""
    asked = plugin_arguments(args)
    registry = load_plugins(block=asked.blocked, local=asked.local)

    import torch

    from nanotrain_core.hf.convert import convert

    written = convert(
        Path(args.source),
        Path(args.out),
        registry,
        form=args.to,
        dtype=getattr(torch, args.dtype) if args.dtype else None,
        shard_bytes=int(args.shard_gb * 1e9),
    )
    files = "1 file" if written.files == 1 else f"{written.files} files"
    step = "" if written.step is None else f", step {written.step}"
    print(f"{args.out}: {written.parameters:,} parameters of model '{written.model}'{step}, in {files}")
    if written.form == "nanotrain":
        print(f'start from them: extends = "{args.out}/model.toml" in a recipe,')
        print(f"                 nanotrain run RECIPE --weights {args.out}")
    return Exit.DONE
