"""A router's choice of experts in one kernel, as an operator that stands in a compiled graph.

Plain PyTorch sorts three times (torch's top-k is two kernels) and adds, sums, fills and masks in between. On
a GPU, for float32 scores, and in Triton's interpreter, one program reads a token's scores once and chooses in
registers; elsewhere it is plain PyTorch.

Of equal scores the expert of the lowest number comes first. NaN is above all numbers, as in torch.

Shapes: T tokens, E experts, K chosen per token, G groups of consecutive experts.
"""

from __future__ import annotations

import torch

from nanotrain_core.api.torch import CountingRouter
from nanotrain_cuda.permutation import in_triton

Tensor = torch.Tensor


def choose_experts(
    scores_E: Tensor, bias_E: Tensor | None, top_k: int, groups: int = 1, chosen_groups: int = 1
) -> Tensor:
    """Return what :func:`nanotrain_core.moe.top_k.choose_experts` does."""
    scores_TE = scores_E.detach().flatten(0, -2)
    experts_TK: Tensor = choose(scores_TE, bias_E, top_k, groups, chosen_groups)
    return experts_TK.view(*scores_E.shape[:-1], top_k)


def _takes(scores: Tensor) -> bool:
    """Return whether the kernel can choose by ``scores``."""
    return in_triton(scores) and scores.dtype == torch.float32


@torch.library.custom_op("nanotrain_cuda::choose", mutates_args=())
def choose(scores: Tensor, bias: Tensor | None, top_k: int, groups: int, chosen_groups: int) -> Tensor:
    """Return the experts of each token [T, K], int64, for scores [T, E]. It has no gradient."""
    if not _takes(scores):
        return CountingRouter.choose(scores, bias, top_k, groups, chosen_groups)
    from nanotrain_cuda.triton_top_k import choose as by_triton

    return by_triton(scores, bias, top_k, groups, chosen_groups)


@choose.register_fake
def _(scores: Tensor, bias: Tensor | None, top_k: int, groups: int, chosen_groups: int) -> Tensor:
    return scores.new_empty(scores.shape[0], top_k, dtype=torch.int64)
