"""Placements: blocks, sums and norms."""

import pytest
import torch

from nanotrain_core.builtin.configs import GridConfig
from nanotrain_core.errors import PluginError
from nanotrain_core.layout.dtensors import read_dtensors
from nanotrain_core.layout.gradients import AllReduceGradients, LocalGradients
from nanotrain_core.layout.grid import Grid
from nanotrain_core.layout.layout import Layout, Span, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import PlacedParameter, Placement, place, placed_parameters
from nanotrain_core.optim.grad_norm import clip_factor, global_norm
from nanotrain_core.run.validate_components import check_dtensors
from nanotrain_core.testing import run_ranks

LAYOUT = Layout(
    {
        "dense": View(("pp", "dp", "cp", "tp"), (1, 2, 1, 4)),
        "expert": View(("pp", "edp", "ep", "etp"), (1, 2, 4, 1)),
    },
    data_dims=("dp", "cp", "edp", "ep"),
)


def test_an_unsplit_tensor_is_partial_along_data_and_the_same_elsewhere():
    placement = Placement.whole("w", (8, 4), LAYOUT)
    assert placement.summed == {"dp", "cp"}
    assert placement.same == {"tp"}
    assert placement.sync_span(LAYOUT) == Span(("dp",))
    assert placement.replicas(LAYOUT) == 8


def test_a_split_moves_the_block_and_the_dimension():
    placement = Placement.whole("w", (8, 4), LAYOUT).split(0, "tp", 3, 4)
    assert (placement.shape, placement.offset) == ((2, 4), (6, 0))
    assert placement.sharded == {"tp"}
    assert placement.replicas(LAYOUT) == 2
    whole = torch.arange(32).view(8, 4)
    assert torch.equal(whole[placement.slices], whole[6:8])


def test_blocks_split_twice_cover_the_tensor_once():
    whole, seen = Placement.whole("w", (8, 4), LAYOUT), torch.zeros(8, 4)
    for tp in range(4):
        for dp in range(2):
            seen[whole.split(0, "tp", tp, 4).split(1, "dp", dp, 2).slices] += 1
    assert torch.equal(seen, torch.ones(8, 4))


def test_a_split_that_does_not_divide_or_repeats_is_refused():
    placement = Placement.whole("w", (6, 4), LAYOUT)
    with pytest.raises(ValueError, match="axis 0 of \\(6, 4\\) does not divide by tp = 4"):
        placement.split(0, "tp", 0, 4)
    with pytest.raises(ValueError, match="already split along 'tp'"):
        placement.split(1, "tp", 0, 4).split(1, "tp", 0, 2)


def test_a_dimension_of_another_view_is_refused():
    dense = Placement.whole("w", (8, 4), LAYOUT)
    for change in (lambda: dense.split(0, "ep", 0, 4), lambda: dense.sum_over("edp")):
        with pytest.raises(ValueError, match=r"w is not replicated along 'ed?p', only along cp, dp, tp"):
            change()


def test_a_dimension_is_divided_as_a_view_of_the_layout_does():
    """Shards of neighbors, of which replicas sum gradients themselves."""
    layout = Grid(GridConfig(dp_shard=2, tp=2)).layout(8)
    dense = Placement.whole("w", (8, 4), layout).split(1, "tp", 1, 2)
    found = dense.divide("dp", ("dp_replicate", "dp_shard"), layout)
    assert (found.view, found.sync_span(layout)) == ("dense_shard", Span(("dp_replicate", "dp_shard")))
    shard = found.complete_over("dp_replicate").cut(0, "dp_shard", 4, 8)
    assert (shard.shape, shard.offset, shard.sharded) == ((4, 2), (4, 2), {"tp", "dp_shard"})
    assert (shard.sync_span(layout), shard.replicas(layout)) == (Span(), 2)
    assert layout.members(3, shard.replica_span(layout)) == (3, 7)
    with pytest.raises(ValueError, match="w: the layout has no view along pp, a, b, cp, tp"):
        dense.divide("dp", ("a", "b"), layout)
    with pytest.raises(ValueError, match="w is not replicated along 'dp'"):
        found.complete_over("dp")


