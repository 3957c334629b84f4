"""Small recipes for the tests of recipe loading."""

from __future__ import annotations

from pathlib import Path

#: Valid on one rank. Its lines are numbered in the tests of error places.
SMALL = """\
[run]
steps = 3

[batch]
sequences = 8
microbatch = 2
length = 16

[model]
use = "transformer"
layers = 2
width = 32
heads = 4
vocab = 256
"""


def write(folder: Path, text: str = SMALL, name: str = "recipe.toml") -> Path:
    """Write a recipe file and return its path."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
