import pickle

import attrs
import pytest
from recipe_files import SMALL, write

from nanotrain_core.errors import RecipeError
from nanotrain_core.recipe import load_recipe, resolve_recipe
from nanotrain_core.recipe.frozen import FrozenMapping
from nanotrain_core.recipe.locate import key_lines


def test_values_get_their_types_and_defaults(tmp_path):
    recipe = load_recipe(write(tmp_path, SMALL + "[optimizer]\nlr = 1\nbetas = [0.8, 0.9]\n"))
    assert recipe.run.steps == 3
    assert isinstance(recipe.optimizer.config.lr, float)
    assert recipe.optimizer.config.betas == (0.8, 0.9)
    assert (recipe.topology.use, recipe.schedule.use, recipe.precision.use) == ("grid", "accumulate", "fp32")
    assert [monitor.use for monitor in recipe.monitor] == ["console", "jsonl"]
    assert recipe.parallel == ()


def test_recipe_is_frozen_hashable_and_picklable(tmp_path):
    recipe = load_recipe(write(tmp_path))
    for part in (recipe, recipe.run, recipe.optimizer, recipe.optimizer.config):
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            part.use = "other"
    with pytest.raises(TypeError):
        recipe.versions["torch"] = "1.0"
    assert hash(pickle.loads(pickle.dumps(recipe))) == hash(recipe)
    assert pickle.loads(pickle.dumps(recipe)) == recipe


def test_frozen_mapping_equals_a_dict_whatever_the_order():
    assert FrozenMapping({"a": 1, "b": 2}) == {"b": 2, "a": 1}
    assert hash(FrozenMapping({"a": 1, "b": 2})) == hash(FrozenMapping({"b": 2, "a": 1}))


def test_extending_merges_tables_replaces_arrays_and_keeps_the_rest(tmp_path):
    write(tmp_path, SMALL + '[data]\nuse = "text"\nsuffixes = [".a", ".b"]\n', "base.toml")
    child = 'extends = "base.toml"\n[run]\nseed = 7\n[data]\nsuffixes = [".c"]\n'
    recipe = load_recipe(write(tmp_path, child))
    assert (recipe.run.steps, recipe.run.seed) == (3, 7)
    assert recipe.data.config.suffixes == (".c",)


def test_changed_use_replaces_the_whole_table(tmp_path):
    base = SMALL + '[optimizer]\nuse = "adamw"\nlr = 0.5\nbetas = [0.1, 0.2]\n'
    write(tmp_path, base, "base.toml")
    recipe = load_recipe(write(tmp_path, 'extends = "base.toml"\n[optimizer]\nuse = "sgd"\nmomentum = 0.5\n'))
    assert (recipe.optimizer.use, recipe.optimizer.config.momentum) == ("sgd", 0.5)
    assert recipe.optimizer.config.lr == 1e-3


@pytest.mark.parametrize(
    "lines",
    [
        ("optimizer.momentum=0.5", "optimizer.use=sgd"),
        ("optimizer.use=sgd", "optimizer.momentum=0.5"),
        ("optimizer.momentum=0.5", 'optimizer={clip_norm=2.0, use="sgd"}', "optimizer.momentum=0.5"),
        ("optimizer={momentum=0.5}", "optimizer.use=adamw", "optimizer.use=sgd"),
        ("optimizer.lr_schedule.use=cosine", "optimizer.momentum=0.5", "optimizer.use=sgd"),
    ],
)
def test_options_set_keys_of_the_component_that_another_one_chooses_in_any_order(tmp_path, lines):
    """One that came before `use` was dropped, and nothing said so. The file's keys are dropped as ever."""
    path = write(tmp_path, SMALL + '[optimizer]\nuse = "adamw"\nlr = 0.5\nbetas = [0.1, 0.2]\n')
    recipe = load_recipe(path, overrides=lines)
    assert (recipe.optimizer.use, recipe.optimizer.config.momentum) == ("sgd", 0.5)
    assert recipe.optimizer.config.lr != 0.5
    assert (recipe.optimizer.config.lr_schedule.use == "cosine") == ("cosine" in lines[0])


def test_options_of_a_list_that_another_one_replaces_are_dropped(tmp_path):
    path = write(tmp_path, SMALL + '[[monitor]]\nuse = "console"\n')
    lines = ["monitor.0.every=2", 'monitor=[{use="jsonl"}]', "monitor.0.window=8", "monitor.0.use=guard"]
    (monitor,) = load_recipe(path, overrides=lines).monitor
    assert (monitor.use, monitor.config.window) == ("guard", 8)


def test_a_key_that_the_chosen_component_lacks_is_refused(tmp_path):
    path = write(tmp_path, SMALL)
    with pytest.raises(RecipeError, match=r"--set #1: optimizer\.betas: unknown key 'betas'"):
        load_recipe(path, overrides=["optimizer.betas=[0.1, 0.2]", "optimizer.use=sgd"])


def test_same_use_merges_into_the_table(tmp_path):
    write(tmp_path, SMALL + '[optimizer]\nuse = "sgd"\nlr = 0.5\n', "base.toml")
    recipe = load_recipe(write(tmp_path, 'extends = "base.toml"\n[optimizer]\nuse = "sgd"\nmomentum = 0.5\n'))
    assert (recipe.optimizer.config.lr, recipe.optimizer.config.momentum) == (0.5, 0.5)


def test_extends_is_relative_to_the_file_and_goes_on(tmp_path):
    write(tmp_path, SMALL, "deep/down/root.toml")
    write(tmp_path, 'extends = "down/root.toml"\n[run]\nseed = 5\n', "deep/middle.toml")
    assert load_recipe(write(tmp_path, 'extends = "deep/middle.toml"\n')).run.seed == 5


