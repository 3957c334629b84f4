"""AdamW with low-precision moments against plain PyTorch; on a CPU, and in Triton's interpreter.

``test_triton.py`` runs this file once more with ``TRITON_INTERPRET=1``.
"""

import os

import pytest
import torch
from nanotrain_cuda import CUDAKernelsConfig
from nanotrain_cuda.kernels import CUDAKernels

from nanotrain_core.optim import moments
from nanotrain_core.optim.moments import FIRST, SECOND, LowPrecisionAdamW

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU"),
            ],
        ),
    ],
)
FORMS = pytest.mark.parametrize("form", ["int8", "bfloat16", "carried"])
#: Of a matrix with whole programs and a rest, of one element of groups, of a bias that has no groups.
SHAPES = ((40, 64), (1, 32), (72,))


def state_of(weight, form):
    """Return moments as of a run; where the first carries errors it is bfloat16."""
    state = {"step": torch.zeros((), device=weight.device)}
    grouped = weight.shape[-1] % moments.GROUP == 0
    for name, code in ((FIRST, torch.int8), (SECOND, torch.uint8)):
        if form == "bfloat16" or (form == "carried" and name == FIRST and grouped):
            state[name] = torch.zeros_like(weight, dtype=torch.bfloat16)
        elif grouped:
            state |= moments.empty_codes(name, code, weight)
        else:
            state[name] = torch.zeros_like(weight)
    return state


def made(kernels, form, device):
    """Return an optimizer after three steps, the last of which has gradients of zero in some groups."""
    random = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=random).to(device)) for shape in SHAPES]
    groups = [{"params": weights[:2], "weight_decay": 0.1}, {"params": weights[2:], "weight_decay": 0.0}]
    optimizer = LowPrecisionAdamW(groups, kernels=kernels, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    for weight in weights:
        weight.requires_grad_(False)
        optimizer.state[weight] = state_of(weight, form)
    for _ in range(3):
        for weight in weights:
            sizes = torch.logspace(-6, 1, weight.numel()).view(weight.shape)
            gradient = torch.randn(weight.shape, generator=random) * sizes
            gradient.view(-1)[:32] = 0.0
            weight.grad = gradient.to(device)
        optimizer.step()
    return optimizer


def tensors(optimizer):
    """Return weights and state by name."""
    found = {}
    for number, weight in enumerate(w for group in optimizer.param_groups for w in group["params"]):
        found[f"{number} weight"] = weight.detach().clone()
        found |= {f"{number} {name}": tensor.clone() for name, tensor in optimizer.state[weight].items()}
    return found


@DEVICES
@FORMS
def test_weights_and_moments_are_those_of_plain_pytorch(form, device):
    """To float32's rounding; few moments lie so that their last bit decides which code they get."""
    kernels = CUDAKernels(CUDAKernelsConfig())
    plain, ours = (tensors(made(use, form, device)) for use in (None, kernels))
    assert plain.keys() == ours.keys()
    for name, expected in plain.items():
        found = ours[name]
        assert found.dtype == expected.dtype
        if not (INTERPRETED or device == "cuda") or name.endswith("step"):
            assert torch.equal(found, expected)
        elif expected.dtype == torch.float32:
            torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-7, msg=name)
        else:
            bits = {1: torch.uint8, 2: torch.int16}[expected.element_size()]
            apart = (found.view(bits).int() - expected.view(bits).int()).abs()
            assert apart.max() <= 1, name
            assert (apart != 0).float().mean() < 0.005, name


@DEVICES
@FORMS
def test_a_step_that_is_skipped_changes_nothing(form, device):
    optimizer = made(CUDAKernels(CUDAKernelsConfig()), form, device)
    before = tensors(optimizer)
    optimizer.found_inf = torch.ones((), device=device)
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad.fill_(float("nan"))
    optimizer.step()
    for name, tensor in tensors(optimizer).items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.skipif(not INTERPRETED, reason="elsewhere the kernel takes no weights of a CPU")
def test_the_kernel_takes_contiguous_float32_weights_alone():
    kernels = CUDAKernels(CUDAKernelsConfig())
    wide, turned = torch.randn(4, 32, dtype=torch.float64), torch.randn(32, 4).T
    weights = [torch.randn(4, 32), wide, turned]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    group = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    states = [state_of(weight, "bfloat16") for weight in weights]
    others = kernels.low_precision_adamw(weights, states, group, None)
    assert [id(each) for each in others] == [id(wide), id(turned)]
    assert [state["step"].item() for state in states] == [1, 0, 0]
