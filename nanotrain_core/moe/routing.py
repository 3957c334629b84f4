"""Mixture of experts: what a router returns, token permutation, and the token counts of load balancing.

A model's router chooses experts and returns a :class:`Routing`. :func:`run_locally` permutes tokens by
expert, has ``compute`` run the experts and sums their weighted outputs; expert parallelism puts its
all-to-all in its place (``plugins/ep_deepseek``). ``compute`` gets rows sorted by expert, whether they are
this rank's tokens or such that other ranks sent.

Shapes: B batch, S sequence, D width, K experts chosen per token, E experts, N rows, one for each token
and chosen expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import nn

from nanotrain_core.errors import PluginError
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.roles import Role, tagged, taken_over_by
from nanotrain_core.models.ops import TORCH, Ops

M = TypeVar("M", bound=nn.Module)

#: Runs experts: rows [N, D] sorted by expert and counts [E], which add up to N, to [N, D].
Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Routing:
    """What a router decided for a batch of tokens."""

    experts: torch.Tensor
    """Chosen experts [B, S, K], int64."""
    weights: torch.Tensor
    """What their outputs are multiplied by [B, S, K]."""
    losses: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Sums of balance losses over whole sequences, which the model adds to its part's losses."""
    load: torch.Tensor | None = None
    """Tokens of each expert [E], int64, over whole sequences: what the model's part adds to the router's
    count. Not the router itself, which activation checkpointing runs a second time."""
    meanwhile: Callable[[], object] | None = None
    """What a model has to do that needs no expert of these, as its shared experts: who waits for tokens may
    call it, and the model itself asks for the result afterwards, so a second call must cost nothing."""


