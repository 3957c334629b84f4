"""Kernels with one deliberate fault each: see ``broken_twins.py``."""

from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from broken_twins import twin
from torch import nn

from nanotrain_core import hookimpl
from nanotrain_core.batch import IGNORE
from nanotrain_core.contracts import Kernels
from nanotrain_core.layout.exchange import GlooExchange
from nanotrain_core.layout.roles import Role, tagged
from nanotrain_core.layout.transport import Transport
from nanotrain_core.models.ops import TORCH_OPS
from nanotrain_core.precision.gemm import TorchGEMM, gemm_parameters, use_gemm


class Replacing(Kernels):
    """Plain PyTorch, but for the ``function`` that the class has a static method for."""

    function = ""

    def __init__(self, config):
        self.config = config

    def ops(self, device):
        return replace(TORCH_OPS, **{self.function: getattr(type(self), self.function)})


class IgnoresTheScale(Replacing):
    function = "attention"

    @staticmethod
    def attention(q, k, v, scale=None, starts_BT=None, window=None):
        return TORCH_OPS.attention(q, k, v, starts_BT=starts_BT, window=window)


class SeesLaterBlocks(Replacing):
    """Causal within blocks of 256 queries; a later block sees all keys up to its own end."""

    function = "attention"

    @staticmethod
    def attention(q, k, v, scale=None, starts_BT=None, window=None):
        if starts_BT is not None or window is not None:
            return TORCH_OPS.attention(q, k, v, scale, starts_BT, window)
        first = TORCH_OPS.attention(q[:, :256], k[:, :256], v[:, :256], scale)
        if q.shape[1] <= 256:
            return first
        late, keys, values = (x.transpose(1, 2) for x in (q[:, 256:], k, v))
        rest = F.scaled_dot_product_attention(late, keys, values, scale=scale, enable_gqa=True)
        return torch.cat([first, rest.transpose(1, 2)], dim=1)


class AddsEpsToTheRoot(Replacing):
    function = "rms_norm"

    @staticmethod
    def rms_norm(x, weight, eps):
        return x / (x.square().mean(-1, keepdim=True).sqrt() + eps) * weight


class WrongSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, d):
        gate, up = ctx.saved_tensors
        return d * up * torch.sigmoid(gate), d * F.silu(gate)  # the derivative of silu has one term more


class WrongGradientOfGates(Replacing):
    function = "swiglu"
    swiglu = staticmethod(WrongSwiGLU.apply)


class RawSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, d):
        gate, up = ctx.saved_tensors
        if d.untyped_storage().nbytes() >= (d.storage_offset() + d.numel()) * d.element_size():
            d = d.as_strided(d.shape, torch.empty_like(gate, memory_format=torch.contiguous_format).stride())
        return torch.ops.aten.silu_backward(d * up, gate), d * F.silu(gate)


class ReadsGradientsByPointer(Replacing):
    """Its backward pass takes the memory of the gradient it is given, as if that were contiguous."""

    function = "swiglu"
    swiglu = staticmethod(RawSwiGLU.apply)


class CountsIgnoredTargets(Replacing):
    function = "linear_cross_entropy"

    @staticmethod
    def linear_cross_entropy(hidden, weight, target, split=None, **options):
        return TORCH_OPS.linear_cross_entropy(
            hidden, weight, target.where(target != IGNORE, 0), split, **options
        )


class IgnoresOtherRanks(Replacing):
    """Knows its own shard of the vocabulary, and takes it for the whole."""

    function = "linear_cross_entropy"

    @staticmethod
    def linear_cross_entropy(hidden, weight, target, split=None, **options):
        if split is not None:
            own = target - split.first
            target = own.where((own >= 0) & (own < len(weight)) & (target != IGNORE), IGNORE)
        return TORCH_OPS.linear_cross_entropy(hidden, weight, target, **options)


class DropsTheLastRow(Replacing):
    """Of experts that have no more than three rows it is right."""

    function = "experts"

    @staticmethod
    def experts(rows, counts, *weights):
        outputs = TORCH_OPS.experts(rows, counts, *weights)
        last = counts.cumsum(0)[counts > 3] - 1
        return outputs.index_fill(0, last, 0.0)


class ForgetsTheirWeights(Replacing):
    """What it returns is right; the router that made the weights does not learn."""

    function = "unpermute"

    @staticmethod
    def unpermute(outputs, order, back, weights):
        return TORCH_OPS.unpermute(outputs, order, back, weights.detach())


class TurnsInPlace(Replacing):
    function = "rope"

    @staticmethod
    def rope(x, cos, sin):
        turned = TORCH_OPS.rope(x, cos, sin)
        x.data.copy_(turned)
        return turned


class ComputesInFloat32(Replacing):
    """Right for bfloat16, and float64 loses half of its digits."""

    function = "rms_norm"

    @staticmethod
    def rms_norm(x, weight, eps):
        return TORCH_OPS.rms_norm(x.float(), weight.float(), eps).to(x.dtype)


