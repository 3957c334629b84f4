"""Weights of a Hugging Face checkpoint, or of a run, under nanotrain's names, and the logits of its model.

A test compares them with those of another implementation, such as transformers'.
"""

from __future__ import annotations

from pathlib import Path

import torch

from nanotrain_core.batch import Batch
from nanotrain_core.hf.open_weights import open_weights
from nanotrain_core.hf.weights import whole
from nanotrain_core.layout.initialization import materialize
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.placement import place
from nanotrain_core.pipeline.actions import Part
from nanotrain_core.registry.registry import load_plugins


def tensors_at(path: Path) -> dict[str, torch.Tensor]:
    """Return all weights at ``path``, by nanotrain's names."""
    reader = open_weights(path, load_plugins()).reader
    return {name: reader.read(name, whole(shape)) for name, shape in reader.shapes.items()}


@torch.no_grad()
def logits_at(path: Path, tokens_BS: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the logits [B, S, V] that nanotrain computes with the weights at ``path``, in ``dtype``.

    Buffers, which checkpoints leave out, have the model's constants.
    """
    registry = load_plugins()
    model = registry.build(open_weights(path, registry).selection)
    part, weights = model.build(Part.whole(model.layers)), tensors_at(path)
    placements = place([part], Layout({"dense": View(("dp",), (1,))}))
    materialize([part], placements, 0, torch.device("cpu"), saved=lambda name, parameter: weights[name])
    logits: torch.Tensor = part.to(dtype).eval()(tokens_BS, Batch(tokens_BS)).value
    return logits
