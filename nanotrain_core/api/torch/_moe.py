"""Mixture of experts: routing, dispatch, load balance, and grouped GEMMs."""

from nanotrain_core.moe.grouped_mm import grouped_linear_on_gpu
from nanotrain_core.moe.routing import (
    Compute,
    CountingRouter,
    DispatchCodec,
    Routing,
    balance_routers,
    bytes_sent,
    counting_routers,
    dispatch_codec,
    invert_permutation,
    run_locally,
    sort_by_expert,
    tokens_per_expert,
    use_dispatch_codec,
)

__all__ = [
    "Compute",
    "CountingRouter",
    "DispatchCodec",
    "Routing",
    "balance_routers",
    "bytes_sent",
    "counting_routers",
    "dispatch_codec",
    "grouped_linear_on_gpu",
    "invert_permutation",
    "run_locally",
    "sort_by_expert",
    "tokens_per_expert",
    "use_dispatch_codec",
]
