import hashlib
from pathlib import Path

import pytest
import tomli
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recipe_files import SMALL, write

from nanotrain_core.recipe import load_recipe, recipe_hash, recipe_values, resolve_recipe, write_resolved
from nanotrain_core.recipe.secrets import without_secrets
from nanotrain_core.recipe.settings import run_settings
from nanotrain_core.recipe.write import explain

SHIPPED = sorted(Path(__file__).parents[1].glob("recipes/*.toml"))

words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
seconds = st.floats(min_value=1, max_value=1e7)
tables = st.fixed_dictionaries(
    {},
    optional={
        "run.seed": st.integers(-(2**62), 2**62),
        "run.timeout": seconds,
        "run.folder": words,
        "optimizer.lr": st.floats(min_value=1e-12, max_value=9),
        "optimizer.betas": st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2).map(list),
        "optimizer.lr_schedule.use": st.sampled_from(["constant", "linear", "cosine", "wsd"]),
        "optimizer.lr_schedule.decay_steps": st.integers(1, 3),
        "data.suffixes": st.lists(words, max_size=3),
        "data.paths": st.lists(words, max_size=3),
    },
)
monitors = st.lists(
    st.sampled_from(
        [{"use": "console"}, {"use": "console", "every": 7}, {"use": "sample", "prompt": "[[a]]\n[b]"}]
    )
)


def nested(flat: dict) -> dict:
    tree: dict = {}
    for key, value in flat.items():
        *tables_above, name = key.split(".")
        table = tree
        for above in tables_above:
            table = table.setdefault(above, {})
        table[name] = value
    return tree


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_resolved_recipe_loads_back_equal(path, tmp_path):
    recipe = load_recipe(path)
    again = load_recipe(write(tmp_path, write_resolved(recipe)))
    assert again == recipe
    assert recipe_hash(again) == recipe_hash(recipe)
    assert recipe_values(again) == recipe_values(recipe)


def test_two_recipes_differ_in_the_values_of_the_keys_that_were_changed():
    one, other = (
        recipe_values(load_recipe("laptop", overrides=lines))
        for lines in ([], ["optimizer.lr=0.5", "monitor=[{use='console', every=3}]"])
    )
    differing = {key: (one.get(key), other.get(key)) for key in one | other if one.get(key) != other.get(key)}
    assert differing.pop("optimizer.lr") == ("0.003", "0.5")
    assert differing.pop("monitor.0.every") == ("10", "3")
    assert differing
    assert all(key.startswith(("monitor.1.", "monitor.2.", "versions.")) for key in differing)


def test_a_secret_that_differs_is_told_by_its_digest():
    urls = ("https://hooks.example/T0/S3CRET", "https://hooks.example/T1/0THER")
    monitors = [f"monitor=[{{use='alerts', to={{webhook='{url}'}}}}]" for url in urls]
    one, other = (recipe_values(load_recipe("laptop", overrides=[monitor])) for monitor in monitors)
    (key,) = (key for key in one if one[key] != other[key])
    assert key.endswith(".webhook")
    for values, url in ((one, urls[0]), (other, urls[1])):
        assert values[key] == f"(hidden), sha256 {hashlib.sha256(url.encode()).hexdigest()[:8]}"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=tables, monitor=monitors)
def test_any_recipe_survives_writing_and_reading(tmp_path, values, monitor):
    import tomli_w

    changes = tomli_w.dumps({"monitor": monitor, **nested(values)})
    base = write(tmp_path, SMALL, "base.toml")
    recipe = load_recipe(write(tmp_path, f'extends = "{base.name}"\n{changes}'))
    assert load_recipe(write(tmp_path, write_resolved(recipe), "resolved.toml")) == recipe


def test_resolved_recipe_is_whole_and_puts_use_first(tmp_path):
    tree = tomli.loads(write_resolved(load_recipe(write(tmp_path))))
    assert tree["model"] | {"tied": False, "norm": "rmsnorm"} == tree["model"]
    assert next(iter(tree["optimizer"])) == "use"
    assert tree["parallel"] == []
    assert {"nanotrain-core", "torch"} <= set(tree["versions"])


def test_resolved_recipe_of_a_relative_path_holds_from_anywhere(tmp_path):
    recipe = load_recipe(write(tmp_path, SMALL + '[data]\npaths = ["corpus"]\n'))
    moved = write(tmp_path, write_resolved(recipe), "elsewhere/resolved.toml")
    assert load_recipe(moved).data.config.paths == (str(tmp_path / "corpus"),)