def test_sum_over_makes_a_dimension_partial():
    placement = Placement.whole("w", (8,), LAYOUT).sum_over("tp")
    assert placement.sync_span(LAYOUT) == Span(("dp", "tp"))
    assert placement.same == set()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_of_gradients_of_16_bits_is_not_rounded_to_them(dtype):
    mesh, gradient = Mesh(Layout({"dense": View(("dp",), (1,))})), torch.full((60_000,), 400.0, dtype=dtype)
    found = global_norm([(gradient, Placement.whole("w", gradient.shape, mesh.layout))], mesh)
    assert found.item() == pytest.approx(400 * 60_000**0.5, rel=1e-6)  # 97,980, beyond float16's 65,504


def test_global_norm_of_one_rank_is_the_norm_of_all_gradients():
    mesh = Mesh(Layout({"dense": View(("dp",), (1,))}))
    gradients = [torch.randn(5, 3, dtype=torch.float64), torch.randn(7, dtype=torch.float64)]
    pairs = [(g, Placement.whole(str(i), g.shape, mesh.layout)) for i, g in enumerate(gradients)]
    expected = torch.cat([g.flatten() for g in gradients]).norm()
    torch.testing.assert_close(global_norm(pairs, mesh), expected)


def norm_of_what_rank_0_has(dtype):
    rank = torch.distributed.get_rank()
    mesh = Mesh(Layout({"dense": View(("dp",), (3,))}), rank=rank)
    gradient = torch.linspace(0.1, 0.7, 5, dtype=dtype)
    placement = Placement.whole("w", (5,), mesh.layout).sharded_over_summed()
    return global_norm([(gradient, placement)] if rank == 0 else [], mesh)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_ranks_without_gradients_have_the_same_norm_to_the_last_bit(dtype):
    norms = run_ranks(norm_of_what_rank_0_has, 3, dtype)
    assert {(norm.dtype, norm.item()) for norm in norms} == {(torch.float64, norms[0].item())}
    exact = torch.linspace(0.1, 0.7, 5, dtype=dtype).double().norm().item()
    assert norms[0].item() == pytest.approx(exact, rel=torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_gradients_are_clipped_in_their_own_dtype_or_float32(dtype, wide):
    norm, gradients = torch.tensor(8.0, dtype=torch.float64), [torch.ones(3, dtype=dtype)]
    assert clip_factor(norm, 2.0, gradients).dtype == wide
    assert clip_factor(norm, 2.0, gradients).item() == pytest.approx(0.25, rel=1e-6)
    assert clip_factor(norm, 9.0, gradients).item() == clip_factor(norm, 0.0, gradients).item() == 1.0


def test_the_norm_of_a_large_gradient_is_that_of_its_parts():
    """A CPU adds squares one after the other in float32: of a table of 22 million it was 0.1% too small."""
    mesh = Mesh(Layout({"dense": View(("dp",), (1,))}))
    placement = Placement.whole("w", (6000, 1000), mesh.layout)
    gradient = torch.randn(placement.shape, generator=torch.Generator().manual_seed(0)) * 1e-3
    exact = sum(part.double().square().sum() for part in gradient.split(10)).sqrt()
    for laid_out in (gradient, gradient.T.contiguous().T):
        norm = global_norm([(laid_out, placement)], mesh)
        torch.testing.assert_close(norm, exact, rtol=3e-6, atol=0.0)


def test_a_parameter_whose_wrapper_forgot_its_placement_is_named():
    layout, model = Layout({"dense": View(("dp",), (1,))}), torch.nn.Linear(2, 3)
    placements = place([model], layout)
    model.weight = torch.nn.Parameter(torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"weight has shape \(1, 2\) but is placed as \(3, 2\)"):
        placed_parameters([model], placements)
    del placements["bias"]
    model.weight = torch.nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="bias has no placement"):
        placed_parameters([model], placements)


