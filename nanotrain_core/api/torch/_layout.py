"""The mesh, placements, gradients, and communication between ranks."""

from nanotrain_core.layout.buckets import BucketExchange, BucketQueue, Pending, Write
from nanotrain_core.layout.exchange import Buffer, Exchange, GlooExchange
from nanotrain_core.layout.gradients import AllReduceGradients, LocalGradients
from nanotrain_core.layout.initialization import replace_parameter
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.messages import DIRECTIONS, EdgeMessages, MessageKey, Messages
from nanotrain_core.layout.placement import RANGE, Piece, PlacedParameter, Placement, Placements, shard_range
from nanotrain_core.layout.transport import Transport
from nanotrain_core.pipeline.p2p import encode_metadata

__all__ = [
    "DIRECTIONS",
    "RANGE",
    "AllReduceGradients",
    "BucketExchange",
    "BucketQueue",
    "Buffer",
    "EdgeMessages",
    "Exchange",
    "GlooExchange",
    "LocalGradients",
    "Mesh",
    "MessageKey",
    "Messages",
    "Pending",
    "Piece",
    "PlacedParameter",
    "Placement",
    "Placements",
    "Transport",
    "Write",
    "encode_metadata",
    "replace_parameter",
    "shard_range",
]
