"""Gradients of inputs are summed over ranks while weights get theirs, and every number stays what it was."""

from contextlib import nullcontext, suppress
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from nanotrain_tp.collectives import Ranks
from nanotrain_tp.regions import ShardedRegion
from nanotrain_tp.tensor_parallel import hook
from torch import nn
from torch.utils.checkpoint import checkpoint

from nanotrain_core.contracts import Kernels
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.roles import Role, tag, tag_of
from nanotrain_core.models.kernels import installed_kernels
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.pipeline.weight_gradients import DeferredGradients
from nanotrain_core.precision.gemm import TorchGEMM, gemms_of, use_gemm
from nanotrain_core.testing import run_ranks

RANKS, BATCH, LENGTH, WIDTH, INNER = 2, 3, 5, 6, 8
COLUMNS = ("q", "k", "v")
PASSES = Passes()


class Apart(nn.Linear):
    """Whose dgrad and wgrad are made apart: :func:`split` sees to it."""


class Region(nn.Module):
    """Three layers that read one tensor, and one whose output is summed."""

    def __init__(self, kind):
        super().__init__()
        for name in COLUMNS:
            setattr(self, name, tag(kind(WIDTH, INNER, bias=False), Role.COLUMN))
        self.o = tag(kind(INNER, WIDTH, bias=False), Role.ROW)

    def forward(self, x):
        return self.o(self.q(x).tanh() * self.k(x) + self.v(x))


class Twice(Region):
    """``q`` reads the same tensor twice, and ``k`` another one too, which only it reads."""

    def forward(self, x):
        y = self.q(x).tanh() * self.q(x) + self.k(x) * self.v(x)
        return self.o(y + self.k(2 * x))


class Tied(Region):
    """``k`` and ``v`` have one weight."""

    def __init__(self, kind):
        super().__init__(kind)
        self.v.weight = self.k.weight


class Noted:
    """Products that tell when they are made."""

    def __init__(self, name, events):
        self.name, self.events = name, events

    def forward(self, x, *weights):
        return [x @ weight.T for weight in weights], (x,)

    def save_for_wgrad(self, x):
        return (x,)

    def dgrad(self, d_y, weight):
        self.events.append(f"input {self.name}")
        return d_y @ weight

    def wgrad(self, d_y, kept):
        self.events.append(f"weight {self.name}")
        return d_y.T @ kept[0]


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fill(region, index=0, ranks=1):
    """Give ``region`` its rank's part of weights that depend on nothing but their names."""
    for seed, (name, parameter) in enumerate(region.named_parameters()):
        axis = 1 if name.startswith("o.") else 0
        whole = numbers(seed, *((WIDTH, INNER) if axis else (INNER, WIDTH)))
        parameter.data = whole.chunk(ranks, axis)[index].clone()
    return region


def expected(region):
    """Return output, and gradients of input and weights, of one process."""
    region, x = fill(region(Apart)), numbers(10, BATCH, LENGTH, WIDTH).requires_grad_()
    y = region(x)
    y.backward(numbers(11, *y.shape))
    return y.detach(), x.grad, {name: p.grad for name, p in region.named_parameters()}


def split(region, kind=Apart, *, sp, shared=True, overlap=True, keep=True):
    """Return this rank's part, hooked, and what cuts a tensor for it."""
    rank = dist.get_rank()
    kernels = installed_kernels(torch.device("cpu")) if shared else Kernels()
    layout = Layout({"dense": View(("tp",), (RANKS,))})
    team = Ranks(Mesh(layout, rank=rank, transport=kernels.transport()))
    team.in_background = True  # in shared memory too, where it works but does not pay
    boundary = ShardedRegion(team, sequence_parallel=sp, overlap=overlap, keep=keep)
    boundary.length = LENGTH  # of which ranks have 2 and 3
    region = fill(region(kind), rank, RANKS)
    for name in (*COLUMNS, "o"):
        module = getattr(region, name)
        if kind is Apart:
            use_gemm(module, {"weight": TorchGEMM()}, PASSES)
        hook(module, tag_of(module), boundary)
    return region, (lambda x: team.own(x, 1)) if sp else (lambda x: x)


def one_pass(region, own, run=None):
    """Return output and gradients of one pass, and how often each weight's gradient was announced."""
    told = []
    hooks = [
        p.register_post_accumulate_grad_hook(lambda _, name=name: told.append(name))
        for name, p in region.named_parameters()
    ]
    x = own(numbers(10, BATCH, LENGTH, WIDTH)).clone().requires_grad_()
    y = (run or region)(x)
    y.backward(own(numbers(11, BATCH, LENGTH, WIDTH)))
    for each in hooks:
        each.remove()
    found = y.detach(), x.grad, {name: p.grad for name, p in region.named_parameters()}
    region.zero_grad()
    return found, told


