"""Models: functions that kernels replace, layers, the head and its loss, and caches."""

from nanotrain_core.models.activation_checkpointing import blocks, store_in_selective_checkpointing
from nanotrain_core.models.cache import Cache, LayerCache
from nanotrain_core.models.cross_entropy import Chunks, MatMul, SplitVocabulary, linear_cross_entropy
from nanotrain_core.models.cross_entropy import matmul as torch_matmul
from nanotrain_core.models.feed_forward import SwiGLU
from nanotrain_core.models.gpu_ops import plain_ops
from nanotrain_core.models.head import Head
from nanotrain_core.models.norms import RMSNorm
from nanotrain_core.models.ops import TORCH_OPS, Ops, attention, ops_of, rms_norm, rope, swiglu
from nanotrain_core.models.rope import Rotation, rope_frequencies, rope_rotation, yarn_frequencies

__all__ = [
    "TORCH_OPS",
    "Cache",
    "Chunks",
    "Head",
    "LayerCache",
    "MatMul",
    "Ops",
    "RMSNorm",
    "Rotation",
    "SplitVocabulary",
    "SwiGLU",
    "attention",
    "blocks",
    "linear_cross_entropy",
    "ops_of",
    "plain_ops",
    "rms_norm",
    "rope",
    "rope_frequencies",
    "rope_rotation",
    "store_in_selective_checkpointing",
    "swiglu",
    "torch_matmul",
    "yarn_frequencies",
]
