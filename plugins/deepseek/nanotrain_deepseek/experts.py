"""All experts of a layer, stacked: a matrix product for the rows of each expert.

Shapes: N rows sorted by expert, E experts on this rank, D width, F width of one expert on this rank.

On a GPU in bfloat16 one kernel makes the products of all experts (torch's grouped_mm). On a CPU they are
made one by one: oneDNN, faster than torch's default for them, prepares itself for every new shape for
2.5 ms, so an expert's rows are filled up with zeros to a multiple that leaves few shapes.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from nanotrain_core.builtin.linear import LARGE, matmul, onednn_is_faster
from nanotrain_core.roles import Role, tag
from nanotrain_core.routing import Routing, run_locally
from nanotrain_core.weight_gradients import weight_gradient
from nanotrain_deepseek.config import DeepSeekConfig

#: Rows of an expert on a CPU are a multiple of this, where the library prepares itself for each shape.
MULTIPLE = 32


class Experts(nn.Module):
    """SwiGLU experts. ``compute`` is what wrappers call with rows of their own making."""

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__()
        E, F_, D = config.experts, config.expert_ffn, config.width
        self.experts = E
        self.gate = nn.Parameter(torch.empty(E, F_, D))
        self.up = nn.Parameter(torch.empty(E, F_, D))
        self.down = nn.Parameter(torch.empty(E, D, F_))
        tag(self, Role.EXPERTS, split={"gate": 1, "up": 1, "down": 2})

    def forward(self, x_BSD: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Return each token's weighted sum of its experts [B, S, D], all of which are on this rank."""
        return run_locally(self.compute, x_BSD, routing, self.experts)

    def compute(self, rows_ND: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs [N, D] for rows sorted by expert, ``counts_E`` of them each.

        An expert may have no rows, and there may be none at all. Of experts split along F, a partial sum.
        """
        products = choose_products(rows_ND, counts_E, self.gate)
        y_ND: torch.Tensor = _SwiGLU.apply(rows_ND, self.gate, self.up, self.down, products)  # type: ignore[no-untyped-call]
        return y_ND


class Products(Protocol):
    """The three products of a linear layer, each for all experts. A, B: its inputs and outputs."""

    def enter(self, rows: torch.Tensor) -> torch.Tensor:
        """Lay rows out as the products need them."""
        ...

    def leave(self, rows: torch.Tensor) -> torch.Tensor:
        """Undo :meth:`enter`."""
        ...

    def forward(self, x_NA: torch.Tensor, weight_EBA: torch.Tensor) -> torch.Tensor: ...

    def backward(self, d_y_NB: torch.Tensor, weight_EBA: torch.Tensor) -> torch.Tensor: ...

    def weight(self, d_y_NB: torch.Tensor, x_NA: torch.Tensor) -> torch.Tensor: ...


class _SwiGLU(torch.autograd.Function):
    """Forward: y = down(h), h = silu(gate(x)) up(x). Backward makes h again: it is cheap and large."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_ND: torch.Tensor,
        gate_EFD: torch.Tensor,
        up_EFD: torch.Tensor,
        down_EDF: torch.Tensor,
        products: Products,
    ) -> torch.Tensor:
        x_ND = products.enter(rows_ND)
        g_NF, u_NF = products.forward(x_ND, gate_EFD), products.forward(x_ND, up_EFD)
        ctx.save_for_backward(x_ND, g_NF, u_NF, gate_EFD, up_EFD, down_EDF)
        ctx.products = products
        return products.leave(products.forward(F.silu(g_NF).mul_(u_NF), down_EDF))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows_ND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_ND, g_NF, u_NF, gate_EFD, up_EFD, down_EDF = ctx.saved_tensors
        products: Products = ctx.products
        d_y_ND = products.enter(d_rows_ND)
        silu_NF = F.silu(g_NF)
        d_h_NF = products.backward(d_y_ND, down_EDF)
        d_u_NF = d_h_NF * silu_NF
        d_g_NF = torch.ops.aten.silu_backward(d_h_NF.mul_(u_NF), g_NF)
        d_x_ND = None
        if ctx.needs_input_grad[0]:
            d_x_ND = products.backward(d_g_NF, gate_EFD).add_(products.backward(d_u_NF, up_EFD))
            d_x_ND = products.leave(d_x_ND)
        d_gate = weight_gradient(gate_EFD, lambda: products.weight(d_g_NF, x_ND))
        d_up = weight_gradient(up_EFD, lambda: products.weight(d_u_NF, x_ND))
        d_down = weight_gradient(down_EDF, lambda: products.weight(d_y_ND, silu_NF.mul_(u_NF)))
        return d_x_ND, d_gate, d_up, d_down, None


