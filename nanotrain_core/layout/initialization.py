"""Initial weights that depend on the seed and the parameter's global name, never on the layout.

A tensor is drawn in chunks of whole rows (axis 0), each from its own random stream, so that a rank
that holds a few rows or a few experts draws only those. Streams are drawn on the CPU for every device: a
run starts from the same values on CPU and GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod

import torch
import torch.distributed as dist
from torch import nn

from nanotrain_core.contracts import Initializer
from nanotrain_core.contracts.model import uninitialized
from nanotrain_core.errors import PluginError
from nanotrain_core.layout.dtensors import local_of
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import PlacedParameter, Placement, Placements
from nanotrain_core.moe.routing import router_buffers
from nanotrain_core.precision.quantized_storage import PackedWeight, live_tensors
from nanotrain_core.run.random_state import stream_seed

#: Returns this rank's block of a parameter of this name, in its dtype, on the CPU; None if it is not saved.
ReadBlock = Callable[[str, nn.Parameter], torch.Tensor | None]

#: Approximate elements per random stream. Part of the definition of every run's initial weights.
CHUNK = 2**20


def initial_block(initializer: Initializer, seed: int, placement: Placement) -> torch.Tensor:
    """Draw one rank's block of a parameter, float32, on the CPU."""
    if initializer.kind == "constant":
        return torch.full(placement.shape, initializer.value)
    draw = _normal if initializer.kind == "normal" else _uniform
    if not placement.global_shape:
        return draw((1,), stream_seed(seed, placement.name))[0] * initializer.value
    rows, *rest = placement.global_shape
    per_chunk = max(1, CHUNK // max(1, prod(rest)))
    first, last = placement.offset[0], placement.offset[0] + placement.shape[0]
    columns = (slice(None), *placement.slices[1:])

    def piece(start: int) -> torch.Tensor:
        stop = min(start + per_chunk, rows)
        chunk = draw((stop - start, *rest), stream_seed(seed, placement.name, start // per_chunk))
        return chunk[max(first - start, 0) : last - start][columns]

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # torch draws with one thread
        pieces = list(threads.map(piece, range(first - first % per_chunk, last, per_chunk)))
    return torch.cat(pieces).mul_(initializer.value)


def _normal(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def _uniform(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    empty = torch.empty(shape, dtype=torch.float32)
    return empty.uniform_(-1, 1, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def materialize(
    parts: Iterable[nn.Module],
    placements: Placements,
    seed: int,
    device: torch.device,
    *,
    saved: ReadBlock = lambda name, parameter: None,
) -> None:
    """Allocate storage on ``device`` for parts built on ``meta``, and give weights their first values.

    A name that occurs in several parts is one tied parameter. Of those that are stored packed, one at a time
    is unpacked. On ``meta``, in a dry run, there are no values to draw.

    Args:
        parts: of the model, on this rank.
        placements: of their parameters and buffers.
        seed: of the run.
        device: where they are allocated.
        saved: returns saved values of a parameter, on the host; None: it is initialized.

    Raises:
        PluginError: a part has a buffer whose values it does not provide, or a parameter without an
            initializer.
    """
    seen: dict[str, nn.Parameter] = {}
    for part in parts:
        constants = {name: _constant(part, name, placements) for name, _ in part.named_buffers()}
        part._apply(lambda each: _allocated(each, device))  # type: ignore[no-untyped-call]
        for name, buffer in part.named_buffers():
            if device.type != "meta":
                buffer.copy_(constants[name])
        for name, parameter in part.named_parameters():
            if name not in placements:
                raise PluginError(
                    f"parameter {name} has no placement: is it tied to another? A tie does not "
                    "survive materialization: lend the other module's weight in forward"
                )
            if name not in seen:
                seen[name] = parameter
                _fill(part, name, placements[name], seed, saved)
            if seen[name] is not parameter:
                replace_parameter(part, name, seen[name])


def _allocated(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return memory for a tensor on ``meta``, packed for a packed weight."""
    if isinstance(tensor, PackedWeight):
        return tensor.stored_in(torch.empty_like(tensor.rows, device=device))
    return torch.empty_like(tensor, device=device)


def _fill(part: nn.Module, name: str, placement: Placement, seed: int, saved: ReadBlock) -> None:
    """Give an allocated parameter its first values."""
    parameter = part.get_parameter(name)
    own = local_of(parameter)
    packed = isinstance(own, PackedWeight)
    unpacked = torch.empty(own.shape, dtype=own.dtype, device=own.device) if packed else own
    if not own.is_meta:
        values = saved(name, parameter)
        if values is None:
            values = initial_block(_initializer(part, name), seed, placement)
        unpacked.copy_(values)
    if isinstance(own, PackedWeight):
        own.fill(unpacked, trained=parameter.requires_grad)


def _constant(part: nn.Module, name: str, placements: Placements) -> torch.Tensor:
    """Return this rank's block of a buffer."""
    placement = placements.get(name)
    if placement is None:  # added after the model was built
        raise uninitialized(name)
    with torch.device("cpu"):  # another default device would be used otherwise
        whole = part.constant(name)  # type: ignore[operator]
    if not isinstance(whole, torch.Tensor) or tuple(whole.shape) != placement.global_shape:
        got = f"shape {tuple(whole.shape)}" if isinstance(whole, torch.Tensor) else type(whole).__name__
        raise PluginError(f"constant('{name}') returned {got}; expected a tensor {placement.global_shape}")
    return whole[placement.slices]


def changed_buffers(parts: Iterable[nn.Module], placements: Placements) -> list[str]:
    """Return the names of buffers that differ from ``constant`` now: checkpoints omit them.

    A script's parts have no placements, and its checkpoints include buffers. Those of routers are saved, too.
    """
    parts = list(parts)
    kept = router_buffers(parts)
    return [
        name
        for part in parts
        for name, buffer in part.named_buffers()
        if name in placements and name not in kept and not buffer.is_meta
        if not torch.equal(buffer, _constant(part, name, placements).to(buffer))
    ]


def replace_parameter(part: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Replace a parameter of ``part`` by ``parameter``, under the existing name."""
    owner, _, last = name.rpartition(".")
    setattr(part.get_submodule(owner), last, parameter)


def _initializer(part: nn.Module, name: str) -> Initializer:
    try:
        found = part.initializer(name)  # type: ignore[operator]
    except KeyError:
        raise PluginError(
            f"the model has no initializer for parameter {name}: initializer(name) must give one"
        ) from None
    if not isinstance(found, Initializer):
        returned = f"initializer('{name}') returned {type(found).__name__}"
        raise PluginError(f"{returned}; expected an Initializer, such as Initializer('normal', 0.02)")
    return found


@torch.no_grad()
def equalize(placed: Sequence[PlacedParameter], mesh: Mesh) -> None:
    """Broadcast the first holder's bits of each block to all its holders.

    They drew the same values from the same streams, but vector units of different processors round
    the last bit differently, and replicas that start different stay different. Stages register parameters in
    different orders, so all ranks proceed by name, with parameters that several stages hold last.
    """
    for parameter in sorted(placed, key=lambda each: (each.placement.stages, each.placement.name)):
        span = parameter.placement.replica_span(mesh.layout)
        group = mesh.group_of(span)
        if group is not None:
            for tensor in live_tensors(parameter.parameter):
                dist.broadcast(tensor, src=mesh.layout.members(mesh.rank, span)[0], group=group)
