"""Module roles: the interface between models and parallel wrappers.

A model tags each module with its role where it creates it. A wrapper reads the tags and
never a module's name or class, so a new model works with every wrapper and vice versa.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from fnmatch import fnmatchcase
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from nanotrain_core.errors import PluginError

if TYPE_CHECKING:
    from torch import nn

    M = TypeVar("M", bound=nn.Module)


class Role(Enum):
    """A module's computation with respect to the hidden dimension, and its call signature.

    The call is part of the role: wrappers attach hooks to it, precisions replace the module.
    """

    VOCAB = "embedding table [V, D]: rows may be split over the vocabulary"
    """``module(tokens [B, S]) -> [B, S, D]``, with ``.weight`` [V, D]."""
    POSITION = "learned positions [S, D]: same on every rank of a layer"
    """Arbitrary call signature. It returns the vectors of whole sequences, [S, D] or [B, S, D], for a wrapper
    to cut, and does not add them itself. Learned ones are in ``.weight`` [S, D], others in a buffer."""
    COLUMN = "linear whose outputs may be split: each rank computes some of them from a whole input"
    """``module(x [..., in]) -> [..., out]``, one tensor; ``.weight`` [out, in], ``.bias`` [out] or None. It
    computes ``x @ weight.T + bias`` and nothing else: a wrapper or a GEMM backend may do so in its place."""
    ROW = "linear whose inputs may be split: each rank computes a partial sum of every output"
    """As COLUMN; the bias is added once, to the whole sum."""
    REPLICATED = "linear kept whole on every rank, for example a low-rank latent projection"
    """As COLUMN."""
    NORM = "normalization over the width, with an element-wise weight"
    """``module(x [..., D]) -> [..., D]``, with ``.weight`` [D] and optional ``.bias`` [D]. Also for a
    scale."""
    INNER = (
        "between COLUMN and ROW, replicated: for example a norm of each query head, which every rank applies "
        "to its own heads"
    )
    """Arbitrary call signature. Each rank's gradient of it is partial."""
    PER_HEAD = (
        "one entry for each head along axis 0 of every parameter and buffer, as ALiBi's slopes or decays"
    )
    """Arbitrary call signature, between COLUMN and ROW. Sharded with the heads, in whole units."""
    HEAD = "output projection [V, D] with the loss: logits may be split over the vocabulary"
    """``module(x [B, S, D], targets [B, S] or None, table [V, D] or None)`` returns the summed loss, or
    logits without targets. ``.weight`` is [V, D], or None when ``table``, the embedding's weight, is
    passed. Wrappers replace its forward: logits are ``x @ weight.T`` and the loss is their cross-entropy in
    nats, summed over targets that are not ``IGNORE``. A bias, a cap of logits or a further loss is no HEAD's:
    such a projection is REPLICATED, and the part computes its loss."""
    BLOCK = "one layer of the model: the unit of recomputation"
    """``module(x [B, S, D], ...) -> [B, S, D]``: further arguments are the model's own."""
    SHARED = "identity, marks where a tensor that all heads share (MLA's rotary key) enters the split region"
    """``module(x [B, S, ...]) -> x``. A COLUMN's input passes through it too, without this role."""
    ROUTER = "chooses experts per token: whole on every rank, and sees whole sequences"
    """``module(x [B, S, D])`` returns a :class:`~nanotrain_core.moe.routing.Routing` [B, S, K]. After each
    step a :class:`~nanotrain_core.moe.routing.CountingRouter` receives the number of tokens of each expert:
    see :func:`nanotrain_core.moe.routing.balance_routers`."""
    EXPERTS = (
        "stacked experts, axis 0 of every parameter: may be split over experts, and each along ``split``"
    )
    """``module(x [B, S, D], routing) -> [B, S, D]``, for any subset of tokens: it is
    :func:`~nanotrain_core.moe.routing.run_locally` of ``module.compute(rows [N, D], counts [E]) -> [N, D]``,
    whose rows are sorted by expert. Experts sharded along the tag's ``split`` axes compute partial sums."""


@attrs.define(frozen=True)
class Tag:
    """A role, and the granularity at which the sharded dimension may be split."""

    role: Role
    """What the module does with the model's width."""
    unit: int = 1
    """Rows (COLUMN) or columns (ROW) that must stay on one rank, for example a head's size."""
    grouped: bool = False
    """For COLUMN: each unit is used by a group of consecutive units elsewhere, as a key head by query heads.
    Where the number of ranks does not divide the units, several ranks may use the same one."""
    split: Mapping[str, int] = attrs.field(factory=dict, hash=False)
    """For EXPERTS: for each parameter the axis, not 0, along which the width of each expert can be
    sharded."""
    gemm_weights: tuple[str, ...] = ()
    """For EXPERTS: the stacked weights [E, N, K] of gate, up and down, as passed to ``ops.experts``.
    One that ``split`` shards along axis 1 reads the module's input, one along axis 2 produces its output."""


_ATTRIBUTE, _SHARED = "nanotrain_tag", "nanotrain_shared_tokens"
_ADDED = "nanotrain_added_by"

