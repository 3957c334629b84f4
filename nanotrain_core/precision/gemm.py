"""The three products of a linear layer, for a precision to make in its own way.

A model says by its roles where it has linear layers, and its wrappers cut them up. Neither knows in which
format they are multiplied: :func:`give_products` puts that in, inside all hooks.

Shapes: M rows, K inputs, N outputs; of stacked weights E.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, Protocol

import attrs
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from nanotrain_core.layout.roles import Role, tag_of, take_over, taken_over_by
from nanotrain_core.pipeline.weight_gradients import Place, take_place, weight_gradient

#: Roles of layers that are ``x @ weight.T + bias`` and nothing else.
LINEAR = frozenset({Role.COLUMN, Role.ROW, Role.REPLICATED})

Kept = tuple[torch.Tensor, ...]


class GEMMBackend(Protocol):
    """Makes products of 2-D rows. Nothing here is differentiable: callers have their own backward pass."""

    def forward(self, x_MK: torch.Tensor, *weights_NK: torch.Tensor) -> tuple[list[torch.Tensor], Kept]:
        """Return x times each transposed weight [M, N], and what of x :meth:`weight_gradient` needs."""
        ...

    def keep(self, x_MK: torch.Tensor) -> Kept:
        """Return what :meth:`weight_gradient` needs of x, which was not kept but made again."""
        ...

    def input_gradient(self, d_y_MN: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        """Return the gradient of x [M, K]."""
        ...

    def weight_gradient(self, d_y_MN: torch.Tensor, kept: Kept) -> torch.Tensor:
        """Return the gradient of the weight [N, K], in the weight's dtype or in float32.

        A run that adds gradients up in float32 adds it as it is; elsewhere autograd rounds it.
        """
        ...

    def grouped(self, counts_E: torch.Tensor) -> GEMMBackend:
        """Return the same for stacked weights [E, N, K]: rows are sorted, ``counts_E`` of them for each.

        A weight may have no rows, and there may be none at all.
        """
        ...


class Narrowing(Protocol):
    """What :class:`GEMMBackend` may offer too: to hold what the input x is made of in fewer bits."""

    def narrow(self, made_of_MK: torch.Tensor) -> Kept | None:
        """Return what to keep for the backward pass in its place; None: it as it is."""
        ...

    def widen(self, kept: Kept, dtype: torch.dtype) -> torch.Tensor:
        """Return about what was kept."""
        ...


@attrs.define(frozen=True, eq=False)
class MadeAgain:
    """How an input of a linear layer is made anew in the backward pass, which then need not be kept."""

    of: Kept
    make: Callable[..., torch.Tensor]
    """``make(*of)``, not differentiable."""


_MADE_AGAIN = "nanotrain_made_again"


def make_again(x: torch.Tensor, how: MadeAgain) -> torch.Tensor:
    """Return ``x``; a linear layer with products given that reads it next keeps ``how.of`` in its place.

    Whoever writes to ``x`` in between has it kept as it is then.
    """
    setattr(x, _MADE_AGAIN, (x._version, how))
    return x


def _how_made_again(x: torch.Tensor) -> MadeAgain | None:
    version, how = getattr(x, _MADE_AGAIN, (None, None))
    return how if version == x._version else None


_ATTRIBUTE = "nanotrain_products"


def multiplied(module: nn.Module) -> tuple[str, ...]:
    """Return the parameters of ``module`` whose products can be given: see :func:`give_products`."""
    found = tag_of(module)
    if found is None or (found.role in LINEAR and taken_over_by(module) not in (None, _forward)):
        return ()  # a wrapper computes on other rows than it is called with
    return ("weight",) if found.role in LINEAR else tuple(found.products)


def give_products(module: nn.Module, products: Mapping[str, GEMMBackend]) -> None:
    """Have ``module`` make the products of its parameters with ``products``, inside all its hooks.

    Args:
        module: a linear layer of any class, or EXPERTS whose tag names ``products``.
        products: for each name in :func:`multiplied`. Those with one object share their input's form.
    """
    setattr(module, _ATTRIBUTE, dict(products))
    found = tag_of(module)
    if products and found is not None and found.role in LINEAR:
        take_over(module, _forward)


def products_of(module: nn.Module) -> Mapping[str, GEMMBackend]:
    """Return what :func:`give_products` was given for ``module``; nothing: it makes them as it likes."""
    found: Mapping[str, GEMMBackend] = getattr(module, _ATTRIBUTE, {})
    return found


def _forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Run in a linear layer's place; a hook may have taken its bias out."""
    bias = module.bias
    products, place = products_of(module)["weight"], take_place(module)
    handle = None if place is None else place.handle
    made = _how_made_again(x)
    y: torch.Tensor = _Linear.apply(x, module.weight, products, made, place, handle)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias  # type: ignore[operator]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_NK: torch.Tensor,
        products: GEMMBackend,
        made: MadeAgain | None,
        place: Place | None,
        handle: torch.Tensor | None,
    ) -> torch.Tensor:
        (y_MN,), kept = products.forward(x.reshape(-1, x.shape[-1]), weight_NK)
        ctx.products, ctx.shape, ctx.place = products, x.shape, place
        ctx.again = place and place.again
        ctx.make = made.make if made else None
        ctx.save_for_backward(weight_NK, *((ctx.again[0],) if ctx.again else made.of if made else kept))
        return y_MN.view(*x.shape[:-1], len(weight_NK))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight_NK, *kept = ctx.saved_tensors
        products, d_y_MN, d_x, d_weight_NK = ctx.products, d_y.reshape(-1, d_y.shape[-1]), None, None
        make: Callable[[], torch.Tensor] | None = ctx.make and partial(ctx.make, *kept)
        if ctx.needs_input_grad[1] and ctx.again:  # begins now, while the other product is made
            make = ctx.again[1](kept[0])

        def product() -> torch.Tensor:
            of_x = tuple(kept) if make is None else products.keep(make().reshape(-1, ctx.shape[-1]))
            d_weight: torch.Tensor = products.weight_gradient(d_y_MN, of_x)
            return d_weight

        if ctx.needs_input_grad[0]:
            d_x = products.input_gradient(d_y_MN, weight_NK).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            d_weight_NK = weight_gradient(weight_NK, product, ctx.place)
        return d_x, d_weight_NK, None, None, None, None


# --- weights that stand still -------------------------------------------------------------------

_numbers = count(1)
_passes: list[int] = []


@contextmanager
def steady_weights() -> Iterator[None]:
    """Announce that no weight changes once it has been used, while this lasts: a step's microbatches."""
    _passes.append(next(_numbers))
    try:
        yield
    finally:
        _passes.pop()


def steady() -> int | None:
    """Return the number of the :func:`steady_weights` that lasts: what was made of weights in it still holds.

    None: outside of one, where anybody may write to weights. A tensor's version does not tell: collectives
    write through other views of the same memory.
    """
    return _passes[-1] if _passes else None
