"""The names for a plugin's computation: contracts, placements, layers, GEMM backends, communication.

Files of the core may move; these names stay.
"""

from nanotrain_core.batch import IGNORE, Batch, Shard
from nanotrain_core.checkpoint.simple import SimpleCheckpoint, open_simple_weights
from nanotrain_core.compose import Run, compose
from nanotrain_core.contracts import (
    AddedWeights,
    Block,
    ChangesInRun,
    ChangesLength,
    Checkpoint,
    CheckpointReport,
    Computed,
    Data,
    EndReport,
    ErrorFeedback,
    EvaluationReport,
    FailedSaveReport,
    GathersWeights,
    GradientSync,
    Initializer,
    Kernels,
    LossScale,
    MasterWeight,
    MetricsReport,
    MixesSources,
    Model,
    ModelPart,
    Monitor,
    Optimizer,
    Parallel,
    PartOutput,
    Precision,
    Request,
    Restore,
    RollbackReport,
    RunInfo,
    SavedWeights,
    Schedule,
    SkipsAhead,
    StepEnd,
    StepReport,
    StepStats,
    Topology,
    TrainState,
    UpdateReport,
    WeightReader,
    caches_context,
)
from nanotrain_core.contracts.update import PieceGradient
from nanotrain_core.data.order import SequenceData
from nanotrain_core.deprecated import attribute_of
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.hf.open_weights import Weights, open_weights
from nanotrain_core.layout.buckets import BucketExchange, BucketQueue, Pending, Write
from nanotrain_core.layout.exchange import Buffer, Exchange, GlooExchange
from nanotrain_core.layout.gradients import AllReduceGradients, LocalGradients
from nanotrain_core.layout.initialization import hold
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.messages import WAYS, EdgeMessages, MessageKey, Messages
from nanotrain_core.layout.placement import RANGE, Piece, PlacedParameter, Placement, Placements, share_of
from nanotrain_core.layout.transport import Transport
from nanotrain_core.metrics.publish import Metrics
from nanotrain_core.metrics.report import Histogram
from nanotrain_core.models.activation_checkpointing import blocks, store_in_selective_checkpointing
from nanotrain_core.models.cache import Cache, LayerCache
from nanotrain_core.models.cross_entropy import Chunks, MatMul, SplitVocabulary, linear_cross_entropy
from nanotrain_core.models.cross_entropy import matmul as torch_matmul
from nanotrain_core.models.feed_forward import SwiGLU
from nanotrain_core.models.gpu_ops import plain_ops
from nanotrain_core.models.head import Head
from nanotrain_core.models.norms import RMSNorm
from nanotrain_core.models.ops import TORCH, Ops, attention, ops_of, rms_norm, rope, swiglu
from nanotrain_core.models.rope import Rotation, rope_frequencies, rope_rotation, yarn_frequencies
from nanotrain_core.moe.grouped_mm import grouped_linear_on_gpu
from nanotrain_core.moe.routing import (
    Compute,
    CountingRouter,
    DispatchCodec,
    Routing,
    balance,
    bytes_sent,
    count_of,
    counting_routers,
    dispatch_codec,
    inverted,
    run_locally,
    sort_by_expert,
    use_dispatch_codec,
)
from nanotrain_core.monitors.replicas import hash_bits
from nanotrain_core.monitors.sink import Sink
from nanotrain_core.monitors.sink_queue import SinkQueue
from nanotrain_core.optim.adamw import AdamW
from nanotrain_core.optim.grad_norm import clip_factor, global_norm
from nanotrain_core.optim.master_optimizer import MasterOptimizer
from nanotrain_core.optim.whole_tensors import WholeTensors
from nanotrain_core.pipeline.executor import Executor
from nanotrain_core.pipeline.p2p import describe as describe_message
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.dequantizing_gemm import DequantizingGEMM
from nanotrain_core.precision.dtypes import cast, keep_dtype
from nanotrain_core.precision.gemm import LINEAR, GEMMBackend, Kept, gemm_parameters, gemms_of, use_gemm
from nanotrain_core.precision.gemm_backend import (
    Prepared,
    PreparesWeights,
    QuantizedActivations,
    QuantizedInput,
    TorchGEMM,
)
from nanotrain_core.precision.loss_scale import DynamicLossScale, NoLossScale
from nanotrain_core.precision.placed_wgrad import Again, Place
from nanotrain_core.precision.quantized_storage import (
    PackedWeight,
    Packing,
    dequantize,
    form_of,
    memory_like,
    move_into,
    quantize_into,
    range_of,
    read_range,
    storage_of,
    unquantized,
    write_range,
)
from nanotrain_core.precision.quantized_swiglu import quantize_swiglu
from nanotrain_core.precision.uniform import Float32Master, LiveMaster, Uniform
from nanotrain_core.run.global_metrics import sum_over_data
from nanotrain_core.run.random_state import stream_seed
from nanotrain_core.run.stop import Rollback, StopRequest
from nanotrain_core.watch.progress import Spent

