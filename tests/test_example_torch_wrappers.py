"""The examples ``torch_ddp`` and ``fsdp2``: PyTorch's own wrappers as drop-ins."""

import re
from unittest import mock

import attrs
import pytest
import torch
from examples_of_plugins import PLUGINS, example
from test_docs import failed
from torch.distributed.fsdp import FSDPModule

from nanotrain_core.api import Exit, NanotrainError
from nanotrain_core.cli import main
from nanotrain_core.testing import RankFailure, run_ranks
from nanotrain_core.testing.compare import assert_same, whole
from nanotrain_core.testing.probe import make_engine, train, weights

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


@pytest.mark.parametrize(
    ("use", "instead"), [("torch_ddp", "plan with ddp"), ("fsdp2", "plan with zero12's stage 2")]
)
def test_a_plan_of_what_cannot_run_dry_is_refused_with_what_to_plan_in_its_place(capsys, use, instead):
    told = ["--set", f"parallel.0.use={use}", "--plugin", str(PLUGINS / f"{use}.py"), "--ranks", "2"]
    assert main(["plan", "laptop", *told]) == Exit.USER
    assert re.fullmatch(rf"nanotrain: {use}: .* on no meta device: {instead}\n", capsys.readouterr().err)


def test_fully_shard_of_an_older_torch_is_refused_by_its_version(monkeypatch):
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params")
    with pytest.raises(NanotrainError, match=r"fsdp2: expected torch 2\.13 or later, got \d"):
        fsdp2({}).build()


OFFLOAD = {"use": "activation_offload", "min_mb": 0.0, "keep": 0}
EXPERTS = {"model": {"use": "routed"}, "batch": {"sequences": 8}}


def fsdp2(topology, *beside, **around):
    around["parallel"] = [*beside, {"use": "fsdp2"}]
    return example("parallel", "fsdp2", topology=topology, overrides=around)


def held(case):
    """Return the elements of weights, and of each of AdamW's moments, that this rank has."""
    engine = make_engine(case, {"run": {"steps": 1}})
    engine.fit()
    moments = [block.tensor.numel() for block in engine.run.optimizer.blocks() if "exp_avg_sq" in block.name]
    return sum(placed.parameter.numel() for placed in engine.run.placed), sum(moments)


def test_each_rank_holds_its_share_of_weights_and_of_their_state():
    (whole_model,) = run_ranks(held, 1, fsdp2({}))
    shares = run_ranks(held, 4, fsdp2({"dp": 4}))
    assert tuple(map(sum, zip(*shares, strict=True))) == whole_model
    assert max(share for each in shares for share in each) < 0.3 * whole_model[0]


def test_shards_beside_packed_weights_are_refused_by_name():
    with pytest.raises(RankFailure, match=r"layers\.0\..* is a DTensor.*: .* precision.packed = false"):
        run_ranks(update, 2, fsdp2({"dp": 2}, precision={"use": "fp4_master"}), {})


def test_fully_shard_of_torch_trains_as_one_process_does():
    labels = ("weights_equal[adamw]", "unused_parameter_does_not_hang[on_one_rank]")
    assert failed(fsdp2({"dp": 2}), *labels) == {}


def trained_on(ranks, folder, checkpoint="simple", **options):
    around = {"optimizer": {"use": "adamw", "lr": 0.01}, "checkpoint": {"use": checkpoint}}
    case = fsdp2({"dp": ranks}, **around)
    traces = run_ranks(train, ranks, case, {"run": {"steps": 4}}, folder=folder, save_at=2, **options)
    return whole([trace.weights for trace in traces]), whole([trace.state for trace in traces])


@pytest.mark.parametrize(
    ("saver", "loader", "checkpoint"),
    [
        (2, 1, "simple"),
        pytest.param(1, 2, "simple", marks=pytest.mark.full),
        pytest.param(4, 2, "sharded_v2", marks=pytest.mark.full),
        pytest.param(1, 4, "sharded_v2", marks=pytest.mark.full),
    ],
)
def test_a_checkpoint_of_shards_opens_on_any_number_of_ranks(tmp_path, saver, loader, checkpoint):
    saved = trained_on(saver, tmp_path, checkpoint)
    resumed = trained_on(loader, tmp_path, checkpoint, resume="2")
    for what, one, other in zip(("weights", "state"), saved, resumed, strict=True):
        assert_same(other, one, f"{what} after resuming", atol=1e-9)


@pytest.mark.full
@pytest.mark.parametrize(
    ("topology", "beside", "around"),
    [
        ({"dp": 2}, [], {}),
        ({"dp": 4}, [], {}),
        ({"dp": 2, "tp": 2}, [{"use": "tp"}], {}),
        ({"dp": 2, "pp": 2}, [], STAGED),
        ({"dp": 2, "ep": 2}, [{"use": "ep_deepseek"}], EXPERTS),
        ({"dp": 4, "ep": 2}, [{"use": "ep_deepseek"}], EXPERTS),
        ({"dp": 4, "ep": 2}, [{"use": "ep_deepseek"}, OFFLOAD], EXPERTS),
        ({"dp": 2}, [{"use": "recompute"}], {}),
    ],
    ids=["dp2", "dp4", "tp", "tied across stages", "experts", "experts in shards", "offload", "recompute"],
)
def test_fully_shard_of_torch_passes_every_check(topology, beside, around):
    assert failed(fsdp2(topology, *beside, **around)) == {}


@pytest.mark.full
def test_shards_beside_w_passes_are_refused_by_name():
    with pytest.raises(RankFailure, match=r"fsdp2: .* no W passes"):
        run_ranks(update, 4, fsdp2({"dp": 2, "pp": 2}, schedule={"use": "zb_h1"}), {})


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


def test_fully_shard_of_torch_refuses_to_go_on_after_a_step_that_was_broken_off():
    """It keeps gradients of layers, and those of embedding and head are never sent."""
    with pytest.raises(RankFailure, match="fsdp2: a step was broken off"):
        run_ranks(goes_on, 2, fsdp2({"dp": 2}))
