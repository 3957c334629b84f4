"""The functions that models call, in plain PyTorch: the definition of each.

A model receives a frozen table of them when it is built, and calls ``self.ops.attention(...)``; a component
of kind ``kernels`` replaces some. The table is constant, so ``torch.compile`` traces through it.

Shapes: B batch, S sequence, T tokens (B S; of keys, those of a sequence so far), D width, H query heads,
G key and value heads, K size of a query and key, V size of a value or of the vocabulary, F feed-forward
width, E experts, C experts chosen for each token, N = T C rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanotrain_core.errors import PluginError, did_you_mean
from nanotrain_core.models.cross_entropy import linear_cross_entropy
from nanotrain_core.models.window import window_attention
from nanotrain_core.moe.grouped_mm import grouped_linear_on_gpu, grouped_mm, has_one_kernel

Tensor = torch.Tensor


def attention(
    q_BSHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    scale: float | None = None,
    starts_BT: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Return causal attention, softmax(q k^T ``scale``) v [B, S, H, V].

    The queries are those of the last S of T tokens. In training T is S, unless a wrapper computes a part of
    the queries; where a model continues from a cache, there are more keys. H is a multiple of G: consecutive
    query heads share a key and value head. ``scale`` is 1 / sqrt(K) by default. With ``starts_BT``, token t
    attends only to those from ``starts_BT[b, t]`` on: documents in one sequence are masked from one another.
    A model passes those of whole sequences, also where ranks split them. With ``window``, a token attends to
    itself and to the ``window`` - 1 tokens before it: t to those from t - ``window`` + 1 on. A model passes
    it only if it is not None. Source: Vaswani et al., arXiv 1706.03762, equation 1.
    """
    if window is not None and window < k_BTGK.shape[1]:
        if q_BSHK.shape[1] > 1 or starts_BT is not None:
            return window_attention(q_BSHK, k_BTGK, v_BTGV, scale, starts_BT, window)
        k_BTGK, v_BTGV = k_BTGK[:, -window:], v_BTGV[:, -window:]
    q, k, v = (x.transpose(1, 2) for x in (q_BSHK, k_BTGK, v_BTGV))
    shared = q_BSHK.shape[2] != k_BTGK.shape[2]
    if starts_BT is not None:
        seen_B1ST = seen(starts_BT, q.shape[2]).unsqueeze(1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen_B1ST, scale=scale, enable_gqa=shared)
    elif q.shape[2] == k.shape[2]:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=shared)
    elif q.shape[2] == 1:  # sees all keys: heads of a group are rows of one product, keys are not copied
        rows_BGRK = q.reshape(len(q), k.shape[1], -1, q.shape[3])
        y = F.scaled_dot_product_attention(rows_BGRK, k, v, scale=scale)
        y = y.reshape(*q.shape[:3], v.shape[3])
    else:
        seen_ST = q.new_ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen_ST, scale=scale, enable_gqa=shared)
    return y.transpose(1, 2)


def seen(starts_BT: Tensor, queries: int) -> Tensor:
    """Return the mask [B, S, T] of tokens that the last S ``queries`` see: their document's, up to theirs."""
    at_T = torch.arange(starts_BT.shape[1], device=starts_BT.device)
    at_S, starts_BS = at_T[len(at_T) - queries :], starts_BT[:, len(at_T) - queries :]
    return (at_T >= starts_BS.unsqueeze(-1)) & (at_T <= at_S.unsqueeze(-1))


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) times ``weight_D``, for each row of x [..., D].

    Source: Zhang and Sennrich, arXiv 1910.07467, equation 4.
    """
    return F.rms_norm(x, weight_D.shape, weight_D, eps)


def rope(x_BSHK: Tensor, cos_S1K: Tensor, sin_S1K: Tensor) -> Tensor:
    """Return ``x_BSHK`` with elements i and i + K/2 of each head rotated by their position's angle.

    ``cos`` and ``sin`` are the result of :func:`~nanotrain_core.models.rope.rope_rotation`; the rotation uses
    their dtype.
    Source: Su et al., arXiv 2104.09864, equation 34, in the "rotate half" order of Llama's public weights.
    """
    x1, x2 = x_BSHK.to(cos_S1K.dtype).chunk(2, dim=-1)
    cos, sin = cos_S1K.chunk(2, dim=-1)[0], sin_S1K.chunk(2, dim=-1)[1]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x_BSHK.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up [..., F]. Source: Shazeer, arXiv 2002.05202, equation 6."""
    return F.silu(gate) * up


def grouped_linear(rows_NK: Tensor, weight_ENK: Tensor, counts_E: Tensor) -> Tensor:
    """Return each expert's rows, ``counts_E`` of them, times its transposed weight; there may be none.

    On a GPU in bfloat16 one kernel computes all of them, and the host does not wait for the counts. Elsewhere
    it does, and in a compiled graph it does so inside one operator.
    """
    if has_one_kernel(rows_NK, *weight_ENK.shape[1:]):
        return grouped_linear_on_gpu(rows_NK, weight_ENK, counts_E)
    if torch.compiler.is_compiling():
        compiled: Tensor = grouped_mm(rows_NK, weight_ENK.mT, counts_E)
        return compiled
    pieces = torch.split(rows_NK, counts_E.tolist())
    return torch.cat([F.linear(rows, weight) for rows, weight in zip(pieces, weight_ENK, strict=True)])


