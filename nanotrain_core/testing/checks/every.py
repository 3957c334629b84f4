"""Checks of every component of any kind."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, get_args

import attrs

from nanotrain_core.component import TORCH_FREE_KINDS, Reference
from nanotrain_core.errors import NanotrainError, PluginError
from nanotrain_core.recipe import load_recipe, write_resolved
from nanotrain_core.recipe.schema import field_docs, recipe_schema
from nanotrain_core.recipe.structure import structure
from nanotrain_core.registry.registry import Registry
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check

_LOAD = """
import sys
from nanotrain_core.testing import Case
{case!r}.{action}()
sys.exit("it imports torch" if "torch" in sys.modules else 0)
"""


@check("every", since="0.1", of_component=True)
def loads_without_torch(case: Case) -> None:
    """The plugin's module registers the component without importing torch."""
    if case.kind in TORCH_FREE_KINDS:
        code = _LOAD.format(case=case, action="build")
    else:  # a process for all components of the same plugins, which are registered together
        any_of_them = Case("model", use="transformer", plugins=case.plugins)
        code = _LOAD.format(case=any_of_them, action="registry")
    problem = _said(code)
    assert not problem, f"{case.kind} '{case.use}': {problem}"


@cache
def _said(code: str) -> str:
    """Return what a process that runs ``code`` wrote to stderr if it fails; empty if it succeeds."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else ""


@check("every", since="0.1", of_component=True)
def describes_itself(case: Case) -> None:
    """It has a one-line summary, a factory named as ``module:attribute``, and an example that it accepts."""
    component = case.component()
    assert component.summary, "summary is empty: `nanotrain plugins` has nothing to show"
    assert "\n" not in component.summary, f"summary has several lines: {component.summary!r}"
    module, _, attribute = component.factory.partition(":")
    assert module, f"factory {component.factory!r} is not 'module:attribute'"
    assert attribute, f"factory {component.factory!r} is not 'module:attribute'"
    if component.example:
        _, problems = structure(dict(component.example), component.config, case.kind)
        assert not problems, f"example: {problems[0].key}: {problems[0].message}"


@check("every", since="0.1", of_component=True)
def factory_can_be_imported(case: Case) -> None:
    """Whatever it names as ``module:attribute`` can be imported; the factory is a callable."""
    component = case.component()
    try:
        component.load()
        for field in get_args(Reference):
            component.load_optional(field)
    except PluginError as error:
        raise AssertionError(str(error)) from None


@check("every", since="0.1", of_component=True)
def config_is_frozen_and_documented(case: Case) -> None:
    """The config is a frozen attrs class, and every field has a docstring that explains it."""
    config = case.component().config
    assert attrs.has(config), f"{config.__name__} is not an attrs class"
    undocumented = [f.name for f in attrs.fields(config) if not field_docs(config).get(f.name)]
    assert not undocumented, f"fields of {config.__name__} without a string under them: {undocumented}"
    for field in attrs.fields(config):
        try:
            setattr(case.settings(), field.name, None)
        except attrs.exceptions.FrozenInstanceError:
            continue
        raise AssertionError(f"{config.__name__}.{field.name} can be assigned: use attrs.define(frozen=True)")


@check("every", since="0.1")
def unknown_key_is_refused(case: Case) -> None:
    """A misspelt key in the component's table is an error that names it and the nearest valid key."""
    names = [field.name for field in attrs.fields(case.component().config)]
    wrong = f"{names[-1]}x" if names else "anything"
    try:
        attrs.evolve(case, config={**case.config, wrong: 1}).settings()
    except NanotrainError as error:
        text = str(error)
    else:
        raise AssertionError(f"a recipe with {case.kind}.{wrong} = 1 was accepted")
    assert f"unknown key '{wrong}'" in text, f"the error does not name {wrong!r}: {text}"
    assert not names or f"did you mean '{names[-1]}'" in text, f"no suggestion in: {text}"


@check("every", since="0.1", applies=lambda case: case.kind != "topology")
def recipe_survives_writing(case: Case) -> None:
    """The resolved recipe, written as TOML with every default, loads back equal."""
    recipe = case.recipe()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "resolved.toml")
        path.write_text(write_resolved(recipe))
        again = load_recipe(path, plugins=case.local)
    assert again == recipe, f"wrote {recipe}, read {again}"


@check("every", since="0.1")
def schema_accepts_the_recipe(case: Case) -> None:
    """The JSON Schema of the installed plugins is valid draft-07, and this recipe is valid under it."""
    validator = _schema_validator(case.registry())
    recipe = case.tables()
    errors = list(validator.iter_errors(recipe))
    assert not errors, f"{errors[0].json_path}: {errors[0].message}"
    case.own_table(recipe)["surely_unknown"] = 1
    assert list(validator.iter_errors(recipe)), "the schema accepts an unknown key"


@cache
def _schema_validator(registry: Registry) -> Any:
    """Return the validator of a registry's schema, which itself was checked: that takes most of the time."""
    import jsonschema  # type: ignore[import-untyped]

    schema = recipe_schema(registry)
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)
