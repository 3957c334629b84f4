"""The executor does what an action says, when it says so, and keeps activations no longer than it must."""

import pytest
import torch

from nanotrain_core.batch import Batch
from nanotrain_core.builtin.transformer_config import TransformerConfig
from nanotrain_core.errors import NanotrainError
from nanotrain_core.layout.gradients import LocalGradients, register_gradient_hook
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.models.transformer import Transformer
from nanotrain_core.pipeline.actions import Action, Part
from nanotrain_core.pipeline.executor import Executor
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.pipeline.weight_gradients import DeferredGradients
from nanotrain_core.precision.gemm import TorchGEMM
from nanotrain_core.run.model_parts import split_linear_layers

CONFIG = TransformerConfig(layers=2, width=16, heads=2, vocab=32)


def order(text):
    """Read actions such as ``F0.1``: forward, stage 0, microbatch 1."""
    return [Action(word[0], *map(int, word[1:].split("."))) for word in text.split()]


@pytest.fixture
def world():
    return Mesh(Layout({"dense": View(("dp",), (1,))}))


def stages(*parts, passes=None):
    """Return parts of a small model with fixed weights; with ``passes``, their linear layers can defer."""
    model, built = Transformer(CONFIG), {}
    for number, part in enumerate(parts):
        built[number] = model.build(part).to_empty(device="cpu").double()
        for name, parameter in built[number].named_parameters():
            generator = torch.Generator().manual_seed(sum(name.encode()))
            torch.nn.init.normal_(parameter, std=0.2, generator=generator)
        if passes is not None:
            split_linear_layers(built[number], TorchGEMM(), passes)
    return built


WHOLE = [Part.whole(2)]
HALVES = [
    Part(first=0, last=1, has_embedding=True, has_head=False),
    Part(first=1, last=2, has_embedding=False, has_head=True),
]
#: Both halves of the model on one rank, which sends to itself.
SPLIT = "F0.0 F1.0 B1.0 F0.1 F1.1 B1.1 W1.0 B0.0 W0.0 W1.1 B0.1 W0.1"


def batches(number):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(32, (number, 2, 9), generator=generator)
    return [Batch(each[:, :-1], each[:, 1:]) for each in tokens]


def run(mesh, parts, text, microbatches=2, frozen=()):
    """Run actions and return the gradients by name, and the summed loss."""
    passes, gradients = Passes(), LocalGradients()
    modules = stages(*parts, passes=passes)
    freeze(modules, frozen)
    executor = Executor(modules, gradients, mesh, owners=[0] * len(parts), passes=passes)
    losses = executor.run(order(text), batches(microbatches), {"lm": torch.tensor(0.5)})
    named = [pair for module in modules.values() for pair in module.named_parameters()]
    return {name: gradients.gradient(p) for name, p in named if p.requires_grad}, losses["lm"]


def freeze(modules, names):
    for module in modules.values():
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.startswith(tuple(names)))


def test_any_order_has_the_gradients_of_the_plain_one(world):
    expected, loss = run(world, WHOLE, "F0.0 B0.0 F0.1 B0.1")
    for parts, text in (
        (WHOLE, "F0.0 F0.1 B0.1 B0.0"),
        (WHOLE, "F0.0 B0.0 F0.1 B0.1 W0.1 W0.0"),
        (HALVES, SPLIT),
    ):
        gradients, same_loss = run(world, parts, text)
        assert gradients.keys() == expected.keys()
        torch.testing.assert_close(same_loss, loss, rtol=1e-12, atol=0)
        for name in expected:
            torch.testing.assert_close(gradients[name], expected[name], rtol=0, atol=1e-12)


FIRST_STAGE = ("embed", "layers.0")


def test_a_first_stage_may_be_frozen(world):
    """autograd had refused its output, which nothing trained leads to."""
    expected, _ = run(world, WHOLE, "F0.0 B0.0 F0.1 B0.1", frozen=FIRST_STAGE)
    for text in (SPLIT, "F0.0 F1.0 B1.0 B0.0 F0.1 F1.1 B1.1 B0.1"):
        gradients, _ = run(world, HALVES, text, frozen=FIRST_STAGE)
        torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-12)


def test_values_of_a_microbatch_are_computed_with_a_frozen_first_stage(world):
    modules = stages(*HALVES)
    freeze(modules, FIRST_STAGE)
    executor = Executor(modules, LocalGradients(), world, owners=[0, 0])
    found = {(each.stage, each.what) for each in executor.compute(*batches(1), {"lm": torch.tensor(1.0)})}
    assert (1, "gradient of head.weight") in found
    assert (0, "gradient of the output") in found
    assert (0, "gradient of embed.weight") not in found


def test_a_model_of_which_nothing_is_trained_is_refused(world):
    with pytest.raises(NanotrainError, match="no parameter that the loss depends on is trained"):
        run(world, WHOLE, "F0.0 B0.0", microbatches=1, frozen=("",))


