"""What is particular about the update: state on the host, weights on their way."""

from unittest import mock

import attrs
import pytest
import torch
from nanotrain_zero12.offload import HostMaster
from nanotrain_zero12.optimizer import Zero12

from nanotrain_core.builtin.configs import PrecisionConfig
from nanotrain_core.contracts import ErrorFeedback
from nanotrain_core.errors import NanotrainError, RecipeError
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.placement import Piece, Placement
from nanotrain_core.precision.uniform import Float32Master, LiveMaster, bf16, fp32
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import drive, make_run, push

ZERO = {"bucket_mb": 0.01, "stage": 2}


def case(*, kernels="auto", **config):
    around = {"kernels": {"use": kernels}}
    return Case("optimizer", use="zero12", config={**ZERO, **config}, topology={"dp": 2}, overrides=around)


# --- state on the host ------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [fp32, bf16])
def test_a_weight_updated_on_the_host_reaches_the_device(precision):
    numbers = precision(PrecisionConfig())
    device = torch.randn(8).to(numbers.parameter_dtype)
    host = device.clone()
    master = HostMaster(device, host, numbers.master(host, "w"))
    value = torch.randn(8)
    master.store(value.clone())
    assert torch.equal(master.load(), value)
    assert torch.equal(device, value.to(device.dtype))
    assert set(master.state()) == ({"master"} if precision is bf16 else set())


def test_a_weight_read_from_a_checkpoint_reaches_the_host():
    device = torch.randn(8)
    host = device.clone()
    master = HostMaster(device, host, fp32(PrecisionConfig()).master(host, "w"))
    device.fill_(3.0)
    master.refresh()
    assert torch.equal(master.load(), device)


def masters_on_cpu(case):
    run = make_run(case, {})
    return [type(shard.master).__name__ for shard in run.optimizer.master_shards]


def test_on_cpu_offload_keeps_no_further_copy():
    for masters in run_ranks(masters_on_cpu, 2, case(offload=True)):
        assert set(masters) == {"LiveMaster"}


# --- on the way -------------------------------------------------------------------------------------


def weights_in_flight(case):
    """Return buckets on their way after a step, after waiting for the last parameter, and for all."""
    run = make_run(case, {})
    push(run, 0, 1.0)
    run.optimizer.step()
    parameters = [placed.parameter for placed in run.placed]
    counts = [len(run.optimizer.gathering)]
    run.optimizer.wait(parameters[-1:])
    counts.append(len(run.optimizer.gathering))
    run.optimizer.wait(parameters)
    return [*counts, len(run.optimizer.gathering)]


def test_through_sockets_weights_arrive_when_they_are_waited_for():
    for after_step, after_one, after_all in run_ranks(weights_in_flight, 2, case(kernels="torch")):
        assert after_step > after_one > after_all == 0


def in_flight_at_an_update(case):
    """Return buckets on their way whenever weights are updated, though nobody waited for any."""
    run = make_run(case, {})
    update, seen = run.optimizer.update_plain, []

    def note(*arguments):
        seen.append(len(run.optimizer.gathering))
        update(*arguments)

    run.optimizer.update_plain = note
    for step in range(2):
        push(run, step, 1.0)
        run.optimizer.step()
        run.gradients.zero()
    run.optimizer.wait([placed.parameter for placed in run.placed])
    return seen


def test_no_weight_is_updated_while_it_is_on_its_way():
    """Of a module that a step does not call, the old weights would arrive on top of the new ones."""
    assert run_ranks(in_flight_at_an_update, 2, case(kernels="torch")) == [[0, 0]] * 2


def test_without_overlap_they_are_there_after_the_step():
    assert run_ranks(weights_in_flight, 2, case(kernels="torch", overlap=False)) == [[0, 0, 0]] * 2


def sum_of_small_gradients(case, microbatches):
    """Return the largest summed gradient of many equal, small ones beside a first large one, in bfloat16."""
    run = make_run(case, {"precision": {"use": "bf16"}})
    sync, parameter = run.gradients, run.placed[-1].parameter
    others = [p.parameter for p in run.placed]
    for number in range(microbatches + 1):
        if number == microbatches:
            sync.last_microbatch(others)
        (parameter * (256.0 if number == 0 else 1.0)).sum().backward()
        sync.microbatch_done(others)
    sync.backward_done(others)
    sync.finish()
    return max((sync.gradient_of(piece).max().item() for piece in sync.pieces()), default=0.0)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_gradients_of_narrow_weights_are_summed_in_float32(stage, kernels):
    """bfloat16 would not see 1 beside 256."""
    found = run_ranks(sum_of_small_gradients, 2, case(stage=stage, kernels=kernels), 8)
    assert max(found) == 2 * (256 + 8)


# --- a rank without a share -------------------------------------------------------------------------

#: Twelve parameters of at most 64 weights: the last of five ranks gets none of them.
TWELVE = {"layers": 1, "width": 4, "heads": 1, "ffn": 16, "vocab": 16, "tied": False}


