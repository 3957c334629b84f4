"""The communication interface of ranks: process groups, or a faster backend that kernels provide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from nanotrain_core.layout.exchange import Exchange, GlooExchange
from nanotrain_core.layout.messages import EdgeMessages, Messages

if TYPE_CHECKING:
    from nanotrain_core.layout.mesh import Mesh


class Transport:
    """Communicates through torch's process groups. A component of kind ``kernels`` may provide another.

    Wrappers, gradient syncs and pipelines use only this interface, whatever implements it. Where a
    transport has nothing faster for a device or a group, it returns what this class does; all ranks of the
    group must decide the same.
    """

    def exchange(self, group: dist.ProcessGroup, device: torch.device, timeout: float) -> Exchange:
        """Return the collectives of a group, with tensors on ``device``. Callers use :meth:`Mesh.exchange`.

        Args:
            group: of several ranks.
            device: where this rank computes.
            timeout: seconds after which waiting for a missing rank fails.
        """
        return GlooExchange(group, device) if device.type == "cpu" else Exchange(group, device)

    def messages(self, owners: Sequence[int], mesh: Mesh) -> Messages:
        """Return the send/recv messages between stages. Collective over the run.

        Args:
            owners: the pipeline rank of each stage.
            mesh: of the run.
        """
        return Messages(owners, mesh) if mesh.device.type == "cpu" else EdgeMessages(owners, mesh)