def experts(rows_ND: Tensor, counts_E: Tensor, gate_EFD: Tensor, up_EFD: Tensor, down_EDF: Tensor) -> Tensor:
    """Return the SwiGLU experts' outputs [N, D] for rows sorted by expert, ``counts_E`` of them each.

    An expert may have no rows, and there may be none at all. For experts sharded along F, a partial sum.
    """
    hidden_NF = swiglu(grouped_linear(rows_ND, gate_EFD, counts_E), grouped_linear(rows_ND, up_EFD, counts_E))
    return grouped_linear(hidden_NF, down_EDF, counts_E)


def permute(x_TD: Tensor, order_N: Tensor, back_N: Tensor, chosen: int) -> Tensor:
    """Return rows [N, D]: each token once per expert in ``chosen``, sorted into ``order_N``.

    ``back_N`` is the inverse of that permutation: the backward pass may gather with it instead of
    scatter-adding.
    """
    return x_TD.unsqueeze(1).expand(-1, chosen, -1).flatten(0, 1).index_select(0, order_N)


def unpermute(outputs_ND: Tensor, order_N: Tensor, back_N: Tensor, weights_TC: Tensor) -> Tensor:
    """Return each token's weighted sum [T, D] of its experts' outputs, in its router's order.

    Computed in float32 or wider and rounded once, as in Megatron: router weights rounded to bfloat16 first
    would be off by up to 0.4%, and each expert's output with them.
    """
    each_TCD = outputs_ND.index_select(0, back_N).view(*weights_TC.shape, outputs_ND.shape[1])
    weights_TC = weights_TC.to(torch.promote_types(weights_TC.dtype, torch.float32))
    return (each_TCD * weights_TC.unsqueeze(-1)).sum(1).to(outputs_ND.dtype)


@dataclass(frozen=True)
class WrappedOp:
    """A function of the table, wrapped by another that receives it as the first argument.

    Monitors that observe its calls see those of ``inner``.
    """

    outer: Callable[..., Tensor]
    inner: Callable[..., Tensor]

    def __call__(self, *args: Any) -> Tensor:
        return self.outer(self.inner, *args)


@dataclass(frozen=True)
class Ops:
    """The table of a model's functions. Each field has the signature and meaning of its default."""

    attention: Callable[..., Tensor] = attention
    """Causal softmax attention of queries [B, S, H, K] over keys [B, T, G, K] and values [B, T, G, V]."""
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    """``(x, weight, eps)``: the last dimension of x scaled to unit root mean square, times the weight."""
    rope: Callable[[Tensor, Tensor, Tensor], Tensor] = rope
    """Rotary position embedding of heads x [B, S, H, K], by the cosine and sine [S, 1, K] of each angle."""
    swiglu: Callable[[Tensor, Tensor], Tensor] = swiglu
    """``(gate, up)``: silu(gate) times up."""
    linear_cross_entropy: Callable[..., Tensor] = linear_cross_entropy
    """The summed cross-entropy of hidden states [T, D], a head's weight [V, D] and targets [T]: a scalar."""
    experts: Callable[..., Tensor] = experts
    """The SwiGLU of every expert: outputs [N, D] for rows [N, D] that are sorted by expert."""
    permute: Callable[[Tensor, Tensor, Tensor, int], Tensor] = permute
    """Copies tokens [T, D] into rows [N, D] that are sorted by expert."""
    unpermute: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = unpermute
    """Each token's sum [T, D] of its rows [N, D], times the weights of their experts [T, C]."""


#: The plain PyTorch table, for models that are built without a run's kernels.
TORCH_OPS = Ops()


def wrap_ops(ops: Ops, *each: Mapping[str, Callable[..., Tensor]]) -> Ops:
    """Return ``ops`` with functions wrapped by those given under their names; the last is outermost.

    Raises:
        PluginError: the table has no such field; the nearest is suggested.
    """
    known = [field.name for field in fields(Ops)]
    for name, outer in (pair for functions in each for pair in functions.items()):
        if name not in known:
            raise PluginError(f"models call no function '{name}'{did_you_mean(name, known)}")
        ops = replace(ops, **{name: WrappedOp(outer, getattr(ops, name))})
    return ops


def expect_window(ops: Ops) -> None:
    """Check that attention, and each function around it, takes a window.

    Raises:
        PluginError: naming one that takes none.
    """
    function, count = ops.attention, len(signature(attention).parameters)
    while isinstance(function, WrappedOp):
        _expect_arguments(function.outer, count + 1, "")
        function = function.inner
    _expect_arguments(function, count, "; [kernels] use = 'torch' has it")


def _expect_arguments(function: Callable[..., Tensor], count: int, remedy: str) -> None:
    with suppress(ValueError):  # a function in C has no signature: its call will tell
        given = signature(function)
        try:
            given.bind(*range(count))
        except TypeError:
            name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"
            raise PluginError(
                f"{name}{given} takes no 'window', which is the last of {count} arguments where a model has "
                f"sliding-window attention{remedy}"
            ) from None


def ops_of(module: nn.Module) -> Ops:
    """Return the table that a module was built with: its attribute ``ops``, or plain PyTorch."""
    found = vars(module).get("ops", TORCH_OPS)
    assert isinstance(found, Ops)
    return found
