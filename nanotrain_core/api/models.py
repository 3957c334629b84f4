"""The names for a model that builds on the core's transformer, or whose layers have routed experts.

Files of the core may move; these names stay. What any model needs is in :mod:`nanotrain_core.api.torch`.
"""

from nanotrain_core.deprecated import attribute_of
from nanotrain_core.models.transformer import Block as TransformerBlock
from nanotrain_core.models.transformer import Transformer, TransformerPart
from nanotrain_core.moe.experts import Experts, Once
from nanotrain_core.moe.load_balancing import expert_share, load_balancing_loss
from nanotrain_core.moe.router import TopKRouter
from nanotrain_core.moe.routing import Routed, count_routed

__all__ = [
    "Experts",
    "Once",
    "Routed",
    "TopKRouter",
    "Transformer",
    "TransformerBlock",
    "TransformerPart",
    "count_routed",
    "expert_share",
    "load_balancing_loss",
]

__getattr__ = attribute_of(__name__)
