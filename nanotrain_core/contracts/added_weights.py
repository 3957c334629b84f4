"""What the parameters that a wrapper adds to a model are in saved weights, without the wrapper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from nanotrain_core.contracts.checkpoint import WeightReader
from nanotrain_core.hf.mapping import ParameterMapping


class AddedWeights:
    """A base class: ``Component.added`` of a wrapper names an object. ``config`` is the wrapper's."""

    form: str = ""
    """The word after ``nanotrain convert --to`` for :meth:`files`; empty: there are none."""

    def merge(self, config: Any, reader: WeightReader) -> WeightReader:
        """Return weights without the added parameters that compute the same in the model alone.

        Args:
            config: of the run that saved them.
            reader: the weights as they are saved. What other wrappers added is among them, too.

        Raises:
            NanotrainError: no weights of the model alone compute the same.
        """
        raise NotImplementedError(f"{type(self).__name__} has no merge(config, reader)")

    def files(
        self, config: Any, reader: WeightReader, mappings: Iterable[ParameterMapping]
    ) -> Mapping[str, str | Mapping[str, torch.Tensor]]:
        """Return the files of the added parameters alone, by name: texts, or tensors for a safetensors file.

        Args:
            config: of the run that saved them.
            reader: the weights as they are saved.
            mappings: of the model's parameters to Hugging Face's.

        Raises:
            NanotrainError: the form cannot represent them.
        """
        raise NotImplementedError(f"{type(self).__name__} has no files(config, reader, mappings)")
