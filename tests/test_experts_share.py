"""Experts that several ranks would call with the same tokens are refused, not trained twice as fast."""

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
    register(Component(name="lazy", config=Config, factory=f"{__name__}:Lazy", mesh_dims={"tp"}))


class Lazy(Parallel):
    def __init__(self, config):
        pass

    def apply(self, part, placements, mesh):
        return part
"""


def test_a_wrapper_that_forgets_experts_is_refused(tmp_path):
    from nanotrain_deepseek.samples import V3

    plugin = tmp_path / "lazy.py"
    plugin.write_text(LAZY)
    overrides = {"model": {"use": "deepseek", **V3}}
    case = Case("parallel", use="lazy", topology={"tp": 2}, overrides=overrides, plugins=(plugin,))
    with pytest.raises(RankFailure, match="all ranks along tp would send the same tokens to these experts"):
        run_ranks(placements, 2, case)
