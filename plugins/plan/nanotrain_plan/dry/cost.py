"""What an operator costs: FLOPs of matrix products and of attention, and bytes that it reads and writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch.utils.flop_counter import flop_registry

#: Operators that move numbers and compute little.
OTHER = "other"

#: What the :attr:`Cost.kind` of attention begins with; the dtype of queries follows.
ATTENTION = "attention "

#: Formats by the dtype of their blocks' scales, which follow the operands of a product.
_BLOCK_SCALED = {torch.float8_e8m0fnu: "mxfp8", torch.float8_e4m3fn: "nvfp4"}

#: Views and allocations: neither computes.
_FREE = ("aten::empty", "aten::new_empty", "aten::detach", "aten::view", "aten::_unsafe_view", "aten::alias")

#: Matrix products of which torch counts no FLOPs, by name, and operators of as many: those that add to a
#: tensor, and ``torch.nn.functional.scaled_mm``.
_COUNTED_AS = {
    "aten::addmm_": torch.ops.aten.addmm,
    "aten::baddbmm_": torch.ops.aten.baddbmm,
    "aten::_scaled_mm_v2": torch.ops.aten.mm,
}

#: Operators that read a few rows or elements of their first argument.
_LOOKUPS = ("aten::embedding", "aten::gather", "aten::index", "aten::index_select")

#: Operators that write their first argument and do not read it.
_OVERWRITES = ("aten::copy_", "aten::_foreach_copy_", "aten::zero_", "aten::_foreach_zero_", "aten::fill_")


@attrs.define(frozen=True)
class Cost:
    """What a recorder notes of one call."""

    kind: str
    """:data:`OTHER`, the dtype of a matrix product, or :data:`ATTENTION` and the dtype of queries."""
    flops: int
    moved: int


def cost_of(func: Any, name: str, args: Any, kwargs: Any, out: Any, *, new: bool, device: str) -> Cost | None:
    """Return the cost of a call, None if it computes nothing.

    Args:
        func: the operator.
        name: its name without its overload, ``aten::mm``.
        args: of the call.
        kwargs: of the call.
        out: what it returned.
        new: whether any of that is new memory.
        device: type of the device whose memory counts, where an operator only moves bytes.
    """
    if name.startswith(_FREE):
        return None
    outputs, inputs = list(tensors_in(out)), [*tensors_in(args), *tensors_in(kwargs)]
    packet = _COUNTED_AS.get(name, func._overloadpacket)
    if "_scaled_dot_product" in name and "_attention" in name:
        kind = ATTENTION + str(inputs[0].dtype)[6:]
        return Cost(kind, _attention_flops(func, args, kwargs), sum(map(dense, (*inputs, *outputs))))
    if name.startswith("torch_attn::_varlen_attn"):  # of windows
        kind = ATTENTION + str(inputs[0].dtype)[6:]
        return Cost(kind, _window_flops(func, args), sum(map(dense, (*inputs, *outputs))))
    if name == "aten::_grouped_mm":
        rows, right = args[:2]
        used = min(1.0, rows.shape[0] / right.shape[0]) if rows.dim() < right.dim() else 1.0
        moved = dense(rows) + sum(map(dense, outputs)) + round(dense(right) * used)
        return Cost(str(rows.dtype)[6:], 2 * rows.numel() * right.shape[-1], moved)
    if name in _LOOKUPS:  # of what they read from, as many bytes as they return
        return Cost(OTHER, 0, 2 * sum(map(dense, outputs)) + sum(map(dense, inputs[1:])))
    if packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=out)
        if inputs[0].dtype is torch.float4_e2m1fn_x2:  # an element is two numbers
            flops *= 2
        return Cost(_units_of(inputs), flops, sum(map(dense, (*inputs, *outputs))))
    if new or func._schema.is_mutable:
        written = outputs if new else list(_written(func, args, kwargs))
        read = inputs[len(written) :] if name in _OVERWRITES else inputs
        return Cost(OTHER, 0, sum(dense(t) for t in (*read, *written) if t.device.type == device))
    return None


def _units_of(inputs: Sequence[torch.Tensor]) -> str:
    """Return the dtype whose units multiply the first two of these; scales may follow them."""
    if inputs[0].element_size() > 1:
        return str(inputs[0].dtype)[6:]
    return next((_BLOCK_SCALED[each.dtype] for each in inputs[2:] if each.dtype in _BLOCK_SCALED), "float8")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an operator's arguments or results: three times as fast as torch's pytrees."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator in place writes; a fused optimizer only reads gradients."""
    for number, each in enumerate(func._schema.arguments):
        if each.alias_info is not None and each.alias_info.is_write and each.name != "grads":
            yield from tensors_in(args[number] if number < len(args) else kwargs.get(each.name))


def _attention_flops(func: Any, args: Any, kwargs: Any) -> int:
    """Return FLOPs of fused attention over the whole score matrix: 2 products forward, 5 backward.

    Half of it is masked. Where the queries are the last S of T tokens, it is that of which half is what they
    see: T - S earlier tokens are seen by all of them. Without a mask they see all.
    """
    names = (each.name for each in func._schema.arguments)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    B, H, S, K = given["query"].shape
    V, T = given["value"].shape[-1], given["key"].shape[2]
    products: int = 3 * K + 2 * V if "backward" in func._schema.name else K + V
    masked = given.get("is_causal") or any(given.get(name) is not None for name in ("attn_mask", "attn_bias"))
    return int(2 * B * H * S * (2 * T - S if masked else 2 * T) * products)


def _window_flops(func: Any, args: Any) -> int:
    """Return twice the FLOPs of fused attention in a window, as if half of them were masked."""
    given = dict(zip((each.name for each in func._schema.arguments), args, strict=False))
    window, S, T = given["window_size"][0] + 1, given["max_q"], given["max_k"]
    _, H, K = given["query"].shape
    products = 5 * K if "backward" in func._schema.name else 2 * K
    seen = _seen_twice(T, window) - _seen_twice(T - S, window)
    return int(2 * (len(given["cu_seq_q"]) - 1) * H * seen * products)


def _seen_twice(tokens: int, window: int) -> int:
    """Return twice the number of scores of this many first tokens, the last one of each as a half."""
    within = min(tokens, window)
    return within * within + 2 * window * (tokens - within)


def dense(tensor: torch.Tensor) -> int:
    """Return the bytes that reading a tensor moves: of an expanded one, those it has."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else 1
    return size