def test_hash_sees_every_value(tmp_path):
    path = write(tmp_path)
    hashes = {
        recipe_hash(load_recipe(path, overrides=[line]))
        for line in ("run.seed=1", "run.seed=2", "batch.length=8")
    }
    assert len(hashes) == 3


def test_other_versions_than_when_resolved_are_noted(tmp_path):
    text = write_resolved(load_recipe(write(tmp_path))).replace(
        'nanotrain-core = "0.1.0"', 'nanotrain-core = "0.0.9"'
    )
    found = resolve_recipe(write(tmp_path, text, "resolved.toml"))
    assert found.notes == (f"{tmp_path}/resolved.toml was resolved with nanotrain-core 0.0.9; now 0.1.0",)
    assert found.recipe.versions["nanotrain-core"] == "0.1.0"


def test_explained_recipe_is_the_resolved_one_with_origins(tmp_path):
    found = resolve_recipe(write(tmp_path), overrides=["optimizer.lr=0.5"])
    text = explain(found.recipe, found.merged)
    resolved = tomli.loads(write_resolved(found.recipe))
    del resolved["versions"]
    assert tomli.loads(text) == resolved
    origins = {line.split(" =")[0]: line.split("  # ")[1] for line in text.splitlines() if "  # " in line}
    assert origins["steps"] == f"{tmp_path}/recipe.toml:2"
    assert origins["lr"] == "--set #1"
    assert origins["betas"] == "default"


def test_tables_in_a_list_of_a_listed_component_come_back(tmp_path):
    """Rules of alerts were written as `[[monitor.3.rules]]`, and the run could not be resumed."""
    rules = [{"metric": "loss", "above": 9.0, "to": {"webhook": SECRET}}, {"event": "failed"}]
    monitors = [f"monitor.{number}={{use='alerts', rules={inline(rules)}}}" for number in (3, 4)]
    recipe = resolve_recipe("laptop", overrides=monitors).recipe
    path = tmp_path / "resolved.toml"
    path.write_text(write_resolved(recipe))
    assert load_recipe(path) == recipe
    first, second = recipe.monitor[4].config.rules
    assert (first.to.webhook, second.to) == (SECRET, None)


SECRET = "https://hooks.example/T0/SECRET"


def inline(value):
    """Return a value on one line of TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {inline(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(inline, value))}]"
    return f"'{value}'" if isinstance(value, str) else repr(value)


def test_what_others_see_of_a_recipe_has_no_secrets():
    """A webhook's address was among the settings that W&B and TensorBoard were given."""
    rule = f"monitor.3.rules=[{inline({'metric': 'loss', 'above': 9.0, 'to': {'webhook': SECRET}})}]"
    recipe = resolve_recipe("laptop", overrides=['monitor.3.use="alerts"', rule]).recipe
    shown = run_settings(recipe)
    assert "SECRET" not in str(shown)
    assert shown["monitor"][3]["rules"][0]["to"]["webhook"] == "(hidden)"
    assert shown["data"]["tokenizer"] == "bytes"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f'webhook = "{SECRET}"\n', 'webhook = "(hidden)"\n'),
        (f"run r --set monitor.3.to.webhook='{SECRET}' -x", 'run r --set monitor.3.to.webhook="(hidden)" -x'),
        ("to = {webhook = '', command = ['a']}", "to = {webhook = '', command = ['a']}"),
        ('tokenizer = "bytes"\nkeep = 2\n', 'tokenizer = "bytes"\nkeep = 2\n'),
        ('api_key="x", use="wandb"', 'api_key="(hidden)", use="wandb"'),
        (f'"webhook" = "{SECRET}"', '"webhook" = "(hidden)"'),
        (f"run r --set a.webhook={SECRET} -x", 'run r --set a.webhook="(hidden)" -x'),
        (f"run r --set=a.webhook={SECRET}", 'run r --set=a.webhook="(hidden)"'),
        (f"run r --set 'a.webhook={SECRET}?a&b' -x", "run r --set 'a.webhook=\"(hidden)\"' -x"),
        ("run r --set 'a.key=ab'\"'\"'cd' -x", "run r --set 'a.key=\"(hidden)\"' -x"),
    ],
)  # fmt: skip
def test_what_others_read_of_a_recipe_s_text_has_no_secrets(text, shown):
    """The report had them, in the resolved recipe and in the command."""
    assert without_secrets(text) == shown
