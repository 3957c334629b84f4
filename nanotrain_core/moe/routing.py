"""Mixture of experts: the router's result, token permutation, and the token counts for load balancing.

A model's router chooses experts and returns a :class:`Routing`. :func:`run_locally` permutes tokens by
expert, calls ``compute`` to run the experts and sums their weighted outputs; expert parallelism replaces it
by its all-to-all (``plugins/ep_deepseek``). ``compute`` gets rows sorted by expert, of this rank's tokens
or of tokens received from other ranks.

Shapes: B batch, S sequence, D width, K experts chosen per token, E experts, N rows, one for each token
and chosen expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from nanotrain_core.errors import PluginError
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.roles import Role, overridden_by, tagged
from nanotrain_core.models.ops import TORCH_OPS, Ops
from nanotrain_core.moe.top_k import choose_experts

M = TypeVar("M", bound=nn.Module)

#: Runs experts: maps rows [N, D] sorted by expert and counts [E], which sum to N, to [N, D].
Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Routing:
    """The routing decision for a batch of tokens."""

    experts: torch.Tensor
    """Chosen experts [B, S, K], int64."""
    weights: torch.Tensor
    """Weights of the experts' outputs [B, S, K]."""
    losses: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Sums of balance losses over whole sequences, which the model adds to its part's losses."""
    load: torch.Tensor | None = None
    """Tokens of each expert [E], int64, over whole sequences, which the model's part adds to the router's
    count. The router does not add it itself, because activation checkpointing runs it twice."""
    meanwhile: Callable[[], object] | None = None
    """Computation of the model that needs none of these experts, such as its shared experts: code that waits
    for tokens may call it, and the model itself requests the result afterwards, so a second call must be
    free."""


class RoutingStatistics(NamedTuple):
    """The outputs of an MoE layer besides its hidden states. Nothing is counted inside the layer, because
    activation checkpointing runs it twice."""

    losses: dict[str, torch.Tensor]
    """Balance losses, summed over sequences."""
    load: torch.Tensor | None
    """Tokens of each expert [E], in training."""


def sort_by_expert(experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order [N] that stably sorts flattened choices by expert, and each expert's rows [E].

    A radix sort makes a pass for each byte of a key: eight for int64, two for int16.
    """
    keys = experts.flatten().to(torch.int16 if count <= 2**15 else experts.dtype)
    return keys.argsort(stable=True), tokens_per_expert(experts, count)


def invert_permutation(order: torch.Tensor) -> torch.Tensor:
    """Return the inverse [N] of the permutation ``order`` [N]."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def run_locally(
    compute: Compute, x: torch.Tensor, routing: Routing, experts: int, ops: Ops = TORCH_OPS
) -> torch.Tensor:
    """Run experts that are all on this rank: permute, compute, unpermute, weight and sum.

    Args:
        compute: see :data:`Compute`.
        x: tokens [..., D].
        routing: of those tokens.
        experts: their number.
        ops: the functions that permute.

    Returns:
        [..., D].
    """
    order, counts = sort_by_expert(routing.experts, experts)
    back = invert_permutation(order)
    outputs = compute(ops.permute(x.flatten(0, -2), order, back, routing.experts.shape[-1]), counts)
    return ops.unpermute(outputs, order, back, routing.weights.flatten(0, -2)).view_as(x)


class CountingRouter(nn.Module):
    """A base class of routers that receive, after each step, how many tokens each of their experts got.

    Its ``forward`` returns the count of a pass as ``Routing.load``; the model's part calls :meth:`add_load`
    with it, outside of modules of role BLOCK, which may run twice.
    """

    choose: Callable[..., torch.Tensor] = staticmethod(choose_experts)
    """:func:`~nanotrain_core.moe.top_k.choose_experts`, where kernels have put nothing in its place."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self._load: torch.Tensor | None = None

    def add_load(self, load_E: torch.Tensor) -> None:
        """Count the tokens of one training pass; in evaluation mode nothing is counted.

        A balancing state would otherwise follow validation tokens too, and the prompts of samples.
        """
        if not self.training:
            return
        self._load = load_E if self._load is None else self._load + load_E

    def take_load(self) -> torch.Tensor:
        """Return how many tokens each expert got [E] in training since the last call, int64."""
        load, self._load = self._load, None
        if load is not None:
            return load
        device = next(self.parameters()).device
        return torch.zeros(self.experts, dtype=torch.int64, device=device)

    def balance(self, load: torch.Tensor) -> None:
        """Update the balancing state from the global ``load`` [E] of a step.

        The state is modified in place: if only the device knows whether the step is skipped, its values are
        restored there. It is a buffer, which checkpoints save beside the weights, or, where the model
        computes something else without it, a frozen parameter.
        """


def count_routed(routed: RoutingStatistics, router: CountingRouter, losses: dict[str, torch.Tensor]) -> None:
    """Add an MoE layer's balance losses to those of its part, and its load to its router's count."""
    for name, value in routed.losses.items():
        losses[name] = losses[name] + value if name in losses else value
    if routed.load is not None:
        router.add_load(routed.load)


def counting_routers(parts: Iterable[nn.Module]) -> dict[str, CountingRouter]:
    """Return the routers that count tokens, by module name."""
    return {
        name: module
        for part in parts
        for name, module, tag in tagged(part)
        if tag.role is Role.ROUTER and isinstance(module, CountingRouter)
    }


def router_buffers(parts: Iterable[nn.Module]) -> dict[str, torch.Tensor]:
    """Return the buffers of the routers that count tokens, by global name.

    They are what a router keeps from one step to the next: checkpoints have them, beside the weights.
    """
    routers = counting_routers(parts).items()
    return {f"{name}.{key}": each for name, router in routers for key, each in router.named_buffers()}


def tokens_per_expert(experts: torch.Tensor, number: int) -> torch.Tensor:
    """Return how often each of ``number`` experts was chosen [E], int64: bfloat16 would lose counts."""
    choices = experts.flatten()
    none = torch.zeros(number, dtype=torch.int64, device=choices.device)
    return none.scatter_add(0, choices, torch.ones_like(choices))  # bincount would wait for the device


def any_routers(parts: Iterable[nn.Module], mesh: Mesh) -> bool:
    """All-gather along pp: return whether any rank's part of the model has a counting router."""
    mine = bool(counting_routers(parts))
    return any(mesh.gather(mine, "pp")) if "pp" in mesh.layout.dims else mine


