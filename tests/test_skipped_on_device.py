"""Where the host would wait for the device a step is skipped there: bit by bit as if it had not been."""

from contextlib import nullcontext

import pytest
import torch
from nanotrain_deepseek.samples import V3
from test_error_feedback import Coarse
from torch import nn

from nanotrain_core.builtin.configs import AdamWConfig, PrecisionConfig, SGDConfig
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.errors import Diverged, PluginError
from nanotrain_core.layout.gradients import LocalGradients
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import place, placed_parameters
from nanotrain_core.moe.routing import unless
from nanotrain_core.optim.adamw import AdamW
from nanotrain_core.optim.sgd import SGD
from nanotrain_core.precision.uniform import bf16, fp32, fp64
from nanotrain_core.script.optimizer import ScriptOptimizer
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_run, push


@pytest.fixture(autouse=True)
def late(monkeypatch):
    """Act as on a device that the host would have to wait for."""
    monkeypatch.setattr(Mesh, "device_is_async", True)


class Setup:
    """A small model with an optimizer: rows of 32, so that moments of 8 bits have groups."""

    def __init__(self, make, config, precision):
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(32, 6), nn.Linear(6, 3)).to(precision.parameter_dtype)
        self.mesh = Mesh(Layout({"dense": View(("dp",), (1,))}))
        self.placed = placed_parameters([self.model], place([self.model], self.mesh.layout))
        self.gradients, self.optimizer = LocalGradients(), make(config)
        self.gradients.attach(self.placed, self.mesh, precision.gradient_dtype)
        self.optimizer.setup(self.placed, precision, self.gradients, self.mesh)

    def step(self, number, broken=None):
        """Step; ``broken`` is what one element of the last gradient is instead."""
        for each, parameter in enumerate(self.model.parameters()):
            generator = torch.Generator().manual_seed(10 * number + each)
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.grad_dtype)
        if broken is not None:
            parameter.grad[1] = broken
        stats = self.optimizer.step()
        self.gradients.zero()
        return stats

    def bits(self):
        tensors = [*self.model.parameters(), *(block.tensor for block in self.optimizer.blocks())]
        return [tensor.detach().clone() for tensor in tensors]


KINDS = {
    "adamw": (AdamW, AdamWConfig(lr=0.01, weight_decay=0.1, clip_norm=1.0)),
    "never clipping": (AdamW, AdamWConfig(lr=0.01, clip_norm=0.0)),
    "bfloat16 moments": (AdamW, AdamWConfig(lr=0.01, moment_dtype="bfloat16")),
    "int8 moments": (AdamW, AdamWConfig(lr=0.01, moment_dtype="int8")),
    "sgd": (SGD, SGDConfig(lr=0.1, weight_decay=0.1, clip_norm=1.0)),
    "momentum": (SGD, SGDConfig(lr=0.1, momentum=0.9)),
}