@pytest.mark.parametrize("scale", [1.0, 1e40], ids=["ordinary", "above float32"])
def test_a_rank_without_a_share_has_the_same_gradient_norm_to_the_last_bit(scale):
    """In float32 it would skip a step that the others make, and leave them waiting for its weights."""
    around = {"model": TWELVE, "data": {"vocab": 16}, "batch": {"sequences": 10}}
    tiny = Case("optimizer", use="zero12", config={"clip_norm": 0.5}, topology={"dp": 5}, overrides=around)
    (alone,) = run_ranks(drive, 1, tiny.alone(), {}, [scale])
    found = run_ranks(drive, 5, tiny, {}, [scale])
    assert [len(each.state) > 0 for each in found] == [True] * 4 + [False]
    assert len({each.norms[0] for each in found}) == 1
    assert found[0].norms == pytest.approx(alone.norms, rel=1e-14)
    assert [each.skipped for each in found] == [[False]] * 5


# --- refusals ---------------------------------------------------------------------------------------


def test_two_gradient_syncs_are_refused():
    twice = Case("optimizer", use="zero12", topology={"dp": 2}, overrides={"parallel": [{"use": "summed"}]})
    with pytest.raises(RecipeError, match="both provide gradient_sync"):
        twice.recipe()


def test_a_third_stage_is_refused():
    told = (
        r"optimizer\.stage: expected 1 \(.*\) or 2 \(gradients too\), got 3; .* use = 'fsdp2' shards weights"
    )
    with pytest.raises(RecipeError, match=told):
        case(stage=3).recipe()


def ask_for_a_whole_gradient(case):
    run = make_run(case, {})
    assert isinstance(run.gradients, Zero12)
    try:
        run.gradients.gradient(run.placed[0].parameter)
    except NanotrainError as refused:
        return str(refused)


def test_no_rank_has_a_whole_gradient_to_give():
    (text, _) = run_ranks(ask_for_a_whole_gradient, 2, case())
    assert "pieces()" in text


# --- masters updated in place -----------------------------------------------------------------------


def bits_after(case, precision, *, in_place):
    """Return this rank's weights and the tensors of its state, after three steps."""
    with pytest.MonkeyPatch.context() as patched:
        for kind in () if in_place else (LiveMaster, Float32Master):
            patched.setattr(kind, "plain", None)
        run = make_run(case, {"precision": {"use": precision}})
    assert (run.optimizer.encoded == []) is in_place
    for step in range(3):
        push(run, step, 30.0**step)
        run.optimizer.step()
        run.gradients.zero()
    run.optimizer.wait([placed.parameter for placed in run.placed])
    weights = [placed.parameter.detach().clone() for placed in run.placed]
    return weights, [block.tensor.clone() for block in run.optimizer.blocks()]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ranges_updated_in_place_end_with_the_bits_of_loaded_ones(precision):
    ranks = zip(
        run_ranks(bits_after, 2, case(), precision, in_place=True),
        run_ranks(bits_after, 2, case(), precision, in_place=False),
        strict=True,
    )
    for at_once, loaded in ranks:
        for found, expected in zip(at_once, loaded, strict=True):
            assert all(map(torch.equal, found, expected))


# --- masters that round -----------------------------------------------------------------------------


class Coarse(ErrorFeedback):
    """bfloat16 whose masters keep halves, and have the optimizer carry what is lost."""

    def __init__(self):
        self.weight = None

    def master(self, weight, piece):
        found = Coarse()
        found.weight = weight
        found.store(weight.float())
        return found

    def load(self):
        return self.weight.float()

    def store(self, value):
        self.weight.copy_((value * 2).round() / 2)

    def error(self, value):
        return value - self.weight


def rounded_weights(case, steps):
    """Return weights under masters that round at once, before the first step or after a few."""
    run = make_run(case, {"precision": {"use": "bf16"}})
    run.optimizer.setup(run.placed, Coarse(), run.gradients, run.mesh)
    for step in range(steps):
        push(run, step, 1.0)
        run.optimizer.step()
        run.gradients.zero()
    run.optimizer.wait([placed.parameter for placed in run.placed])
    return [placed.parameter.detach().clone() for placed in run.placed]


@pytest.mark.parametrize(
    "config",
    [
        {},
        pytest.param({"kernels": "torch"}, marks=pytest.mark.full),
        pytest.param({"moment_dtype": "bfloat16"}, marks=pytest.mark.full),
    ],
)
def test_what_masters_round_reaches_all_ranks_before_the_first_step_too(config):
    one = attrs.evolve(case(**config), topology={}, world_size=1)
    for steps in (0, 3):
        (alone,) = run_ranks(rounded_weights, 1, one, steps)
        for weights in run_ranks(rounded_weights, 2, case(**config), steps):
            assert all(torch.equal(found, wanted) for found, wanted in zip(weights, alone, strict=True))
            assert all(torch.equal(found * 2, (found * 2).round()) for found in weights)


def test_an_offloaded_master_that_loses_still_says_how_much():
    """Else the optimizer would not know that there is anything to carry."""
    device = torch.tensor([0.3, 0.7, 1.1], dtype=torch.bfloat16)
    piece = Piece(
        torch.nn.Parameter(device), Placement.whole("w", (3,), Layout({"dense": View(("dp",), (1,))}))
    )
    with mock.patch.object(
        torch, "empty", lambda *shape, pin_memory, dtype: torch.zeros(*shape, dtype=dtype)
    ):
        master = HostMaster.of(piece, Coarse())
    assert isinstance(master, ErrorFeedback)
    assert piece.weight.tolist() == [0.5, 0.5, 1.0]
    value = torch.tensor([0.4, 0.8, 1.3])
    master.store(value)
    assert torch.equal(master.error(value), value - torch.tensor([0.5, 1.0, 1.5]))
