"""One layer's experts over ranks equal every expert computed on every token, whoever has how many rows."""

from functools import cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from nanotrain_ep_deepseek import ExpertParallelConfig
from nanotrain_ep_deepseek.exchange import AllToAll, PendingAllToAll
from nanotrain_ep_deepseek.expert_parallel import ExpertParallel, check_view
from torch.utils.checkpoint import checkpoint

from nanotrain_core.builtin.configs import GridConfig
from nanotrain_core.errors import NanotrainError
from nanotrain_core.layout.grid import Grid
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import place
from nanotrain_core.layout.roles import Role, overridden_by, replace_module, tag
from nanotrain_core.moe.routing import Routing, use_dispatch_codec
from nanotrain_core.pipeline.actions import Part
from nanotrain_core.testing import run_ranks
from nanotrain_core.testing.collectives import CollectiveLog
from nanotrain_core.testing.components.moe import RoutedConfig
from nanotrain_core.testing.components.moe_model import Routed

E, D, WIDTH, NAMES = 8, 32, 12, ("gate", "up", "down")


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole_weights():
    shapes = {"gate": (E, WIDTH, D), "up": (E, WIDTH, D), "down": (E, D, WIDTH)}
    return {name: 0.3 * numbers(seed, *shape) for seed, (name, shape) in enumerate(shapes.items())}


def inputs(tokens, rank, route):
    """Return one rank's tokens [T, D], experts [T, K], weights [T, K], and gradient of its outputs."""
    x, weights, d_y = (
        numbers(10 + rank, tokens, D),
        numbers(20 + rank, tokens, 2),
        numbers(30 + rank, tokens, D),
    )
    first = torch.arange(tokens) % E if route == "everywhere" else torch.zeros(tokens, dtype=torch.int64)
    return (
        x,
        torch.stack([first, (first + 1 + rank) % E if route == "everywhere" else first + 1], 1),
        weights,
        d_y,
    )


def reference(tokens_by_rank, route, enter=lambda x: x, leave=lambda x: x):
    """Return outputs, gradients of tokens and of router weights by rank, and gradients of experts.

    Every expert computes on every token; ``enter`` is applied to its inputs, ``leave`` to its outputs.
    """
    parameters = {name: value.requires_grad_() for name, value in whole_weights().items()}
    found = []
    for rank, tokens in enumerate(tokens_by_rank):
        x, experts, weights, d_y = inputs(tokens, rank, route)
        x.requires_grad_(), weights.requires_grad_()
        seen = enter(x)
        hidden = F.silu(torch.einsum("td,efd->tef", seen, parameters["gate"]))
        hidden = hidden * torch.einsum("td,efd->tef", seen, parameters["up"])
        every = torch.einsum("tef,edf->ted", hidden, parameters["down"])
        chosen = leave(every.gather(1, experts[:, :, None].expand(-1, -1, D)))
        y = (chosen * weights[:, :, None]).sum(1)
        y.backward(d_y)
        found.append((y.detach(), x.grad, weights.grad))
    return found, {name: value.grad for name, value in parameters.items()}


def build(degrees, *, ffn=WIDTH, split=None, split_by=None):
    """Return this rank's part with its experts spread and filled, placements and mesh."""
    config = RoutedConfig(layers=1, experts=E, width=D, ffn=ffn)
    part = Routed(config).build(Part.whole(1)).double()
    layout = Grid(GridConfig(**degrees)).layout(dist.get_world_size())
    placements, mesh = place([part], layout), Mesh(layout, rank=dist.get_rank())
    experts = part.layers["0"].experts
    if split:
        tag(experts, Role.EXPERTS, split=split)
    if split_by:
        name = "layers.0.experts.gate"
        placements[name] = placements[name].split(1, split_by, 0, 2)
    ExpertParallel(ExpertParallelConfig()).apply(part, placements, mesh)
    experts.to_empty(device="cpu")
    for name in NAMES:
        block = placements[f"layers.0.experts.{name}"].slices
        getattr(experts, name).data = whole_weights()[name][block].clone()
    return part, placements, mesh


