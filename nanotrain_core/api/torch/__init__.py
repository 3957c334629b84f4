"""The names for a plugin's computation: contracts, placements, layers, GEMM backends, communication.

Files of the core may move; these names stay. A name is added to the module of its topic.
"""

from nanotrain_core.api.torch import (
    _contracts,
    _data,
    _layout,
    _models,
    _moe,
    _monitors,
    _optim,
    _precision,
    _run,
)
from nanotrain_core.api.torch._contracts import *
from nanotrain_core.api.torch._data import *
from nanotrain_core.api.torch._layout import *
from nanotrain_core.api.torch._models import *
from nanotrain_core.api.torch._moe import *
from nanotrain_core.api.torch._monitors import *
from nanotrain_core.api.torch._optim import *
from nanotrain_core.api.torch._precision import *
from nanotrain_core.api.torch._run import *
from nanotrain_core.deprecated import attribute_of

__all__: list[str] = []
__all__ += _contracts.__all__
__all__ += _data.__all__
__all__ += _layout.__all__
__all__ += _models.__all__
__all__ += _moe.__all__
__all__ += _monitors.__all__
__all__ += _optim.__all__
__all__ += _precision.__all__
__all__ += _run.__all__

__getattr__ = attribute_of(__name__)
