"""Sees every operator of a step: collectives, FLOPs and memory traffic, and when memory is taken and freed.

A ``TorchDispatchMode``. On ``meta`` it records what would run; on a real device what does, which is how plans
are tested. Memory is that of storages, exact to the byte, without an allocator's rounding.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
import torch.distributed._meta_registrations
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from nanotrain_plan.dry.collectives import Collective, read_collective
from nanotrain_plan.dry.operators import OPERATORS, OTHER, Cost, Traits, key_of
from nanotrain_plan.dry.origin import Origin, find_origin
from nanotrain_plan.dry.values import Values

#: Views and allocations: neither computes.
_FREE = ("aten::empty", "aten::new_empty", "aten::detach", "aten::view", "aten::_unsafe_view", "aten::alias")

#: Matrix products that add to a tensor, by name, and operators of as many FLOPs: torch counts none of theirs.
_GEMMS_IN_PLACE = {
    "aten::addmm_": torch.ops.aten.addmm,
    "aten::baddbmm_": torch.ops.aten.baddbmm,
}

#: Operators that read a few rows or elements of their first argument.
_LOOKUPS = ("aten::embedding", "aten::gather", "aten::index", "aten::index_select")

#: What kinds of :attr:`Phase.gemm_flops` that are attention's begin with; the dtype of queries follows.
ATTENTION = "attention "

#: Operators that write their first argument and do not read it.
_OVERWRITES = ("aten::copy_", "aten::_foreach_copy_", "aten::zero_", "aten::_foreach_zero_", "aten::fill_")

_ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::zeros", "aten::new_zeros")

#: Pointwise functions of one tensor: a fused kernel computes their results again from what they were made of.
POINTWISE = ("aten::_to_copy", "aten::silu", "aten::gelu", "aten::relu")


@attrs.define(eq=False)
class Storage:
    """Memory of one tensor and its views."""

    bytes: int
    module: str
    """Qualified name of the module whose forward was running; empty outside of any."""
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Storage | None = None
    """What it is a :data:`POINTWISE` function of."""
    recomputable: bool = False
    """Whether :attr:`source` was alive at the end of the phase."""
    freed_in: str = ""
    """Name of the phase in which it was freed; empty if it is alive."""


@attrs.define(eq=False)
class Phase:
    """What happened from one call of :meth:`Recorder.enter` to the next."""

    name: str
    before: int
    """Bytes alive at its beginning."""
    peak: int
    """Most bytes alive within."""
    after: int = 0
    kept: list[Storage] = attrs.field(factory=list)
    """Made here and alive at its end."""
    made: int = 0
    """Bytes of :attr:`kept`."""
    host: int = 0
    """Bytes of the host's memory that it takes, in a dry run, less those that it gives back."""
    lasting: int = 0
    """Of them, those that are alive after the step, as buffers that gradient sync uses again: a later step
    finds them there."""
    collectives: list[Collective] = attrs.field(factory=list)
    origins: list[Origin | None] = attrs.field(factory=list)
    """Who asked for each of :attr:`collectives`, if the recorder looks."""
    callers: list[str] = attrs.field(factory=list)
    """Module whose forward was running, likewise."""
    gemm_flops: Counter[str] = attrs.field(factory=Counter)
    """FLOPs of matrix products by dtype, and of attention by :data:`ATTENTION` and dtype; half is masked."""
    flops_of: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    """FLOPs by the module whose forward runs, and by ``gemm`` or ``attention`` (whole scores). In a backward
    pass these are FLOPs of recomputation."""
    bytes_of: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    """Bytes read and written, likewise, and by ``other`` operators. Experts without rows do not count."""
    moved: int = 0
    """Bytes that operators other than matrix products read and wrote."""
    eager: int = 0
    """Of :attr:`moved`, those of autograd where it adds a gradient to earlier ones: no compiler fuses it."""
    kernels: int = 0

    @property
    def attention_flops(self) -> float:
        """FLOPs of attention over whole score matrices, of all dtypes."""
        return sum(flops for kind, flops in self.gemm_flops.items() if kind.startswith(ATTENTION))

    @property
    def transient(self) -> int:
        """Bytes needed within, on top of those at its beginning."""
        return self.peak - self.before

    def with_sync_of(self, last: Phase, usual: Phase | None) -> Phase:
        """Return it with what ``last`` does and ``usual``, of another microbatch, does not: gradient sync."""
        if usual is None:  # of W passes, which have no other collectives
            return attrs.evolve(self, collectives=[*self.collectives, *last.collectives])
        added = Counter(last.collectives) - Counter(usual.collectives)
        return attrs.evolve(
            self,
            collectives=[*self.collectives, *added.elements()],
            moved=self.moved + max(0, last.moved - usual.moved),
            kernels=self.kernels + max(0, last.kernels - usual.kernels),
        )


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators, collectives and memory, see the module. Only tensors on ``device`` count."""

    def __init__(self, device: str, values: Values | None = None, *, origins: bool = False) -> None:
        """Prepare to record.

        Args:
            device: see the class.
            values: numbers of tensors on ``meta``; None on a real device.
            origins: also note who asked for each collective.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.values, self.origins = device, values, origins
        self.live = 0
        self.alive: dict[int, Storage] = {}
        self._references: dict[int, weakref.KeyedRef[int, Any]] = {}
        self._made: dict[int, Storage] = {}
        """Those of the phase under way."""
        self._on_host: dict[int, int] = {}
        self.phases: list[Phase] = [Phase("start", 0, 0)]
        self._modules: list[str] = []
        self._names: dict[nn.Module, str] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from wrapping :meth:`__torch_dispatch__`: nothing is compiled under a recorder."""
        return False

    # --- phases -------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """Return the one under way."""
        return self.phases[-1]

    def enter(self, name: str) -> None:
        """End the phase under way and begin another."""
        self._end()
        self.phases.append(Phase(name, self.live, self.live))

    def _end(self) -> None:
        self.phase.after = self.live
        self.phase.kept = list(self._made.values())
        self.phase.made = sum(storage.bytes for storage in self.phase.kept)
        living = set(map(id, self.alive.values()))
        for storage in self.phase.kept:
            storage.recomputable = id(storage.source) in living
        self._made = {}

    def settle(self, first: int) -> None:
        """Set :attr:`Phase.lasting` of the phases from ``first`` on, which are a step that has ended.

        Buffers are tensors allocated outside of modules. Anything else that is alive was left by the last
        backward pass, and a forward pass frees it.
        """
        self._end()
        living = set(map(id, self.alive.values()))
        for phase in self.phases[first:]:
            buffers = (each for each in phase.kept if not each.module and each.op.startswith(_ALLOCATIONS))
            phase.lasting = sum(each.bytes for each in buffers if id(each) in living)

    def named(self, modules: dict[nn.Module, str]) -> None:
        """Give modules the names that storages are told by."""
        self._names = modules

    @contextmanager
    def watching_modules(self) -> Iterator[None]:
        """Know which module runs."""
        before = hooks.register_module_forward_pre_hook(self._enter_module)
        after = hooks.register_module_forward_hook(self._leave_module, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._modules.append(self._names.get(module, self._modules[-1] if self._modules else ""))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._modules.pop()

    # --- operators ----------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and note it."""
        kwargs = kwargs or {}
        traits = OPERATORS.traits(func)
        if traits.view and _is_floating(args[0]):  # most calls: they compute nothing, and nobody reads them
            return func(*args, **kwargs)
        if traits.collective:
            return self._collective(func, args, kwargs)
        if self.values is None:
            out = func(*args, **kwargs)
            self._note(func, traits.name, args, kwargs, out)
            return out
        if kwargs.get("pin_memory"):  # on meta: it stands for memory of the host
            return self._take_on_host(func(*args, **kwargs))
        read = self.values.read(func, args, kwargs)
        if read is not None:
            return read
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return self.values.scalar(args[0])
        out = self._dry(func, traits, args, kwargs)
        if traits.name == "aten::add_":
            self._note_accumulation(args)
        self.values.follow(func, args, kwargs, out)
        return out

    def _dry(self, func: Any, traits: Traits, args: Any, kwargs: Any) -> Any:
        """Run an operator on ``meta``, or make what it made of arguments of the same form."""
        if traits.view:
            return func(*args, **kwargs)
        key = key_of(func, args, kwargs) if traits.remembered else None
        made = None if key is None else OPERATORS.get(key)
        if made is None:
            out = func(*args, **kwargs)
            cost, new = self._note(func, traits.name, args, kwargs, out)
            if key is not None:
                OPERATORS.keep(key, traits, out, cost, new=new)
            return out
        out, source = made.again(args), self._source(traits.name, args)
        if made.several is not None:
            for tensor in out:
                self.take(tensor, traits.name, source)
        elif made.forms:
            self.take(out, traits.name, source)
        if made.cost is not None:
            self._count(made.cost)
        return out

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        found = read_collective(func, args)
        if found is not None:
            self.phase.collectives.append(found)
            if self.origins:
                self.phase.origins.append(find_origin())
                self.phase.callers.append(self._modules[-1] if self._modules else "")
        if self.values is not None:
            self.values.exchanged(func._schema.name.partition("::")[2], args)
        return func(*args, **kwargs)

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> tuple[Cost | None, bool]:
        """Note what an operator made and did; return that, and whether all that it returned is new."""
        outputs, source = list(tensors_in(out)), self._source(name, args)
        found = [tensor.device.type == self.device and self.take(tensor, name, source) for tensor in outputs]
        cost = self._cost(func, name, args, kwargs, out, new=any(found))
        if cost is not None:
            self._count(cost)
        return cost, all(found)

    def _cost(self, func: Any, name: str, args: Any, kwargs: Any, out: Any, *, new: bool) -> Cost | None:
        if name.startswith(_FREE):
            return None
        outputs, inputs = list(tensors_in(out)), [*tensors_in(args), *tensors_in(kwargs)]
        packet = _GEMMS_IN_PLACE.get(name, func._overloadpacket)
        if "_scaled_dot_product" in name and "_attention" in name:
            kind = ATTENTION + str(inputs[0].dtype)[6:]
            return Cost(kind, _attention_flops(name, args), sum(map(_dense, (*inputs, *outputs))))
        if name == "aten::_grouped_mm":
            rows, right = args[:2]
            used = min(1.0, rows.shape[0] / right.shape[0]) if rows.dim() < right.dim() else 1.0
            moved = _dense(rows) + sum(map(_dense, outputs)) + round(_dense(right) * used)
            return Cost(str(rows.dtype)[6:], 2 * rows.numel() * right.shape[-1], moved)
        if name in _LOOKUPS:  # of what they read from, as many bytes as they return
            return Cost(OTHER, 0, 2 * sum(map(_dense, outputs)) + sum(map(_dense, inputs[1:])))
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=out)
            kind = "float8" if inputs[0].element_size() == 1 else str(inputs[0].dtype)[6:]
            return Cost(kind, flops, sum(map(_dense, (*inputs, *outputs))))
        if new or func._schema.is_mutable:
            written = outputs if new else list(_written(func, args, kwargs))
            read = inputs[len(written) :] if name in _OVERWRITES else inputs
            return Cost(OTHER, 0, sum(_dense(t) for t in (*read, *written) if t.device.type == self.device))
        return None

    def _note_accumulation(self, args: Any) -> None:
        """Note what is moved to add a gradient to one that was there before the phase.

        Autograd may cast the gradient before.
        """
        total, gradient = args[:2]
        if total.untyped_storage()._cdata in self._made or not isinstance(gradient, torch.Tensor):
            return
        self.phase.eager += 2 * _dense(total) + _dense(gradient)
        made = self._made.get(gradient.untyped_storage()._cdata)
        if made is not None and made.op == "aten::_to_copy" and made.source is not None:
            self.phase.eager += made.bytes + made.source.bytes

    def _count(self, cost: Cost) -> None:
        """Add what an operator did to the phase, and to the module whose forward runs, if one does."""
        phase = self.phase
        phase.kernels += 1
        if cost.kind == OTHER:
            phase.moved += cost.moved
        else:
            phase.gemm_flops[cost.kind] += cost.flops
        if self._modules:
            attends = cost.kind.startswith(ATTENTION)
            kind = OTHER if cost.kind == OTHER else "attention" if attends else "gemm"
            phase.flops_of[self._modules[-1], kind] += cost.flops
            phase.bytes_of[self._modules[-1], kind] += cost.moved

    def _source(self, name: str, args: Any) -> Storage | None:
        """Return the storage that a pointwise operator reads."""
        if name not in POINTWISE:
            return None
        return self.alive.get(args[0].untyped_storage()._cdata)

    def take(self, tensor: torch.Tensor, op: str = "", source: Storage | None = None) -> bool:
        """Note a tensor's storage; return whether it was not known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.alive:
            return False
        size = storage.nbytes()
        module = self._modules[-1] if self._modules else ""
        shape = tuple(tensor.shape)
        self.alive[key] = self._made[key] = Storage(size, module, op, shape, tensor.dtype, source)
        self.live += size
        self.phase.peak = max(self.phase.peak, self.live)
        self._references[key] = weakref.KeyedRef(storage, self._free, key)
        return True

    def _take_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, pinned(storage.nbytes())
        self._on_host[key] = size
        self.phase.host += size
        self._references[key] = weakref.KeyedRef(storage, self._free_on_host, key)
        return tensor

    def _free_on_host(self, reference: weakref.KeyedRef[int, Any]) -> None:
        del self._references[reference.key]
        self.phase.host -= self._on_host.pop(reference.key)

    def _free(self, reference: weakref.KeyedRef[int, Any]) -> None:
        key = reference.key
        del self._references[key]
        self._made.pop(key, None)
        storage = self.alive.pop(key)
        storage.freed_in = self.phase.name
        self.live -= storage.bytes


def pinned(size: int) -> int:
    """Return the bytes that torch allocates for pinned memory of ``size`` bytes: the next power of two.

    Source: ``CachingHostAllocatorImpl`` in torch's ``c10/core/CachingHostAllocator.h``.
    """
    return 1 << (size - 1).bit_length() if size else 0


def _is_floating(value: Any) -> bool:
    """Return whether the numbers of a tensor are none that a dry run follows: see :class:`Values`."""
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an operator's arguments or results: three times as fast as torch's pytrees."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator in place writes; a fused optimizer only reads gradients."""
    for number, each in enumerate(func._schema.arguments):
        if each.alias_info is not None and each.alias_info.is_write and each.name != "grads":
            yield from tensors_in(args[number] if number < len(args) else kwargs.get(each.name))


def _attention_flops(name: str, args: Any) -> int:
    """Return FLOPs of fused attention over the whole score matrix: 2 products forward, 5 backward.

    Half of it is masked. Where the queries are the last S of T tokens, it is that of which half is what they
    see: T - S earlier tokens are seen by all of them.
    """
    q, k, v = (t for t in args[1:4]) if "backward" in name else (t for t in args[:3])
    B, H, S, K = q.shape
    V, T = v.shape[-1], k.shape[2]
    products: int = 3 * K + 2 * V if "backward" in name else K + V
    return int(2 * B * H * S * (2 * T - S) * products)


def _dense(tensor: torch.Tensor) -> int:
    """Return the bytes that reading a tensor moves: of an expanded one, those it has."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else 1
    return size