def compare(ranks, region, *, sp):
    """Hold every rank's pass against one process."""
    y, d_x, d_weights = expected(region)
    for rank, (mine, my_d_x, mine_d) in enumerate(ranks):
        pairs = [(mine, y), (my_d_x, d_x)]
        pairs = [(got, want.split([2, 3], 1)[rank] if sp else want) for got, want in pairs]
        pairs += [
            (got, d_weights[name].chunk(RANKS, 1 if name.startswith("o.") else 0)[rank])
            for name, got in mine_d.items()
        ]
        for got, want in pairs:
            torch.testing.assert_close(torch.as_tensor(got), want, rtol=0, atol=1e-12)


def three_passes(region, kind, run, **options):
    """Run three passes: layers that read one tensor are known from the second on."""
    part, own = split(region, kind, **options)
    return [one_pass(part, own, None if run is None else partial(run, part)) for _ in range(3)]


@pytest.mark.parametrize("shared", [True, False], ids=["memory", "gloo"])
@pytest.mark.parametrize("region", [Region, Twice, Tied])
@pytest.mark.parametrize("again", [False, True], ids=["once", "recomputed"])
def test_what_is_gathered_again_gives_the_same_gradients(region, shared, again):
    options = {"sp": True, "shared": shared, "keep": False, "check_collectives": not shared}
    run = recomputed if again else None
    for found in zip(*run_ranks(three_passes, RANKS, region, Apart, run, **options), strict=True):
        compare([each for each, _ in found], region, sp=True)


