"""Checkpoints: listing, verification, quarantine, and the state of a run."""

from nanotrain_core.checkpoint.box_cover import uncovered
from nanotrain_core.checkpoint.info import DTYPE_BYTES, DTYPE_NAMES, CheckpointInfo, unexpected_kinds
from nanotrain_core.checkpoint.quarantine import quarantine_checkpoint, set_checkpoints_aside
from nanotrain_core.checkpoint.run_state import (
    is_of_a_run,
    load_json,
    newest_evaluated,
    state_problems,
    streams_problem,
)
from nanotrain_core.checkpoint.simple_listing import list_checkpoints as list_simple_checkpoints
from nanotrain_core.checkpoint.tensor_boxes import Shape, index_of

__all__ = [
    "DTYPE_BYTES",
    "DTYPE_NAMES",
    "CheckpointInfo",
    "Shape",
    "index_of",
    "is_of_a_run",
    "list_simple_checkpoints",
    "load_json",
    "newest_evaluated",
    "quarantine_checkpoint",
    "set_checkpoints_aside",
    "state_problems",
    "streams_problem",
    "uncovered",
    "unexpected_kinds",
]
