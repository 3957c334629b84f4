"""The interface that the object behind each kind of component implements.

``Component.factory`` is called with the component's config and returns one of these. Inherit from
:class:`Kernels`, :class:`Monitor`, :class:`Optimizer`, :class:`Parallel` and :class:`Precision`: base
classes, of which a plugin overrides only the methods it needs. The same holds for :class:`MasterWeight`
and :class:`ErrorFeedback`, which a precision creates, for :class:`ModelPart`, which a model builds, and for
:class:`AddedWeights` of a wrapper. The others are structural protocols.
"""

from nanotrain_core.contracts.added_weights import AddedWeights
from nanotrain_core.contracts.checkpoint import Checkpoint, SavedWeights, TrainState, WeightReader
from nanotrain_core.contracts.data import (
    ChangesLength,
    CountsHeldOut,
    Data,
    HasTokenizer,
    MixesSources,
    SkipsAhead,
    TextCodec,
)
from nanotrain_core.contracts.kernels import Kernels
from nanotrain_core.contracts.model import (
    CachesContext,
    ChangesInRun,
    Initializer,
    Model,
    ModelPart,
    PartOutput,
    caches_context,
)
from nanotrain_core.contracts.monitor import Monitor, Request, Restore, RunInfo, StepEnd
from nanotrain_core.contracts.optimizer import Block, Optimizer, StepStats
from nanotrain_core.contracts.parallel import GathersWeights, GradientSync, KnowsPieces, Parallel
from nanotrain_core.contracts.precision import ErrorFeedback, LossScale, MasterWeight, Precision
from nanotrain_core.contracts.reports import (
    CheckpointReport,
    EndReport,
    EvaluationReport,
    FailedSaveReport,
    RollbackReport,
    StepReport,
)
from nanotrain_core.contracts.schedule import SaysInFlight, Schedule
from nanotrain_core.contracts.topology import Topology
from nanotrain_core.contracts.update import Computed, PieceGradient, UpdateReport
from nanotrain_core.metrics.report import MetricsReport

__all__ = [
    "AddedWeights",
    "Block",
    "CachesContext",
    "ChangesInRun",
    "ChangesLength",
    "Checkpoint",
    "CheckpointReport",
    "Computed",
    "CountsHeldOut",
    "Data",
    "EndReport",
    "ErrorFeedback",
    "EvaluationReport",
    "FailedSaveReport",
    "GathersWeights",
    "GradientSync",
    "HasTokenizer",
    "Initializer",
    "Kernels",
    "KnowsPieces",
    "LossScale",
    "MasterWeight",
    "MetricsReport",
    "MixesSources",
    "Model",
    "ModelPart",
    "Monitor",
    "Optimizer",
    "Parallel",
    "PartOutput",
    "PieceGradient",
    "Precision",
    "Request",
    "Restore",
    "RollbackReport",
    "RunInfo",
    "SavedWeights",
    "SaysInFlight",
    "Schedule",
    "SkipsAhead",
    "StepEnd",
    "StepReport",
    "StepStats",
    "TextCodec",
    "Topology",
    "TrainState",
    "UpdateReport",
    "WeightReader",
    "caches_context",
]
