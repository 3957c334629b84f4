"""Modules that a recipe names are looked up in its model before anything runs."""

import pytest

from nanotrain_core.cli import main

RECIPE = """\
[run]
steps = 2
[batch]
sequences = 2
microbatch = 1
length = 8
[model]
use = "transformer"
layers = 2
width = 16
heads = 2
vocab = 64
[data]
use = "synthetic"
vocab = 64
[[monitor]]
use = "dump"
steps = "1"
modules = [{modules}]
"""


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        ('"layers.*.attn", "layers.1.attn.q.weight", "head"', None),
        (
            '"head", "layers.0.atn"',
            ": monitor.0.modules.1: the model has no module or parameter 'layers.0.atn'",
        ),
        ('"layers.2.*"', "the model has no module or parameter 'layers.2.*' (did you mean 'layers."),
    ],
)
def test_a_module_that_the_model_has_not_is_named_with_the_nearest(tmp_path, capsys, modules, says):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(modules=modules))
    code = main(["check", str(path)])
    assert (code == 0) == (says is None)
    assert (says or "") in capsys.readouterr().err