#: Where ``torch.nn.Module`` stores forward and backward hooks: torch has no public way to move them.
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)


def tag(
    module: M,
    role: Role,
    *,
    unit: int = 1,
    grouped: bool = False,
    split: Mapping[str, int] | None = None,
    gemm_weights: tuple[str, ...] = (),
) -> M:
    """Give ``module`` a role and return it: ``self.q = tag(nn.Linear(D, D), Role.COLUMN, unit=K)``.

    Raises:
        PluginError: it is not a role: no wrapper would recognize it.
    """
    if not isinstance(role, Role):
        roles = ", ".join(each.name for each in Role)
        raise PluginError(f"{type(module).__name__} is tagged {role!r}; expected a Role, one of {roles}")
    setattr(module, _ATTRIBUTE, Tag(role, unit, grouped, split or {}, gemm_weights))
    return module


def tag_of(module: nn.Module) -> Tag | None:
    """Return the tag of ``module``, or None."""
    return getattr(module, _ATTRIBUTE, None)


def override_forward(module: M, forward: Callable[..., Any]) -> M:
    """Make ``forward(module, *args)`` run instead of the module's own forward, inside all its hooks.

    For a wrapper for which hooks are not enough: one that computes on other rows than the module receives.
    :func:`replace_module` keeps it, with the new module as the first argument.
    """
    module.forward = MethodType(forward, module)
    return module


def overridden_by(module: nn.Module) -> Callable[..., Any] | None:
    """Return the function passed to :func:`override_forward` for ``module``, or None."""
    found = vars(module).get("forward")
    return found.__func__ if isinstance(found, MethodType) else None


def share_tokens(experts: nn.Module, dim: str) -> None:
    """Record that a wrapper makes each rank along ``dim`` call these EXPERTS with its own tokens.

    The core refuses to train experts that several ranks call with the same tokens.
    """
    setattr(experts, _SHARED, shared_tokens(experts) | {dim})


def shared_tokens(experts: nn.Module) -> frozenset[str]:
    """Return the dimensions recorded by :func:`share_tokens`."""
    found: frozenset[str] = getattr(experts, _SHARED, frozenset())
    return found


def note_added(parameter: nn.Parameter, wrapper: str) -> None:
    """Record which wrapper added a parameter to the model, for those that are applied after it."""
    setattr(parameter, _ADDED, wrapper)


def added_by(parameter: nn.Parameter) -> str:
    """Return the earlier wrapper that added ``parameter``, by its name in recipes; empty for the model's own.

    Known in ``Parallel.apply`` of later wrappers.
    """
    found: str = getattr(parameter, _ADDED, "")
    return found


def replace_module(old: nn.Module, new: M) -> M:
    """Return ``new`` as a replacement of ``old``: with its tag, and its hooks before its own.

    A precision that replaces modules runs after the wrappers, whose collectives are hooks of tagged
    modules. Assign the result under the old name; ``new`` holds the parameters under the names ``old`` had.
    """
    found = tag_of(old)
    if found is not None:
        setattr(new, _ATTRIBUTE, found)
    forward = overridden_by(old)
    if forward is not None:
        override_forward(new, forward)
    for name in _HOOKS:
        hooks = getattr(old, name)
        hooks.update(getattr(new, name))
        setattr(new, name, hooks)  # the same table, so that handles of old hooks stay valid
    new._is_full_backward_hook = new._is_full_backward_hook or old._is_full_backward_hook
    return new


def tagged(root: nn.Module) -> Iterator[tuple[str, nn.Module, Tag]]:
    """Yield (name, module, tag) of every tagged module below ``root``, outermost first."""
    for name, module in root.named_modules():
        found = tag_of(module)
        if found is not None:
            yield name, module, found


def natural_sort_key(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts layers.2 before layers.10."""
    return [(word.isdecimal(), int(word) if word.isdecimal() else 0, word) for word in name.split(".")]


def lies_in(name: str, pattern: str) -> bool:
    """Return whether a module or parameter, or a module around it, matches a shell-style pattern.

    >>> [lies_in("layers.0.attn.q", pattern) for pattern in ("*.q", "layers.*.attn", "*.k")]
    [True, True, False]
    >>> [lies_in("layers.0.attn.q.weight", each) for each in ("layers.0.attn", "*.q.weight", "*.k")]
    [True, True, False]
    """
    words = name.split(".")
    return any(fnmatchcase(".".join(words[:count]), pattern) for count in range(1, len(words) + 1))


def main_layers(names: Iterable[str]) -> list[str]:
    """Return the layers of a model's trunk, in order, from the names of all its layers.

    These are the layers whose names differ only in their numbers, such as ``layers.0`` and ``layers.1``; of
    several such families the largest, of equal ones the first. Any other block, such as that of a module for
    multi-token prediction, is neither the model's first nor its last layer.
    """
    families: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(set(names), key=natural_sort_key):
        family = tuple("" if word.isdecimal() else word for word in name.split("."))
        families.setdefault(family, []).append(name)
    return max(families.values(), key=len, default=[])
