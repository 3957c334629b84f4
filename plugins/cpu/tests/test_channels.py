"""Messages through shared memory arrive once, in their own step, and are not taken for others."""

import mmap

import pytest
import torch
import torch.distributed as dist
from nanotrain_cpu.barrier import HostBarrier
from nanotrain_cpu.channels import CHANNEL, STAMP, Channel
from nanotrain_cpu.transport import SharedMemoryTransport

from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.pipeline.p2p import StageP2P
from nanotrain_core.testing.pool import run_ranks


def send_steps(sizes, microbatches, left=(), *, crossed=False):
    """Send each step's messages, of ``left`` steps none is received; return what came, and by which way.

    ``crossed``: the receiver has another order of microbatches.
    """
    layout = Layout({"dense": View(("pp",), (2,))})
    mesh = Mesh(layout, rank=dist.get_rank(), transport=SharedMemoryTransport())
    p2p, came = StageP2P([0, 1], mesh), []
    for step, size in enumerate(sizes):
        p2p.begin(microbatches[step])
        order = range(microbatches[step])
        for m in order if crossed and p2p.rank else reversed(order):
            if p2p.rank == 0:
                p2p.send("forward", 0, m, torch.full((size,), 100.0 * step + m), (1, size))
            elif step not in left:
                found = p2p.receive(0, m, (1, size))
                assert found.shape == (size,)
                assert (found == found[0]).all()
                came.append(found[0].item())
        mesh.gather(step, "pp")
    shared = any(channel._unread for channel in p2p.messages.channels.values())
    p2p.flush()
    return came, shared


LARGE = (CHANNEL // 3 // STAMP - 1) * STAMP // 4


@pytest.mark.parametrize(
    ("sizes", "microbatches", "shared"),
    [
        ([5, 5, 300, 1, 300], [7, 7, 7, 1, 3], True),
        ([LARGE, LARGE, LARGE], [3, 3, 3], True),  # the whole channel
        ([LARGE, LARGE, 5], [4, 5, 4], True),  # another way, then through memory
        ([CHANNEL, CHANNEL], [3, 3], False),
    ],
)
def test_messages_arrive_once_and_in_their_own_step(sizes, microbatches, shared):
    (_, through), (came, _) = run_ranks(send_steps, 2, sizes, microbatches, check_collectives=False)
    assert through == shared
    expected = [100.0 * step + m for step, count in enumerate(microbatches) for m in reversed(range(count))]
    assert came == expected


def test_what_a_step_that_was_broken_off_left_in_memory_is_not_taken_for_the_next_one_s():
    with pytest.raises(Exception, match="a step that was broken off left messages behind"):
        run_ranks(send_steps, 2, [5, 5, 5], [1, 1, 2], (1,), check_collectives=False)


def crossed_steps():
    return send_steps([5], [2], crossed=True)


def test_a_schedule_that_crosses_microbatches_is_told_so():
    with pytest.raises(Exception, match="microbatch 0 was expected from another stage and 1 came"):
        run_ranks(crossed_steps, 2, check_collectives=False)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((8,), torch.bfloat16), ((2, 2), torch.float32), ((2,), torch.float32)], ids=str
)
def test_a_message_of_another_form_is_not_taken_for_what_was_expected(shape, dtype):
    memory = mmap.mmap(-1, CHANNEL + HostBarrier.size(2))
    sender, receiver = (HostBarrier(memory, CHANNEL, rank, [0, 1], 1.0) for rank in range(2))
    assert sender.make()
    ends = Channel(memory, 0, sender), Channel(memory, 0, receiver)
    for end in ends:
        end.begin(1)
    ends[0].send(torch.arange(4.0), 0)
    with pytest.raises(RuntimeError, match="another stage sent something else"):
        ends[1].receive(torch.empty(shape, dtype=dtype), 0)
