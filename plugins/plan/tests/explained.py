"""A small recipe, explained."""

import json

from nanotrain_core.cli import main

TINY = """
[run]
name = "tiny"
steps = 10
ranks = 2
[batch]
sequences = 8
microbatch = 2
length = 16
[model]
use = "transformer"
layers = 3
width = 32
heads = 4
vocab = 64
[[parallel]]
use = "recompute"
[data]
use = "synthetic"
vocab = 64
"""


def explained(capsys, *words):
    code = main(["explain", *words, "--json"])
    told = json.loads(capsys.readouterr().out)
    return code, {section["title"]: section for section in told["sections"]}, told


def value(section, name):
    """Return the first value of that name in the sentences of a section."""
    return next(each["values"][name] for each in section["statements"] if name in each["values"])


PHASES = """
[[phase]]
until_tokens = 10_000_000
batch.sequences = { start = 8, end = 60_000 }
[[phase]]
until_tokens = 20_000_000
"""
