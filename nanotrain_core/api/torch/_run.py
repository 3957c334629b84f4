"""A run: composition, the engine, the executor of schedules, and weights it starts from."""

from nanotrain_core.checkpoint.simple import SimpleCheckpoint, open_simple_weights
from nanotrain_core.compose import Run, compose
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.hf.open_weights import Weights, open_weights
from nanotrain_core.pipeline.executor import Executor
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.run.random_state import stream_seed

__all__ = [
    "Executor",
    "Passes",
    "Run",
    "RuntimeEngine",
    "SimpleCheckpoint",
    "Weights",
    "compose",
    "open_simple_weights",
    "open_weights",
    "stream_seed",
]
