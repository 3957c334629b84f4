"""The plugins of docs/examples/plugins, as cases of the harness."""

from pathlib import Path

from nanotrain_core.testing import Case

PLUGINS = Path(__file__).parents[1] / "docs/examples/plugins"
ALIBI = {"layers": 2, "heads": 4, "head_size": 8, "vocab": 64}
TP = {"parallel": [{"use": "tp"}, {"use": "summed"}]}


def example(kind, use, **options):
    """Return a case of the component that the file of its name has."""
    return Case(kind, use=use, plugins=[PLUGINS / f"{use}.py"], **options)
