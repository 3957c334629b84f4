"""The example ``torch_pipelining``: orders of torch.distributed.pipelining as schedules."""

import pytest
from examples_of_plugins import example
from test_docs import failed

from nanotrain_core.pipeline.simulator import simulate
from nanotrain_core.testing import Case
from nanotrain_core.testing.checks.schedule import microbatch_counts


def pipelined(order, pp=2):
    model = {"layers": 4 * pp}
    around = {"model": model, "parallel": [{"use": "summed"}]}
    return example(
        "schedule", "torch_pipelining", config={"order": order}, topology={"pp": pp}, overrides=around
    )


@pytest.mark.parametrize(("order", "like"), [("GPipe", "gpipe"), ("Interleaved1F1B", "interleaved_1f1b")])
def test_an_order_of_torch_leaves_the_idle_time_of_ours(order, like):
    idle = []
    for case in (pipelined(order, 4), Case("schedule", use=like, topology={"pp": 4})):
        idle.append(simulate(case.build().actions(4, 8)).bubble())
    assert idle[0] == idle[1]


@pytest.mark.parametrize(
    "order",
    [
        "ZBVZeroBubble",
        *(
            pytest.param(order, marks=pytest.mark.full)
            for order in ("GPipe", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "DualPipeV")
        ),
    ],
)
def test_an_order_of_torch_gives_the_gradients_of_one_process(order):
    assert failed(pipelined(order), "every_pass_happens_once", "uneven_stages_train_alike") == {}


@pytest.mark.full
@pytest.mark.parametrize("pp", [2, 4])
def test_orders_of_torch_pass_every_check(pp):
    assert failed(pipelined("ZBVZeroBubble", pp)) == {}


def test_the_harness_leaves_out_numbers_of_microbatches_without_a_schedule():
    case = pipelined("DualPipeV", 4)
    with pytest.raises(ValueError, match="at least as many microbatches as stages"):
        case.build().actions(4, 7)
    assert microbatch_counts(case) == [9, 18]