@pytest.mark.parametrize("broken", [float("inf"), float("nan")])
@pytest.mark.parametrize("precision", [fp32, bf16, fp64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_leaves_weights_state_and_counters_as_they_were(kind, precision, broken):
    made, plain = (Setup(*KINDS[kind], precision(PrecisionConfig())) for _ in range(2))
    for number in (1, 2):
        assert not made.step(number).skipped
        plain.step(number)
    before = made.bits()
    stats = made.step(3, broken)
    assert isinstance(stats.skipped, torch.Tensor)
    assert stats.skipped.dtype == torch.bool
    assert stats.skipped
    assert not stats.grad_norm.isfinite()
    assert all(map(torch.equal, made.bits(), before))
    made.step(4)
    plain.step(4)
    assert all(map(torch.equal, made.bits(), plain.bits()))
    assert not all(map(torch.equal, made.bits(), before))


@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_are_not_skipped_are_those_of_a_cpu(kind, monkeypatch):
    made = Setup(*KINDS[kind], bf16(PrecisionConfig()))
    monkeypatch.setattr(Mesh, "device_is_async", False)
    read = Setup(*KINDS[kind], bf16(PrecisionConfig()))
    for number in range(4):
        monkeypatch.setattr(Mesh, "device_is_async", True)
        one = made.step(number)
        monkeypatch.setattr(Mesh, "device_is_async", False)
        assert torch.equal(one.grad_norm, read.step(number).grad_norm)
    for found, expected in zip(made.bits(), read.bits(), strict=True):
        if kind == "momentum":  # torch's fused kernel rounds once less
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-6)
        else:
            assert torch.equal(found, expected)


def test_masters_that_are_decoded_have_the_host_read_the_norm():
    made = Setup(AdamW, AdamWConfig(), Coarse())
    before = made.bits()
    assert made.step(1, float("inf")).skipped is True
    assert all(map(torch.equal, made.bits(), before))
    assert made.step(2).skipped is False


class Preconditioned(AdamW):
    """Notes for which steps it was called."""

    calls = 0

    def precondition(self, gradients):
        self.calls += 1


def test_gradients_of_a_skipped_step_are_not_preconditioned():
    made = Setup(Preconditioned, AdamWConfig(), bf16(PrecisionConfig()))
    assert made.step(1, float("inf")).skipped is True
    assert made.optimizer.calls == 0
    made.step(2)
    assert made.optimizer.calls == 1


# --- sharded over ranks -----------------------------------------------------------------------------


def sharded_bits(case):
    """Return what two ranks hold after steps of which the second overflows on one, and the third is fine."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Mesh, "device_is_async", True)
        run = make_run(case, {"precision": {"use": "bf16"}})
        found, skipped = [], []
        for step, scale in enumerate((1.0, float("inf") if run.mesh.rank else 1.0, 1.0)):
            push(run, step, scale)
            skipped.append(run.optimizer.step().skipped)
            run.gradients.zero()
            run.optimizer.wait([placed.parameter for placed in run.placed])
            tensors = [*(p.parameter for p in run.placed), *(b.tensor for b in run.optimizer.blocks())]
            found.append([tensor.detach().clone() for tensor in tensors])
        return found, skipped


@pytest.mark.parametrize("config", [{}, {"moment_dtype": "int8"}])
def test_all_ranks_of_zero_skip_what_overflows_on_one(config):
    case = Case("optimizer", use="zero12", config={"bucket_mb": 0.01, **config}, topology={"dp": 2})
    for (first, second, third), skipped in run_ranks(sharded_bits, 2, case):
        assert [bool(each) for each in skipped] == [False, True, False]
        assert all(isinstance(each, torch.Tensor) for each in skipped)
        assert all(map(torch.equal, first, second))
        assert not all(map(torch.equal, second, third))


# --- routers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [False, True])
def test_a_step_skipped_on_the_device_moves_no_router_bias(broken):
    model = {**V3, "use": "deepseek", "bias_update_rate": 0.01, "init_std": 0.3}
    case = Case("precision", use="fp32", overrides={"model": model, "optimizer": {"use": "adamw"}})
    engine = RuntimeEngine.from_recipe(case.recipe(), registry=case.registry())
    engine.fit(steps=1)
    before = {p.placement.name: p.parameter.clone() for p in engine.run.placed}
    biases = [name for name in before if name.endswith("bias")]
    assert biases
    if broken:
        finish = engine.run.gradients.finish

        def overflow():
            finish()
            engine.run.placed[0].parameter.grad[0] = float("nan")

        engine.run.gradients.finish = overflow
    with pytest.raises(Diverged) if broken else nullcontext():
        engine.fit(steps=2)
    after = {p.placement.name: p.parameter for p in engine.run.placed}
    assert engine.loads
    moved = {name for name, found in before.items() if not torch.equal(after[name], found)}
    assert moved == set() if broken else moved >= {*biases}


def test_a_router_that_replaces_its_bias_is_told_to_change_it_in_place():
    """It could not be put back, and would move on skipped steps of a GPU alone."""
    router = nn.Module()
    router.register_buffer("bias", torch.zeros(2))
    with unless(torch.tensor(True), [router]):
        router.bias.add_(1.0)
    assert not router.bias.any()
    undo = unless(torch.tensor(False), [router])
    with pytest.raises(PluginError, match="replaced its bias; expected a change in place"), undo:
        router.bias = router.bias + 1.0


# --- scripts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
def test_a_scripts_optimizer_skips_on_the_device_if_it_is_fused(fused):
    made = Setup(*KINDS["adamw"], fp32(PrecisionConfig()))
    inner = torch.optim.AdamW(made.model.parameters(), lr=0.01, fused=fused)
    made.optimizer = ScriptOptimizer(inner, made.placed, made.gradients, made.mesh, 1.0)
    for number, broken in ((1, None), (2, float("inf"))):
        torch.manual_seed(number)
        made.model(torch.randn(4, 32)).sum().backward()
        if broken is not None:
            made.model[0].weight.grad[0, 0] = broken
            before = [p.detach().clone() for p in made.model.parameters()]
            state = [t.clone() for each in inner.state.values() for t in each.values()]
        stats = made.optimizer.step()
        made.gradients.zero()
    assert stats.skipped
    assert isinstance(stats.skipped, torch.Tensor) is fused
    assert all(map(torch.equal, before, made.model.parameters()))
    after = [t for each in inner.state.values() for t in each.values()]
    assert all(map(torch.equal, state, after))


def test_fused_momentum_that_begins_with_a_skipped_step_begins_at_zero():
    """torch makes it of memory that nobody has written to, and the skipped kernel leaves it so."""
    made = Setup(*KINDS["adamw"], fp32(PrecisionConfig()))
    inner = torch.optim.SGD(made.model.parameters(), lr=0.01, momentum=0.9, fused=True)
    made.optimizer = ScriptOptimizer(inner, made.placed, made.gradients, made.mesh, 0.0)
    for broken in (True, False, False):
        torch.manual_seed(1)
        made.model(torch.randn(4, 32)).sum().backward()
        if broken:
            made.model[0].weight.grad[0, 0] = float("nan")
        gradients = [p.grad.clone() for p in made.model.parameters()]
        stats = made.optimizer.step()
        made.gradients.zero()
        assert bool(stats.skipped) is broken
        momentum = [inner.state[p].get("momentum_buffer") for p in made.model.parameters()]
        if broken:
            assert momentum == [None] * 4
            first = None
        elif first is None:
            assert all(map(torch.equal, momentum, gradients))
            first = momentum
    assert isinstance(stats.skipped, torch.Tensor)
