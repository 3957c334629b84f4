"""Base class of the ``health`` monitor's parts, one per subject, and the view of the run that they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from nanotrain_core.api import Role, main_layers, natural_sort_key, tagged
from nanotrain_core.api.text import HasConversations
from nanotrain_core.api.torch import (
    EvaluationReport,
    Metrics,
    MetricsReport,
    RunInfo,
    UpdateReport,
)
from nanotrain_health import HealthConfig

#: Steps at the beginning of a run in which tensors are read whenever a step is logged.
CLOSELY = 20


@attrs.define(eq=False)
class Scene:
    """The run, and which of its layers are monitored."""

    run: RunInfo
    config: HealthConfig
    layers: tuple[str, ...]
    """Names of all layers of the whole model, in order."""
    depth: tuple[str, ...]
    """The layers of the model's trunk, from first to last: without separate blocks, such as one for
    multi-token prediction."""
    sentinels: frozenset[str]
    """Layers whose tensors are read: the first, middle and last one, or all at level ``debug``."""
    norms: tuple[str, ...]
    """Norms on this rank: inside these layers, and outside of all layers, such as the final norm."""

    looking: bool = True
    """Whether tensors are read in the step under way, if it is logged."""
    closely: bool = False
    """Whether they are read in every logged step."""
    next_step: int = 1
    looked: int = 0
    """The last step in which tensors were read."""
    ignored: str = attrs.field(init=False)
    """Last word of metrics on targets that the loss ignores: by design, without a rule, or not."""
    _blocks: dict[str, str] = attrs.field(factory=dict)
    """What :meth:`block` has returned."""

    @ignored.default
    def _ignored(self) -> str:
        return "masked" if isinstance(self.run.data, HasConversations) else "ignored"

    @property
    def metrics(self) -> Metrics:
        """What is published with."""
        return self.run.metrics

    @property
    def detailed(self) -> bool:
        """Whether every layer and parameter is read."""
        return self.config.level == "debug"

    def reads_tensors(self) -> bool:
        """Return whether tensors are read in the step under way, if it is logged."""
        return self.looking

    def begin(self, step: int) -> None:
        """Note which step comes next."""
        self.next_step = step
        self.looking = self.closely or step <= CLOSELY or step - self.looked >= self.config.every

    def read_closely(self, closely: bool) -> None:
        """Read tensors in every logged step from the next one on, or in a few again."""
        if closely != self.closely:
            self.closely = closely
            self.begin(self.next_step)

    def looks(self, update: UpdateReport) -> bool:
        """Return whether tensors are read in this step."""
        return update.logged and self.looking

    def end(self, update: UpdateReport) -> None:
        """Note that a step is over."""
        if self.looks(update):
            self.looked = update.step
        self.begin(update.step + 1)

    def block(self, parameter: str) -> str:
        """Return the layer that contains a parameter; outside of layers its module, such as ``embed``."""
        if parameter not in self._blocks:
            inside = (each for each in self.layers if parameter.startswith(f"{each}."))
            module = parameter.rpartition(".")[0] or parameter
            self._blocks[parameter] = next(inside, module)
        return self._blocks[parameter]


def scene_of(run: RunInfo, config: HealthConfig) -> Scene:
    """Find the layers of the whole model, and the norms of this rank. Collective."""
    mine = [(name, tag.role) for part in run.parts for name, _, tag in tagged(part)]
    own = [name for name, role in mine if role is Role.BLOCK]
    layers = sorted({name for rank in run.mesh.gather(own) for name in rank}, key=natural_sort_key)
    depth = main_layers(layers)
    sentinels = layers if config.level == "debug" else [depth[n] for n in _three(len(depth))]
    outside = [name for name, role in mine if role is Role.NORM and not _inside(name, layers)]
    norms = [name for name, role in mine if role is Role.NORM and _inside(name, sentinels)]
    return Scene(run, config, tuple(layers), tuple(depth), frozenset(sentinels), (*norms, *outside))


def _three(count: int) -> list[int]:
    return sorted({0, count // 2, count - 1}) if count else []


def _inside(name: str, layers: list[str]) -> bool:
    return any(name.startswith(f"{each}.") for each in layers)


class Watcher:
    """Base class: observes one subject. Subclasses override the methods that they need."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    def before_update(self, update: UpdateReport) -> None:
        """Look at the complete gradient of a step."""

    def after_update(self, update: UpdateReport) -> None:
        """Look at what a step changed."""

    def evaluation(self, report: EvaluationReport) -> None:
        """Look at a validation loss."""

    def derive(self, report: MetricsReport) -> Mapping[str, float]:
        """Return what follows from a logged step's metrics."""
        return {}

    def meta(self) -> dict[str, Any]:
        """Return what a resumed run goes on with, as JSON."""
        return {}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Go on with it."""
