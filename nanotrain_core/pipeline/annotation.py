"""Names each pass of a step in a profiler's trace, if a profiler records."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import profiler

from nanotrain_core.pipeline.actions import Action

WORDS = {"F": "forward", "B": "backward", "W": "weight gradients"}


def annotated(action: Action) -> AbstractContextManager[object]:
    """Return a context for an action: ``forward of stage 1, microbatch 3`` in a trace, otherwise a no-op."""
    if not profiler._is_profiler_enabled:
        return nullcontext()
    text = f"{WORDS[action.kind]} of stage {action.stage}, microbatch {action.microbatch}"
    return torch.profiler.record_function(text)
