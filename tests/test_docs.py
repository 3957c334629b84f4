"""The documentation says what the code does."""

import inspect
import re
from pathlib import Path

import pytest
from command import nanotrain

from nanotrain_core import hookspecs
from nanotrain_core.component import KINDS, Component
from nanotrain_core.errors import Exit

ROOT = Path(__file__).parents[1]
PLUGINS = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")

HOOKS = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("nanotrain_register_")}


def test_there_is_a_hook_for_every_kind():
    assert set(HOOKS) == {f"nanotrain_register_{kind}" for kind in KINDS}


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_has_a_heading_with_its_signature(name):
    signature = ", ".join(inspect.signature(HOOKS[name]).parameters)
    assert f"### `{name}({signature})`" in PLUGINS


def test_every_field_of_a_component_is_explained():
    for field in Component.__attrs_attrs__:
        assert re.search(rf"^\|.*`{field.name}`", PLUGINS, re.MULTILINE), field.name


def test_the_plugin_of_the_tutorial_trains(tmp_path):
    (source,) = re.findall(r"<!-- file: lion.py -->\n```python\n(.*?)```", PLUGINS, re.DOTALL)
    (tmp_path / "lion.py").write_text(source)
    words = ("--plugin", "lion.py", "--set", "optimizer.use=lion", "--set", "optimizer.lr=3e-3")
    done = nanotrain("run", "capstone", "--nproc", "1", *words, cwd=tmp_path)
    assert (done.code, done.err) == (Exit.DONE, "")
    losses = [float(found) for found in re.findall(r"^ +\d+/20 +(\S+)", done.out, re.MULTILINE)]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))], ids=lambda path: path.name
)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\((?!http)([^)#]+)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target
