"""Masters that lose much of what is stored: optimizers carry the loss in their momentum, or refuse."""

import json
from itertools import count

import pytest
import torch
from test_optimizers import gradients_of, make_model

from nanotrain_core.builtin.configs import AdamWConfig, PrecisionConfig, SGDConfig
from nanotrain_core.contracts import ErrorFeedback, MasterWeight
from nanotrain_core.errors import NanotrainError
from nanotrain_core.layout.gradients import LocalGradients
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import place, placed_parameters
from nanotrain_core.optim import master_optimizer as optimizers
from nanotrain_core.optim.adamw import AdamW
from nanotrain_core.optim.master_optimizer import MasterOptimizer
from nanotrain_core.optim.master_shards import waves
from nanotrain_core.optim.sgd import SGD
from nanotrain_core.precision.uniform import fp32, fp64
from nanotrain_core.recipe.tree import OptimizerConfig

STEP = 0.25


class CoarseMaster(ErrorFeedback):
    """Keeps multiples of 1/4, and decodes them anew whenever asked."""

    def __init__(self, weight):
        self.weight = weight
        self.store(weight.clone())

    def load(self):
        return self.weight.clone()

    def store(self, value):
        self.weight.copy_((value / STEP).round() * STEP)

    def error(self, value):
        return value - self.weight


class Coarse:
    """float64 with coarse masters."""

    def __init__(self):
        base = fp32(PrecisionConfig())
        self.parameter_dtype = self.gradient_dtype = torch.float64
        self.loss_scale, self.convert = base.loss_scale, base.convert

    def master(self, weight, piece):
        return CoarseMaster(weight)


def set_up(make, config, precision):
    model = make_model(torch.float64)
    mesh = Mesh(Layout({"dense": View(("dp",), (1,))}))
    placed = placed_parameters([model], place([model], mesh.layout))
    gradients, optimizer = LocalGradients(), make(config)
    gradients.attach(placed, mesh, torch.float64)
    optimizer.setup(placed, precision, gradients, mesh)
    return model, gradients, optimizer


