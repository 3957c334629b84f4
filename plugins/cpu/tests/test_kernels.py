"""Who gets which functions."""

import torch
from nanotrain_cpu import CPUKernelsConfig
from nanotrain_cpu.attention import attention
from nanotrain_cpu.gemm import CPUGEMM
from nanotrain_cpu.kernels import CPUKernels

from nanotrain_core.models.ops import TORCH_OPS


def test_a_cpu_gets_faster_functions_and_every_other_device_plain_pytorch():
    kernels = CPUKernels(CPUKernelsConfig())
    assert kernels.ops(torch.device("cpu")).attention is attention
    assert kernels.ops(torch.device("cpu")).swiglu is TORCH_OPS.swiglu
    assert kernels.ops(torch.device("cuda")) is TORCH_OPS
    assert isinstance(kernels.gemm(), CPUGEMM)
