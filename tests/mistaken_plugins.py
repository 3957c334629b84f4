"""Plugins of one file with a mistake, written for a test, and what the registry says of them."""

from nanotrain_core.recipe.tree import Selection
from nanotrain_core.registry.discovery import PluginArguments, discover
from nanotrain_core.registry.registry import Registry

PLUGIN = '''
import attrs
from nanotrain_core import hookimpl
from nanotrain_core.component import Component
from nanotrain_core.errors import DataError, Problem
from nanotrain_core.recipe.model_config import ModelConfig
from nanotrain_core.recipe.tree import OptimizerConfig

@attrs.define(frozen=True, kw_only=True)
class Config({base}):
    """No keys."""

def check(recipe, config, layout):
    return ()

@hookimpl
def nanotrain_register_{kind}(register):
    register(Component(name="mine", config=Config, factory=f"{{__name__}}:build", check=check))

def build(config):
    {build}
'''

BASES = {"model": "ModelConfig", "optimizer": "OptimizerConfig"}


def plugin(folder, build="return object()", kind="monitor", name="mistake.py", **changes):
    """Write a plugin; ``changes`` replaces its texts: ``old=new`` with old one of the keys below."""
    text = PLUGIN.format(build=build, kind=kind, base=BASES.get(kind, "object"))
    olds = {
        "factory": 'f"{__name__}:build"',
        "check": "    return ()\n",
        "signature": "(recipe, config, layout)",
        "register": 'Component(name="mine", config=Config, ',
        "head": "\nimport attrs\n",
    }
    for key, new in changes.items():
        assert olds[key] in text
        text = text.replace(olds[key], new)
    path = folder / name
    path.write_text(text)
    return path


def registry(*paths):
    return Registry(discover(PluginArguments(local=[str(path) for path in paths])))


def build(path, kind="monitor"):
    found = registry(path)
    assert not found.broken, found.broken
    return found.build(Selection(kind, "mine", found.get(kind, "mine").config()))
