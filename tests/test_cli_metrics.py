"""``nanotrain metrics``: what it shows, and how that fits a terminal."""

import json
import re
import sys

import pytest

from nanotrain_core.cli import main
from nanotrain_core.cli.metrics import by_group
from nanotrain_core.registry.registry import load_plugins


def call(capsys, *words):
    code = main(["metrics", *words])
    return code, *capsys.readouterr()


@pytest.mark.parametrize(("width", "kept"), [(80, "metric unit what it is"), (1000, "rule")])
def test_a_terminal_never_cuts_a_name(capsys, monkeypatch, width, kept):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    code, out, err = call(capsys)
    assert code == 0
    out = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert "\u2026" not in out  # an ellipsis
    words = set(out.split())
    plain = [metric.name for _, metric in by_group(load_plugins()) if "{" not in metric.name]
    singles = [name for name in plain if name.rpartition("/")[2] not in ("max", "mean", "median", "rank")]
    assert words >= set(singles)
    assert " ".join(out.splitlines()[0].split()).endswith(kept)
    assert ("left out" in err) == (width == 80)


def test_a_pattern_or_a_group_chooses(capsys):
    def names(word):
        code, out, _ = call(capsys, word, "--json")
        assert code == 0
        return {each["name"] for each in json.loads(out)}, {each["group"] for each in json.loads(out)}

    found, _ = names("loss*")
    assert "loss" in found
    assert all(name.startswith("loss") for name in found)
    assert names("optimizer")[1] == {"optimizer"}
    code, out, err = call(capsys, "optimzer")
    assert (code, out) == (2, "")
    assert "no metric or group named 'optimzer' (did you mean 'optimizer'?)" in err
