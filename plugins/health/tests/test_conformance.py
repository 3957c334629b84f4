"""With and without these monitors a run has the same bits, and what they publish is declared."""

import pytest

from nanotrain_core.testing import Case, conformance

SUMMED = {"parallel": [{"use": "summed"}]}
ROUTED = {"model": {"use": "routed"}}


def case(use, name="", ranks=1, around=None, **config):
    topology, overrides = ({"dp": ranks}, SUMMED) if ranks > 1 else ({}, {})
    overrides = {**overrides, **(around or {})}
    return Case("monitor", use=use, config=config, topology=topology, overrides=overrides, name=name)


test_conformance = conformance(
    case("health", "health", ranks=2),
    # The first tier has them of the core's own monitors.
    slow=pytest.mark.full,
)
# tests/test_health.py has all three on eight ranks, in the first tier.
test_exhaustively = pytest.mark.full(
    conformance(
        case("moe", "moe", around=ROUTED),
        case("probes", "probes", every=2),
        case("health", "debug", ranks=2, level="debug"),
        case("health", "minimal", level="minimal"),
        case("health", "health-routed", around=ROUTED),
        case("moe", "moe-ranks", ranks=2, around=ROUTED, loads_every=2),
        case("probes", "probes-ranks", ranks=2, every=2),
    )
)
