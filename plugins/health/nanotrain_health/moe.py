"""The ``moe`` monitor: load balance of the experts in each layer, and bytes sent in all-to-alls.

Shapes: E experts.
"""

from __future__ import annotations

import math

import structlog
import torch

from nanotrain_core.api import Bins
from nanotrain_core.api.torch import (
    Monitor,
    RollbackReport,
    RunInfo,
    UpdateReport,
    bytes_sent,
    counting_routers,
)
from nanotrain_health import MoEConfig

#: Decay of the moving average of loads per logged step, and fewest logged steps for publishing it.
KEPT, KNOWN = 0.9, 10
#: Fraction of the mean load below which an expert counts as starved.
STARVED = 0.02


class MoE(Monitor):
    """Publishes the routers' token counts in logged steps, over the whole batch."""

    reads_weights = False

    def __init__(self, config: MoEConfig) -> None:
        self.config = config
        self.begun, self.told = 0, 0
        """The steps of the first and of the last histograms."""

    def on_start(self, run: RunInfo) -> None:
        """Find this rank's routers. Warns if no rank has any: nothing would be published."""
        self.run, self.routers = run, counting_routers(run.parts)
        if not any(run.mesh.gather(bool(self.routers))) and run.mesh.rank == 0:
            log = structlog.get_logger("nanotrain.health")
            log.warning("monitor 'moe' has nothing to publish: the model has no experts")
        dense = {*run.mesh.layout.views["dense"].dims} - {"pp"}
        self.speaks = all(run.mesh.coordinate(dim) == 0 for dim in dense)
        """Whether this rank publishes the loads, which are the same on all ranks of its pipeline stage."""
        self.sent = bytes_sent(run.parts)
        self.recent: dict[str, torch.Tensor] = {}
        """Each expert's share of tokens [E], a moving average over logged steps, by router."""
        self.known = 0

    def on_after_update(self, update: UpdateReport) -> None:
        """Publish the step's loads."""
        if not update.logged:
            return
        in_detail = self._is_due(update.step)
        if in_detail:
            self.begun, self.told = self.begun or update.step, update.step
        self.known += 1
        for name, load_E in update.loads.items() if self.speaks else ():
            self._publish(name, load_E)
            if in_detail:
                self._histogram(name, load_E)
        for name, total in bytes_sent(self.run.parts).items():
            self.run.metrics.scalar(f"moe/all_to_all_bytes/{name}", total - self.sent.get(name, 0))
            self.sent[name] = total

    def on_rollback(self, report: RollbackReport) -> None:
        """Start the histograms' intervals again, for the steps that are computed again."""
        self.begun, self.told = 0, 0
        self.sent = bytes_sent(self.run.parts)

    def _is_due(self, step: int) -> bool:
        """Return whether a logged step has histograms.

        The first has, then steps at intervals that double up to ``loads_every``, since loads change most at
        the beginning, and the last step of the run.
        """
        every = self.config.loads_every
        if not every or not self.told:
            return every > 0
        return step - self.told >= min(every, self.told - self.begun + 1) or step == self.run.steps

    def _publish(self, name: str, load_E: torch.Tensor) -> None:
        metrics = self.run.metrics
        for metric, value in spread(load_E).items():
            metrics.scalar(f"moe/{metric}/{name}", value)
        share = share_of_tokens(load_E)
        self.recent[name] = share.lerp(self.recent.get(name, share), KEPT)
        if self.known >= KNOWN:
            starved = self.recent[name] * len(load_E) < STARVED
            metrics.scalar(f"moe/starved/{name}", starved.sum())
            metrics.scalar(f"moe/balance/{name}", entropy(self.recent[name]))
        router = self.routers[name]
        frozen = (each.detach() for each in router.parameters() if not each.requires_grad)
        state = (each for each in (*frozen, *router.buffers()) if each.is_floating_point())
        # One number for each expert: a frozen router's weight [E, D] balances nothing.
        if moved := [each for each in state if each.shape == load_E.shape]:
            norms = torch.stack([torch.linalg.vector_norm(each.double()) for each in moved])
            metrics.scalar(f"moe/bias_norm/{name}", torch.linalg.vector_norm(norms))

    def _histogram(self, name: str, load_E: torch.Tensor) -> None:
        experts = torch.arange(len(load_E), device=load_E.device) + 0.5
        bins = Bins(low=0.0, high=float(len(load_E)), count=len(load_E))
        self.run.metrics.histogram(f"moe/load/{name}", experts, bins=bins, weight=load_E)


def spread(load_E: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return statistics of a load: maximum and minimum over the mean, entropy, number of empty experts."""
    share = share_of_tokens(load_E)
    return {
        "max_load": share.max() * len(share),
        "min_load": share.min() * len(share),
        "entropy": entropy(share),
        "empty": (load_E == 0).sum(),
    }


def share_of_tokens(load_E: torch.Tensor) -> torch.Tensor:
    """Return each expert's share [E], float64; zeros where there are no tokens."""
    return load_E.double() / load_E.sum().clamp(min=1)


def entropy(share_E: torch.Tensor) -> torch.Tensor:
    """Return the entropy of shares, normalized by that of equal shares: from 0 to 1."""
    total: torch.Tensor = torch.special.entr(share_E).sum()
    return total / math.log(max(2, len(share_E)))
