"""Mixture of experts: routing, dispatch, load balance, and grouped GEMMs."""

from nanotrain_core.moe.grouped_mm import grouped_linear_on_gpu
from nanotrain_core.moe.routing import (
    Compute,
    CountingRouter,
    DispatchCodec,
    Routing,
    balance,
    bytes_sent,
    count_of,
    counting_routers,
    dispatch_codec,
    inverted,
    run_locally,
    sort_by_expert,
    use_dispatch_codec,
)

__all__ = [
    "Compute",
    "CountingRouter",
    "DispatchCodec",
    "Routing",
    "balance",
    "bytes_sent",
    "count_of",
    "counting_routers",
    "dispatch_codec",
    "grouped_linear_on_gpu",
    "inverted",
    "run_locally",
    "sort_by_expert",
    "use_dispatch_codec",
]
