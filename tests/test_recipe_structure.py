from collections.abc import Mapping

import attrs
import pytest
from attrs.validators import ge

from nanotrain_core.recipe.frozen import FrozenMapping
from nanotrain_core.recipe.structure import structure


@attrs.define(frozen=True)
class Inner:
    size: int = attrs.field(validator=ge(1))


@attrs.define(frozen=True)
class Config:
    sizes: Mapping[str, int] = attrs.field(factory=FrozenMapping)
    pair: tuple[int, str] = (1, "a")
    either: int | str = 0
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    names: tuple[str, ...] = ()

    def __attrs_post_init__(self):
        if self.either == "never":
            raise ValueError("either must not be 'never'")


def messages(table) -> dict[str, str]:
    return {problem.key: problem.message for problem in structure(table, Config, "data")[1]}


def test_every_shape_of_value_is_typed_and_frozen():
    table = {"sizes": {"a": 1}, "pair": [2, "b"], "either": "x", "inner": {"size": 3}, "many": [{"size": 4}]}
    config, problems = structure(table, Config, "data")
    assert problems == []
    assert config == Config(FrozenMapping({"a": 1}), (2, "b"), "x", Inner(3), (Inner(4),))
    assert hash(config) == hash(structure(table, Config, "data")[0])


@pytest.mark.parametrize(
    ("table", "key", "text"),
    [
        ({"sizes": {"a": "x"}}, "data.sizes.a", "expected an integer, got the string 'x'"),
        ({"sizes": [1]}, "data.sizes", "expected a table, got the array"),
        ({"pair": [1, 2]}, "data.pair.1", "expected a string, got the integer 2"),
        ({"either": 1.5}, "data.either", "expected an integer or a string, got the float 1.5"),
        ({"inner": {"sise": 1}}, "data.inner.sise", "unknown key 'sise' (did you mean 'size'?); valid: size"),
        ({"inner": {}}, "data.inner.size", "missing; expected an integer"),
        ({"many": [{"size": 1}, {"size": 0}]}, "data.many.1.size", "'size' must be >= 1: 0"),
        ({"many": {"size": 1}}, "data.many", "expected an array, got the table"),
        ({"names": "a"}, "data.names", "expected an array of strings ([\"...\"]), got the string 'a'"),
        ({"either": "never"}, "data", "either must not be 'never'"),
        ([], "data", "expected a table, got the array"),
    ],
)
def test_misfit_is_told_under_its_own_key(table, key, text):
    assert messages(table)[key] == text
