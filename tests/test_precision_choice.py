"""The table of docs/precision.md#which-to-choose: what it says of GPUs is what components refuse."""

import re

import pytest
from doc_blocks import ROOT
from recipe_files import SMALL, write

from nanotrain_core.recipe.component_functions import gpu_refusals
from nanotrain_core.recipe.load import resolve_recipe

#: Ampere, Ada, Hopper, and two of Blackwell.
GPUS = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
TEXT = (ROOT / "docs/precision.md").read_text()
TABLE = TEXT.partition("## Which to choose")[2].partition("\n## ")[0]
#: (name, least capability, whether later ones are refused) of rows that name one.
ROWS = [
    (name, (int(major), int(minor)), how == "alone")
    for name, major, minor, how in re.findall(
        r"^\| `(\w+)` \|[^|]*\| (\d+)\.(\d) (alone|or later)", TABLE, re.MULTILINE
    )
]


@pytest.mark.parametrize(("name", "least", "alone"), ROWS)
def test_gpus_of_the_table_are_those_that_are_not_refused(tmp_path, name, least, alone):
    found = resolve_recipe(write(tmp_path, f'{SMALL}\n[precision]\nuse = "{name}"\n'))
    taken = [gpu for gpu in GPUS if not gpu_refusals(found.recipe, found.registry, found.layout, gpu)]
    assert taken == [gpu for gpu in GPUS if (gpu == least if alone else gpu >= least)]


def test_the_table_has_every_precision_that_needs_some_gpu():
    assert [name for name, *_ in ROWS] == ["fp8_deepseek_v3", "fp8_hybrid", "mxfp8", "nvfp4"]
