"""What a recorder says of memory, from the operators of a step that was taken once."""

import torch
from nanotrain_plan.dry.recorder import Recorder
from nanotrain_plan.dry.values import Values


def buffer(size):
    return torch.empty(size, dtype=torch.uint8, device="meta")


def test_a_later_step_finds_buffers_there_before_the_first_one_allocated_them():
    recorder = Recorder("meta", Values())
    with recorder:
        recorder.enter("B")
        activations = buffer(1000)
        first = buffer(200)
        del activations
        second, temporary = buffer(300), buffer(50)
        del temporary
        recorder.enter("update")
        moved = buffer(400)
        del moved
        recorder.enter("end")
        recorder.settle(1)
    backward, update, _ = recorder.phases[1:]
    assert (backward.lasting, update.lasting) == (500, 0)
    # With both buffers there from the beginning, and activations: the step itself had at most 1200.
    assert backward.peak == 1500
    assert update.peak == 900
    assert (first.nbytes, second.nbytes) == (200, 300)
