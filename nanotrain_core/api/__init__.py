"""The names a plugin may import without importing torch: components, configs, checks, roles.

Files of the core may move; these names stay. A name is added to the module of its topic. Names that need
torch are in :mod:`nanotrain_core.api.torch`.
"""

from nanotrain_core.api import (
    _checkpoints,
    _commands,
    _components,
    _configs,
    _files,
    _hf,
    _layout,
    _metrics,
    _pipeline,
    _recipes,
)
from nanotrain_core.api._checkpoints import *
from nanotrain_core.api._commands import *
from nanotrain_core.api._components import *
from nanotrain_core.api._configs import *
from nanotrain_core.api._files import *
from nanotrain_core.api._hf import *
from nanotrain_core.api._layout import *
from nanotrain_core.api._metrics import *
from nanotrain_core.api._pipeline import *
from nanotrain_core.api._recipes import *
from nanotrain_core.deprecated import attribute_of

__all__: list[str] = []
__all__ += _checkpoints.__all__
__all__ += _commands.__all__
__all__ += _components.__all__
__all__ += _configs.__all__
__all__ += _files.__all__
__all__ += _hf.__all__
__all__ += _layout.__all__
__all__ += _metrics.__all__
__all__ += _pipeline.__all__
__all__ += _recipes.__all__

__getattr__ = attribute_of(__name__)
