"""``run.cuda_graphs``: replayed microbatches train as eager ones do.

Most machines have no GPU: :mod:`recorded_graph` records a CPU's operators, and replays them.
"""

from types import SimpleNamespace
from unittest import mock

import attrs
import pytest
import torch
from captured_runs import EVEN, STEPS, case, differences, on_the_device, values
from compiled import MODELS
from recorded_graph import recorded_graphs
from structlog.testing import capture_logs
from torch._dynamo.utils import counters

from nanotrain_core import engine
from nanotrain_core.compile import captured_executor
from nanotrain_core.testing import probe, run_ranks


@pytest.mark.full_cases("llama-fp32", "gpt-bf16", "gpt-fp16", "deepseek-bf16", "deepseek-fp16")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("model", MODELS)
def test_replayed_microbatches_train_as_eager_ones_do(model, precision):
    with on_the_device:
        differ, replays = differences(case(model, precision={"use": precision}))
    assert not differ
    assert replays == STEPS * 3 - 2


def test_a_shorter_last_microbatch_is_not_replayed():
    differ, replays = differences(case(batch={**EVEN, "sequences": 5}))
    assert not differ
    assert replays == STEPS * 2 - 2


def test_documents_are_masked_in_replays_too(tmp_path):
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text("a quick fox"[: 3 + number % 7], encoding="utf-8")
    text = {"use": "text", "paths": [str(tmp_path)], "mask_documents": True}
    differ, replays = differences(case(data=text, vocab=257))
    assert not differ
    assert replays == STEPS * 3 - 2


def test_a_phase_with_another_length_is_captured_anew():
    phases = [
        {"until_tokens": 2 * 24, "batch": {"length": 4}},
        {"until_tokens": 10_000, "batch": {"length": 8}},
    ]
    differ, replays = differences(case(phase=phases))
    assert not differ
    assert replays == STEPS * 3 - 2 * 2


#: Three pairs of each head are rotated: of one pair the angle does not depend on the base.
ROTATED = {"heads": 3, "kv_heads": 3}


@pytest.mark.full_cases("deepseek")
@pytest.mark.parametrize("model", ["llama", "deepseek"])
def test_a_phase_that_changes_the_model_is_captured_anew(model):
    """Another base of the rotary positions is another constant in the passes."""
    phases = [{"until_tokens": 2 * 48}, {"until_tokens": 10_000, "model": {"rope_theta": 50.0}}]
    plain = case(model, phase=phases)
    wide = ROTATED if model == "llama" else {"rope_size": 6}
    plain = attrs.evolve(plain, overrides={**plain.overrides, "model": {**plain.overrides["model"], **wide}})
    with on_the_device:
        differ, replays = differences(plain)
    assert not differ
    assert replays == 2 * (2 * 3 - 2)


def fitted_twice(change, **run):
    """Return the weights after two calls of ``fit`` with a change of the model between them."""
    plain = case(run=run)
    made = probe.make_engine(plain, {})
    made.fit(steps=2)
    change(made)
    made.fit(steps=4)
    return {placed.placement.name: placed.parameter.tolist() for placed in made.run.placed}


def freeze(made):
    for placed in made.run.placed:
        placed.parameter.requires_grad_(placed.placement.name != "embed.weight")


def halve(made):
    made.run.stages[0].norm.register_forward_hook(lambda module, args, output: output * 0.5)


@pytest.mark.full_cases("halve")
@pytest.mark.parametrize("change", [freeze, halve])
def test_what_a_script_changes_between_two_fits_is_noticed(change):
    expected = fitted_twice(change)
    with recorded_graphs() as made:
        assert fitted_twice(change, cuda_graphs=True) == expected
    assert made[0].replays == 2 * (2 * 3 - 2)


def test_a_second_fit_goes_on_with_the_graph():
    with recorded_graphs() as made:
        fitted_twice(lambda made: None, cuda_graphs=True)
    assert made[0].replays == 4 * 3 - 2


@pytest.mark.full
def test_only_steps_in_which_a_monitor_reads_its_taps_are_not_replayed():
    """``health`` reads the first 20, and then every 20th."""
    differ, replays = differences(case(monitor=[{"use": "health"}], run={"steps": 24}))
    assert not differ
    assert replays == 4 * 3 - 2


@pytest.mark.full
def test_a_run_in_which_nothing_is_replayed_says_why():
    monitor = [{"use": "health", "every": 1}]
    with recorded_graphs() as made, capture_logs() as logs:
        probe.train(case(monitor=monitor, run={"cuda_graphs": True, "steps": 32}), {})
    assert not made[0].replays
    (said,) = [each for each in logs if each["event"] == "run.cuda_graphs has no effect"]
    assert said["why"].endswith("in 30 steps: a monitor reads modules in every step: raise run.log_every")


def test_the_most_frequent_reason_is_told_and_not_the_last_one():
    with recorded_graphs() as made, capture_logs() as logs:
        probe.train(case(monitor=[{"use": "health", "every": 1}], run={"cuda_graphs": True, "steps": 2}), {})
        (executor,) = made
        executor._shapes = []  # of no microbatch
        executor.passes.observed = False
        assert not executor._can_replay(0)
        executor.steps = captured_executor.PATIENCE
        executor._warn_once()
    (said,) = [each for each in logs if each["event"] == "run.cuda_graphs has no effect"]
    assert "a monitor reads modules" in said["why"]