def run_layer(degrees, tokens_by_rank, route, options=()):
    """Return this rank's output, gradients of tokens, router weights and experts, placements, rows."""
    part, placements, mesh = build(degrees)
    experts = part.layers["0"].experts
    codec = None
    if "codec" in options:
        use_dispatch_codec(experts, codec := Halved())
    if "replaced" in options:
        new = type(experts)(RoutedConfig(), experts.ops)
        for name in NAMES:
            setattr(new, name, getattr(experts, name))
        new.forward = None  # whatever it would have done
        experts = part.layers["0"].experts = replace_module(experts, new)
    x, chosen, weights, d_y = inputs(tokens_by_rank[mesh.rank], mesh.rank, route)
    x.requires_grad_("frozen" not in options), weights.requires_grad_()
    routing = Routing(chosen, weights)
    y = (
        checkpoint(experts, x, routing, use_reentrant=False)
        if "recomputed" in options
        else experts(x, routing)
    )
    y.backward(d_y)
    return {
        "y": y.detach(),
        "x": x.grad,
        "weights": weights.grad,
        "experts": {name: gradient(getattr(experts, name)) for name in NAMES},
        "slices": {name: placements[f"layers.0.experts.{name}"].slices for name in NAMES},
        "rows": overridden_by(experts).rows,
        "encoded": codec.rows if codec else 0,
    }


def gradient(parameter):
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class Halved:
    """Sends rows as the bytes of bfloat16."""

    rows = 0

    def encode(self, rows):
        self.rows += len(rows)
        return rows.to(torch.bfloat16).view(torch.uint8)

    def decode(self, coded, width, dtype):
        assert coded.shape[1] == 2 * width
        return coded.view(torch.bfloat16).to(dtype)


class RoundInputs(torch.autograd.Function):
    """Rows lose digits on their way to experts, gradients on their way back do not."""

    @staticmethod
    def forward(ctx, x):
        return x.to(torch.bfloat16).to(x.dtype)

    @staticmethod
    def backward(ctx, d_x):
        return d_x


class RoundGradients(torch.autograd.Function):
    """Gradients lose digits on their way to experts, results on their way back do not."""

    @staticmethod
    def forward(ctx, y):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, d_y):
        return d_y.to(torch.bfloat16).to(d_y.dtype)


FOLDS = [
    pytest.param({"ep": 2}, [5, 3], id="ep2"),
    pytest.param({"etp": 2}, [5, 3], id="etp2"),
    pytest.param({"ep": 4}, [5, 0, 3, 1], id="ep4"),
    pytest.param({"ep": 2, "etp": 2}, [0, 4, 7, 0], id="ep2-etp2"),
    pytest.param({"ep": 2}, [2, 0, 3, 6], id="edp2-ep2"),
]


def check(ranks, expected, *, tokens=True):
    """Compare every rank's outputs and gradients, and those of experts summed over their replicas."""
    by_rank, experts = expected
    for rank, (result, (y, d_x, d_weights)) in enumerate(zip(ranks, by_rank, strict=True)):
        for key, want in (("y", y), ("x", d_x), ("weights", d_weights)):
            if key != "x" or tokens:
                torch.testing.assert_close(
                    torch.as_tensor(result[key]), want, rtol=0, atol=1e-11, msg=f"{key} of {rank}"
                )
    for name in NAMES:
        blocks = {}
        for result in ranks:  # those that hold a block: along edp they add up, as gradient sync does
            key = str(result["slices"][name])
            mine = torch.as_tensor(result["experts"][name])
            blocks[key] = (result["slices"][name], blocks[key][1] + mine if key in blocks else mine)
        got = torch.full_like(experts[name], torch.nan)
        for slices, block in blocks.values():
            got[slices] = block
        torch.testing.assert_close(got, experts[name], rtol=0, atol=1e-11, msg=f"gradient of {name}")