def sort_by_expert(experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order [N] that sorts flattened choices by expert, stably, and each expert's rows [E]."""
    return experts.flatten().argsort(stable=True), count_of(experts, count)


def inverted(order: torch.Tensor) -> torch.Tensor:
    """Return the permutation [N] that undoes ``order`` [N]."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def run_locally(
    compute: Compute, x: torch.Tensor, routing: Routing, experts: int, ops: Ops = TORCH
) -> torch.Tensor:
    """Run experts that are all on this rank: sort, compute, sort back, weigh and add up.

    Args:
        compute: see :data:`Compute`.
        x: tokens [..., D].
        routing: of those tokens.
        experts: how many there are.
        ops: who permutes.

    Returns:
        [..., D].
    """
    order, counts = sort_by_expert(routing.experts, experts)
    back = inverted(order)
    outputs = compute(ops.permute(x.flatten(0, -2), order, back, routing.experts.shape[-1]), counts)
    return ops.unpermute(outputs, order, back, routing.weights.flatten(0, -2)).view_as(x)


class CountingRouter(nn.Module):
    """A base class of routers that are given, after each step, how many tokens each of their experts got.

    Its ``forward`` returns the count of a pass as ``Routing.load``; the model's part calls :meth:`add_load`
    with it, outside of modules of role BLOCK, which may run twice.
    """

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self._load: torch.Tensor | None = None

    def add_load(self, load_E: torch.Tensor) -> None:
        """Count the tokens of one pass."""
        self._load = load_E if self._load is None else self._load + load_E

    def take_load(self) -> torch.Tensor:
        """Return how many tokens each expert got [E] in training since the last call, int64."""
        load, self._load = self._load, None
        if load is not None:
            return load
        device = next(self.parameters()).device
        return torch.zeros(self.experts, dtype=torch.int64, device=device)

    def balance(self, load: torch.Tensor) -> None:
        """Learn the global ``load`` [E] of a step.

        What is kept of it is a buffer, or a frozen parameter, and changed in place: where only the device
        knows whether the step is skipped, its numbers are put back there.
        """


def counting_routers(parts: Iterable[nn.Module]) -> dict[str, CountingRouter]:
    """Return the routers that count tokens, by module name."""
    return {
        name: module
        for part in parts
        for name, module, tag in tagged(part)
        if tag.role is Role.ROUTER and isinstance(module, CountingRouter)
    }


def count_of(experts: torch.Tensor, number: int) -> torch.Tensor:
    """Return how often each of ``number`` experts was chosen [E], int64: bfloat16 would lose counts."""
    choices = experts.flatten()
    none = torch.zeros(number, dtype=torch.int64, device=choices.device)
    return none.scatter_add(0, choices, torch.ones_like(choices))  # bincount would wait for the device


def any_routers(parts: Iterable[nn.Module], mesh: Mesh) -> bool:
    """All-gather along pp: return whether any rank's part of the model has a router that counts tokens."""
    mine = bool(counting_routers(parts))
    return any(mesh.gather(mine, "pp")) if "pp" in mesh.layout.dims else mine


def balance(
    parts: Iterable[nn.Module], mesh: Mesh, *, skipped: bool | torch.Tensor = False
) -> dict[str, torch.Tensor]:
    """Tell every router how many tokens each of its experts got in this step, over the whole batch.

    After a ``skipped`` step routers are not called: it moves nothing. If only the device knows, they are,
    and their buffers, and parameters that no gradient moves, are put back there if the step was skipped.

    All-reduce over the ranks that see different tokens. A router's ``take_load()`` returns its own
    count [E], int64, of every rank's whole sequences, and forgets it; ``balance(load)`` gets the sum.

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
    """Undo what is done to the state of ``modules``, in place, if ``skipped`` is true on the device.

    Raises:
        PluginError: another tensor has taken the place of one, which cannot be undone.
    """
    modules = list(modules)
    state = [_state_of(module) for module in modules]
    alike: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in (each for found in state for each in found.values()):
        alike.setdefault(tensor.dtype, []).append(tensor.detach())
    before = [torch.cat([tensor.reshape(-1) for tensor in tensors]) for tensors in alike.values()]
    yield
    for module, found in zip(modules, state, strict=True):
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
    """Return buffers, and parameters that no gradient moves, by name."""
    frozen = {name: each for name, each in module.named_parameters() if not each.requires_grad}
    return {**dict(module.named_buffers()), **frozen}


# --- between ranks ------------------------------------------------------------------------------


class DispatchCodec(Protocol):
    """How rows travel to the ranks that hold their experts, and in backward their gradients.

    A precision may offer a quantized form of them. What comes back from the experts, and
    gradients on their way back, is not encoded: DeepSeek-V3 dispatches in FP8 and combines in BF16.
    Source: arXiv 2412.19437, section 3.3.3.
    """

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [N, D] as [N, C], scales included, in a dtype that collectives carry, as uint8."""
        ...

    def decode(self, coded: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows [N, D] of ``coded`` [N, C], of ``width`` D and in ``dtype``."""
        ...


_CODEC = "nanotrain_dispatch_codec"


def use_dispatch_codec(experts: M, codec: DispatchCodec) -> M:
    """Have whoever spreads ``experts``, a module of that role, send rows through ``codec``; return it.

    For a precision's ``convert``, on the module that it leaves in the model.
    """
    setattr(experts, _CODEC, codec)
    return experts


def dispatch_codec(experts: nn.Module) -> DispatchCodec | None:
    """Return the codec to send rows through, or None: as they are."""
    return getattr(experts, _CODEC, None)


def bytes_sent(parts: Iterable[nn.Module]) -> dict[str, int]:
    """Return how many bytes this rank has sent to others for its experts, both ways, by module name.

    Since the beginning, in passes of training, their backward passes and recomputations included, and not in
    those of an evaluation. Known of experts spread over ranks alone, of those whose
    wrapper counts: what takes over their module has ``bytes_sent``.
    """
    return _counted(parts, "bytes_sent")


def rows_computed(parts: Iterable[nn.Module]) -> dict[str, int]:
    """Return on how many rows this rank's experts computed in their last pass, by module name.

    Known of experts spread over ranks alone: theirs is the load that ranks wait for.
    """
    return _counted(parts, "rows")


def _counted(parts: Iterable[nn.Module], what: str) -> dict[str, int]:
    """Return what those who took over experts' modules count under an attribute, by module name."""
    experts = (
        (name, getattr(taken_over_by(module), what, None))
        for part in parts
        for name, module, tag in tagged(part)
        if tag.role is Role.EXPERTS
    )
    return {name: count for name, count in experts if count is not None}
