"""``run.cuda_graphs`` on a GPU: what is captured trains as eager code does, and a failed capture says why."""

import subprocess
import sys

import attrs
import pytest
import torch
from captured_runs import STEPS, case
from recorded_graph import counted_executors

from nanotrain_core.testing import probe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


def compare(plain, replayed, *, weights):
    """Train with and without graphs; hold losses and weights to each other."""
    run = {**plain.overrides["run"], "device": "cuda"}
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
def test_it_replays_what_it_computes_eagerly(model, compiled):
    run = {"compile": compiled, "deterministic": True}
    compare(case(model, run=run, precision={"use": "fp32"}), STEPS * 3 - 2, weights=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_narrow_gradients_are_accumulated_in_float32(precision):
    plain = case(run={"deterministic": True}, precision={"use": precision})
    compare(plain, STEPS * 3 - 2, weights=0.02)


def test_recomputation_is_in_the_graphs_of_layers():
    plain = case(parallel=[{"use": "recompute"}], precision={"use": "bf16"})
    compare(plain, STEPS * 3 - 2, weights=0.02)


def test_another_length_is_captured_anew():
    phases = [
        {"until_tokens": 2 * 24, "batch": {"length": 4}},
        {"until_tokens": 10_000, "batch": {"length": 8}},
    ]
    compare(case(phase=phases, precision={"use": "fp32"}), STEPS * 3 - 2 * 2, weights=1e-4)


def test_experts_in_bfloat16_are_captured():
    sizes = {"width": 64, "expert_ffn": 32, "experts": 8}
    plain = case("deepseek", precision={"use": "bf16"})
    model = {**plain.overrides["model"], **sizes}
    plain = attrs.evolve(plain, overrides={**plain.overrides, "model": model})
    compare(plain, STEPS * 3 - 2, weights=0.05)


def test_a_value_that_the_host_reads_is_named_and_the_stream_is_as_before():
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
