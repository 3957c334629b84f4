"""The head's chunked loss and its gradient, as compiled functions: few passes over the logits.

The matrix products around them stay outside, with their sums in float32. The eager definition
(:func:`~nanotrain_core.models.cross_entropy.cross_entropy`) works in place in a float32 copy of the logits.
Here there is no copy: the compiler computes exponentials where they are used, directly from the logits, and
the only result of that size is the gradient, in the logits' dtype, including its columns of zeros. If ranks
shard the vocabulary, they communicate between two graphs.

The row count is symbolic from the first call on, so that a last, shorter chunk needs no graph of its own.

Shapes: C tokens of one chunk, V vocabulary, or this rank's shard of it, P columns of logits that are stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from nanotrain_core.compile.function import CompiledFunction
from nanotrain_core.layout.roles import Role, tagged
from nanotrain_core.models.cross_entropy import (
    SplitVocabulary,
    combine,
    linear_cross_entropy,
    locate,
    loss_of,
    softmax_scale,
    wide_dtype,
)
from nanotrain_core.models.ops import Ops

Loss = tuple[torch.Tensor, torch.Tensor | None]


def compile_losses(
    parts: Iterable[nn.Module],
    backend: str,
    *,
    options: Mapping[str, Any] | None = None,
    log: bool = True,
) -> list[str]:
    """Compile the chunk loss of each HEAD of ``parts``; return the heads' names.

    A head whose kernels have their own loss instead of the core's keeps it.
    """
    names = []
    for part in parts:
        for name, module, tag in tagged(part):
            ops = vars(module).get("ops")
            if tag.role is Role.HEAD and isinstance(ops, Ops) and _is_chunked(ops.linear_cross_entropy):
                loss = CompiledLoss(backend, f"{name}.loss", options=options, log=log)
                chunked = partial(ops.linear_cross_entropy, loss=loss)
                cast(Any, module).ops = replace(ops, linear_cross_entropy=chunked)
                names.append(name)
    return names


def _is_chunked(function: Any) -> bool:
    """Return whether ``function`` is the core's, perhaps with arguments."""
    while isinstance(function, partial):
        function = function.func
    return function is linear_cross_entropy


class CompiledLoss:
    """See :class:`~nanotrain_core.models.cross_entropy.ChunkLoss`."""

    def __init__(
        self, backend: str, name: str, *, options: Mapping[str, Any] | None = None, log: bool
    ) -> None:
        self._whole, self._own, self._rest = (
            CompiledFunction(function, backend, name, options=options, log=log, modules=1)
            for function in (whole_loss, own_statistics, loss_and_gradient)
        )

    def __call__(
        self,
        logits_CP: torch.Tensor,
        target_C: torch.Tensor,
        columns: int,
        split: SplitVocabulary | None,
        *,
        gradient: bool,
    ) -> Loss:
        """Return the summed loss, and the gradient of the logits."""
        _rows_vary(logits_CP, target_C)
        if split is None:
            found: Loss = self._whole(logits_CP, target_C, columns, gradient)
            return found
        own_C3 = self._own(logits_CP, target_C, columns, split.first)
        each_RC3 = split.gather(own_C3.unsqueeze(0))
        _rows_vary(own_C3)
        _rows_vary(each_RC3, dim=1)
        found = self._rest(logits_CP, target_C, columns, split.first, own_C3, each_RC3, gradient)
        return found


def _rows_vary(*tensors: torch.Tensor, dim: int = 0) -> None:
    """Make the number of rows symbolic in a graph; zero or one row needs a separate graph."""
    for each in tensors:
        torch._dynamo.maybe_mark_dynamic(each, dim)


def whole_loss(logits_CP: torch.Tensor, target_C: torch.Tensor, columns: int, gradient: bool) -> Loss:
    """Return the loss and the gradient where this rank has the whole vocabulary."""
    own_C3 = own_statistics(logits_CP, target_C, columns, None)
    return loss_and_gradient(logits_CP, target_C, columns, None, own_C3, None, gradient)


def own_statistics(
    logits_CP: torch.Tensor, target_C: torch.Tensor, columns: int, first: int | None
) -> torch.Tensor:
    """Return each row's largest logit, the sum of exponentials relative to it, and the target's [C, 3]."""
    wide_CP = _widen(logits_CP, columns)
    largest_C1 = wide_CP.amax(dim=1, keepdim=True)
    sum_C1 = (wide_CP - largest_C1).exp().sum(dim=1, keepdim=True)
    at_C1, mine_C1 = locate(target_C, columns, first)
    at_target_C1 = logits_CP[:, :columns].gather(1, at_C1).to(wide_CP.dtype).masked_fill(~mine_C1, 0.0)
    return torch.cat((largest_C1, sum_C1, at_target_C1), dim=1)


def _widen(logits_CP: torch.Tensor, columns: int) -> torch.Tensor:
    """Return logits in the dtype of the softmax, -inf in the columns that are none.

    These are masked instead of cut off: the compiler puts statistics and gradient into one kernel, which
    reads the logits of a row from memory once, only if both have the same number of columns.
    """
    wide_CP, stored = logits_CP.to(wide_dtype(logits_CP)), logits_CP.shape[1]
    none_P = torch.arange(stored, device=logits_CP.device) >= columns
    return wide_CP.masked_fill(none_P, float("-inf")) if stored > columns else wide_CP


def loss_and_gradient(
    logits_CP: torch.Tensor,
    target_C: torch.Tensor,
    columns: int,
    first: int | None,
    own_C3: torch.Tensor,
    each_RC3: torch.Tensor | None,
    gradient: bool,
) -> Loss:
    """Return the loss, and softmax - onehot in the logits' dtype, from all ranks' logit statistics."""
    all_C3 = own_C3 if each_RC3 is None else combine(each_RC3)
    loss = loss_of(all_C3, target_C)
    if not gradient:
        return loss, None
    exp_CP = (_widen(logits_CP, columns) - own_C3[:, :1]).exp()  # 0 in the columns that are none
    at_C1, mine_C1 = locate(target_C, columns, first)
    onehot_CP = mine_C1 & (torch.arange(logits_CP.shape[1], device=target_C.device) == at_C1)
    d_logits_CP = exp_CP * softmax_scale(own_C3, all_C3, target_C) - onehot_CP.to(exp_CP.dtype)
    return loss, d_logits_CP.to(logits_CP.dtype)