class MakesItsTableAnew(Replacing):
    """Equal functions that are not the same: ``torch.compile`` would compile for each."""

    def ops(self, device):
        return replace(TORCH_OPS, swiglu=partial(TORCH_OPS.swiglu))


class ReplacesParameters(Replacing):
    def ops(self, device):
        return TORCH_OPS

    def apply(self, part, passes):
        for module in part.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(torch.empty_like(module.weight))


class TransposedGradient(TorchGEMM):
    def wgrad(self, d_y, kept):
        found = super().wgrad(d_y, kept)
        return found.T if found.shape[0] == found.shape[1] else found


class TransposesSquareWeights(Replacing):
    def ops(self, device):
        return TORCH_OPS

    def gemm(self):
        return TransposedGradient()


class CachesByVersion(TorchGEMM):
    """Multiplies with a copy of the weight, made anew when torch has counted a write to it."""

    def __init__(self):
        self.copies = {}

    def forward(self, x, *weights):
        return [x @ self.copy_of(weight).T for weight in weights], (x,)

    def copy_of(self, weight):
        version, copy = self.copies.get(weight, (None, None))
        if version != weight._version:
            copy = weight.detach().clone()
            self.copies[weight] = weight._version, copy
        return copy


class TrustsTheVersionCounter(Replacing):
    """The fused kernel of AdamW writes to a weight without advancing its counter."""

    def ops(self, device):
        return TORCH_OPS

    def apply(self, part, passes):
        for _, module, found in tagged(part):
            if found.role is not Role.EXPERTS and gemm_parameters(module):
                use_gemm(module, {"weight": CachesByVersion()}, passes)


class BufferedLoss(torch.autograd.Function):
    """Computes its gradients in forward, that of the weight in a buffer for all calls of a shape."""

    buffers: ClassVar = {}

    @staticmethod
    def forward(ctx, hidden, weight, target):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
            loss = TORCH_OPS.linear_cross_entropy(*leaves, target)
        d_hidden, d_weight = torch.autograd.grad(loss, leaves)
        key = (weight.shape, weight.dtype)
        ctx.buffer = BufferedLoss.buffers.setdefault(key, torch.empty_like(d_weight)).copy_(d_weight)
        ctx.save_for_backward(d_hidden)
        return loss.detach()

    @staticmethod
    def backward(ctx, d):
        (d_hidden,) = ctx.saved_tensors
        return (d_hidden * d).to(d_hidden.dtype), (ctx.buffer * d).to(d_hidden.dtype), None


class KeepsOneBuffer(Replacing):
    """Right where each backward pass follows its forward pass."""

    function = "linear_cross_entropy"

    @staticmethod
    def linear_cross_entropy(hidden, weight, target, split=None, **options):
        if split is not None or not torch.is_grad_enabled():
            return TORCH_OPS.linear_cross_entropy(hidden, weight, target, split, **options)
        return BufferedLoss.apply(hidden, weight, target)


class CountsRuns(Replacing):
    """What it computes depends, in the last bits, on how many runs this process has composed."""

    function, runs = "rms_norm", 0

    def apply(self, part, passes):
        CountsRuns.runs += 1

    @staticmethod
    def rms_norm(x, weight, eps):
        return TORCH_OPS.rms_norm(x, weight * (1 + 1e-14 * CountsRuns.runs), eps)


class RoundsAtRandom(Replacing):
    """Rounds bfloat16 up or down by chance, which is as near, and never the same."""

    function = "swiglu"

    @staticmethod
    def swiglu(gate, up):
        y = TORCH_OPS.swiglu(gate, up)
        return y if y.dtype != torch.bfloat16 else (y.float() * (1 + torch.rand(y.shape) * 2**-7)).to(y.dtype)


class SumsAllButTheLast(Kernels):
    """Has an all-reduce that leaves the last element of an odd number as it was."""

    def __init__(self, config):
        self.config = config

    def transport(self):
        return ShortTransport()


class ShortTransport(Transport):
    def exchange(self, group, device, timeout):
        return ShortExchange(group, device)


class ShortExchange(GlooExchange):
    def all_reduce(self, x, *, async_op=False):
        pending = super().all_reduce(x, async_op=async_op)

        def total():
            found = pending()
            if x.numel() % 2:
                found.view(-1)[-1] = x.reshape(-1)[-1]
            return found

        return total


TWINS = (
    SumsAllButTheLast,
    IgnoresTheScale,
    SeesLaterBlocks,
    AddsEpsToTheRoot,
    WrongGradientOfGates,
    ReadsGradientsByPointer,
    CountsIgnoredTargets,
    IgnoresOtherRanks,
    DropsTheLastRow,
    ForgetsTheirWeights,
    TurnsInPlace,
    ComputesInFloat32,
    MakesItsTableAnew,
    ReplacesParameters,
    TransposesSquareWeights,
    TrustsTheVersionCounter,
    KeepsOneBuffer,
    CountsRuns,
    RoundsAtRandom,
)


@hookimpl
def nanotrain_register_kernels(register):
    for cls in TWINS:
        register(twin(cls))
