"""What a plugin may import where it computes: contracts, placements, layers, GEMM backends, exchanges.

Files of the core may move; these names stay.
"""

from nanotrain_core.batch import IGNORE, Batch
from nanotrain_core.contracts import (
    Block,
    Checkpoint,
    CheckpointReport,
    Data,
    EndReport,
    ErrorFeedback,
    EvaluationReport,
    FailedSaveReport,
    GradientSync,
    Initializer,
    Kernels,
    LossScale,
    MasterWeight,
    Model,
    ModelPart,
    Monitor,
    Optimizer,
    Parallel,
    PartOutput,
    Precision,
    Request,
    RollbackReport,
    RunInfo,
    SavedWeights,
    Schedule,
    StepReport,
    StepStats,
    Topology,
    TrainState,
    UpdateReport,
    WeightReader,
)
from nanotrain_core.layout.buckets import BucketExchange, Pending, Write
from nanotrain_core.layout.exchange import Buffer, Exchange, GlooExchange
from nanotrain_core.layout.gradients import LocalGradients
from nanotrain_core.layout.initialisation import hold
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.messages import WAYS, MessageKey, Messages
from nanotrain_core.layout.placement import (
    RANGE,
    Piece,
    PlacedParameter,
    Placement,
    Placements,
    clip_factor,
    global_norm,
    share_of,
)
from nanotrain_core.layout.transport import Transport
from nanotrain_core.models.cross_entropy import Chunks, linear_cross_entropy, wide_dtype
from nanotrain_core.models.feed_forward import SwiGLU
from nanotrain_core.models.head import Head
from nanotrain_core.models.norms import RMSNorm
from nanotrain_core.models.ops import TORCH, Ops, attention, ops_of, rms_norm, rope, swiglu
from nanotrain_core.models.rope import Rotation, rope_frequencies, rope_rotation, yarn_frequencies
from nanotrain_core.moe.routing import (
    Compute,
    DispatchCodec,
    Routing,
    dispatch_codec,
    inverted,
    run_locally,
    sort_by_expert,
    use_dispatch_codec,
)
from nanotrain_core.optim.adamw import AdamW
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.dequantizing_gemm import DequantizingGEMM
from nanotrain_core.precision.dtypes import cast, keep_dtype
from nanotrain_core.precision.gemm import (
    GEMMBackend,
    Kept,
    QuantizedActivations,
    TorchGEMM,
    gemm_parameters,
    gemms_of,
    use_gemm,
)
from nanotrain_core.precision.placed_wgrad import Again, Place
from nanotrain_core.precision.quantized_storage import (
    PackedWeight,
    form_of,
    memory_like,
    move_into,
    read_range,
    unquantized,
    write_range,
)
from nanotrain_core.precision.quantized_swiglu import quantize_swiglu
from nanotrain_core.precision.uniform import LiveMaster, NoLossScale, Uniform
from nanotrain_core.run.random_state import stream_seed
from nanotrain_core.run.stop import Rollback

__all__ = [
    "IGNORE",
    "RANGE",
    "TORCH",
    "WAYS",
    "AdamW",
    "Again",
    "Batch",
    "Block",
    "BucketExchange",
    "Buffer",
    "Checkpoint",
    "CheckpointReport",
    "Chunks",
    "Compute",
    "Data",
    "DequantizingGEMM",
    "DispatchCodec",
    "EndReport",
    "ErrorFeedback",
    "EvaluationReport",
    "Exchange",
    "FailedSaveReport",
    "GEMMBackend",
    "GlooExchange",
    "GradientSync",
    "Head",
    "Initializer",
    "Kept",
    "Kernels",
    "LiveMaster",
    "LocalGradients",
    "LossScale",
    "MasterWeight",
    "Mesh",
    "MessageKey",
    "Messages",
    "Model",
    "ModelPart",
    "Monitor",
    "NoLossScale",
    "Ops",
    "Optimizer",
    "PackedWeight",
    "Parallel",
    "PartOutput",
    "Passes",
    "Pending",
    "Piece",
    "Place",
    "PlacedParameter",
    "Placement",
    "Placements",
    "Precision",
    "QuantizedActivations",
    "RMSNorm",
    "Request",
    "Rollback",
    "RollbackReport",
    "Rotation",
    "Routing",
    "RunInfo",
    "SavedWeights",
    "Schedule",
    "StepReport",
    "StepStats",
    "SwiGLU",
    "Topology",
    "TorchGEMM",
    "TrainState",
    "Transport",
    "Uniform",
    "UpdateReport",
    "WeightReader",
    "Write",
    "attention",
    "cast",
    "clip_factor",
    "dispatch_codec",
    "form_of",
    "gemm_parameters",
    "gemms_of",
    "global_norm",
    "hold",
    "inverted",
    "keep_dtype",
    "linear_cross_entropy",
    "memory_like",
    "move_into",
    "ops_of",
    "quantize_swiglu",
    "read_range",
    "rms_norm",
    "rope",
    "rope_frequencies",
    "rope_rotation",
    "run_locally",
    "share_of",
    "sort_by_expert",
    "stream_seed",
    "swiglu",
    "unquantized",
    "use_dispatch_codec",
    "use_gemm",
    "wide_dtype",
    "write_range",
    "yarn_frequencies",
]
