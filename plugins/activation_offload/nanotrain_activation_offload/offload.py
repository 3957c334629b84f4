"""The component ``activation_offload``: tensors saved for backward are moved to host memory until then.

Autograd's hooks copy them (``torch.autograd.graph.saved_tensors_hooks``). A layer's forward hooks install
these hooks for its forward pass: outside the compiled region, and below the hooks of activation
checkpointing, which first decide which tensors are saved at all.

Source of the idea: Rajbhandari et al., "ZeRO-Infinity", arXiv 2104.07857, section 5.1.2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from nanotrain_activation_offload import OffloadConfig
from nanotrain_activation_offload.host_memory import HostMemory, host_memory
from nanotrain_activation_offload.saved import SavedByLayer, places_of
from nanotrain_core.api.torch import Mesh, Parallel, Placements, blocks


class ActivationOffload(Parallel):
    """See :class:`~nanotrain_core.api.torch.Parallel`."""

    def __init__(self, config: OffloadConfig) -> None:
        self.config = config

    def apply(self, part: nn.Module, placements: Placements, mesh: Mesh) -> nn.Module:
        """Offload what the layers of ``part`` save, except the last ones. Placements are unchanged."""
        layers, found = Layers(host_memory(mesh.device)), list(blocks(part))
        for number, block in enumerate(found):
            kept = number >= len(found) - self.config.keep
            layers.watch(block, number, math.inf if kept else self.config.min_mb * 2**20)
        return part


class Layers:
    """The layers of a stage, in the order in which forward passes go through them."""

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self._open: list[tuple[SavedByLayer, saved_tensors_hooks] | None] = []
        self._last: tuple[int, SavedByLayer] | None = None

    def watch(self, block: nn.Module, number: int, least: float) -> None:
        """Offload tensors of at least ``least`` bytes that ``block``, layer ``number``, saves in forward.

        A layer that keeps everything needs the hooks too: its backward copies back for the one before.
        """

        def begin(module: nn.Module, args: Any) -> None:
            self._open.append(self._hooks(module, number, least) if torch.is_grad_enabled() else None)

        def end(module: nn.Module, args: Any, output: Any) -> None:
            opened = self._open.pop()
            if opened is not None:
                saved, hooks = opened
                hooks.__exit__()
                saved.check()

        block.register_forward_pre_hook(begin)
        block.register_forward_hook(end, always_call=True)

    def _hooks(self, block: nn.Module, number: int, least: float) -> tuple[SavedByLayer, saved_tensors_hooks]:
        last = self._last
        before = last[1] if last is not None and last[0] == number - 1 else None
        weights = {place for weight in block.parameters() for place in places_of(weight)}
        saved = SavedByLayer(self.memory, least, weights, before)
        self._last = (number, saved)
        hooks = saved_tensors_hooks(saved.pack, saved.unpack)
        hooks.__enter__()
        return saved, hooks
