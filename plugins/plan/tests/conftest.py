"""A small recipe, and the JSON that ``nanotrain plan`` prints of one."""

import json

import pytest

from nanotrain_core.cli import main

TINY = """
[run]
steps = 10
[batch]
sequences = 8
microbatch = 2
length = 32
[model]
use = "transformer"
layers = 3
width = 64
heads = 4
vocab = 256
[data]
use = "synthetic"
vocab = 256
"""


@pytest.fixture
def recipe(tmp_path):
    """Return its path."""
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return str(path)


@pytest.fixture
def planned(capsys):
    """Return a function of the command's words, which returns its exit code and its JSON."""

    def plan(*words):
        code = main(["plan", *words, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return plan
