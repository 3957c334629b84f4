"""Every number of a recipe has a range: what lies outside was accepted by `check`, and failed in the run."""

import typing
from itertools import product

import attrs
import pytest

from nanotrain_core.component import KINDS
from nanotrain_core.errors import RecipeError
from nanotrain_core.recipe.load import resolve_recipe
from nanotrain_core.recipe.range_validator import Range
from nanotrain_core.recipe.schema import recipe_schema
from nanotrain_core.recipe.tree import BatchConfig, EvaluationConfig, RunConfig
from nanotrain_core.recipe.types import field_types, is_tuple, members
from nanotrain_core.registry.registry import load_plugins
from nanotrain_core.testing import Case

REGISTRY = load_plugins()
COMPONENTS = [(kind, name) for kind in KINDS for name in REGISTRY.names(kind)]
SECTIONS = {"run": RunConfig, "batch": BatchConfig, "evaluation": EvaluationConfig} | {
    f"{kind} {name}": REGISTRY.get(kind, name).config for kind, name in COMPONENTS
}


def numbers(config):
    """Yield (class, field, whether it holds a tuple) of all keys that are numbers, nested ones too."""
    for field in attrs.fields(config):
        type_ = field_types(config)[field.name]
        for each in members(type_) or (type_,):
            if isinstance(each, type) and attrs.has(each):
                yield from numbers(each)
            inner = typing.get_args(each)[0] if is_tuple(each) else each
            if inner in (int, float):
                yield config, field, is_tuple(each)


def refuses(field, value):
    try:
        field.validator(None, field, value)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("section", SECTIONS)
def test_every_number_has_a_range(section):
    for config, field, many in numbers(SECTIONS[section]):
        assert field.validator is not None, f"{config.__name__}.{field.name} has no range: see Range"
        for extreme in (2.0**63, -(2.0**63), float("nan")):
            value = (extreme,) if many else extreme
            assert refuses(field, value), f"{config.__name__}.{field.name} accepts {extreme}"


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("optimizer.betas=[0.9, 1.0]", "expected a number from 0 and below 1, got 1.0"),
        ("optimizer.betas=[-0.1, 0.9]", "expected a number from 0 and below 1, got -0.1"),
        ("optimizer.lr=inf", "expected a finite number, got inf"),
        ("optimizer.lr=1e4", "expected a number above 0 and at most 1000, got 10000.0"),
        ("optimizer.eps=nan", "expected a finite number, got nan"),
        ("optimizer.weight_decay=500", "takes lr x weight_decay = 0.003 x 500 = 1.5 of each weight away"),
        ("model.init_std=1e30", "expected a number from 1e-12 and at most 10, got 1e+30"),
        ("model.width=2147483648", "expected an integer from 1 to 134,217,728, got 2147483648"),
        ("model.ffn=9223372036854775807", "from 0 to 134,217,728, got 9223372036854775807"),
        (f"model.vocab={10**400}", "expected an integer of 64 bits, as TOML's are"),
        ("model.layers=2147483647", "expected an integer from 1 to 10,000"),
        ("run.timeout=1e300", "expected a number from 1 and at most 1e+07, got 1e+300"),
        ("run.timeout=0.001", "expected a number from 1 and at most 1e+07, got 0.001"),
        ("run.hang_timeout=1e-300", "expected 0, which disables it, or a number from 1, got 1e-300"),
        ("run.grace=0.1", "expected a number from 1 and at most 1e+07, got 0.1"),
        ("run.steps=4611686018427387904", "expected an integer from 1 to 2,147,483,647"),
        ('run.name="../../x"', "expected the name of a folder in runs"),
        ('run.name=""', "expected the name of a folder in runs"),
        ('run.name="a\\u0000"', "expected text without the character NUL"),
        (f'run.name="{"x" * 5000}"', f"got '{'x' * 60}', of 5000 characters; run.folder may be any"),
        (f'run.folder="{"x" * 5000}"', "too long for a file's name, of 5000 characters"),
        (f'run.weights="{"x" * 300}"', "too long for a file's name"),
        ("batch.sequences=2147483647", "expected at most 16,384 a step: lower it, or raise batch.microbatch"),
    ],
)  # fmt: skip
def test_an_extreme_is_told_with_its_key_and_what_was_expected(override, text):
    key = override.partition("=")[0]
    with pytest.raises(RecipeError) as refused:
        resolve_recipe("laptop", overrides=[override])
    told = [line for line in str(refused.value).splitlines() if line.startswith(f"--set #1: {key}: ")]
    assert [text in line for line in told] == [True]


@pytest.mark.parametrize(("left", "right", "depth"), [*product("[", "]", (40, 400, 40_000))])
def test_deep_nesting_is_no_recursion_error(tmp_path, left, right, depth):
    path = tmp_path / "deep.toml"
    path.write_text(f"run = {left * depth}{right * depth}\n")
    with pytest.raises(RecipeError, match=r"deep\.toml: tables or arrays are nested too deeply"):
        resolve_recipe(path)
    with pytest.raises(RecipeError, match="tables or arrays are nested too deeply"):
        resolve_recipe("laptop", overrides=[f"run.name={left * depth}{right * depth}"])


def test_editors_know_the_ranges():
    definitions = recipe_schema(REGISTRY)["definitions"]
    lr = definitions["optimizer.adamw"]["properties"]["lr"]
    assert {"exclusiveMinimum": 0.0, "maximum": 1000.0}.items() <= lr.items()
    betas = definitions["optimizer.adamw"]["properties"]["betas"]
    assert [(each["minimum"], each["exclusiveMaximum"]) for each in betas["items"]] == [(0.0, 1.0)] * 2
    assert "minimum" not in betas
    width = definitions["model.transformer"]["properties"]["width"]
    assert {"minimum": 1, "maximum": 2**27}.items() <= width.items()


@pytest.mark.parametrize(
    ("range_", "inside", "outside"),
    [
        (Range(1), (1, 7, 2**31 - 1), (0, -1, 2**31)),
        (Range(0.0, 1.0, above=True, below=True), (1e-300, 0.5), (0.0, 1.0, float("nan"))),
        (Range(0.0, 1.0), (0.0, 1.0), (-1e-300, 1.1, float("inf"))),
    ],
)
def test_what_is_in_a_range(range_, inside, outside):
    assert all(value in range_ for value in inside)
    assert not any(value in range_ for value in outside)


def test_a_range_of_floats_has_two_ends():
    with pytest.raises(TypeError, match="needs its upper end"):
        Range(0.0)


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"schedule": {"use": "1f1b", "layers": []}}, "schedule.layers"),
        ({"monitor": [{"use": "dump", "steps": "1", "what": []}]}, "monitor.0.what"),
    ],
)
def test_an_empty_array_where_items_are_needed_is_refused(table, key):
    with pytest.raises(RecipeError, match=f"{key}: expected at least one item, got an empty array"):
        Case("optimizer", use="sgd", overrides=table).recipe()
