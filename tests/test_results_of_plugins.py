"""What a component returns or does while a run is composed, and must not: told with its name."""

import re
from unittest import mock

import pytest

from nanotrain_core.contracts import TrainState
from nanotrain_core.data.synthetic import Synthetic
from nanotrain_core.errors import PluginError
from nanotrain_core.models.transformer import Transformer
from nanotrain_core.pipeline.actions import Costs
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_run


@pytest.mark.parametrize(
    "costs", [Costs(layers=(2.0,)), Costs(layers=(0.0, 0.0)), 2.0e6], ids=["fewer", "free", "a number"]
)
def test_a_model_that_is_cut_up_by_costs_of_other_layers_is_refused(costs):
    case = Case("schedule", use="accumulate", overrides={"model": {"layers": 2}})
    with (
        mock.patch.object(Transformer, "flops", return_value=costs),
        pytest.raises(PluginError, match="'transformer': flops returned"),
    ):
        make_run(case, {})


@pytest.mark.parametrize("meta", [{"position": 3, "tokens": 48}, None], ids=["taken", "none"])
def test_data_that_remember_under_a_key_of_the_core_are_refused(meta):
    """The core's own number was saved in its place, and given back to the data without a word."""
    with (
        mock.patch.object(Synthetic, "meta", return_value=meta),
        pytest.raises(
            PluginError, match=r"^data .synthetic.: meta returned .*; expected a dict without batch_"
        ),
    ):
        make_run(Case("schedule", use="accumulate"), {})


@pytest.mark.parametrize(
    ("meta", "text"),
    [
        ({"moments": {"names": [1, {2}]}}, "optimizer.moments.names.1 is a set, which JSON cannot represent"),
        ({"by_step": {3: 0.5}}, "optimizer.by_step is a dict whose keys are not all str"),
    ],
    ids=["set", "numbers"],
)
def test_a_state_that_is_no_json_is_named_by_kind_and_key(meta, text):
    with pytest.raises(PluginError, match=f"^a checkpoint cannot store this state: {re.escape(text)}"):
        state({"step": 1, "optimizer": meta})


def test_a_state_is_a_copy_as_json_gives_it_back():
    own = {"monitors": {"Guard": {"good": (1.0, 2.0)}}}
    found = state(own).meta
    own["monitors"]["Guard"]["good"] = ()
    assert found == {"monitors": {"Guard": {"good": [1.0, 2.0]}}}


def state(meta):
    return TrainState([], meta, {})


GREEDY = """
import attrs
from nanotrain_core.api import Component, hookimpl, tagged

@attrs.define(frozen=True, kw_only=True)
class Config:
    \"\"\"No keys.\"\"\"

@hookimpl
def nanotrain_register_kernels(register):
    register(Component(name="greedy", config=Config, factory=f"{__name__}:kernels", summary="takes all"))

@hookimpl
def nanotrain_register_precision(register):
    register(Component(name="own", config=Config, factory=f"{__name__}:precision", summary="its own GEMMs"))

def take(part, passes):
    from nanotrain_core.api.torch import TorchGEMM, gemm_parameters, use_gemm

    for _, module, _ in tagged(part):
        use_gemm(module, dict.fromkeys(gemm_parameters(module), TorchGEMM()), passes)

def kernels(config):
    from nanotrain_core.api.torch import Kernels

    class Greedy(Kernels):
        def apply(self, part, passes):
            take(part, passes)

    return Greedy()

def precision(config):
    import torch
    from nanotrain_core.api.torch import NoLossScale, Uniform

    class Own(Uniform):
        def setup(self, seed, passes, behind):
            self.passes = passes

        def convert(self, part):
            part = super().convert(part)
            take(part, self.passes)
            return part

    return Own(torch.float64, NoLossScale())
"""


def test_kernels_that_take_a_precisions_backend_away_are_refused(tmp_path):
    """FP8 would be gone without a word, with bfloat16's losses."""
    path = tmp_path / "greedy.py"
    path.write_text(GREEDY)
    make_run(Case("kernels", use="greedy", plugins=(path,)), {})
    case = Case("kernels", use="greedy", plugins=(path,), overrides={"precision": {"use": "own"}})
    wanted = r"kernels 'greedy': apply replaced the GEMM backend of layers.0.attn.q, set by the precision"
    with pytest.raises(PluginError, match=wanted):
        make_run(case, {})
