"""Models are built without storage, and without what only training needs."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from nanotrain_core.layout.meta_device import meta_device


def test_modules_are_built_on_meta_and_others_are_initialized_as_ever():
    with meta_device():
        layer = nn.Linear(3, 5)
        real = nn.init.normal_(torch.zeros(1000, device="cpu"), std=2.0)
        other = torch.zeros(1000, device="cpu").uniform_()
    assert all(each.is_meta for each in layer.parameters())
    assert 1.5 < real.std() < 2.5
    assert 0.4 < other.mean() < 0.6


@pytest.mark.full
def test_a_model_is_built_without_torch_dynamo():
    """It takes two seconds to import, and `sample` and `convert` compile nothing."""
    code = """
import sys
from nanotrain_core import compose
from nanotrain_core.layout.meta_device import meta_device
from nanotrain_core.pipeline.actions import Part
from nanotrain_core.testing import Case
model = Case("model", use="transformer").build()
with meta_device():
    assert len([*model.build(Part.whole(model.layers)).parameters()]) > 5
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
