"""Batches, and the order of sequences."""

from nanotrain_core.batch import IGNORE, Batch, Shard
from nanotrain_core.data.order import SequenceData

__all__ = [
    "IGNORE",
    "Batch",
    "SequenceData",
    "Shard",
]
