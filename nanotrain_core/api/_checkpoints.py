"""Checkpoints: listing, verification, quarantine, and the state of a run."""

from nanotrain_core.builtin.configs import SimpleCheckpointConfig
from nanotrain_core.checkpoint.box_cover import coverage_problem
from nanotrain_core.checkpoint.info import DTYPE_BYTES, DTYPE_NAMES, CheckpointInfo, unexpected_kinds
from nanotrain_core.checkpoint.listing import listed_of_all as list_all_checkpoints
from nanotrain_core.checkpoint.quarantine import quarantine_checkpoint, set_checkpoints_aside
from nanotrain_core.checkpoint.run_state import (
    is_run_state,
    load_json,
    newest_evaluated,
    state_problems,
    streams_problem,
)
from nanotrain_core.checkpoint.simple_listing import list_checkpoints as list_simple_checkpoints
from nanotrain_core.checkpoint.tensor_boxes import box_slices

__all__ = [
    "DTYPE_BYTES",
    "DTYPE_NAMES",
    "CheckpointInfo",
    "SimpleCheckpointConfig",
    "box_slices",
    "coverage_problem",
    "is_run_state",
    "list_all_checkpoints",
    "list_simple_checkpoints",
    "load_json",
    "newest_evaluated",
    "quarantine_checkpoint",
    "set_checkpoints_aside",
    "state_problems",
    "streams_problem",
    "unexpected_kinds",
]
