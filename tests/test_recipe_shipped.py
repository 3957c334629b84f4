from pathlib import Path

import tomli

from nanotrain_core.recipe.source import find_recipe, shipped_recipes

ROOT = Path(__file__).parents[1]


def test_every_recipe_goes_into_the_wheel():
    build = tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert build["targets"]["wheel"]["shared-data"] == {"recipes": "share/nanotrain/recipes"}


def test_a_recipe_in_the_working_directory_hides_the_shipped_one(tmp_path, monkeypatch):
    own = tmp_path / "recipes" / "laptop.toml"
    own.parent.mkdir()
    own.write_text("")
    assert find_recipe("laptop").resolve() == ROOT / "recipes" / "laptop.toml"
    monkeypatch.chdir(tmp_path)
    assert find_recipe("laptop").resolve() == own
    assert "capstone.toml" in shipped_recipes()


def test_every_shipped_recipe_says_what_it_is():
    for path in ROOT.glob("recipes/*.toml"):
        assert path.read_text().startswith("# "), path
