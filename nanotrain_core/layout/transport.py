"""How ranks exchange tensors: the seam behind which kernels may put something faster than process groups."""

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
    """Exchanges through torch's process groups. A component of kind ``kernels`` may offer another.

    Wrappers, gradient syncs and pipelines ask for no more than this, and do not learn what they got. Where a
    transport has nothing faster for a device or a group it returns what this class does; all ranks of the
    group must come to the same answer.
    """

    def exchange(self, group: dist.ProcessGroup, device: torch.device, timeout: float) -> Exchange:
        """Return the collectives of a group, with its tensors on ``device``. Ask :meth:`Mesh.exchange`.

        Args:
            group: of several ranks.
            device: where this rank computes.
            timeout: seconds until a rank that does not come is given up.
        """
        return GlooExchange(group, device) if device.type == "cpu" else Exchange(group, device)

    def messages(self, owners: Sequence[int], mesh: Mesh) -> Messages:
        """Return what passes messages between stages. Collective over the run.

        Args:
            owners: the pipeline rank of each stage.
            mesh: of the run.
        """
        return Messages(owners, mesh) if mesh.device.type == "cpu" else EdgeMessages(owners, mesh)
