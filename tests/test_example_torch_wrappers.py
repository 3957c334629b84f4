"""The example ``torch_ddp``: PyTorch's own wrapper as a drop-in."""

import re
from unittest import mock

import attrs
import pytest
import torch
from examples_of_plugins import PLUGINS, example
from test_docs import failed

from nanotrain_core.api import Exit
from nanotrain_core.cli import main
from nanotrain_core.testing import RankFailure, run_ranks
from nanotrain_core.testing.probe import make_engine, weights

STAGED = {"schedule": {"use": "1f1b"}, "model": {"use": "transformer", "tied": True}}


def torch_ddp(topology, *beside, **around):
    """Return a case with several buckets on each rank."""
    overrides = {**around, "parallel": [*beside, {"use": "torch_ddp", "bucket_mb": 0.01}]}
    return example(
        "parallel", "torch_ddp", config={"bucket_mb": 0.01}, topology=topology, overrides=overrides
    )


def test_ddp_of_torch_sums_gradients_of_all_ranks_those_of_one_alone_included():
    labels = ("gradients_equal[fp64]", "weights_equal[adamw]", "unused_parameter_does_not_hang[on_one_rank]")
    assert failed(torch_ddp({"dp": 2}), *labels) == {}


@pytest.mark.full
@pytest.mark.parametrize(
    ("topology", "beside", "around"),
    [
        ({"dp": 2}, [], {}),
        ({"dp": 4}, [], {}),
        ({"dp": 2, "pp": 2}, [], STAGED),
        ({"dp": 2, "pp": 2}, [], {"schedule": {"use": "zb_h1"}}),
        ({"dp": 2, "tp": 2}, [{"use": "tp"}], {}),
    ],
    ids=["dp2", "dp4", "tied across stages", "W passes", "tp"],
)
def test_ddp_of_torch_passes_every_check(topology, beside, around):
    assert failed(torch_ddp(topology, *beside, **around)) == {}


def update(case, changes):
    engine = make_engine(case, changes)
    engine.fit()
    return torch.cat([block.tensor.flatten() for block in weights(engine.run)])


def test_compressed_gradients_are_near_and_not_the_same():
    changes = {"run": {"steps": 1}, "optimizer": {"use": "sgd", "lr": 0.1}}
    plain = torch_ddp({"dp": 2})
    narrow = {"use": "torch_ddp", "compress": "fp16"}
    (exact, _), (sent, _) = (
        run_ranks(update, 2, plain, {**changes, **more}) for more in ({}, {"parallel": [narrow]})
    )
    assert not torch.equal(sent, exact)
    torch.testing.assert_close(sent, exact, atol=1e-3, rtol=0)


def test_gradients_wider_than_their_parameters_are_refused_by_name():
    with pytest.raises(
        RankFailure, match=r"torch_ddp: .* is torch.bfloat16, and its gradient to be torch.float32"
    ):
        run_ranks(update, 2, torch_ddp({"dp": 2}), {"precision": {"use": "bf16"}})


def test_a_plan_of_torch_ddp_is_refused_with_what_to_plan_in_its_place(capsys):
    told = ["--set", "parallel.0.use=torch_ddp", "--plugin", str(PLUGINS / "torch_ddp.py"), "--ranks", "2"]
    assert main(["plan", "laptop", *told]) == Exit.USER
    assert re.fullmatch(
        r"nanotrain: torch_ddp: .* on no meta device: plan with ddp\n", capsys.readouterr().err
    )


def goes_on(case):
    """Return the weights of three steps, of which the second was broken off in its last backward pass."""
    engine, passes, backward = make_engine(case, {}), [], torch.autograd.backward

    def breaks_off(*args):
        passes.append(args)
        if len(passes) == 4:  # of two in each step
            raise RuntimeError("broken off")
        backward(*args)

    with mock.patch.object(torch.autograd, "backward", breaks_off):
        with pytest.raises(RuntimeError, match="broken off"):
            engine.fit()
        engine.fit()
    return torch.cat([block.tensor.flatten() for block in weights(engine.run)])


def test_ddp_of_torch_forgets_a_step_that_was_broken_off():
    """Its reducer summed the first microbatch of the next step, and that sum once more with the last."""
    summed = attrs.evolve(torch_ddp({"dp": 2}), use="summed", config={}, overrides={})
    (ours, _), (plain, _) = (run_ranks(goes_on, 2, case) for case in (torch_ddp({"dp": 2}), summed))
    torch.testing.assert_close(ours, plain, atol=1e-12, rtol=0)
