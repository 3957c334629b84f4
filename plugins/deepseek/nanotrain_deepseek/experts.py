"""All experts of a layer, stacked: a matrix product for the rows of each expert.

Shapes: N rows sorted by expert, E experts on this rank, D width, F width of one expert on this rank.

On a GPU in bfloat16 one kernel makes the products of all experts (torch's grouped_mm). On a CPU each
expert's are made while its rows are in the cache. oneDNN, faster there than torch's default, prepares itself
for every new shape for 2.5 ms, so rows are filled up with zeros to a multiple that leaves few shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from nanotrain_core.builtin.linear import LARGE, matmul, onednn_is_faster
from nanotrain_core.products import products_of
from nanotrain_core.roles import Role, tag
from nanotrain_core.routing import Routing, run_locally
from nanotrain_core.weight_gradients import weight_gradient
from nanotrain_deepseek.config import DeepSeekConfig
from nanotrain_deepseek.given_products import given_swiglu

#: Rows of an expert on a CPU are filled up to a multiple of this, or of about a 16th of their mean number.
MULTIPLE = 16


class Experts(nn.Module):
    """SwiGLU experts. ``compute`` is what wrappers call with rows of their own making."""

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__()
        E, F_, D = config.experts, config.expert_ffn, config.width
        self.experts = E
        self.gate = nn.Parameter(torch.empty(E, F_, D))
        self.up = nn.Parameter(torch.empty(E, F_, D))
        self.down = nn.Parameter(torch.empty(E, D, F_))
        split = {"gate": 1, "up": 1, "down": 2}
        tag(self, Role.EXPERTS, split=split, products=tuple(split))

    def forward(self, x_BSD: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Return each token's weighted sum of its experts [B, S, D], all of which are on this rank."""
        return run_locally(self.compute, x_BSD, routing, self.experts)

    def compute(self, rows_ND: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs [N, D] for rows sorted by expert, ``counts_E`` of them each.

        An expert may have no rows, and there may be none at all. Of experts split along F, a partial sum.
        """
        given = products_of(self)
        if given:
            y_ND: torch.Tensor = given_swiglu(rows_ND, counts_E, self, given)
            return y_ND
        products = choose_products(rows_ND, counts_E, self.gate)
        y_ND = _SwiGLU.apply(rows_ND, self.gate, self.up, self.down, products)  # type: ignore[no-untyped-call]
        return y_ND


class Products(Protocol):
    """The products of a linear layer [B, A] of every expert, for rows in one or more pieces."""

    def cut(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the pieces of ``rows``."""
        ...

    def weights(self, weight_EBA: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the weights for each piece."""
        ...

    def room(self, like_NA: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """Return memory for a result [N, A] and, to be replaced by it, where in it each piece goes."""
        ...

    def whole(self, memory: torch.Tensor, pieces: list[Any]) -> torch.Tensor:
        """Return the result, all of whose pieces are there."""
        ...

    def forward(
        self, x_NA: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a piece of x times the transposed weight [N, B], in ``out`` if there is one."""
        ...

    def backward(
        self,
        d_y_NB: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        add: bool = False,
    ) -> torch.Tensor:
        """Return a piece of the gradient of x [N, A], in ``out``, or added to it, if there is one."""
        ...

    def of_weight(self, d_y_NB: list[torch.Tensor], x_NA: list[torch.Tensor]) -> torch.Tensor:
        """Return the gradient of the weights [E, B, A] from all pieces; zeros for an expert without rows."""
        ...


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
        x, g, u = products.cut(rows_ND), [], []
        memory, y = products.room(rows_ND)
        gate, up, down = map(products.weights, (gate_EFD, up_EFD, down_EDF))
        for n, x_ND in enumerate(x):
            g.append(products.forward(x_ND, gate[n]))
            u.append(products.forward(x_ND, up[n]))
            y[n] = products.forward(F.silu(g[n]).mul_(u[n]), down[n], y[n])
        ctx.products, ctx.pieces = products, len(x)
        ctx.save_for_backward(gate_EFD, up_EFD, down_EDF, *x, *g, *u)
        return products.whole(memory, y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows_ND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate_EFD, up_EFD, down_EDF, *saved = ctx.saved_tensors
        products, pieces = ctx.products, ctx.pieces
        x, g, u = saved[:pieces], saved[pieces : 2 * pieces], saved[2 * pieces :]
        gate, up, down = map(products.weights, (gate_EFD, up_EFD, down_EDF))
        d_y, d_g, d_u, h = products.cut(d_rows_ND), [], [], []
        memory, d_x = products.room(d_rows_ND)
        for n in range(pieces):
            silu_NF = F.silu(g[n])
            d_h_NF = products.backward(d_y[n], down[n])
            d_u.append(d_h_NF * silu_NF)
            d_g.append(torch.ops.aten.silu_backward(d_h_NF.mul_(u[n]), g[n]))
            h.append(silu_NF.mul_(u[n]))
            if ctx.needs_input_grad[0]:
                d_x[n] = products.backward(d_g[n], gate[n], d_x[n])
                d_x[n] = products.backward(d_u[n], up[n], d_x[n], add=True)
        of_weights = (
            (gate_EFD, lambda: products.of_weight(d_g, x)),
            (up_EFD, lambda: products.of_weight(d_u, x)),
            (down_EDF, lambda: products.of_weight(d_y, h)),
        )
        wanted = zip(of_weights, ctx.needs_input_grad[1:4], strict=True)
        d_weights = [weight_gradient(*each) if needed else None for each, needed in wanted]
        return (products.whole(memory, d_x) if ctx.needs_input_grad[0] else None, *d_weights, None)


def choose_products(rows_ND: torch.Tensor, counts_E: torch.Tensor, weight_EFD: torch.Tensor) -> Products:
    """Return the fastest way to make products of these rows."""
    sizes = weight_EFD.shape[1:]
    aligned = all(size * weight_EFD.element_size() % 16 == 0 for size in sizes)
    if rows_ND.is_cuda and rows_ND.dtype == torch.bfloat16 and aligned and len(rows_ND):
        return Grouped(counts_E)
    return OneByOne(counts_E, _multiple(rows_ND, weight_EFD))


def _multiple(rows_ND: torch.Tensor, weight_EFD: torch.Tensor) -> int:
    """Return what to fill an expert's rows up to: where oneDNN will make the products, more than 1."""
    if rows_ND.device.type != "cpu" or rows_ND.dtype == torch.float64:
        return 1
    mean = len(rows_ND) // len(weight_EFD)
    large = mean * weight_EFD[0].numel() >= LARGE and onednn_is_faster()
    if rows_ND.dtype == torch.float32 and not large:
        return 1
    return max(MULTIPLE, 1 << max(0, mean.bit_length() - 5))


class OneByOne:
    """A piece for each expert, whose rows are filled up with zeros to a ``multiple``."""

    def __init__(self, counts_E: torch.Tensor, multiple: int) -> None:
        self.counts: list[int] = counts_E.tolist()
        self.multiple = multiple
        self.padded = [count + -count % multiple for count in self.counts]

    def cut(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows of each expert."""
        own = torch.split(rows, self.counts)
        missing = [padded - count for padded, count in zip(self.padded, self.counts, strict=True)]
        return [F.pad(r, (0, 0, 0, m)) if m else r for r, m in zip(own, missing, strict=True)]

    def weights(self, weight_EBA: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return each expert's."""
        return weight_EBA.unbind()

    def room(self, like_NA: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """Return views of one tensor."""
        memory = like_NA.new_empty(sum(self.padded), like_NA.shape[1])
        return memory, list(torch.split(memory, self.padded))

    def whole(self, memory: torch.Tensor, pieces: list[Any]) -> torch.Tensor:
        """Return the tensor, without its filling."""
        if self.padded == self.counts:
            return memory
        return torch.cat([piece[:count] for piece, count in zip(pieces, self.counts, strict=True)])

    def forward(
        self, x_NA: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One product."""
        return matmul(x_NA, weight.T, out)

    def backward(
        self,
        d_y_NB: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        add: bool = False,
    ) -> torch.Tensor:
        """One product."""
        return matmul(d_y_NB, weight, out, add=add)

    def of_weight(self, d_y_NB: list[torch.Tensor], x_NA: list[torch.Tensor]) -> torch.Tensor:
        """A product for each expert; one over no rows is zero."""
        total = d_y_NB[0].new_empty(len(x_NA), d_y_NB[0].shape[1], x_NA[0].shape[1])
        for d_y, x, own in zip(d_y_NB, x_NA, total.unbind(), strict=True):
            matmul(d_y.T, x, own)
        return total


class Grouped:
    """One piece: a kernel for all experts, which reads on the device where their rows end."""

    def __init__(self, counts_E: torch.Tensor) -> None:
        self.ends = counts_E.cumsum(0).to(torch.int32)
        self.idle = (counts_E == 0)[:, None, None]

    def cut(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return all rows."""
        return [rows.contiguous()]

    def weights(self, weight_EBA: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return all."""
        return [weight_EBA]

    def room(self, like_NA: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """Return nothing: the kernel makes room itself."""
        return like_NA.new_empty(0), [None]

    def whole(self, memory: torch.Tensor, pieces: list[Any]) -> torch.Tensor:
        """Return what the kernel made."""
        return pieces[0]  # type: ignore[no-any-return]

    def forward(
        self, x_NA: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """All products."""
        return F.grouped_mm(x_NA, weight.transpose(1, 2), offs=self.ends)

    def backward(
        self,
        d_y_NB: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        add: bool = False,
    ) -> torch.Tensor:
        """All products."""
        d_x_NA = F.grouped_mm(d_y_NB, weight, offs=self.ends)
        return d_x_NA if out is None else out.add_(d_x_NA)

    def of_weight(self, d_y_NB: list[torch.Tensor], x_NA: list[torch.Tensor]) -> torch.Tensor:
        """All products; what the kernel leaves for an expert without rows is not defined."""
        (d_y,), (x,) = d_y_NB, x_NA
        return F.grouped_mm(d_y.T, x, offs=self.ends).masked_fill_(self.idle, 0.0)
