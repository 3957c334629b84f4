"""Options that ``sample`` and ``eval`` both have, and numbers as argparse reads them."""

from __future__ import annotations

import argparse

from nanotrain_core.api import add_plugin_options


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Add the weights that are used."""
    what = "a run folder (its newest checkpoint), a checkpoint, a converted folder, or a Hugging Face folder"
    parser.add_argument("path", metavar="PATH", help=what)


def add_layout_options(parser: argparse.ArgumentParser, *, example: str, otherwise: str) -> None:
    """Add which checkpoint, by which tokenizer, and on which layout.

    Args:
        parser: of the command.
        example: of ``--set``.
        otherwise: what is printed without ``--json``.
    """
    parser.add_argument("--step", type=count, metavar="N", help="the checkpoint of this step")
    about = "a tokenizer.json, or bytes; default: that of the run's data"
    parser.add_argument("--tokenizer", metavar="FILE", help=about)
    about = "split the model over ranks, for example tp=2; may be repeated"
    parser.add_argument("--degree", action="append", default=[], metavar="DIM=N", help=about)
    about = f"change one value of the recipe, for example {example} or run.device=cpu"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=about)
    parser.add_argument("--json", action="store_true", help=f"print JSON instead of {otherwise}")
    add_plugin_options(parser)


def count(text: str) -> int:
    """Return a number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected 0 or a number above it, got '{text}'")
    return int(text)


def above_zero(text: str) -> int:
    """Return a number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got '{text}'")
    return int(text)
