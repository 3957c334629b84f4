"""The kernel of :mod:`~nanotrain_cuda.top_k`. Imported only where Triton is.

One warp holds a token's scores. They are compared as integers of the same order, so that NaN has a defined
rank, and each expert is chosen at most once, never one that does not exist: later kernels would access memory
out of bounds with its index.

Shapes: T tokens, E experts, K chosen per token, G groups of S consecutive experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Below the integer of any number.
NONE = tl.constexpr(-(2**31))


@triton.jit
def ordered(x):  # type: ignore[no-untyped-def]
    """Return integers in the order of float32 ``x``, NaN above all."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def number_of(key):  # type: ignore[no-untyped-def]
    """Return the float32 number for which :func:`ordered` returns ``key``."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def choose_best(  # type: ignore[no-untyped-def]
    scores_ptr,
    bias_ptr,
    experts_ptr,
    scores_token,
    scores_expert,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Choose the groups of a token, then its experts, one after the other."""
    t = tl.program_id(0).to(tl.int64)
    g, s = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S)
    e = g[:, None] * SIZE + s[None, :]
    exists = (g[:, None] < GROUPS) & (s[None, :] < SIZE)
    x = tl.load(scores_ptr + t * scores_token + e * scores_expert, mask=exists, other=0.0)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + e, mask=exists, other=0.0)
    key = tl.where(exists, ordered(x), NONE)
    if CHOSEN_GROUPS < GROUPS:
        best = tl.max(key, 1)
        if bias_ptr is None:
            of_group = best
        else:
            rest = tl.where(s[None, :] == tl.argmax(key, 1)[:, None], NONE, key)
            of_group = ordered(number_of(best) + number_of(tl.max(rest, 1)))
        of_group = tl.where(g < GROUPS, of_group, NONE)
        opened = g < 0
        for _ in tl.static_range(CHOSEN_GROUPS):
            chosen = g == tl.argmax(of_group, 0)
            opened = opened | chosen
            of_group = tl.where(chosen, NONE, of_group)
        key = tl.where(opened[:, None], key, NONE)
    key, e = tl.reshape(key, (BLOCK_G * BLOCK_S,)), tl.reshape(e, (BLOCK_G * BLOCK_S,))
    at = tl.arange(0, BLOCK_G * BLOCK_S)
    for k in tl.static_range(TOP_K):
        chosen = at == tl.argmax(key, 0)
        tl.store(experts_ptr + t * TOP_K + k, tl.sum(tl.where(chosen, e, 0), 0).to(tl.int64))
        key = tl.where(chosen, NONE, key)


def choose(
    scores_TE: torch.Tensor, bias_E: torch.Tensor | None, top_k: int, groups: int, chosen_groups: int
) -> torch.Tensor:
    """Return the experts of each token [T, K], int64."""
    T, E = scores_TE.shape
    size, few = E // groups, chosen_groups < groups
    if not few:  # they may be of any size
        groups, size = 1, E
    if top_k > size * (chosen_groups if few else 1) or (few and bias_E is not None and size < 2):
        raise ValueError(f"{top_k} of {E} experts cannot be chosen from {chosen_groups} of {groups} groups")
    experts = scores_TE.new_empty(T, top_k, dtype=torch.int64)
    if T:
        bias = None if bias_E is None else bias_E.float().contiguous()
        choose_best[(T,)](
            scores_TE, bias, experts, *scores_TE.stride(), TOP_K=top_k, GROUPS=groups, SIZE=size,
            CHOSEN_GROUPS=chosen_groups if few else groups, BLOCK_G=triton.next_power_of_2(groups),
            BLOCK_S=triton.next_power_of_2(size), num_warps=1,
        )  # fmt: skip
    return experts