def balance_routers(
    parts: Iterable[nn.Module], mesh: Mesh, *, skipped: bool | torch.Tensor = False
) -> dict[str, torch.Tensor]:
    """Pass every router the tokens of each of its experts in this step, over the whole batch.

    After a ``skipped`` step routers are not called. If only the device knows, they are called, and their
    buffers and frozen parameters are restored there if the step was skipped.

    All-reduce over the ranks that see different tokens. A router's ``take_load()`` returns its own
    count [E], int64, for every rank's whole sequences, and resets it; ``balance(load)`` gets the sum.

    Returns:
        The global load [E] of each router on this rank, by module name.
    """
    routers = counting_routers(parts)
    if not routers:
        return {}
    loads = [router.take_load() for router in routers.values()]
    total = torch.cat(loads)
    mesh.all_reduce_data(total)
    summed = dict(zip(routers, torch.split(total, [len(load) for load in loads]), strict=True))
    undo: AbstractContextManager[None] = nullcontext()
    if isinstance(skipped, torch.Tensor):
        undo = unless(skipped, routers.values())
    elif skipped:
        return summed
    with undo:
        for name, router in routers.items():
            router.balance(summed[name])
    return summed


@contextmanager
def unless(skipped: torch.Tensor, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Undo the block's in-place changes to the state of ``modules`` if ``skipped`` is true on the device.

    Raises:
        PluginError: a tensor was replaced by another, which cannot be undone.
    """
    state = [(module, _state_of(module)) for module in modules]
    alike: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in (each for _, found in state for each in found.values()):
        alike.setdefault(tensor.dtype, []).append(tensor.detach())
    before = [torch.cat([tensor.reshape(-1) for tensor in tensors]) for tensors in alike.values()]
    yield
    for module, found in state:
        for name, tensor in _state_of(module).items():
            if found.get(name) is not tensor:
                raise PluginError(
                    f"balance of {type(module).__name__} replaced its {name}; expected a change in place "
                    f"(self.{name}.add_(...)), which can be undone if the step turns out to be skipped"
                )
    for old, tensors in zip(before, alike.values(), strict=True):
        new = torch.cat([tensor.reshape(-1) for tensor in tensors])
        pieces = torch.split(torch.where(skipped, old, new), [tensor.numel() for tensor in tensors])
        torch._foreach_copy_(tensors, [p.view(t.shape) for p, t in zip(pieces, tensors, strict=True)])


def _state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return buffers and frozen parameters, by name."""
    frozen = {name: each for name, each in module.named_parameters() if not each.requires_grad}
    return {**dict(module.named_buffers()), **frozen}


# --- between ranks ------------------------------------------------------------------------------


class DispatchCodec(Protocol):
    """The encoding of rows sent to the ranks that hold their experts, and of their gradients in backward.

    A precision may provide a quantized encoding. The experts' outputs and the
    gradients sent back are not encoded: DeepSeek-V3 dispatches in FP8 and combines in BF16.
    Source: arXiv 2412.19437, section 3.3.3.
    """

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [N, D] as [N, C], including scales, in a dtype for collectives, such as uint8."""
        ...

    def decode(self, coded: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows [N, D] of ``coded`` [N, C], of ``width`` D and in ``dtype``."""
        ...


_CODEC = "nanotrain_dispatch_codec"


def use_dispatch_codec(experts: M, codec: DispatchCodec) -> M:
    """Make the wrapper that shards ``experts``, a module of that role, use ``codec``; return the module.

    For a precision's ``convert``, on the module that remains in the model.
    """
    setattr(experts, _CODEC, codec)
    return experts


def dispatch_codec(experts: nn.Module) -> DispatchCodec | None:
    """Return the codec to send rows through, or None: unencoded."""
    return getattr(experts, _CODEC, None)


@runtime_checkable
class CountsBytes(Protocol):
    """Optional interface of the function with which a wrapper takes over EXPERTS that it shards."""

    bytes_sent: int
    """Bytes that this rank has sent to others for these experts, both ways, since the beginning: in training
    passes, including their backward passes and recomputations, but not in evaluation. Can be set."""


def bytes_sent(parts: Iterable[nn.Module]) -> dict[str, int]:
    """Return the bytes this rank has sent to others for its experts, both ways, by module name.

    Known only for experts sharded over ranks whose wrapper counts them: see :class:`CountsBytes`.
    """
    experts: list[tuple[str, object]] = [
        (name, overridden_by(module))
        for part in parts
        for name, module, tag in tagged(part)
        if tag.role is Role.EXPERTS
    ]
    return {name: taker.bytes_sent for name, taker in experts if isinstance(taker, CountsBytes)}


@contextmanager
def bytes_not_counted(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Leave :func:`bytes_sent` as it was before the block."""
    takers: list[object] = [overridden_by(module) for part in parts for module in part.modules()]
    counting = [(each, each.bytes_sent) for each in takers if isinstance(each, CountsBytes)]
    try:
        yield
    finally:
        for each, sent in counting:
            each.bytes_sent = sent