__all__ = [
    "IGNORE",
    "LINEAR",
    "RANGE",
    "TORCH",
    "WAYS",
    "AdamW",
    "AddedWeights",
    "Again",
    "AllReduceGradients",
    "Batch",
    "Block",
    "BucketExchange",
    "BucketQueue",
    "Buffer",
    "Cache",
    "ChangesInRun",
    "ChangesLength",
    "Checkpoint",
    "CheckpointReport",
    "Chunks",
    "Compute",
    "Computed",
    "CountingRouter",
    "Data",
    "DequantizingGEMM",
    "DispatchCodec",
    "DynamicLossScale",
    "EdgeMessages",
    "EndReport",
    "ErrorFeedback",
    "EvaluationReport",
    "Exchange",
    "Executor",
    "FailedSaveReport",
    "Float32Master",
    "GEMMBackend",
    "GathersWeights",
    "GlooExchange",
    "GradientSync",
    "Head",
    "Histogram",
    "Initializer",
    "Kept",
    "Kernels",
    "LayerCache",
    "LiveMaster",
    "LocalGradients",
    "LossScale",
    "MasterOptimizer",
    "MasterWeight",
    "MatMul",
    "Mesh",
    "MessageKey",
    "Messages",
    "Metrics",
    "MetricsReport",
    "MixesSources",
    "Model",
    "ModelPart",
    "Monitor",
    "NoLossScale",
    "Ops",
    "Optimizer",
    "PackedWeight",
    "Packing",
    "Parallel",
    "PartOutput",
    "Passes",
    "Pending",
    "Piece",
    "PieceGradient",
    "Place",
    "PlacedParameter",
    "Placement",
    "Placements",
    "Precision",
    "Prepared",
    "PreparesWeights",
    "QuantizedActivations",
    "QuantizedInput",
    "RMSNorm",
    "Request",
    "Restore",
    "Rollback",
    "RollbackReport",
    "Rotation",
    "Routing",
    "Run",
    "RunInfo",
    "RuntimeEngine",
    "SavedWeights",
    "Schedule",
    "SequenceData",
    "Shard",
    "SimpleCheckpoint",
    "Sink",
    "SinkQueue",
    "SkipsAhead",
    "Spent",
    "SplitVocabulary",
    "StepEnd",
    "StepReport",
    "StepStats",
    "StopRequest",
    "SwiGLU",
    "Topology",
    "TorchGEMM",
    "TrainState",
    "Transport",
    "Uniform",
    "UpdateReport",
    "WeightReader",
    "Weights",
    "WholeTensors",
    "Write",
    "attention",
    "balance",
    "blocks",
    "bytes_sent",
    "caches_context",
    "cast",
    "clip_factor",
    "compose",
    "count_of",
    "counting_routers",
    "dequantize",
    "describe_message",
    "dispatch_codec",
    "form_of",
    "gemm_parameters",
    "gemms_of",
    "global_norm",
    "grouped_linear_on_gpu",
    "hash_bits",
    "hold",
    "inverted",
    "keep_dtype",
    "linear_cross_entropy",
    "memory_like",
    "move_into",
    "open_simple_weights",
    "open_weights",
    "ops_of",
    "plain_ops",
    "quantize_into",
    "quantize_swiglu",
    "range_of",
    "read_range",
    "rms_norm",
    "rope",
    "rope_frequencies",
    "rope_rotation",
    "run_locally",
    "share_of",
    "sort_by_expert",
    "storage_of",
    "store_in_selective_checkpointing",
    "stream_seed",
    "sum_over_data",
    "swiglu",
    "torch_matmul",
    "unquantized",
    "use_dispatch_codec",
    "use_gemm",
    "write_range",
    "yarn_frequencies",
]

__getattr__ = attribute_of(__name__)
