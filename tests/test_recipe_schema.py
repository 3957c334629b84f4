from pathlib import Path
from typing import Literal

import attrs
import jsonschema
import pytest
import tomli
from recipe_files import SMALL

from nanotrain_core.builtin.configs import AdamWConfig
from nanotrain_core.recipe.schema import field_docs, recipe_schema
from nanotrain_core.recipe.types import check_config_types, type_schema
from nanotrain_core.registry.registry import load_plugins

SHIPPED = sorted(Path(__file__).parents[1].glob("recipes/*.toml"))


@pytest.fixture(scope="module")
def validator():
    schema = recipe_schema(load_plugins())
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_are_valid(validator, path):
    validator.validate(tomli.loads(path.read_text()))


@pytest.mark.parametrize(
    "text",
    [
        SMALL,
        SMALL + "[optimizer]\nmomentum = 0.5\n",
        SMALL + '[[monitor]]\nuse = "sample"\ntokens = 3\n',
        SMALL + '[[monitor]]\nuse = "alerts"\nrules = [{ metric = "loss" }]\nto = { file = "alerts" }\n',
        'extends = "base.toml"\n[run]\nseed = 1\n',
        SMALL + "[[phase]]\nuntil_tokens = 9\nbatch.sequences = 4\noptimizer.lr = { end = 1e-4 }\n",
    ],
)
def test_right_recipes_are_valid(validator, text):
    validator.validate(tomli.loads(text))


@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        (SMALL.replace("steps = 3", "steps = 3.5"), "steps"),
        (SMALL.replace("steps = 3", "stepz = 3"), "run"),
        (SMALL.replace("heads = 4", 'heads = 4\nnorm = "no"'), "norm"),
        (SMALL.replace('"transformer"', '"transfromer"'), "use"),
        (SMALL + "[optimizer]\nmomentun = 0.5\n", "optimizer"),
        (SMALL + '[optimizer]\nuse = "adamw"\nmomentum = 0.5\n', "optimizer"),
        (SMALL + "[optimizer]\nbetas = [0.9]\n", "optimizer"),
        (SMALL + '[optimizer]\nlr_schedule = {use = "cosin"}\n', "optimizer"),
        (SMALL + '[[monitor]]\nuse = "alerts"\nrules = [{ metric = "loss", over = 9.0 }]\n', "rules"),
        (SMALL + "[surprise]\n", None),
        ("[run]\nsteps = 1\n", None),
        (SMALL + "[[phase]]\nbatch.width = 4\n", "phase"),
        (SMALL + "[[phase]]\nbatch.length = { end = 32 }\n", "length"),
        (SMALL + "[[phase]]\noptimizer.lr = { ends = 1e-4 }\n", "lr"),
    ],
)
def test_wrong_recipes_are_invalid_where_they_are_wrong(validator, text, culprit):
    errors = list(validator.iter_errors(tomli.loads(text)))
    assert errors
    assert culprit is None or any(culprit in error.absolute_path for error in errors)


def test_text_under_each_field_is_its_description():
    docs = field_docs(AdamWConfig)
    assert docs["eps"] == "Added to the root of the second moment."
    assert docs["lr"] == "Peak learning rate."


def test_every_field_of_every_component_is_described():
    registry = load_plugins()
    for plugin in registry.plugins:
        for kind, component in plugin.components:
            names = {field.name for field in attrs.fields(component.config)}
            assert names <= set(field_docs(component.config)), f"{kind} {component.name}"


@pytest.mark.parametrize(
    ("type_", "schema"),
    [
        (bool, {"type": "boolean"}),
        (int | None, {"type": "integer"}),
        (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        (Literal["a", 2], {"enum": ["a", 2]}),
        (tuple[str, ...], {"type": "array", "items": {"type": "string"}}),
    ],
)
def test_types_become_json_types(type_, schema):
    assert type_schema(type_) == schema


@pytest.mark.parametrize("type_", [list[int], dict[str, int], set[str], bytes, object])
def test_mutable_and_foreign_types_are_refused(type_):
    config = attrs.make_class("Config", {"field": attrs.field(type=type_)}, frozen=True)
    with pytest.raises(TypeError, match=r"Config\.field: .* is no type of a recipe"):
        check_config_types(config)
