"""The notebook runs from top to bottom, in a kernel of its own, and is kept without what it printed."""

import ast
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs/examples/first_steps.ipynb"


@pytest.fixture
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def test_it_is_valid_and_kept_without_outputs(notebook):
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) > 5
    for cell in code:
        ast.parse(cell.source)
        assert (cell.outputs, cell.execution_count) == ([], None)


def test_pages_lead_to_it():
    assert "](docs/examples/first_steps.ipynb)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "](examples/first_steps.ipynb)" in (ROOT / "docs/learn.md").read_text(encoding="utf-8")


@pytest.mark.full
def test_it_runs_from_top_to_bottom(notebook, tmp_path):
    """Its own assertions hold: the model learns, and two ranks have the losses of one process."""
    from nbclient import NotebookClient

    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(
        output.text
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "stream"
    )
    assert "in backward                    all-reduce   along dp" in printed
    assert "alone, " in printed
    assert "def " in printed