DP2 = Layout({"dense": View(("dp",), (2,))})


def sharded_by_torch(dim, dtype=torch.float32):
    """Return a model of 3 rows that torch's fully_shard has taken, and placements from before."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    part = torch.nn.Linear(4, 3, dtype=dtype)
    placements = place([part], DP2)
    fully_shard(part, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=(dim,)))
    return part, placements


def read_shards():
    """Return where this rank's shards are, and whether they share memory with the model's DTensors."""
    part, placements = sharded_by_torch("dp")
    read_dtensors([part], placements, DP2)
    read_dtensors([part], placements, DP2)  # what was read once stays
    placed = placed_parameters([part], placements)
    with torch.no_grad():
        placed[0].parameter.fill_(7.0)
    seen = part.weight.to_local().eq(7.0).all().item()
    return [(each.placement.name, each.placement.offset, each.placement.shape) for each in placed], seen


def test_dtensors_are_read_into_placements_as_torch_cuts_them():
    first = [("weight", (0, 0), (2, 4)), ("bias", (0,), (2,))]
    second = [("weight", (2, 0), (1, 4)), ("bias", (2,), (1,))]
    assert run_ranks(read_shards, 2) == [(first, True), (second, True)]


def refused_shards():
    """Return what is told of DTensors that nobody read, and of those along a dimension of another name."""
    part, placements = sharded_by_torch("shards")
    with pytest.raises(ValueError, match="is a DTensor") as unread:
        placed_parameters([part], placements)
    with pytest.raises(ValueError, match="is a DTensor") as unknown:
        read_dtensors([part], placements, DP2)
    return str(unread.value), str(unknown.value)


def test_dtensors_that_a_placement_cannot_say_are_refused():
    for unread, unknown in run_ranks(refused_shards, 2):
        assert unread.startswith("parameter weight is a DTensor, whose local tensor has shape")
        assert unread.endswith("but is placed as (3, 4)")
        assert unknown == (
            "parameter weight is a DTensor along 'shards' of 2 ranks; expected a DeviceMesh with "
            "mesh_dim_names of this layout: dp of 2"
        )


def test_dtensors_beside_a_gradient_sync_that_does_not_read_them_are_refused():
    weight = torch.nn.Parameter(torch.zeros(2))
    placed = [PlacedParameter(weight, Placement.whole("w", (2,), DP2), dtensor=weight)]
    with pytest.raises(PluginError, match="w is a DTensor, and LocalGradients, the run's gradient sync"):
        check_dtensors(placed, LocalGradients())
    check_dtensors(placed, AllReduceGradients())


def gradient_of_shards():
    """Return what the core's gradient sync makes of two microbatches' gradients in DTensors of bfloat16."""
    part, placements = sharded_by_torch("dp", torch.bfloat16)
    read_dtensors([part], placements, DP2)
    (weight, bias), sync = placed_parameters([part], placements), AllReduceGradients()
    sync.attach([weight, bias], Mesh(DP2), torch.float32)
    for microbatch in (1.0, 2**-10):  # whose sum bfloat16 has not
        part.weight.grad = torch.full_like(part.weight, microbatch)
        sync.microbatch_done([weight.parameter, bias.parameter])
    sync.finish()
    part.weight.grad = torch.zeros_like(part.weight)  # of a step that is broken off
    totals = [sync.gradient(each.parameter).clone() for each in (weight, bias)]
    sync.zero()
    return totals, part.weight.grad, weight.parameter.grad


def test_the_core_reads_gradients_of_dtensors_and_adds_microbatches_in_the_runs_dtype():
    for rank, (totals, *left) in enumerate(run_ranks(gradient_of_shards, 2)):
        rows = 2 - rank
        assert torch.equal(totals[0], torch.full((rows, 4), 1 + 2**-10))
        assert torch.equal(totals[1], torch.zeros(rows))  # no microbatch reached it
        assert left == [None, None]
