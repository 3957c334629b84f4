"""What plugins may use is what contracts.txt says; ``python tests/test_contracts_snapshot.py`` writes it.

A difference is a change of the contract: see docs/compatibility.md for what it needs.
"""

import inspect
import warnings
from importlib import import_module
from pathlib import Path

import attrs
import pytest
from api_modules import API_MODULES

import nanotrain_core
from nanotrain_core import contracts, deprecated, hookspecs
from nanotrain_core.command import Command
from nanotrain_core.component import Component
from nanotrain_core.deprecated import Deprecation, NanotrainDeprecationWarning
from nanotrain_core.errors import PluginError
from nanotrain_core.layout.roles import Role

SNAPSHOT = Path(__file__).with_name("contracts.txt")


def of_class(found):
    """Yield a line for each thing that a class offers: fields, methods with their parameters, properties."""
    if attrs.has(found):
        for field in attrs.fields(found):
            yield f"  {field.name}{'' if field.default is attrs.NOTHING else ' ='}"
    for name in sorted(vars(found)):
        value = inspect.getattr_static(found, name)
        if name.startswith("_") or (attrs.has(found) and name in attrs.fields_dict(found)):
            continue
        if isinstance(value, property):
            yield f"  {name} (property)"
        elif isinstance(value, (staticmethod, classmethod)) or inspect.isfunction(value):
            yield f"  {name}({', '.join(parameters(getattr(found, name)))})"
    for name in sorted(vars(found).get("__annotations__", {})):
        if not name.startswith("_") and not attrs.has(found):
            yield f"  {name}"


def parameters(function):
    """Yield the parameters of a method or function, without types, which other names may stand for."""
    for name, each in inspect.signature(function).parameters.items():
        star = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        only = "*, " if each.kind is each.KEYWORD_ONLY and not star else ""
        yield f"{only}{star}{name}{'' if each.default is each.empty else '='}"


def snapshot():
    """Return the text of what plugins may use."""
    lines = [f"hook specification {hookspecs.HOOKSPEC_VERSION}"]
    for name, hook in sorted(vars(hookspecs).items()):
        if name.startswith("nanotrain_register_"):
            lines.append(f"  {name}({', '.join(parameters(hook))})")
    for found in (Component, Command):
        lines += ["", found.__name__, *of_class(found)]
    lines += ["", "Role", *(f"  {role.name}" for role in Role)]
    for name in sorted(contracts.__all__):
        found = getattr(contracts, name)
        if inspect.isclass(found):
            lines += ["", f"contract {name}", *of_class(found)]
    for api in API_MODULES:
        lines += ["", api, *(f"  {name}" for name in sorted(import_module(api).__all__))]
    return "\n".join(lines) + "\n"


def test_what_plugins_may_use_is_what_is_written_down():
    assert snapshot() == SNAPSHOT.read_text(encoding="utf-8")


OLD = Deprecation(warns="0.4", fails="0.5", gone="0.6", instead="use Component")


@pytest.mark.parametrize(
    ("version", "stage"),
    [
        ("0.3.9", "fine"),
        ("0.4", "warns"),
        ("0.4.7", "warns"),
        ("0.5.0", "fails"),
        ("0.6.0", "gone"),
        ("1.0", "gone"),
    ],
)
def test_what_goes_away_warns_then_fails_then_is_gone(monkeypatch, version, stage):
    monkeypatch.setattr(deprecated, "NAMES", {"nanotrain_core.api": {"Part0": (OLD, lambda: Component)}})
    find = deprecated.attribute_of("nanotrain_core.api", version)
    assert OLD.stage(version) == stage
    text = "nanotrain_core.api.Part0 is deprecated since nanotrain-core 0.4"
    if stage == "fine":
        with warnings.catch_warnings(action="error"):
            assert find("Part0") is Component
    elif stage == "warns":
        with pytest.warns(NanotrainDeprecationWarning) as caught:
            assert find("Part0") is Component
        assert str(caught[0].message) == f"{text}, an error from 0.5 on: use Component"
        assert caught[0].filename == __file__  # of who uses it
    elif stage == "fails":
        with pytest.raises(PluginError, match=r"since nanotrain-core 0\.4, and an error now: use Component"):
            find("Part0")
    else:
        with pytest.raises(AttributeError, match="has no attribute 'Part0'"):
            find("Part0")


def test_the_api_modules_find_what_is_deprecated(monkeypatch):
    old = attrs.evolve(OLD, warns="0.0", fails="98.0", gone="99.0")
    for api in API_MODULES:
        monkeypatch.setattr(deprecated, "NAMES", {api: {"Part0": (old, lambda: Component)}})
        with pytest.warns(NanotrainDeprecationWarning, match="Part0 is deprecated"):
            assert import_module(api).Part0 is Component
        with pytest.raises(AttributeError, match=r"has no attribute 'Part1'"):
            _ = import_module(api).Part1


@pytest.mark.parametrize(
    ("warns", "fails", "gone"), [("0.4", "0.4.1", "0.5"), ("0.4", "0.5", "0.5.9"), ("0.5", "0.4", "0.6")]
)
def test_no_stage_is_skipped(warns, fails, gone):
    with pytest.raises(ValueError, match="a minor version for each stage"):
        Deprecation(warns=warns, fails=fails, gone=gone, instead="use another")


def test_nothing_stays_whose_time_is_over():
    over = [
        f"{api}.{name}"
        for api, names in deprecated.NAMES.items()
        for name, (found, _) in names.items()
        if found.stage(nanotrain_core.__version__) == "gone"
    ]
    assert over == []


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot(), encoding="utf-8")