@pytest.mark.parametrize("route", ["everywhere", "to_the_first_two"])
@pytest.mark.parametrize(("degrees", "tokens"), FOLDS)
def test_outputs_and_gradients_equal_those_of_one_process(degrees, tokens, route):
    check(run_ranks(run_layer, len(tokens), degrees, tokens, route), reference(tokens, route))


def test_megatron_735_1207_and_deepspeed_7461_a_rank_without_rows_takes_part_where_only_weights_are_trained():
    """Ranks that had nothing to compute left a collective to the others."""
    degrees, tokens, route = {"ep": 4}, [5, 0, 3, 1], "to_the_first_two"
    ranks = run_ranks(run_layer, 4, degrees, tokens, route, ("frozen",))
    assert [rank["rows"] for rank in ranks] == [18, 0, 0, 0]
    assert all(rank["x"] is None for rank in ranks)
    check(ranks, reference(tokens, route), tokens=False)


@pytest.mark.parametrize("option", ["replaced", "recomputed"])
def test_a_replaced_or_recomputed_module_still_meets_the_others(option):
    degrees, tokens = {"ep": 2, "etp": 2}, [0, 4, 7, 0]
    check(run_ranks(run_layer, 4, degrees, tokens, "everywhere", (option,)), reference(tokens, "everywhere"))


@pytest.mark.parametrize("degrees", [{"ep": 2}, {"etp": 2}, {"ep": 2, "etp": 2}], ids=str)
def test_a_codec_narrows_what_goes_to_experts_and_nothing_that_comes_back(degrees):
    tokens = [4, 7] if len(degrees) == 1 else [0, 4, 7, 2]
    ranks = run_ranks(run_layer, len(tokens), degrees, tokens, "everywhere", ("codec",))
    check(ranks, reference(tokens, "everywhere", RoundInputs.apply, RoundGradients.apply))
    assert sum(rank["encoded"] for rank in ranks) >= 2 * 2 * sum(tokens)  # rows, and then their gradients


def test_a_monitor_learns_how_many_rows_each_rank_computes():
    ranks = run_ranks(run_layer, 4, {"ep": 2, "etp": 2}, [0, 4, 7, 1], "to_the_first_two")
    assert [rank["rows"] for rank in ranks] == [24, 24, 0, 0]


def refusal(degrees, change):
    """Return the text with which this rank's layer is refused."""
    try:
        build(degrees, **change)
    except NanotrainError as error:
        return str(error)
    return "built"


GATE = "ep_deepseek: layers.0.experts.gate"
REFUSED = [
    ({"ep": 3}, {}, f"{GATE} has 8 experts, which do not divide by ep = 3; topology.ep could be 2 or 4"),
    (
        {"etp": 2},
        {"ffn": 15},
        f"{GATE} has 15 columns, which do not divide by etp = 2; topology.etp could be 1 or 3",
    ),
    (
        {"etp": 2},
        {"split": {"up": 1}},
        f"{GATE} cannot be split along etp: its model's tag(..., split={{...}}) names no axis of it, only "
        "of up; expected topology.etp = 1",
    ),
    (
        {"ep": 2},
        {"split_by": "tp"},
        f"{GATE} is already split along tp by a wrapper before: expected experts that are whole; etp cuts "
        "them along their width",
    ),
]


@pytest.mark.parametrize(("degrees", "change", "text"), REFUSED)
def test_what_cannot_be_split_is_refused_with_names_and_the_nearest_degrees(degrees, change, text):
    ranks = max(degrees.values())
    assert run_ranks(refusal, ranks, degrees, change) == [text] * ranks


def test_a_topology_without_etp_is_refused():
    view = View(("pp", "edp", "ep"), (1, 1, 2))
    with pytest.raises(
        NanotrainError, match="view 'expert' has no etp: expected the dimensions edp, ep and etp"
    ):
        check_view(Layout({"expert": view}))
    check_view(Grid(GridConfig(ep=2)).layout(4))