def train(make, config, steps, lrs=None, precision=None):
    model, gradients, optimizer = set_up(make, config, precision or Coarse())
    for step in range(steps):
        for group in optimizer.inner.param_groups:
            group["lr"] = lrs[step] if lrs else config.lr
        for parameter, gradient in zip(model.parameters(), gradients_of(model, step), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        gradients.zero()
    return model, optimizer


def coarse(value):
    return (value / STEP).round() * STEP


def adam_by_hand(weight, gradients, lr, betas, eps, decay):
    """ECO's algorithm on one tensor, in float64, from the paper's formulae."""
    m, v, (b1, b2) = torch.zeros_like(weight), torch.zeros_like(weight), betas
    weight = coarse(weight)
    for t, g in enumerate(gradients, start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        wide = (1 - lr * decay) * weight - lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)
        weight = coarse(wide)
        root = (v / (1 - b2**t)).sqrt() + eps
        m = m + (1 - b1**t) / lr * (1 - 1 / b1) * root * (wide - weight)
    return weight, m


def sgd_by_hand(weight, gradients, lr, momentum):
    m, weight = torch.zeros_like(weight), coarse(weight)
    for g in gradients:
        m = momentum * m + g
        wide = weight - lr * m
        weight = coarse(wide)
        m = m + (1 / lr) * (1 - 1 / momentum) * (wide - weight)
    return weight, m


def test_adamw_carries_the_error_as_the_paper_says():
    config = AdamWConfig(lr=0.05, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, clip_norm=0.0)
    model, optimizer = train(AdamW, config, 6)
    each = [gradients_of(model, step) for step in range(6)]
    for number, (shard, start) in enumerate(
        zip(optimizer.master_shards, make_model(torch.float64).parameters(), strict=True)
    ):
        decay = 0.3 if start.dim() > 1 else 0.0
        own = [gradients[number] for gradients in each]
        weight, moment = adam_by_hand(start.detach(), own, 0.05, (0.8, 0.9), 1e-6, decay)
        assert torch.equal(shard.parameter.detach(), weight)
        # torch keeps the step in float32, and so does the correction
        torch.testing.assert_close(
            optimizer.inner.state[shard.weight]["exp_avg"], moment, rtol=1e-6, atol=1e-9
        )


def test_sgd_carries_the_error_in_its_velocity():
    model, optimizer = train(SGD, SGDConfig(lr=0.05, momentum=0.9, clip_norm=0.0), 6)
    each = [gradients_of(model, step) for step in range(6)]
    for number, (shard, start) in enumerate(
        zip(optimizer.master_shards, make_model(torch.float64).parameters(), strict=True)
    ):
        own = [gradients[number] for gradients in each]
        weight, velocity = sgd_by_hand(start.detach(), own, 0.05, 0.9)
        assert torch.equal(shard.parameter.detach(), weight)
        found = optimizer.inner.state[shard.weight]["momentum_buffer"]
        torch.testing.assert_close(found, velocity, rtol=0, atol=1e-12)


def test_updates_below_the_rounding_add_up_when_they_are_carried():
    """Each update is a tenth of what would round away."""
    config = SGDConfig(lr=0.01, momentum=0.5, clip_norm=0.0)
    model, gradients, optimizer = set_up(SGD, config, Coarse())
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(200):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        gradients.zero()
    for old, new in zip(before, model.parameters(), strict=True):
        # 200 steps of lr / (1 - momentum), to the rounding
        torch.testing.assert_close(old - new, torch.full_like(old, 200 * 0.02), rtol=0, atol=2 * STEP)


def test_at_a_rate_of_zero_nothing_is_carried_and_nothing_breaks():
    _, optimizer = train(AdamW, AdamWConfig(lr=0.1, clip_norm=0.0), 3, lrs=[0.1, 0.0, 0.1])
    for state in optimizer.inner.state.values():
        assert state["exp_avg"].isfinite().all()


class Exact(Coarse):
    """float64 with masters that are loaded and stored, and lose nothing."""

    def master(self, weight, piece):
        master = MasterWeight()
        master.load, master.store = weight.clone, weight.copy_
        return master


class Once(Exact):
    """float64 with masters that keep all, and once report an error of 1 nevertheless."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def master(self, weight, piece):
        stores, master = count(), ErrorFeedback()
        master.load, master.store = weight.clone, weight.copy_
        master.error = lambda value: torch.full_like(value, float(next(stores) == self.at))
        return master


def moved(make, config, rates, at, resumed):
    """Return how far a run goes whose masters report an error in step ``at``; optionally resume it after."""
    _, gradients, optimizer = set_up(make, config, Once(at))
    optimizers = [optimizer]
    for step, rate in enumerate(rates):
        if step == at + 1 and resumed:
            _, gradients, new = set_up(make, config, Once(-1))
            saved = {block.name: block.tensor.clone() for block in optimizers[-1].blocks()}
            for old, shard in zip(optimizers[-1].master_shards, new.master_shards, strict=True):
                shard.parameter.data.copy_(old.parameter)
            for block in new.blocks():
                block.tensor.copy_(saved[block.name])
            new.load_meta(json.loads(json.dumps(optimizers[-1].meta())))
            optimizers.append(new)
        for group in optimizers[-1].inner.param_groups:
            group["lr"] = 0.0 if group.get("frozen") else rate
        for shard in optimizers[-1].master_shards:
            shard.parameter.grad = torch.ones_like(shard.parameter)
        optimizers[-1].step()
        gradients.zero()
    return [shard.parameter.detach().clone() for shard in optimizers[-1].master_shards]


class FirstFrozen(SGD):
    """SGD whose first parameter group has a rate of 0."""

    def options(self, shard):
        frozen = shard is self.master_shards[0]
        return {"weight_decay": 0.0, "frozen": frozen, "lr": 0.0 if frozen else self.config.lr}


@pytest.mark.parametrize("resumed", [False, True], ids=["through", "resumed"])
@pytest.mark.parametrize(
    ("rates", "share"),
    [
        ((1.0,), 1.0),
        ((100.0,), 1.0),
        ((0.0, 100.0), 0.7),  # momentum decays in a step that moves nothing
        ((2.0,), 2.0),  # what schedules change is left to them
    ],
    ids=["constant", "jump", "zero", "schedule"],
)
@pytest.mark.parametrize(
    ("make", "config"),
    [
        (SGD, SGDConfig(lr=0.01, momentum=0.7, clip_norm=0.0)),
        (FirstFrozen, SGDConfig(lr=0.01, momentum=0.7, clip_norm=0.0)),
        (AdamW, AdamWConfig(lr=0.01, betas=(0.7, 0.9), weight_decay=0.0, clip_norm=0.0)),
    ],
    ids=["sgd", "frozen", "adamw"],
)
def test_later_steps_move_the_weight_by_the_error_also_if_the_rate_jumps(make, config, rates, share, resumed):
    """It had been multiplied by the ratio of the rates: by 100 where a phase raised the rate so far."""
    at = 30
    rates = [0.01] * (at + 1) + [0.01 * rate for rate in rates] + [0.01 * rates[-1]] * 60
    carried, exact = (moved(make, config, rates, n, resumed and n >= 0) for n in (at, -1))
    for one, other in [*zip(carried, exact, strict=True)][make is FirstFrozen :]:
        torch.testing.assert_close(one - other, torch.full_like(one, share), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize(
    ("make", "config"),
    [(SGD, SGDConfig(lr=0.1, momentum=0.0)), (AdamW, AdamWConfig(betas=(0.0, 0.9)))],
    ids=["sgd", "adamw"],
)
def test_an_optimizer_without_momentum_refuses_such_masters(make, config):
    with pytest.raises(NanotrainError, match=r"0\.weight and 5 others.*momentum"):
        set_up(make, config, Coarse())


# --- what is decoded is let go ----------------------------------------------------------------------


def test_no_decoded_weight_outlives_a_step():
    _, optimizer = train(AdamW, AdamWConfig(lr=0.1), 2)
    assert all(shard.weight.numel() == 0 and shard.weight.grad is None for shard in optimizer.master_shards)


@pytest.mark.parametrize(
    ("limit", "expected"), [(1, [1] * 6), (42, [2, 4]), (10**6, [6])], ids=["each", "some", "all"]
)
def test_weights_are_loaded_in_waves_that_change_nothing(limit, expected, monkeypatch):
    """The model's parameters have 35, 7, 7, 7, 14 and 2 elements."""
    config = AdamWConfig(lr=0.05, weight_decay=0.1)
    whole, optimizer = train(AdamW, config, 3)
    assert [len(wave) for wave in waves(optimizer.master_shards, limit)] == expected
    monkeypatch.setattr(optimizers, "waves", lambda shards: waves(shards, limit))
    cut, optimizer = train(AdamW, config, 3)
    assert [len(group["params"]) for group in optimizer.inner.param_groups] == [2, 4]
    for one, other in zip(whole.parameters(), cut.parameters(), strict=True):
        assert torch.equal(one, other)


def test_torch_sees_no_weight_that_is_not_loaded(monkeypatch):
    """An optimizer of torch's need not skip those without a gradient."""
    _, _, optimizer = set_up(AdamW, AdamWConfig(), Coarse())
    monkeypatch.setattr(optimizers, "waves", lambda shards: waves(shards, 42))
    seen, step = [], optimizer.inner.step

    def look():
        seen.append([w.numel() for group in optimizer.inner.param_groups for w in group["params"]])
        step()

    optimizer.inner.step = look
    for parameter in (shard.parameter for shard in optimizer.master_shards):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert seen == [[35, 7], [14, 7, 7, 2]]


class Counting(torch.optim.SGD):
    """Divides the learning rate by the number of steps, which it counts itself."""

    t = 0

    def step(self):
        self.t += 1
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(weight.grad, alpha=group["lr"] / self.t)


class GroupCounting(torch.optim.SGD):
    """Counts in its groups."""

    def step(self):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for weight in group["params"]:
                weight.sub_(weight.grad, alpha=group["lr"] / group["k"])


class TensorCounting(Counting):
    """Counts in a tensor."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.t = torch.zeros(())


class CountedOutside(Counting):
    """The count is that of the training steps: see Decayed.precondition."""

    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(weight.grad, alpha=group["lr"] / self.t)


def decayed(inner, precision):
    """Return the model after three steps of an optimizer whose ``inner`` this is."""

    class Decayed(MasterOptimizer):
        def make(self, groups):
            return inner(groups, lr=self.config.lr)

        def initial_state(self, weight):
            return {}

        def precondition(self, gradients):
            if inner is CountedOutside:
                self.inner.t += 1

    return train(Decayed, OptimizerConfig(lr=0.5, clip_norm=0.0), 3, precision=precision)[0]


@pytest.mark.parametrize(
    ("inner", "what"), [(Counting, "self.t"), (TensorCounting, "self.t"), (GroupCounting, "group 0.k")]
)
def test_a_count_of_steps_that_several_calls_would_advance_is_refused(inner, what, monkeypatch):
    """The model had trained with a count for each wave of its weights, without a word."""
    monkeypatch.setattr(optimizers, "waves", lambda shards: waves(shards, 42))
    with pytest.raises(NanotrainError, match=rf"{inner.__name__}.step changes {what}, but a step may"):
        decayed(inner, Exact())


def test_a_count_of_steps_advances_once_in_a_step(monkeypatch):
    monkeypatch.setattr(optimizers, "waves", lambda shards: waves(shards, 42))
    plain, cut = decayed(Counting, fp64(PrecisionConfig())), decayed(CountedOutside, Exact())
    for one, other in zip(plain.parameters(), cut.parameters(), strict=True):
        assert torch.equal(one, other)
