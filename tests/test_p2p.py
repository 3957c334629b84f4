"""Messages reach the stage they are for, in whatever order, with tags and in groups of their own."""

import weakref

import pytest
import torch
import torch.distributed as dist

from nanotrain_core.errors import PluginError
from nanotrain_core.layout.layout import Layout, Span, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.messages import EdgeMessages
from nanotrain_core.layout.transport import Transport
from nanotrain_core.models.kernels import installed_kernels
from nanotrain_core.pipeline.p2p import StageP2P, encode_metadata
from nanotrain_core.testing.collectives import CollectiveLog
from nanotrain_core.testing.pool import run_ranks

LIKE = (1, 3)


class Groups(Transport):
    """Messages as between GPUs, on a CPU."""

    def messages(self, owners, mesh):
        return EdgeMessages(owners, mesh)


def installed():
    """Return what goes through shared memory where nanotrain-cpu is installed."""
    return installed_kernels(torch.device("cpu")).transport()


WAYS = {"memory": installed, "tags": Transport, "groups": Groups}


@pytest.mark.parametrize(
    ("tensor", "found"),
    [
        (torch.ones(2, dtype=torch.int8), "torch.int8 with 1 dim"),
        (torch.ones([1] * 7), "torch.float32 with 7 dim"),
    ],
)
def test_hidden_states_that_no_message_can_carry_are_refused(tensor, found):
    with pytest.raises(
        PluginError, match=f"a stage's hidden states are of {found}.*expected at most 6 dimensions"
    ):
        encode_metadata(tensor)


def pass_through(owners, way, stages_that_share):
    """Send what each stage adds to through all stages and back; return what this rank's stages saw.

    The second microbatch is smaller, as a step's last one may be.
    """
    ranks = max(owners) + 1
    view = View(("pp", "dp"), (ranks, dist.get_world_size() // ranks))
    mesh = Mesh(Layout({"dense": view}), rank=dist.get_rank(), transport=WAYS[way]())
    mesh.create_groups([Span((), stages) for stages in stages_that_share])
    p2p = StageP2P(owners, mesh)
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


@pytest.mark.full_cases("three-memory", "three-tags", "three-groups")
@pytest.mark.parametrize(("way", "checked"), [("memory", False), ("tags", True), ("groups", True)], ids=WAYS)
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
def test_every_stage_gets_what_the_one_before_sent(way, checked, owners, world, shared):
    results = run_ranks(pass_through, world, owners, way, shared, check_collectives=checked)
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


def one_forward_one_backward(microbatches, way):
    """Return the most hidden states that the first of two stages keeps alive after sending them."""
    layout = Layout({"dense": View(("pp",), (2,))})
    mesh = Mesh(layout, rank=dist.get_rank(), transport=WAYS[way]())
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


@pytest.mark.parametrize("way", ["tags", "memory"])
def test_what_was_sent_is_let_go_when_its_gradient_is_back(way):
    assert run_ranks(one_forward_one_backward, 2, 5, way, check_collectives=way == "tags")[0] == 0


def connections(owners):
    """Return what this rank sent and received, by peer, while the groups of edges were made."""
    view = View(("pp",), (dist.get_world_size(),))
    mesh = Mesh(Layout({"dense": view}), rank=dist.get_rank(), transport=Groups())
    with CollectiveLog() as log:
        EdgeMessages(owners, mesh)
    return [name.partition("_")[0].partition(".")[0] for name, _, _ in log.entries]


def test_groups_of_edges_are_connected_by_send_and_recv_which_nccl_connects_apart():
    first, middle, last = run_ranks(connections, 3, [0, 1, 2])
    assert first == ["send", "recv"]
    assert middle == ["recv", "send", "send", "recv"]
    assert last == ["recv", "send"]
