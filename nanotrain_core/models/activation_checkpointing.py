"""Activation checkpointing (recompute): layers store few activations; backward recomputes the rest.

Full: only a layer's input [B, S, D] is stored, so one layer's activations exist at a time, for a third more
    computation. Selective: the results of matrix products and attention are stored too, which take nearly all
    of the time; the rest (norms, RoPE, activation functions, casts) is recomputed.

Sources: full: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174. Selective:
    torch's policies of selective checkpointing, as in torchtitan; Megatron-LM's (Korthikanti et al., arXiv
    2205.05198, section 5) instead recomputes attention. Implemented with ``torch.utils.checkpoint``, not
    reentrant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from nanotrain_core.builtin.configs import RecomputeConfig
from nanotrain_core.contracts import Parallel
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import Placements
from nanotrain_core.layout.roles import Role, overridden_by, override_forward, tagged

#: Operators whose results selective checkpointing stores, if this build of PyTorch has them. Batched products
#: are not among them: they are parts of attention, with results quadratic in the sequence length.
KEPT = {
    "aten::mm",
    "aten::addmm",
    "aten::linear",
    "aten::_grouped_mm",
    "aten::_scaled_mm",
    "aten::_scaled_mm_v2",
    "aten::_scaled_grouped_mm",
    "aten::_scaled_grouped_mm_v2",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "mkldnn::_linear_pointwise",
    "nanotrain::grouped_mm",
    "flex_attention",
    "torch_attn::_varlen_attn",
}

#: Hooks on saved tensors, such as those of offloading, do not see what selective checkpointing stores: torch
#: 2.14 and later warn where this is not said, those before have no such option.
_UNSEEN = {name: False for name in signature(checkpoint).parameters if name == "respect_saved_tensors_hooks"}


def store_in_selective_checkpointing(*operators: str) -> None:
    """Let selective activation checkpointing store the results of these operators too.

    For matrix products that a plugin defines as operators of torch, such as those of eight-bit floats.
    Call it where they are defined.

    Args:
        operators: ``namespace::name`` of each, without overload.
    """
    KEPT.update(operators)


class Recompute(Parallel):
    """The ``recompute`` component. See :class:`~nanotrain_core.contracts.Parallel`."""

    def __init__(self, config: RecomputeConfig) -> None:
        self.config = config

    def apply(self, part: nn.Module, placements: Placements, mesh: Mesh) -> nn.Module:
        """Checkpoint the activations of modules of role BLOCK; placements are unchanged."""
        recompute_blocks(part, every=self.config.every, selective=self.config.granularity == "selective")
        return part


def recompute_blocks(part: nn.Module, *, every: int = 1, selective: bool = False) -> None:
    """Checkpoint the activations of the first module of role BLOCK and each ``every``-th after it."""
    for number, block in enumerate(blocks(part)):
        if number % every == 0:
            override_forward(block, partial(recompute, overridden_by(block), selective=selective))


def blocks(part: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of role BLOCK that are in no other."""
    inside = "\0"
    for name, module, tag in tagged(part):
        if tag.role is Role.BLOCK and not name.startswith(inside):
            inside = f"{name}."
            yield module


def recompute(
    before: Callable[..., Any] | None, block: nn.Module, *args: Any, selective: bool = False, **kwargs: Any
) -> Any:
    """Call ``block`` as ``before`` did, or with its class's forward if None, storing only its input.

    ``selective``: also store the results of :data:`KEPT` operators.
    """
    forward = partial(before or type(block).forward, block)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if selective:
        kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        kwargs.update(_UNSEEN)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


@contextmanager
def outside_of_layers() -> Iterator[None]:
    """Run operators that are not a layer's, though they run in its forward pass.

    Selective checkpointing finds the results of a layer by how often each operator was called. Calls that its
    recomputation does not repeat, or makes alone, must be neither stored nor counted: those of an observer,
    and those whose results are kept for later calls.
    """
    modes = _get_current_dispatch_mode_stack()
    counts = any(isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode) for mode in modes)
    with _disable_current_modes() if counts else nullcontext():
        yield


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # An operator that writes into an argument is run again: others may write to that memory, too.
    schema = getattr(operator, "_schema", None)  # FlexAttention, of higher order, has none
    kept = operator.name().partition(".")[0] in KEPT and not (schema and schema.is_mutable)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
