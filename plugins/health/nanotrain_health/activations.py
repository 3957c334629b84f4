"""Statistics of the residual stream after each monitored layer, and of the outputs of norms.

Shapes: B batch, S sequence, D width.
"""

from __future__ import annotations

from typing import Any

import torch

from nanotrain_health.watcher import Scene, Watcher

#: An element is an outlier if its magnitude exceeds this many times the root mean square of its token.
OUTLIER = 10.0


class Activations(Watcher):
    """Publishes statistics of module outputs: of monitored layers, and of norms."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        if scene.sentinels:
            scene.run.observe_outputs(self.look, sorted(scene.sentinels), when=scene.reads_tensors)
        everywhere = {name for rank in scene.run.mesh.gather(scene.norms) for name in rank}
        if everywhere:
            scene.run.observe_outputs(
                self.look_at_norm, sorted(everywhere), compiled=False, when=scene.reads_tensors
            )

    def look(self, name: str, output: Any) -> None:
        """Publish the size of a layer's output, and its outliers."""
        if not _is_activation(output):
            return
        metrics, (rms, most) = self.scene.metrics, sizes(output)
        metrics.statistics(f"residual/{{statistic}}/{name}", rms, ("rms",))
        metrics.scalar(f"residual/max_abs/{name}", most.amax())
        metrics.scalar(f"residual/outliers/{name}", outliers(output, rms, most), weight=output.numel())

    def look_at_norm(self, name: str, output: Any) -> None:
        """Publish the size of what a norm returns."""
        if _is_activation(output):
            self.scene.metrics.statistics(f"norms/{{statistic}}/{name}", output, ("rms", "max_abs"))


def _is_activation(output: Any) -> bool:
    return isinstance(output, torch.Tensor) and output.is_floating_point() and output.numel() > 0


def sizes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return root mean square and largest magnitude of each row of x [..., D], in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rms = torch.linalg.vector_norm(x, dim=-1, dtype=wide) * x.shape[-1] ** -0.5
    return rms, torch.maximum(x.amax(-1), -x.amin(-1)).to(wide)


def outliers(x: torch.Tensor, rms: torch.Tensor, most: torch.Tensor) -> float | torch.Tensor:
    """Return the share of elements of x [..., D] beyond :data:`OUTLIER` times the rms of their row.

    ``rms`` and ``most`` are :func:`sizes`. Where the host can read them, most calls need not look at x again.
    """
    if x.shape[-1] <= OUTLIER**2:  # one element cannot be so far above all of them
        return 0.0
    limit = OUTLIER * rms
    if x.is_cpu and not (most > limit).any():
        return 0.0
    return torch.count_nonzero(x.abs() > limit.unsqueeze(-1)) / x.numel()
