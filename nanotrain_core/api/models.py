"""The names for a model that builds on the core's transformer, or whose layers have routed experts.

Also for what computes a part of any model's layers, and keeps results for later calls.
Files of the core may move; these names stay. What any model needs is in :mod:`nanotrain_core.api.torch`.
"""

from nanotrain_core.deprecated import attribute_of
from nanotrain_core.models.activation_checkpointing import outside_of_layers
from nanotrain_core.models.transformer import Block as TransformerBlock
from nanotrain_core.models.transformer import Transformer, TransformerPart
from nanotrain_core.moe.experts import CallOnce, Experts
from nanotrain_core.moe.grouped_mm import has_one_kernel
from nanotrain_core.moe.load_balancing import expert_share, load_balancing_loss
from nanotrain_core.moe.router import TopKRouter
from nanotrain_core.moe.routing import RoutingStatistics, count_routed

__all__ = [
    "CallOnce",
    "Experts",
    "RoutingStatistics",
    "TopKRouter",
    "Transformer",
    "TransformerBlock",
    "TransformerPart",
    "count_routed",
    "expert_share",
    "has_one_kernel",
    "load_balancing_loss",
    "outside_of_layers",
]

__getattr__ = attribute_of(__name__)
