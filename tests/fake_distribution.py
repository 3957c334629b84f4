"""Installs made-up distributions for the tests of the plugin discovery: metadata and a module, no pip."""

from __future__ import annotations

from pathlib import Path

PLUGIN = '''
import attrs
from nanotrain_core import hookimpl
from nanotrain_core.component import Component
from nanotrain_core.recipe.tree import OptimizerConfig

@attrs.define(frozen=True, kw_only=True)
class Config:
    size: int = 3
    """How large."""

@hookimpl
def nanotrain_register_monitor(register):
    register(Component(name="{name}", config=Config, factory="json:Thing"))
'''


def install(
    site: Path, name: str, source: str | None = None, *, version: str = "1.0", core: str = "", entry: str = ""
) -> None:
    """Put distribution ``name`` with one plugin into the folder ``site``.

    Args:
        source: of its module; the default registers a monitor called ``name``.
        core: the range of nanotrain-core it requires.
        entry: name of its entry point, by default its own.
    """
    module = name.replace("-", "_")
    site.mkdir(exist_ok=True)
    (site / f"{module}.py").write_text(PLUGIN.format(name=module) if source is None else source)
    info = site / f"{module}-{version}.dist-info"
    info.mkdir()
    requires = f"Requires-Dist: nanotrain-core{core}\n" if core else ""
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
    (info / "entry_points.txt").write_text(f"[nanotrain.plugins]\n{entry or module} = {module}\n")