def test_recipes_that_extend_each_other_are_refused(tmp_path):
    write(tmp_path, '\nextends = "recipe.toml"\n', "other.toml")
    path = write(tmp_path, 'extends = "other.toml"\n' + SMALL)
    with pytest.raises(
        RecipeError, match=r"other.toml:2: extends: .*recipe.toml -> other.toml -> recipe.toml"
    ):
        load_recipe(path)


def test_a_recipe_extends_a_shipped_one_by_its_file_name(tmp_path):
    recipe = load_recipe(write(tmp_path, 'extends = "capstone.toml"\n[run]\nsteps = 4\n'))
    assert (recipe.run.steps, recipe.model.config.width) == (4, 32)


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("run.steps=9", "run.steps", 9),
        ("run.name=laptop", "run.name", "laptop"),
        ('run.name="two words"', "run.name", "two words"),
        ("optimizer.config.lr = 1e-4", "optimizer.lr", 1e-4),
        ("monitor.0.every=5", "monitor.0.every", 5),
        ("run.strict_monitors=true", "run.strict_monitors", True),
        ('data.suffixes=[".x"]', "data.suffixes", (".x",)),
    ],
)
def test_set_changes_one_value(tmp_path, line, key, value):
    recipe = load_recipe(write(tmp_path), overrides=[line.replace(".config", "")])
    found = recipe
    for name in key.split("."):
        found = getattr(found, "config", found)
        found = found[int(name)] if name.isdigit() else getattr(found, name)
    assert found == value
    assert type(found) is type(value)


def test_later_set_wins_and_a_number_past_the_end_appends(tmp_path):
    lines = ["run.steps=4", "run.steps=5", "monitor.2.use=sample", "monitor.2.tokens=7"]
    recipe = load_recipe(write(tmp_path), overrides=lines)
    assert recipe.run.steps == 5
    assert [monitor.use for monitor in recipe.monitor] == ["console", "jsonl", "sample"]
    assert recipe.monitor[2].config.tokens == 7


def test_ranks_argument_wins_over_file_and_set(tmp_path):
    path = write(tmp_path, SMALL + '[[parallel]]\nuse = "ddp"\n')
    assert load_recipe(path, overrides=["run.ranks=2"], ranks=4).run.ranks == 4
    assert load_recipe(path, overrides=["run.ranks=2"]).run.ranks == 2


def test_paths_are_relative_to_the_file_that_wrote_them(tmp_path, monkeypatch):
    write(tmp_path, SMALL + '[data]\npaths = ["a.txt", "/b.txt"]\n', "lower/base.toml")
    path = write(
        tmp_path, 'extends = "../lower/base.toml"\n[data]\ntokenizer = "../t.json"\n', "upper/recipe.toml"
    )
    config = load_recipe(path).data.config
    assert config.paths == (str(tmp_path / "lower" / "a.txt"), "/b.txt")
    assert config.tokenizer == str(tmp_path / "t.json")
    monkeypatch.chdir(tmp_path)
    config = load_recipe(path, overrides=['data.paths=["c"]', "data.tokenizer=bytes"]).data.config
    assert (config.paths, config.tokenizer) == ((str(tmp_path / "c"),), "bytes")


def test_every_value_knows_its_origin(tmp_path):
    write(tmp_path, SMALL, "base.toml")
    path = write(tmp_path, 'extends = "base.toml"\n[run]\nseed = 1\n')
    merged = resolve_recipe(path, overrides=["batch.length=8"], ranks=1).merged
    places = {
        key: merged.origin(key).place(key) for key in ("run.steps", "run.seed", "batch.length", "run.ranks")
    }
    assert places == {
        "run.steps": f"{tmp_path}/base.toml:2",
        "run.seed": f"{tmp_path}/recipe.toml:3",
        "batch.length": "--set #1",
        "run.ranks": "--nproc",
    }
    assert merged.origin("run.name") is None


def test_ranks_that_the_recipe_has_keep_their_line(tmp_path):
    """A launcher gives its ranks the number that it has read in the recipe."""
    path = write(tmp_path, 'extends = "base.toml"\n[run]\nranks = 2\n')
    write(tmp_path, SMALL, "base.toml")
    assert resolve_recipe(path, ranks=2).merged.place("run.ranks") == f"{tmp_path}/recipe.toml:3"
    assert resolve_recipe(path, ranks=1).merged.place("run.ranks") == "--nproc"


def test_versions_name_what_the_recipe_uses(tmp_path):
    path = write(tmp_path)
    assert "nanotrain-ddp" not in load_recipe(path).versions
    with_ddp = load_recipe(path, overrides=["parallel=[{use='ddp'}]"])
    assert {"nanotrain-core", "nanotrain-ddp", "torch"} == set(with_ddp.versions)


def test_lines_of_keys_in_every_way_toml_can_write_them():
    text = (
        '\n# a comment\n[run]\nname = "x"\na.b = 1\nlist = [\n  1,\n  2,\n]\n\n'
        '[[many]]\n[[many]]\nc = {d = 3}\ntext = """\n[x]\n"""\n'
    )
    lines = key_lines(text)
    expected = {"run": 3, "run.name": 4, "run.a.b": 5, "run.list": 6, "run.list.1": 6}
    expected |= {"many.0": 11, "many.1": 12, "many.1.c.d": 13, "many.1.text": 14}
    assert expected.items() <= lines.items()
