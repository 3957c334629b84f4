"""Sees every operator of a step: collectives, FLOPs and memory traffic, and when memory is taken and freed.

A ``TorchDispatchMode``. On ``meta`` it records what would run; on a real device what does, which is how plans
are tested. Memory is that of storages, exact to the byte, without an allocator's rounding.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
import torch.distributed._meta_registrations
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode

from nanotrain_core.api.torch import PackedWeight
from nanotrain_plan.dry.collectives import read_collective
from nanotrain_plan.dry.cost import ATTENTION, OTHER, Cost, cost_of, dense, tensors_in
from nanotrain_plan.dry.operators import OPERATORS, Traits, key_of
from nanotrain_plan.dry.origin import find_origin
from nanotrain_plan.dry.phase import Level, Phase, Storage
from nanotrain_plan.dry.values import Values

_ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::zeros", "aten::new_zeros")

#: Pointwise functions of one tensor: a fused kernel computes their results again from what they were made of.
POINTWISE = ("aten::_to_copy", "aten::silu", "aten::gelu", "aten::relu")


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
        self.phases: list[Phase] = [Phase("start", 0, 0, levels=[Level(None, 0)])]
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
        self.phases.append(Phase(name, self.live, self.live, levels=[Level(None, self.live)]))

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
        backward pass, and a forward pass frees it. A later step finds the buffers there, also before the
        moment at which this one allocated them: that may be its peak.
        """
        self._end()
        living = set(map(id, self.alive.values()))
        for phase in self.phases[first:]:
            highest = 0
            for level in phase.levels:
                if level.buffer is not None and id(level.buffer) in living:
                    phase.lasting += level.buffer.bytes
                highest = max(highest, level.most - phase.lasting)
            phase.peak = highest + phase.lasting

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
        if kwargs:
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
        cost = cost_of(func, name, args, kwargs, out, new=any(found), device=self.device)
        if cost is not None:
            self._count(cost)
        return cost, all(found)

    def _note_accumulation(self, args: Any) -> None:
        """Note what is moved to add a gradient to one that was there before the phase.

        Autograd may cast the gradient before.
        """
        total, gradient = args[:2]
        if total.untyped_storage()._cdata in self._made or not isinstance(gradient, torch.Tensor):
            return
        self.phase.eager += 2 * dense(total) + dense(gradient)
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
        storage = (tensor.rows if isinstance(tensor, PackedWeight) else tensor).untyped_storage()
        key = storage._cdata
        if key in self.alive:
            return False
        size = storage.nbytes()
        module = self._modules[-1] if self._modules else ""
        shape = tuple(tensor.shape)
        self.alive[key] = self._made[key] = made = Storage(size, module, op, shape, tensor.dtype, source)
        if not module and op.startswith(_ALLOCATIONS):
            self.phase.levels.append(Level(made, 0))
        self.live += size
        self._rise()
        self._references[key] = weakref.KeyedRef(storage, self._free, key)
        return True

    def _rise(self) -> None:
        """Note a level of :attr:`live`."""
        phase, level = self.phase, self.phase.levels[-1]
        phase.peak, level.most = max(phase.peak, self.live), max(level.most, self.live)

    @contextmanager
    def watching_resizes(self) -> Iterator[None]:
        """See storages freed and allocated again under their tensors, as torch's ``fully_shard`` does.

        No operator is called for that.
        """
        resize = torch.UntypedStorage.resize_

        def noted(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            self._resized(storage._cdata, size)
            return found

        torch.UntypedStorage.resize_ = noted  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def _resized(self, key: int, size: int) -> None:
        before = self.alive.get(key)
        if before is None:
            return
        before.freed_in = self.phase.name
        self._made.pop(key, None)
        module = self._modules[-1] if self._modules else ""
        self.alive[key] = after = attrs.evolve(before, bytes=size, module=module, freed_in="")
        if size:
            self._made[key] = after
        self.live += size - before.bytes
        self._rise()

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
