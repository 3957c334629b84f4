"""Optimizers: AdamW, master weights, and the gradient norm."""

from nanotrain_core.optim.adamw import AdamW
from nanotrain_core.optim.grad_norm import clip_factor, global_norm
from nanotrain_core.optim.master_optimizer import MasterOptimizer
from nanotrain_core.optim.master_shards import MasterShard
from nanotrain_core.optim.whole_tensors import WholeTensors

__all__ = [
    "AdamW",
    "MasterOptimizer",
    "MasterShard",
    "WholeTensors",
    "clip_factor",
    "global_norm",
]
