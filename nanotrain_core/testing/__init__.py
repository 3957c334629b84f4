"""Tests distributed code on this machine, and verifies that a component fulfils its contract.

``run_ranks`` runs a function on several ranks. ``conformance(Case(...))`` is a whole test of one
component; docs/testing.md shows both. Importing this package never imports torch.
"""

from nanotrain_core.testing.case import Case
from nanotrain_core.testing.conformance import conformance, failures, planned, trials
from nanotrain_core.testing.pool import Pool, RankFailure, close_pools, run_ranks

__all__ = [
    "Case",
    "Pool",
    "RankFailure",
    "close_pools",
    "conformance",
    "failures",
    "planned",
    "run_ranks",
    "trials",
]
