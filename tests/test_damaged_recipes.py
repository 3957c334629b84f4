"""Recipes that were damaged at random are refused, or are recipes: never a traceback, never for long."""

import copy
import time
from pathlib import Path
from random import Random

import pytest
import tomli
import tomli_w
from damage import hurt, hurt_bytes, writable

from nanotrain_core.errors import NanotrainError
from nanotrain_core.recipe.load import resolve_recipe

RECIPES = Path(__file__).parents[1] / "recipes"


def source(path):
    """Return a shipped recipe that is found from anywhere."""
    table = tomli.loads(path.read_text())
    return table | ({"extends": str(RECIPES / table["extends"])} if "extends" in table else {})


SOURCES = [source(path) for path in sorted(RECIPES.glob("*.toml"))]


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 2030), marks=pytest.mark.full)], ids=len)
def test_a_damaged_recipe_is_refused_or_is_one(tmp_path, monkeypatch, seeds):
    monkeypatch.chdir(tmp_path)
    path, refused = tmp_path / "damaged.toml", 0
    for seed in seeds:
        random = Random(seed)
        table = copy.deepcopy(random.choice(SOURCES))
        said = [hurt(table, random) for _ in range(random.randrange(1, 4))]
        data = tomli_w.dumps(writable(table)).encode()
        path.write_bytes(data if random.random() < 0.8 else hurt_bytes(data, random))
        began = time.monotonic()
        try:
            resolve_recipe(path)
        except NanotrainError:
            refused += 1
        except Exception as problem:
            raise AssertionError(f"seed {seed}: {said}") from problem
        assert time.monotonic() - began < 10, f"seed {seed}: {said}"
        assert list(tmp_path.iterdir()) == [path], f"seed {seed}: {said}"
    assert refused > len(seeds) / 2
