"""Messages reach the stage they are for, in whatever order, with tags and in groups of their own."""

import mmap
import weakref

import pytest
import torch
import torch.distributed as dist

from nanotrain_core.host.barrier import HostBarrier
from nanotrain_core.host.messages import CHANNEL, STAMP, Channel
from nanotrain_core.layout.layout import Layout, Span, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.pipeline.p2p import StageP2P
from nanotrain_core.testing.pool import run_ranks

LIKE = (1, 3)


def pass_through(owners, tags, stages_that_share):
    """Send what each stage adds to through all stages and back; return what this rank's stages saw.

    The second microbatch is smaller, as a step's last one may be.
    """
    ranks = max(owners) + 1
    view = View(("pp", "dp"), (ranks, dist.get_world_size() // ranks))
    mesh = Mesh(Layout({"dense": view}), rank=dist.get_rank())
    mesh.create_groups([Span((), stages) for stages in stages_that_share])
    p2p = StageP2P(owners, mesh, tags=tags)
    p2p.begin(2)
    seen = {}
    rows = (2, 1)
    for m in range(2):
        like = (rows[m], 3)
        for stage in (s for s, owner in enumerate(owners) if owner == p2p.rank):
            x = torch.zeros(like) + m if stage == 0 else p2p.receive(stage - 1, m, like)
            x = x + 10 ** (stage + 1)
            seen["F", stage, m] = x[0, 0].item()
            if stage + 1 < len(owners):
                p2p.send("forward", stage, m, x, like)
    for m in range(2):
        like = (rows[m], 3)
        for stage in reversed([s for s, owner in enumerate(owners) if owner == p2p.rank]):
            last = stage + 1 == len(owners)
            g = torch.zeros(like) - m if last else p2p.receive_gradient(stage, m, torch.empty(like))
            seen["B", stage, m] = g[-1, 2].item()
            if stage:
                p2p.send("backward", stage - 1, m, g - 1, like)
    p2p.flush()
    one = torch.ones(1)
    dist.all_reduce(one, group=mesh.new_group(range(dist.get_world_size()), "afterwards"))
    return seen, one.item()


@pytest.mark.parametrize(
    ("tags", "checked"), [(True, False), (True, True), (False, True)], ids=["memory", "tags", "groups"]
)
@pytest.mark.parametrize(
    ("owners", "world", "shared"),
    [
        ([0, 1], 2, []),
        ([0, 1, 2], 3, [(0, 2)]),
        ([0, 1, 2, 3], 4, [(0, 3), (0, 1), (0, 3)]),
        ([0, 1, 2, 0, 1, 2], 3, [(1, 2)]),
        ([0, 1, 1, 0], 4, []),
    ],
    ids=["two", "three", "four", "loop", "v_twice"],
)
def test_every_stage_gets_what_the_one_before_sent(tags, checked, owners, world, shared):
    results = run_ranks(pass_through, world, owners, tags, shared, check_collectives=checked)
    replicas = world // (max(owners) + 1)
    for rank, (seen, together) in enumerate(results):
        assert together == world  # groups made after those of only some ranks still meet
        stages = [stage for stage, owner in enumerate(owners) if owner == rank // replicas]
        expected = {}
        for m in range(2):
            for stage in stages:
                expected["F", stage, m] = m + sum(10 ** (s + 1) for s in range(stage + 1))
                expected["B", stage, m] = -m - (len(owners) - 1 - stage)
        assert seen == expected


def one_forward_one_backward(microbatches):
    """Return the most hidden states that the first of two stages keeps alive after sending them."""
    mesh = Mesh(Layout({"dense": View(("pp",), (2,))}), rank=dist.get_rank())
    p2p, sent = StageP2P([0, 1], mesh), []
    p2p.begin(microbatches)
    for m in range(microbatches):
        if p2p.rank == 0:
            x = torch.full((2, 3), float(m))
            sent.append(weakref.ref(x))
            p2p.send("forward", 0, m, x, LIKE)
            p2p.receive_gradient(0, m, torch.empty_like(x))
            del x
        else:
            p2p.send("backward", 0, m, p2p.receive(0, m, LIKE), LIKE)
    alive = sum(each() is not None for each in sent)
    p2p.flush()
    return alive


@pytest.mark.parametrize("checked", [True, False], ids=["tags", "memory"])
def test_what_was_sent_is_let_go_when_its_gradient_is_back(checked):
    assert run_ranks(one_forward_one_backward, 2, 5, check_collectives=checked)[0] == 0


def send_steps(sizes, microbatches, left=(), *, crossed=False):
    """Send each step's messages, of ``left`` steps none is received; return what came, and by which way.

    ``crossed``: the receiver has another order of microbatches.
    """
    mesh = Mesh(Layout({"dense": View(("pp",), (2,))}), rank=dist.get_rank())
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
    shared = any(channel._unread for channel in p2p._channels.values())
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
