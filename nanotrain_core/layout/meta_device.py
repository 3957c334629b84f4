"""Building modules without storage: on the ``meta`` device, and without computing initial values there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

#: What modules call to initialize a tensor in place.
_INITIALIZERS = {getattr(nn.init, name) for name in dir(nn.init) if name.endswith("_") and name[0] != "_"}
_RANDOM = {torch.Tensor.normal_, torch.Tensor.uniform_}


@contextmanager
def meta_device() -> Iterator[None]:
    """Create tensors on ``meta`` by default, and leave those as they are that ``nn.init`` would initialize.

    torch computes random values on ``meta``, of which nothing remains, by decompositions that import
    ``torch._dynamo``: two seconds of a process that compiles nothing.
    """
    with torch.device("meta"), _Uninitialized():
        yield


class _Uninitialized(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func in _INITIALIZERS or func in _RANDOM:
            tensor = args[0] if args else given["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **given)