def tokens_kept(keep):
    """Return how many tokens' inputs of the split layers one pass keeps for its backward, at most."""
    region, own = split(Region, sp=True, keep=keep)
    found = []
    x = own(numbers(10, BATCH, LENGTH, WIDTH)).clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        region(x)
    kept = [t for t in found if t.shape[-1] == WIDTH and t.numel() % (BATCH * WIDTH) == 0]
    return max(t.numel() // (BATCH * WIDTH) for t in kept)


def test_a_share_is_kept_of_what_is_gathered_again():
    assert run_ranks(tokens_kept, RANKS, True) == [LENGTH] * RANKS
    assert run_ranks(tokens_kept, RANKS, False) == [2, 3]


def recomputed(region, x):
    return checkpoint(region, x, use_reentrant=False)


@pytest.mark.parametrize("sp", [True, False], ids=["shares", "whole"])
@pytest.mark.parametrize("shared", [True, False], ids=["memory", "gloo"])
@pytest.mark.parametrize("region", [Region, Twice, Tied])
def test_gradients_are_those_of_one_process_and_are_announced_once(region, shared, sp):
    ranks = run_ranks(
        three_passes, RANKS, region, Apart, None, sp=sp, shared=shared, check_collectives=not shared
    )
    for found in zip(*ranks, strict=True):
        compare([each for each, _ in found], region, sp=sp)
        for _, told in found:
            assert sorted(told) == sorted({name for name, _ in region(Apart).named_parameters()})


@pytest.mark.parametrize(
    ("kind", "run"),
    [(nn.Linear, None), (nn.Linear, recomputed), (Apart, recomputed)],
    ids=["whole", "whole-recomputed", "recomputed"],
)
def test_layers_that_cannot_leave_a_product_and_layers_run_again_have_the_same_gradients(kind, run):
    for found in zip(*run_ranks(three_passes, RANKS, Region, kind, run, sp=True), strict=True):
        compare([each for each, _ in found], Region, sp=True)


def left_after(kind, *, fails):
    """Return the layers that a pass leaves a place with."""
    region, own = split(Region, kind, sp=True)
    x = own(numbers(10, BATCH, LENGTH, WIDTH)).clone().requires_grad_()
    failing = nullcontext()
    if fails:
        where, name = (TorchGEMM, "forward") if kind is Apart else (F, "linear")
        failing = mock.patch.object(where, name, side_effect=ArithmeticError)
    with suppress(ArithmeticError), failing:
        region(x)
    layers = [(name, gemms_of(getattr(region, name))) for name in COLUMNS]
    return [name for name, gemms in layers if gemms and gemms.wgrad_point is not None]


@pytest.mark.parametrize(("kind", "fails"), [(Apart, False), (Apart, True), (nn.Linear, True)])
def test_no_place_is_left_with_a_layer_that_did_not_take_it(kind, fails):
    assert run_ranks(left_after, RANKS, kind, fails=fails) == [[]] * RANKS


def backward_that_looks_for_nan():
    region, own = split(Region, sp=False)
    x = own(numbers(10, BATCH, LENGTH, WIDTH)).clone().requires_grad_()
    torch.use_deterministic_algorithms(True)  # then what is not written to is NaN
    try:
        with torch.autograd.set_detect_anomaly(True):
            region(x).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    return bool(x.grad.isfinite().all())


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_nothing_is_passed_on_that_anomaly_detection_takes_for_a_mistake():
    assert run_ranks(backward_that_looks_for_nan, RANKS) == [True] * RANKS


def order_of_events(sp, shared, overlap, keep=True):
    """Return what happened in the backward passes of the split layers, pass by pass."""
    region, own = split(Region, sp=sp, shared=shared, overlap=overlap, keep=keep)
    words = {"begin_all_reduce": "sum", "begin_reduce_scatter": "sum", "begin_all_gather": "gather"}
    found, events = [], []
    for name in COLUMNS:
        use_gemm(getattr(region, name), {"weight": Noted(name, events)}, PASSES)

    def noted(name):
        begin, word = getattr(Ranks, name), words[name]

        def begin_and_tell(*args, **options):
            events.append(f"begin {word}")
            pending = begin(*args, **options)
            return lambda: events.append(f"end {word}") or pending()

        return begin_and_tell

    with mock.patch.multiple(Ranks, **{name: noted(name) for name in words}):
        for _ in range(2):
            x = own(numbers(10, BATCH, LENGTH, WIDTH)).clone().requires_grad_()
            y = region(x)
            d_y = torch.ones_like(y)
            events.clear()
            y.backward(d_y)
            found.append(events[2:] if sp else list(events))  # not the gather before `o`
    return found


INPUTS = [f"input {name}" for name in reversed(COLUMNS)]
WEIGHTS = sorted(f"weight {name}" for name in COLUMNS)


@pytest.mark.parametrize("sp", [True, False], ids=["shares", "whole"])
@pytest.mark.parametrize("shared", [True, False], ids=["memory", "gloo"])
def test_the_sum_begins_before_the_products_for_weights_and_is_awaited_after_them(sp, shared):
    for _, known in run_ranks(order_of_events, RANKS, sp, shared, True, check_collectives=not shared):
        assert known[:4] == [*INPUTS, "begin sum"]
        assert sorted(known[4:7]) == WEIGHTS
        assert known[7:] == ["end sum"], "one collective for all three layers"


def gathers_again(region):
    """Return how often the input of one pass after the other is gathered again in backward."""
    region, own = split(region, sp=True, shared=False, keep=False)
    found, begin = [], Ranks.begin_all_gather

    def counted(*args, **options):
        found[-1] += 1
        return begin(*args, **options)

    for _ in range(3):
        x = own(numbers(10, BATCH, LENGTH, WIDTH)).clone().requires_grad_()
        y = region(x)
        found.append(-1)  # the gather before `o` is of its gradient
        with mock.patch.object(Ranks, "begin_all_gather", counted):
            y.backward(torch.ones_like(y))
    return found


@pytest.mark.parametrize(("region", "inputs"), [(Region, 1), (Twice, 2)])
def test_an_input_is_gathered_again_once_for_all_its_layers_in_a_first_pass_too(region, inputs):
    assert run_ranks(gathers_again, RANKS, region) == [[inputs] * 3] * RANKS


def test_what_is_gathered_again_travels_during_the_products_for_the_input():
    for _, known in run_ranks(order_of_events, RANKS, True, False, True, False):
        assert known[:5] == ["begin gather", *INPUTS, "begin sum"]
        assert known[5] == "end gather"
        assert sorted(known[6:9]) == WEIGHTS
        assert known[9:] == ["end sum"]


def test_without_overlap_the_sum_comes_last():
    for found in run_ranks(order_of_events, RANKS, True, False, False):
        for events in found:
            assert sorted(events[:6]) == sorted([*INPUTS, *WEIGHTS])
            assert events[6:] == ["begin sum", "end sum"]


def split_backward():
    """Return gradients where weights wait for a pass of their own, as in zero-bubble schedules."""
    region, own = split(Region, sp=True)
    for _ in range(2):
        region.zero_grad()
        x = own(numbers(10, BATCH, LENGTH, WIDTH)).clone().requires_grad_()
        y = region(x)
        with PASSES.backward(waiting := DeferredGradients()):
            y.backward(own(numbers(11, *expected(Region)[0].shape)))
        assert all(getattr(region, name).weight.grad is None for name in COLUMNS)
        waiting.compute()
    return y.detach(), x.grad, {name: p.grad for name, p in region.named_parameters()}


def test_a_backward_pass_that_is_split_leaves_weights_for_later():
    compare(run_ranks(split_backward, RANKS), Region, sp=True)


def entered_by(in_background):
    """Return the node that a layer's input enters by, where collectives do or do not go on by themselves."""
    region, own = split(Region, sp=False, shared=False)
    (enter,) = region.q._forward_pre_hooks.values()
    boundary = enter.__self__
    del boundary.ranks.in_background  # it asks the exchange
    x = own(numbers(10, BATCH, LENGTH, WIDTH)).requires_grad_()
    with mock.patch.object(type(boundary.ranks.exchange), "in_background", in_background):
        return boundary.enter_layer(x, region.q).grad_fn.name()


@pytest.mark.parametrize(("in_background", "node"), [(True, "_EnterBackward"), (False, "CopyBackward")])
def test_it_is_left_out_where_nothing_goes_on_in_the_background(in_background, node):
    assert run_ranks(entered_by, RANKS, in_background) == [node] * RANKS