def test_a_split_backward_leaves_the_products_of_linear_layers_to_w(world, monkeypatch):
    log, passes = [], Passes()
    modules = stages(*HALVES, passes=passes)
    for module in modules.values():
        for name, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: log.append(name) if p.grad is not None else None
            )
    compute = DeferredGradients.compute

    def logged(self):
        log.append("W")
        compute(self)

    monkeypatch.setattr(DeferredGradients, "compute", logged)
    executor = Executor(modules, LocalGradients(), world, owners=[0, 0], passes=passes)
    executor.run(order("F0.0 F1.0 B1.0 B0.0 W1.0 W0.0"), batches(1), {"lm": torch.tensor(1.0)})
    before, last, first = " ".join(log).split("W")
    linear = {
        f"{block}.weight"
        for block in ("attn.q", "attn.k", "attn.v", "attn.o", "ffn.gate", "ffn.up", "ffn.down")
    }
    assert set(last.split()) == {f"layers.1.{name}" for name in linear}
    assert set(first.split()) == {f"layers.0.{name}" for name in linear}
    assert {"embed.weight", "head.weight", "norm.weight", "layers.0.ffn_norm.weight"} <= set(before.split())


def test_activations_live_from_f_to_b(world):
    modules, alive = stages(*WHOLE), []
    executor = Executor(modules, LocalGradients(), world)
    forward = executor._forward

    def counted(action):
        forward(action)
        alive.append(len(executor._pending))

    executor._forward = counted
    executor.run(order("F0.0 F0.1 B0.0 F0.2 B0.1 B0.2 F0.3 B0.3"), batches(4), {"lm": torch.tensor(1.0)})
    assert alive == [1, 2, 2, 1]


def test_a_step_that_broke_off_leaves_nothing_to_the_next(world):
    modules, gradients = stages(*HALVES), LocalGradients()
    executor = Executor(modules, gradients, world, owners=[0, 0])
    with pytest.raises(KeyError):
        executor.run(order("F0.0 F1.0 B0.0"), batches(1), {"lm": torch.tensor(0.5)})  # before stage 1's
    whole_step = "F0.0 F1.0 B1.0 B0.0"
    executor.run(order(whole_step), batches(1), {"lm": torch.tensor(0.5)})
    expected, _ = run(world, HALVES, whole_step, microbatches=1)
    for module in modules.values():
        for name, parameter in module.named_parameters():
            assert torch.equal(gradients.gradient(parameter), expected[name]), name


def test_gradients_deferred_by_a_step_that_broke_off_are_not_waited_for(world):
    """Else no later gradient of these weights would count as complete, and the weights were never freed."""
    passes, gradients, complete = Passes(), LocalGradients(), []
    modules = stages(*HALVES, passes=passes)
    placed = [parameter for module in modules.values() for parameter in module.parameters()]
    for parameter in placed:
        register_gradient_hook(parameter, gradients)
    gradients.dtype, gradients.on_final_gradient = None, complete.append
    executor = Executor(modules, gradients, world, owners=[0, 0], passes=passes)
    with pytest.raises(KeyError):
        executor.run(order("F0.0 F1.0 B1.0 B0.1 W1.0 W0.0"), batches(1), {"lm": torch.tensor(0.5)})
    assert passes.weights_version is None
    assert passes.deferred is None
    assert not passes.in_backward
    for parameter in placed:
        parameter.grad = None
    executor.run(order("F0.0 F1.0 B1.0 B0.0"), batches(1), {"lm": torch.tensor(0.5)})
    assert {id(parameter) for parameter in complete} == {id(parameter) for parameter in placed}
    assert all(parameter.grad is not None for parameter in placed)


def test_two_runs_in_one_process_do_not_see_each_others_passes(world):
    """One defers; the other, whose pass goes on inside of that, gets all of its gradients at once."""
    passes, gradients = Passes(), LocalGradients()
    outer, found = stages(*WHOLE, passes=passes), []
    executor = Executor(outer, gradients, world, passes=passes)
    backward = executor._backward

    def during(action):
        with passes.backward(DeferredGradients()):
            found.append(run(world, WHOLE, "F0.0 B0.0", microbatches=1)[0])
            assert passes.in_backward
        backward(action)

    executor._backward = during
    executor.run(order("F0.0 B0.0 W0.0"), batches(1), {"lm": torch.tensor(0.5)})
    alone, _ = run(world, WHOLE, "F0.0 B0.0", microbatches=1)
    for name, parameter in outer[0].named_parameters():
        assert torch.equal(found[0][name], alone[name]), name
        assert torch.equal(parameter.grad, alone[name]), name


def test_passes_without_a_step_are_not_counted(world):
    passes, built = Passes(), stages(*WHOLE)
    executor = Executor(built, LocalGradients(), world, passes=passes)
    seen = []
    built[0].register_forward_hook(lambda *_: seen.append((passes.counted, built[0].training)))
    executor.forward(batches(1)[0])
    executor.logits(batches(1)[0].tokens)
    assert (seen, passes.counted) == ([(False, False)] * 2, True)
