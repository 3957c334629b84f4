"""``run.cuda_graphs``: replayed microbatches train as eager ones do, and what cannot be captured is refused.

Most machines have no GPU: :mod:`recorded_graph` records a CPU's operators, and replays them.
"""

import re
import subprocess
import sys
from dataclasses import replace
from unittest import mock

import attrs
import pytest
import torch
import torch.nn.functional as F
from compiled import MODELS
from recipe_files import SMALL, write
from recorded_graph import counted_executors, recorded_graphs
from structlog.testing import capture_logs
from torch._dynamo.utils import counters

from nanotrain_core import engine
from nanotrain_core.cli import main
from nanotrain_core.compile import captured_executor
from nanotrain_core.errors import NanotrainError
from nanotrain_core.models import kernels
from nanotrain_core.models.ops import TORCH
from nanotrain_core.recipe.validate import find_problems
from nanotrain_core.testing import probe, run_ranks
from nanotrain_core.testing.case import Case

STEPS = 4
#: Three microbatches of two sequences in each step.
EVEN = {"sequences": 6, "microbatch": 2, "length": 8}


def case(model="llama", degrees=None, vocab=33, ranks=None, **overrides):
    run = {"steps": STEPS, **overrides.pop("run", {})}
    tables = {
        "kernels": {"use": "torch"},
        "model": {"init_std": 0.3, "vocab": vocab, "layers": 2, **MODELS[model]},
        "data": {"vocab": vocab},
        "batch": EVEN,
        "evaluation": {"every": 2, "sequences": 5},
        "run": run,
    }
    ranks = {} if ranks is None else {"world_size": ranks}
    return Case("topology", use="grid", topology=degrees or {}, overrides=tables | overrides, **ranks)


def experts_on_the_device(rows_ND, counts_E, gate_EFD, up_EFD, down_EDF):
    """The torch kernels' experts, without telling the host how many rows each has."""
    owner_N = torch.searchsorted(counts_E.cumsum(0), torch.arange(len(rows_ND)), right=True)
    gate, up, down = (weight[owner_N] for weight in (gate_EFD, up_EFD, down_EDF))
    hidden = F.silu(torch.einsum("nd,nfd->nf", rows_ND, gate)) * torch.einsum("nd,nfd->nf", rows_ND, up)
    return torch.einsum("nf,ndf->nd", hidden, down)


on_the_device = mock.patch.object(
    kernels, "plain_ops", return_value=replace(TORCH, experts=experts_on_the_device)
)


def values(trace):
    """Return everything that a run computed, by name."""
    found = {f"loss {report.step}": report.loss for report in trace.reports}
    found |= {f"norm {report.step}": report.grad_norm for report in trace.reports}
    found |= {f"evaluation {number}": loss for number, loss in enumerate(trace.evaluations)}
    for what in ("gradients", "weights", "state"):
        found |= {f"{what} {block.name} {block.of}": block.tensor.tolist() for block in getattr(trace, what)}
    return found


def differences(plain, **options):
    """Return the names of what differs from an eager run's, and how many microbatches were replayed."""
    expected = values(probe.train(plain, {}, **options))
    with recorded_graphs() as made:
        found = values(
            probe.train(plain, {"run": {**plain.overrides["run"], "cuda_graphs": True}}, **options)
        )
    assert found.keys() == expected.keys()
    return [name for name in expected if found[name] != expected[name]], sum(each.replays for each in made)


# --- equality -----------------------------------------------------------------------------------------


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


def test_a_run_in_which_nothing_is_replayed_says_why():
    monitor = [{"use": "health"}]
    with recorded_graphs() as made, capture_logs() as logs:
        probe.train(case(monitor=monitor, run={"cuda_graphs": True, "steps": 12}), {})
    assert not made[0].replays
    (said,) = [each for each in logs if each["event"] == "run.cuda_graphs has no effect"]
    assert said["why"].endswith("in 10 steps: a monitor observes every step: raise run.log_every")


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
    """Health taps layers in steps that are logged, every second one."""
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


@pytest.mark.parametrize("sums", SUMS)
def test_data_parallel_ranks_replay_what_is_not_reduced_during_backward(sums):
    tables, replayed = SUMS[sums]
    plain = case(ranks=2, batch={**EVEN, "sequences": 12}, precision={"use": "bf16"}, **tables)
    for differ, replays in run_ranks(differences, 2, plain, check_collectives=False):
        assert not differ
        assert replays == STEPS * replayed - 2


# --- what is refused ----------------------------------------------------------------------------------


def test_passes_in_which_the_host_reads_a_value_are_refused():
    """The experts of plain PyTorch, outside of bfloat16 on a GPU."""
    plain = case("deepseek", run={"cuda_graphs": True})
    with (
        recorded_graphs(),
        pytest.raises(NanotrainError, match=r"run\.cuda_graphs: .*cannot be captured.*= false"),
    ):
        probe.train(plain, {})


def problems(plain, **changes):
    recipe = attrs.evolve(plain.recipe(**changes))
    run = attrs.evolve(recipe.run, cuda_graphs=True, device="auto", compile="auto")
    return [
        f"{each.key}: {each.message}"
        for each in find_problems(attrs.evolve(recipe, run=run), plain.registry())[1]
    ]


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({}, None),
        ({"parallel": [{"use": "ddp"}, {"use": "recompute"}]}, None),
        ({"optimizer": {"use": "zero12"}}, None),
        ({"optimizer": {"use": "zero12", "stage": 2}}, "optimizer 'zero12': stage 2 .* expected stage 1"),
        ({"precision": {"use": "fp4_master"}}, "precision 'fp4_master' does not declare"),
        ({"kernels": {"use": "cpu"}}, "kernels 'cpu' does not declare"),
        ({"parallel": [{"use": "activation_offload"}]}, "parallel 'activation_offload' does not declare"),
    ],
)
def test_what_cannot_be_captured_is_named(tables, said):
    found = problems(case(**tables))
    assert len(found) == (said is not None)
    assert all(re.match(f"run.cuda_graphs: {said}", each) for each in found)