def buffers_of(degrees):
    """Return the shape and the offset of a buffer of experts, as this rank has it."""
    part = Routed(RoutedConfig(layers=1, experts=E, width=D, ffn=WIDTH)).build(Part.whole(1))
    experts = part.layers["0"].experts
    experts.register_buffer("scale", torch.empty(E, device="meta"))
    layout = Grid(GridConfig(**degrees)).layout(dist.get_world_size())
    placements = place([part], layout)
    ExpertParallel(ExpertParallelConfig()).apply(part, placements, Mesh(layout, rank=dist.get_rank()))
    (own,) = [name for name, _ in part.named_buffers() if name.endswith("scale")]
    return tuple(experts.scale.shape), placements[own].offset


@pytest.mark.parametrize(("degrees", "second"), [({"ep": 2}, (E // 2,)), ({"etp": 2}, (0,))])
def test_a_buffer_of_experts_is_split_as_they_are(degrees, second):
    size = E // degrees.get("ep", 1)
    assert run_ranks(buffers_of, 2, degrees) == [((size,), (0,)), ((size,), second)]


def logged(degrees, tokens_by_rank):
    """Return the collectives of one pass, as (dtype, ranks of the group)."""
    with CollectiveLog() as log:
        run_layer(degrees, tokens_by_rank, "everywhere")
    return [
        (sent[0].partition("[")[0], group) for operator, group, sent in log.entries if "alltoall" in operator
    ]


def test_a_pass_exchanges_counts_once_and_rows_there_and_back():
    for rank, found in enumerate(run_ranks(logged, 4, {"ep": 2, "etp": 2}, [3, 4, 7, 1])):
        over_ep, over_etp = ((0, 2), (1, 3))[rank % 2], ((0, 1), (2, 3))[rank // 2]
        there_and_back = [over_ep, over_etp, over_etp, over_ep]
        counts = [("int64", over_ep), ("int64", over_etp)]
        assert found == counts + [("float64", group) for group in there_and_back * 2]  # forward, backward


class Work(torch.autograd.Function):
    """Doubles, and notes when."""

    @staticmethod
    def forward(ctx, x, events):
        ctx.events = events
        events.append("work")
        return 2 * x

    @staticmethod
    def backward(ctx, d_y):
        ctx.events.append("work")
        return 2 * d_y, None


def events_of_a_layer():
    """Return what happened in a layer's forward and backward pass, and output and gradient of the tokens."""
    events, begin, waited = [], AllToAll.begin, PendingAllToAll.wait
    part, _, mesh = build({"ep": 2})
    x, chosen, weights, d_y = inputs(4, mesh.rank, "everywhere")
    x.requires_grad_()
    beside = cache(lambda: Work.apply(x, events))
    with (
        mock.patch.object(AllToAll, "begin", lambda *a: events.append("send") or begin(*a)),
        mock.patch.object(PendingAllToAll, "wait", lambda sent: events.append("wait") or waited(sent)),
    ):
        y = part.layers["0"].experts(x, Routing(chosen, weights, meanwhile=beside)) + beside()
        events.append("backward")
        y.backward(d_y)
    return events, y.detach() - 2 * x.detach(), x.grad - 2 * d_y


def test_shared_experts_run_while_tokens_and_their_gradients_travel():
    forward, backward = ["send", "work", "wait", "send", "wait"], ["send", "wait", "send", "work", "wait"]
    found = run_ranks(events_of_a_layer, 2)
    assert [events for events, _, _ in found] == [[*forward, "backward", *backward]] * 2
    expected, _ = reference([4, 4], "everywhere")
    for (_, y, d_x), (want, d_want, _) in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(y), want, rtol=0, atol=1e-11)
        torch.testing.assert_close(torch.as_tensor(d_x), d_want, rtol=0, atol=1e-11)
