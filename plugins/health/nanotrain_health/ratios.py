"""Metrics derived from norms: clipping, update-to-weight ratios, the first layer over the last one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from nanotrain_core.api import PhaseTimeline
from nanotrain_core.api.torch import MetricsReport
from nanotrain_health.watcher import Scene, Watcher

#: Logged steps in the windows of the clip and skip rates, and fewest logged steps for a skip rate.
CLIPS, SKIPS, SKIPS_KNOWN = 100, 20, 10


class Ratios(Watcher):
    """Derives ratios from reduced metrics only, on the host: the same on every rank."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        recipe = scene.run.recipe
        config = getattr(recipe, "optimizer", None)
        config = recipe if config is None else config.config
        self.clip_norm = float(getattr(config, "clip_norm", 0.0) or 0.0)
        self.full_lr = float(getattr(config, "lr", 0.0) or 0.0)
        """The highest learning rate of the schedule, or of all phases; of a script 0: it is not known."""
        if getattr(recipe, "phase", ()):
            self.full_lr = max(now.optimizer.config.lr for _, now in PhaseTimeline(recipe).corners())
        self.clips: deque[float] = deque(maxlen=CLIPS)
        """Clip coefficients."""
        self.skipped: deque[float] = deque(maxlen=SKIPS)

    def derive(self, report: MetricsReport) -> Mapping[str, float]:
        """Derive from a logged step, and nothing from an evaluation or a checkpoint."""
        values = report.values
        if "grad_norm" not in values:
            return {}
        self.skipped.append(values.get("skipped", 0.0))
        found = {}
        if len(self.skipped) >= SKIPS_KNOWN:
            found["optimizer/skip_rate"] = sum(self.skipped) / len(self.skipped)
        skipped = bool(values.get("skipped"))
        clip = clip_coefficient(values["grad_norm"], self.clip_norm)
        if not skipped:
            found |= self._clipping(clip)
        norms = {name: value for name, value in values.items() if "/norm/" in name}
        if not norms:  # as in most logged steps
            return found
        weights = _by_word(norms, "weights/norm/")
        found |= self._of_weights(weights)
        if skipped:
            return found
        found |= self._of_gradients(_by_word(norms, "gradients/norm/"), weights, values["lr"] * clip)
        return found | self._of_updates(norms, weights, values["lr"])

    def _clipping(self, clip: float) -> dict[str, float]:
        self.clips.append(clip)
        found = {"gradients/clip_coefficient": clip, "gradients/clipped": float(clip < 1)}
        if len(self.clips) == CLIPS:
            found["gradients/clip_rate"] = sum(each < 1 for each in self.clips) / CLIPS
            found["gradients/clip_mean"] = sum(self.clips) / CLIPS
        return found

    def _of_weights(self, weights: Mapping[str, float]) -> dict[str, float]:
        layers = self._layers(weights)
        found = {"weights/norm": _norm(weights.values())} if weights else {}
        if len(layers) > 1 and min(layers) > 0:
            found["weights/spread"] = max(layers) / min(layers)
        return found

    def _of_gradients(
        self, gradients: Mapping[str, float], weights: Mapping[str, float], step: float
    ) -> dict[str, float]:
        """Derive ratios of layers, and proxies of updates; ``step``: plain SGD's factor of a gradient."""
        layers = self._layers(gradients)
        found = _first_last("gradients/first_last", layers)
        if len(layers) > 1 and (middle := median(layers)) > 0:
            found |= {
                f"gradients/share/{name}": gradients[name] / middle
                for name in self.scene.layers
                if name in gradients
            }
        proxies = _over(gradients, weights, step)
        if not proxies:
            return found
        found |= {f"updates/proxy/{name}": value for name, value in proxies.items()}
        found |= _first_last("updates/proxy_first_last", self._layers(proxies))
        ordered = sorted(proxies.values())
        return found | {
            "updates/proxy": step * _norm(gradients.values()) / _norm(weights.values()),
            "updates/proxy_median": median(ordered),
            "updates/proxy_p95": ordered[math.ceil(0.95 * len(ordered)) - 1],
            "updates/proxy_max": ordered[-1],
        }

    def _of_updates(
        self, norms: Mapping[str, float], weights: Mapping[str, float], lr: float
    ) -> dict[str, float]:
        changes = _by_word(norms, "updates/norm/")
        ratios = _over(changes, weights, 1.0)
        if not ratios:
            return {}
        found = {f"updates/ratio/{name}": value for name, value in ratios.items()}
        whole = _norm(changes.values()) / _norm(weights[name] for name in ratios)
        found["updates/ratio"] = whole
        if self.full_lr and lr:
            found["updates/ratio_at_full_lr"] = whole * self.full_lr / lr
        each, of = (_by_word(norms, f"{what}/parameters/norm/") for what in ("updates", "weights"))
        return found | {f"updates/parameters/ratio/{name}": x for name, x in _over(each, of, 1.0).items()}

    def _layers(self, found: Mapping[str, float]) -> list[float]:
        """Return the values of the layers from first to last."""
        return [found[name] for name in self.scene.depth if name in found]

    def meta(self) -> dict[str, Any]:
        """Return what rates are over."""
        return {"clips": list(self.clips), "skipped": list(self.skipped)}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Go on with it."""
        for mine, saved in ((self.clips, meta["clips"]), (self.skipped, meta["skipped"])):
            mine.clear()
            mine.extend(saved)


def clip_coefficient(norm: float, limit: float) -> float:
    """Return what gradients of a global norm are multiplied by; 1 for a limit of 0."""
    return min(1.0, limit / (norm + 1e-6)) if limit else 1.0


def _by_word(values: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): x for name, x in values.items() if name.startswith(prefix)}


def _over(above: Mapping[str, float], below: Mapping[str, float], factor: float) -> dict[str, float]:
    return {name: factor * x / below[name] for name, x in above.items() if below.get(name)}


def _first_last(name: str, layers: Sequence[float]) -> dict[str, float]:
    return {name: layers[0] / layers[-1]} if len(layers) > 1 and layers[-1] else {}


def _norm(norms: Any) -> float:
    return math.sqrt(math.fsum(x * x for x in norms))
