"""Kernels of a dry run stand in on ``meta`` alone."""

import pytest
import torch
from nanotrain_plan import DryKernelsConfig
from nanotrain_plan.dry.kernels import DryKernels

from nanotrain_core.api.torch import TORCH_OPS


@pytest.mark.parametrize("host", [False, True])
def test_they_are_plain_pytorch_on_any_other_device(host):
    kernels = DryKernels(DryKernelsConfig(host=host))
    assert kernels.ops(torch.device("cpu")) is TORCH_OPS
    assert kernels.ops(torch.device("meta")).attention is not TORCH_OPS.attention
