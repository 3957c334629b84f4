"""The embedding table, whose gradient is as small as what was looked up.

PyTorch's is as large as the table: for 256 tokens and 4096 words it fills 4 MB with zeros for every
microbatch, and adds them all to the sum of those before. Here a microbatch after the first adds its own
rows to that sum.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable


class Embedding(nn.Embedding):
    """A table [V, D] of which tokens look up rows."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows [..., D] of tokens [...]."""
        rows: torch.Tensor = _LookUp.apply(tokens, self.weight)  # type: ignore[no-untyped-call]
        return rows


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
        ctx.table = table_VD  # not saved: its gradient is looked at, never its values
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, table_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        (tokens,), table_VD = ctx.saved_tensors, ctx.table
        rows_ND = d_rows.reshape(-1, d_rows.shape[-1])
        if _adds_in_place(table_VD, rows_ND):
            return None, torch.sparse_coo_tensor(
                tokens.reshape(1, -1), rows_ND, table_VD.shape, check_invariants=False
            )
        return None, torch.ops.aten.embedding_dense_backward(d_rows, tokens, len(table_VD), -1, False)


def _adds_in_place(table_VD: torch.Tensor, rows_ND: torch.Tensor) -> bool:
    """Say whether autograd will add a sparse gradient to the rows of a dense one that is there already.

    On a GPU the rows would be sorted first; there is bandwidth for the zeros.
    """
    sum_VD = table_VD.grad if table_VD.is_leaf else None
    return (
        sum_VD is not None
        and sum_VD.is_cpu
        and sum_VD.layout == torch.strided
        and sum_VD.dtype == rows_ND.dtype
    )
