"""``WholeTensors`` makes every parameter whole from blocks of tp and ranges of ZeRO, in few all-gathers."""

from math import prod
from unittest import mock

import attrs
import pytest
import torch
import torch.distributed as dist

from nanotrain_core.api.torch import WholeTensors
from nanotrain_core.optim import whole_tensors
from nanotrain_core.testing import Case, RankFailure, run_ranks
from nanotrain_core.testing.probe import make_engine

LAYOUT = Case(
    "optimizer",
    use="adamw",
    topology={"tp": 2, "dp": 2},
    overrides={"parallel": [{"use": "tp"}, {"use": "zero12"}]},
)


def gathered(case, bucket):
    """Return (parameters, all-gathers, names that came out wrong): elements have their place as value."""
    run = make_engine(case, {}).run
    with mock.patch.object(whole_tensors, "BUCKET", bucket):
        whole = WholeTensors(
            [shard.piece for shard in getattr(run.optimizer, "behind", run.optimizer).master_shards], run.mesh
        )
    numbered = {
        name: torch.arange(prod(shape), dtype=torch.float64).view(shape)
        for name, shape in whole.shapes.items()
    }
    own = dict(pair for name, tensor in numbered.items() for pair in whole.pieces(name, tensor))
    with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as calls:
        found = dict(whole.gather(own))
    assert sorted(found) == sorted(numbered)
    return len(found), calls.call_count, [name for name in found if not found[name].equal(numbered[name])]


@pytest.mark.parametrize("bucket", [1, 3000, whole_tensors.BUCKET])
def test_they_are_whole_on_every_rank_whatever_a_bucket_holds(bucket):
    for parameters, calls, wrong in run_ranks(gathered, 4, LAYOUT, bucket):
        assert wrong == []
        assert calls == parameters if bucket == 1 else calls < parameters
        assert calls == 1 or bucket < whole_tensors.BUCKET


def replicated(case):
    """Return how many ranks' elements one all-gather brings, and names that came out wrong."""
    with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as calls:
        *_, wrong = gathered(case, whole_tensors.BUCKET)
        return {len(call.args[0]) for call in calls.call_args_list}, wrong


def test_what_ranks_of_ddp_all_have_is_sent_once():
    """Each of 64 sent a bucket of 128 MiB: 8 GiB on every rank."""
    around = {"overrides": {"parallel": [{"use": "tp"}, {"use": "ddp"}]}}
    assert run_ranks(replicated, 4, attrs.evolve(LAYOUT, **around)) == [({2}, [])] * 4


def test_a_tied_table_whose_ranges_several_stages_have_is_whole_on_all_of_them():
    """Each stage had assembled the half that its own ranks update, and zeros."""
    staged = {"schedule": {"use": "1f1b"}, "model": {"tied": True}}
    around = {**staged, "parallel": [{"use": "zero12", "bucket_mb": 0.01}]}
    case = Case("optimizer", use="adamw", topology={"pp": 2}, overrides=around)
    for parameters, calls, wrong in run_ranks(gathered, 2, case, whole_tensors.BUCKET):
        assert wrong == []
        assert parameters > calls == 1  # the other parameters are on one rank


def without_one(case):
    run = make_engine(case, {}).run
    shards = getattr(run.optimizer, "behind", run.optimizer).master_shards
    WholeTensors([shard.piece for shard in shards if run.mesh.rank or shard is not shards[0]], run.mesh)


def test_pieces_that_leave_some_elements_to_no_rank_are_refused():
    around = {"parallel": [{"use": "zero12", "bucket_mb": 0.01}]}
    case = Case("optimizer", use="adamw", topology={"dp": 2}, overrides=around)
    with pytest.raises(RankFailure, match=r"no rank has all of head\.weight: expected pieces that make"):
        run_ranks(without_one, 2, case)