class PassedThrough:
    """Runs the passes again in each replay, where a recording would stop torch from compiling."""

    graphs = 0

    def __init__(self, device):
        pass

    def capture(self, work):
        (executor,) = PassedThrough.made
        before = [each.grad.clone() for each in executor._trained]
        compiled = counters["stats"]["unique_graphs"]
        self.work, self.found = work, work()
        PassedThrough.graphs += counters["stats"]["unique_graphs"] - compiled
        for each, gradient in zip(executor._trained, before, strict=True):
            each.grad.copy_(gradient)
        return self.found

    def replay(self):
        for kept, new in zip(self.found, self.work(), strict=True):
            for name, tensor in kept.items():
                tensor.copy_(new[name])


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nothing_is_compiled_in_a_capture(precision):
    """It would measure kernels, which cannot be captured."""
    torch._dynamo.reset()
    run = {"compile": True, "compile_backend": "aot_eager"}
    plain = case("gpt", run=run, precision={"use": precision}, parallel=[{"use": "recompute"}])
    expected = values(probe.train(plain, {}))
    with recorded_graphs() as made, mock.patch.object(captured_executor, "CUDAGraph", PassedThrough):
        PassedThrough.made = made
        found = values(probe.train(plain, {"run": {**plain.overrides["run"], "cuda_graphs": True}}))
    assert found == expected
    assert made[0].replays == STEPS * 3 - 2
    assert PassedThrough.graphs == 0


def test_a_resumed_run_captures_what_it_restored(tmp_path):
    differ, replays = differences(case(), folder=tmp_path, save_at=2)
    assert not differ
    differ, replays = differences(case(), folder=tmp_path, resume="2")
    assert not differ
    assert replays == 2 * 3 - 2


def test_a_step_in_which_a_monitor_taps_layers_is_not_replayed():
    """Health observes layers in steps that are logged, every second one."""
    differ, replays = differences(case(monitor=[{"use": "health"}], run={"log_every": 2}))
    assert not differ
    assert replays == 2 * 3 - 2


def test_weights_in_other_memory_are_captured_anew():
    """An optimizer that replaces a weight's memory would otherwise never be heard of again."""
    step = probe.FirstGradients.step

    def moving(self, **options):
        stats = step(self, **options)
        for placed in self.run.placed:
            placed.parameter.data = placed.parameter.data.clone()
        return stats

    with mock.patch.object(probe.FirstGradients, "step", moving):
        differ, replays = differences(case())
    assert not differ
    assert replays == STEPS * (3 - 2)


class LateOptimizer(probe.FirstGradients):
    """Returns before its new weights are there, as an optimizer does that all-gathers them meanwhile."""

    in_flight = ()

    def step(self, **options):
        parameters = [placed.parameter.data for placed in self.run.placed]
        old = [each.clone() for each in parameters]
        stats = super().step(**options)
        LateOptimizer.in_flight = [(each, each.clone()) for each in parameters]
        torch._foreach_copy_(parameters, old)
        return stats

    @staticmethod
    def arrive(*_):
        for parameter, new in LateOptimizer.in_flight:
            parameter.copy_(new)
        LateOptimizer.in_flight = ()

    @staticmethod
    def install(parts, optimizer):
        """Stands for :func:`install_ready_hooks`."""
        for part in parts:
            part.register_forward_pre_hook(LateOptimizer.arrive)
        return LateOptimizer.arrive


def test_a_replay_waits_for_weights_in_flight():
    with (
        mock.patch.object(engine, "install_ready_hooks", LateOptimizer.install),
        mock.patch.object(probe, "FirstGradients", LateOptimizer),
        mock.patch.object(probe.Reports, "reads_weights", False),  # nobody else waits
    ):
        differ, replays = differences(case())
    assert not differ
    assert replays == STEPS * 3 - 2


#: How ranks add up gradients, and how many of a step's three microbatches may be replayed.
SUMS = {
    "after-backward": ({}, 3),
    "ddp": ({"parallel": [{"use": "ddp"}]}, 2),
    "ddp-without-overlap": ({"parallel": [{"use": "ddp", "overlap": False}]}, 3),
    "zero12": ({"optimizer": {"use": "zero12"}}, 2),
    "zero12-without-overlap": ({"optimizer": {"use": "zero12", "overlap": False}}, 3),
    "zero12-of-sgd": ({"parallel": [{"use": "zero12"}], "optimizer": {"use": "sgd", "lr": 0.1}}, 2),
}


@pytest.mark.full_cases(
    "zero12", "after-backward", "ddp-without-overlap", "zero12-of-sgd", "zero12-without-overlap"
)
@pytest.mark.parametrize("sums", SUMS)
def test_data_parallel_ranks_replay_what_is_not_reduced_during_backward(sums):
    tables, replayed = SUMS[sums]
    plain = case(ranks=2, batch={**EVEN, "sequences": 12}, precision={"use": "bf16"}, **tables)
    for differ, replays in run_ranks(differences, 2, plain, check_collectives=False):
        assert not differ
        assert replays == STEPS * replayed - 2


def test_a_graph_is_released_after_its_last_replay(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    kind = captured_executor.CapturingExecutor
    executor = kind.__new__(kind)
    executor.mesh = SimpleNamespace(device_is_async=True, device=torch.device("cuda", 1))
    for captured, expected in ((None, []), (object(), [torch.device("cuda", 1)])):
        executor._captured = captured
        executor._forget()
        assert (executor._captured, waited) == (None, expected)