def choose_products(rows_ND: torch.Tensor, counts_E: torch.Tensor, weight_EFD: torch.Tensor) -> Products:
    """Return the fastest way to make products of these rows."""
    sizes = weight_EFD.shape[1:]
    aligned = all(size * weight_EFD.element_size() % 16 == 0 for size in sizes)
    if rows_ND.is_cuda and rows_ND.dtype == torch.bfloat16 and aligned and len(rows_ND):
        return Grouped(counts_E)
    multiplications = rows_ND.numel() // max(1, len(weight_EFD)) * sizes[0]
    prepared = {
        torch.float32: onednn_is_faster() and multiplications >= LARGE,
        torch.bfloat16: True,
        torch.float16: True,
    }
    on_cpu = rows_ND.device.type == "cpu"
    return OneByOne(counts_E, MULTIPLE if on_cpu and prepared.get(rows_ND.dtype, False) else 1)


class OneByOne:
    """A product for each expert, whose rows are filled up with zeros to a ``multiple``."""

    def __init__(self, counts_E: torch.Tensor, multiple: int) -> None:
        counts = counts_E.tolist()
        room = [-(-count // multiple) * multiple for count in counts]
        self.multiple = multiple
        self.counts, self.ends = counts, list(accumulate(room))
        self.spans = [slice(end - size, end) for end, size in zip(self.ends, room, strict=True)]

    def enter(self, rows: torch.Tensor) -> torch.Tensor:
        """Copy rows to where their experts' spans begin."""
        if self.multiple == 1:
            return rows
        laid_out = rows.new_zeros(self.ends[-1], rows.shape[1])
        for mine, span, count in zip(torch.split(rows, self.counts), self.spans, self.counts, strict=True):
            laid_out[span.start : span.start + count] = mine
        return laid_out

    def leave(self, rows: torch.Tensor) -> torch.Tensor:
        """Gather the rows that are no filling."""
        if self.multiple == 1:
            return rows
        pairs = zip(self.spans, self.counts, strict=True)
        return torch.cat([rows[span.start : span.start + count] for span, count in pairs])

    def forward(self, x_NA: torch.Tensor, weight_EBA: torch.Tensor) -> torch.Tensor:
        """Return x times the transposed weight [N, B]."""
        return torch.cat([matmul(x_NA[s], w.T) for s, w in zip(self.spans, weight_EBA, strict=True)])

    def backward(self, d_y_NB: torch.Tensor, weight_EBA: torch.Tensor) -> torch.Tensor:
        """Return the gradient of x [N, A]."""
        return torch.cat([matmul(d_y_NB[s], w) for s, w in zip(self.spans, weight_EBA, strict=True)])

    def weight(self, d_y_NB: torch.Tensor, x_NA: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the weights [E, B, A]; zeros for an expert without rows."""
        return torch.stack([matmul(d_y_NB[s].T, x_NA[s]) for s in self.spans])


class Grouped:
    """One kernel for all experts, which reads on the device where their rows end."""

    def __init__(self, counts_E: torch.Tensor) -> None:
        self.ends = counts_E.cumsum(0).to(torch.int32)
        self.idle = (counts_E == 0)[:, None, None]

    def enter(self, rows: torch.Tensor) -> torch.Tensor:
        """The kernel takes rows as they are, without gaps."""
        return rows.contiguous()

    def leave(self, rows: torch.Tensor) -> torch.Tensor:
        """As :meth:`enter`."""
        return rows

    def forward(self, x_NA: torch.Tensor, weight_EBA: torch.Tensor) -> torch.Tensor:
        """Return x times the transposed weight [N, B]."""
        return F.grouped_mm(x_NA, weight_EBA.transpose(1, 2), offs=self.ends)

    def backward(self, d_y_NB: torch.Tensor, weight_EBA: torch.Tensor) -> torch.Tensor:
        """Return the gradient of x [N, A]."""
        return F.grouped_mm(d_y_NB, weight_EBA, offs=self.ends)

    def weight(self, d_y_NB: torch.Tensor, x_NA: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the weights [E, B, A]; what the kernel leaves for no rows is not defined."""
        return F.grouped_mm(d_y_NB.T, x_NA, offs=self.ends).masked_fill_(self.idle, 0.0)
