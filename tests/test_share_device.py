"""Ranks that share one GPU train as one process does, and where they cannot it is said.

Where there is no GPU the same code stages copies of tensors of the CPU.
"""

import pytest
import torch
import torch.distributed as dist

from nanotrain_core.contracts import Kernels
from nanotrain_core.errors import NanotrainError, RecipeError
from nanotrain_core.launch import worker
from nanotrain_core.launch.environment import Ranks
from nanotrain_core.layout.staging import StagedTransport
from nanotrain_core.recipe import load_recipe
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.compare import assert_same, whole
from nanotrain_core.testing.probe import train

TOLERANCE = 1e-9

ROUTED = {"model": {"use": "routed"}, "parallel": [{"use": "ddp"}]}
CASES = {
    "tp": Case("parallel", use="tp", config={"sequence_parallel": True}, topology={"tp": 2}),
    "ep": Case("parallel", use="ep_deepseek", topology={"dp": 2, "ep": 2}, overrides=ROUTED),
    "etp": Case("parallel", use="ep_deepseek", topology={"dp": 2, "etp": 2}, overrides=ROUTED),
    "cp": Case("parallel", use="cp", config={"communication": "ring"}, topology={"cp": 2}),
    "pp": Case("schedule", use="1f1b", topology={"pp": 2}),
    "ddp": Case("parallel", use="ddp", topology={"dp": 2}),
    "zero12": Case("optimizer", use="zero12", config={"stage": 2, "lr": 0.01}, topology={"dp": 2}),
}


def staged(case, changes):
    """Train with every exchange staged; return what came of it, and how many tensors were copied."""
    copied = []

    def down(x):
        copied.append(x.numel())
        return x.clone(memory_format=torch.contiguous_format)

    Kernels.transport = lambda self: StagedTransport(down)
    try:
        return train(case, changes), len(copied)
    finally:
        del Kernels.transport
        Kernels.transport = TRANSPORT


TRANSPORT = Kernels.transport


def assert_as_one_process(case, ranks, alone):
    for part in ("gradients", "weights"):
        found = whole([getattr(trace, part) for trace in ranks], atol=TOLERANCE)
        assert_same(found, whole([getattr(alone, part)]), part, atol=TOLERANCE)


@pytest.mark.full_cases("tp", "ep", "ddp", "cp")
@pytest.mark.parametrize("name", CASES)
def test_staged_ranks_train_as_one_process(name):
    case, changes = CASES[name], {"kernels": {"use": "torch"}}
    found = run_ranks(staged, 2, case, changes, check_collectives=False)
    (alone,) = run_ranks(train, 1, case.alone(), changes)
    assert all(copied >= 3 for _, copied in found)
    assert_as_one_process(case, [trace for trace, _ in found], alone)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("checkpoint", ["", "simple", "sharded_v2"])
@pytest.mark.parametrize("name", CASES)
def test_ranks_on_one_gpu_train_as_one_process(name, checkpoint, tmp_path):
    """The one process is on the CPU. With a checkpoint they stop after a step, and others go on from it."""
    case = CASES[name]
    changes = {"run": {"device": "cuda", "share_device": True}}
    if checkpoint:
        changes["checkpoint"] = {"use": checkpoint}
        first = {**changes, "run": {**changes["run"], "steps": 2}}
        run_ranks(train, 2, case, first, folder=tmp_path, save_at=2, check_collectives=False)
    options = {"folder": tmp_path, "resume": "latest"} if checkpoint else {}
    found = run_ranks(train, 2, case, changes, check_collectives=False, **options)
    (alone,) = run_ranks(train, 1, case.alone(), {})
    part = whole([trace.weights for trace in found], atol=TOLERANCE)
    assert_same(part, whole([alone.weights]), "weights", atol=TOLERANCE)
    if not checkpoint:
        assert_as_one_process(case, found, alone)


# --- refusals ---------------------------------------------------------------------------------------------


def test_a_recipe_for_a_cpu_is_refused(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text('extends = "laptop.toml"\n[run]\ndevice = "cpu"\nshare_device = true\n')
    with pytest.raises(RecipeError, match=r'ranks share a GPU, and run\.device = "cpu"; leave it out'):
        load_recipe(file)


def test_without_a_gpu_a_rank_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NanotrainError, match="lets ranks share a GPU, and torch finds none here"):
        worker.choose_device("auto", Ranks(1, 2, 1, 2), shared=True)


def test_all_ranks_of_a_host_take_its_first_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    device = worker.choose_device("auto", Ranks(3, 4, 3, 4), shared=True)
    assert device == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("variable", "value", "own"),
    [
        ("SLURM_GPUS_PER_TASK", "1", True),
        ("SLURM_TRES_PER_TASK", "cpu=8,gres/gpu=1", True),
        ("SLURM_TRES_PER_TASK", "cpu=8", False),
        ("CUDA_VISIBLE_DEVICES", "0", False),
    ],
)
def test_a_task_that_sees_its_own_gpu_alone_takes_it(monkeypatch, variable, value, own):
    """``srun --gpus-per-task=1``: each task's only GPU is number 0. It was told to start fewer ranks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv(variable, value)
    if own:
        assert worker.choose_device("auto", Ranks(3, 4, 3, 4)) == torch.device("cuda", 0)
        return
    with pytest.raises(NanotrainError, match="rank 3 is number 3 on its host, which has 1 GPUs"):
        worker.choose_device("auto", Ranks(3, 4, 3, 4))


@pytest.mark.parametrize(
    ("built", "why"), [(True, "no GPU is visible here"), (False, "this torch is built without CUDA")]
)
def test_a_gpu_that_is_asked_for_where_there_is_none_is_told_as_that(monkeypatch, built, why):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    with pytest.raises(NanotrainError, match=f'run.device = "cuda", but {why}'):
        worker.choose_device("cuda", Ranks(3, 4, 3, 4))


def test_groups_of_nccl_are_refused(monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
    with pytest.raises(NanotrainError, match="NCCL does not support two ranks on one GPU"):
        StagedTransport().exchange(None, torch.device("cuda", 0), 60.0)
