"""Options that ``sample`` and ``eval`` both have, and numbers as argparse reads them."""

from __future__ import annotations

import argparse

from nanotrain_core.api import add_plugin_options, unsigned_int


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
    parser.add_argument("--step", type=unsigned_int, metavar="N", help="the checkpoint of this step")
    about = "a tokenizer.json, or bytes; default: that of the run's data"
    parser.add_argument("--tokenizer", metavar="FILE", help=about)
    about = "split the model over ranks, for example tp=2; may be repeated"
    parser.add_argument("--degree", action="append", default=[], metavar="DIM=N", help=about)
    about = f"change one value of the recipe, for example {example} or run.device=cpu"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=about)
    parser.add_argument("--json", action="store_true", help=f"print JSON instead of {otherwise}")
    add_plugin_options(parser)
