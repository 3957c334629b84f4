"""What ``run.cuda_graphs`` is refused for, each by name."""

import re

import attrs
import pytest
import torch
from captured_runs import case
from recipe_files import SMALL, write
from recorded_graph import recorded_graphs

from nanotrain_core.cli import main
from nanotrain_core.compile import cuda_graphs
from nanotrain_core.component import NotCaptured
from nanotrain_core.errors import NanotrainError
from nanotrain_core.recipe.validate import find_problems
from nanotrain_core.testing import probe


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


def test_a_reason_may_have_any_words(monkeypatch):
    """Whether the reader is told to set it to false depends on ``expected`` alone."""
    given = NotCaptured("the host reads the expected number of rows")
    monkeypatch.setattr(cuda_graphs, "call_declared", lambda *_: [given])
    assert {each.rpartition("rows")[2] for each in problems(case())} == {"; expected false"}


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