@pytest.mark.parametrize(
    ("degrees", "tables", "said"),
    [
        ({"tp": 2}, {"parallel": [{"use": "tp"}]}, "topology.tp = 2: passes that communicate"),
        ({"pp": 2}, {"schedule": {"use": "1f1b"}}, "topology.pp = 2: passes that communicate"),
    ],
)
def test_layouts_whose_passes_communicate_are_refused(degrees, tables, said):
    assert any(said in each for each in problems(case(degrees=degrees, **tables)))


def test_w_passes_are_refused():
    assert any(
        "'zb_h1' does not run each microbatch" in each for each in problems(case(schedule={"use": "zb_h1"}))
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('device = "cpu"', "a CUDA graph needs an NVIDIA GPU, and this run is on 'cpu'; expected false"),
        ("share_device = true", "ranks that share a GPU communicate through host memory"),
        ('compile_backend = "cudagraphs"', 'compile_backend = "cudagraphs" makes its own'),
    ],
)
def test_what_a_run_table_rules_out_is_said(line, said, tmp_path, capsys):
    path = write(tmp_path, SMALL.replace("steps = 3", f"steps = 3\ncuda_graphs = true\n{line}"))
    assert main(["check", str(path)]) == 2
    assert f"run.cuda_graphs: {said}" in capsys.readouterr().err


def test_a_run_that_finds_no_gpu_is_refused(tmp_path, capfd):
    path = write(tmp_path, SMALL.replace("steps = 3", "steps = 3\ncuda_graphs = true"))
    assert main(["check", str(path), "--explain"]) == 0
    assert "# CUDA graph: forward and backward of a microbatch" in capfd.readouterr().out
    if not torch.cuda.is_available():
        assert main(["run", str(path), "--set", f'run.folder="{tmp_path / "run"}"']) == 2
        assert "run.cuda_graphs: a CUDA graph needs an NVIDIA GPU" in capfd.readouterr().err


# --- on a GPU -----------------------------------------------------------------------------------------


on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


class TestOnAGPU:
    pytestmark = on_a_gpu

    def compare(self, plain, replayed, *, weights, device="cuda"):
        """Train with and without graphs; hold losses and weights to each other."""
        run = {**plain.overrides["run"], "device": device}
        eager = probe.train(plain, {"run": run})
        with counted_executors() as made:
            found = probe.train(plain, {"run": {**run, "cuda_graphs": True}})
        assert sum(each.replays for each in made) == replayed
        for one, other in zip(eager.reports, found.reports, strict=True):
            assert other.loss == pytest.approx(one.loss, rel=weights)
        for one, other in zip(eager.weights, found.weights, strict=True):
            assert (other.tensor - one.tensor).norm() <= weights * one.tensor.norm() + 1e-12, one.name

    @pytest.mark.parametrize("compiled", [False, True])
    @pytest.mark.parametrize("model", ["llama", "gpt"])
    def test_it_replays_what_it_computes_eagerly(self, model, compiled):
        run = {"compile": compiled, "deterministic": True}
        self.compare(case(model, run=run, precision={"use": "fp32"}), STEPS * 3 - 2, weights=1e-4)

    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_narrow_gradients_are_accumulated_in_float32(self, precision):
        plain = case(run={"deterministic": True}, precision={"use": precision})
        self.compare(plain, STEPS * 3 - 2, weights=0.02)

    def test_recomputation_is_in_the_graphs_of_layers(self):
        plain = case(parallel=[{"use": "recompute"}], precision={"use": "bf16"})
        self.compare(plain, STEPS * 3 - 2, weights=0.02)

    def test_another_length_is_captured_anew(self):
        phases = [
            {"until_tokens": 2 * 24, "batch": {"length": 4}},
            {"until_tokens": 10_000, "batch": {"length": 8}},
        ]
        self.compare(case(phase=phases, precision={"use": "fp32"}), STEPS * 3 - 2 * 2, weights=1e-4)

    def test_experts_in_bfloat16_are_captured(self):
        sizes = {"width": 64, "expert_ffn": 32, "experts": 8}
        plain = case("deepseek", precision={"use": "bf16"})
        model = {**plain.overrides["model"], **sizes}
        plain = attrs.evolve(plain, overrides={**plain.overrides, "model": model})
        self.compare(plain, STEPS * 3 - 2, weights=0.05)

    def test_a_value_that_the_host_reads_is_named_and_the_stream_is_as_before(self):
        """In a process of its own: torch does not recover from it."""
        code = (
            "import torch\n"
            "from nanotrain_core.compile.captured_executor import CUDAGraph\n"
            "graph = CUDAGraph(torch.device('cuda', 0))\n"
            "x, before = torch.ones(2, device='cuda'), torch.cuda.current_stream()\n"
            "try:\n    graph.capture(lambda: x.sum().item())\n"
            "except RuntimeError as problem:\n    print('captur' in str(problem))\n"
            "print(torch.cuda.current_stream() == before)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.stdout.split() == ["True", "True"], done.stderr
