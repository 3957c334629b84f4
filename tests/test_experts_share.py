"""Experts that ranks would call with the same tokens, and routers with parts of sequences, are refused."""

import pytest

from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.pool import RankFailure
from nanotrain_core.testing.probe import placements

LAZY = """
import attrs
from nanotrain_core import hookimpl
from nanotrain_core.component import Component
from nanotrain_core.contracts import Parallel


@attrs.define(frozen=True)
class Config:
    pass


@hookimpl
def nanotrain_register_parallel(register):
    register(Component(name="lazy", config=Config, factory=f"{__name__}:Lazy", mesh_dims={"tp", "cp"}))


class Lazy(Parallel):
    def __init__(self, config):
        pass

    def apply(self, part, placements, mesh):
        return part
"""


@pytest.mark.parametrize(
    ("dim", "told"),
    [
        ("tp", "all ranks along tp would send the same tokens to these experts"),
        ("cp", "each rank along cp would route its part of each sequence"),
    ],
)
def test_a_wrapper_that_forgets_experts_or_their_router_is_refused(tmp_path, dim, told):
    plugin = tmp_path / "lazy.py"
    plugin.write_text(LAZY)
    overrides = {"model": {"use": "routed"}}
    case = Case("parallel", use="lazy", topology={dim: 2}, overrides=overrides, plugins=(plugin,))
    with pytest.raises(RankFailure, match=told):
        run_ranks(placements, 2, case)
