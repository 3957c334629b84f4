"""A script that is stopped and run again goes on bit by bit, from what its folder has."""

import copy

import pytest
import torch
from command import nanotrain
from resumed_script import (
    COSINE,
    OPTIMIZERS,
    STEPS,
    STOP,
    Counting,
    Net,
    Records,
    assert_bitwise,
    many_batches,
    plain_list,
    script,
    shuffled,
    workers,  # noqa: F401, of usefixtures
)
from torch import nn

from nanotrain_core import RuntimeEngine
from nanotrain_core.errors import CheckpointError, NanotrainError
from nanotrain_core.script import ScriptConfig
from nanotrain_core.testing import run_ranks


@pytest.mark.parametrize(
    ("optimizer", "loader", "precision"),
    [
        *((optimizer, "shuffled", "fp32") for optimizer in OPTIMIZERS if optimizer != "Counting"),
        ("AdamW", "list", "bf16"),
        ("AdamW", "with a generator", "fp16"),
    ],
)
def test_a_script_that_is_stopped_and_run_again_ends_as_one_that_was_not(
    tmp_path, optimizer, loader, precision
):
    """The second launch seeds everything otherwise: what comes back, comes from the checkpoint."""
    options = {"optimizer": optimizer, "loader": loader, "precision": precision}
    losses, straight = script(0, **options)
    # Ranks agree on a stop with the step after the one that asked.
    first, _ = script(0, **options, stop_after=STOP - 1, folder=tmp_path, resume="auto")
    assert max(first) == STOP
    after, resumed = script(1, **options, folder=tmp_path, resume="auto")
    assert {**first, **after} == losses
    assert list(after) == list(range(STOP + 1, STEPS + 1))
    assert_bitwise(resumed, straight)
    assert len(straight["optimizer"]) == 5, "one head has no state"


def test_state_that_an_optimizer_keeps_apart_from_parameters_is_restored(tmp_path):
    losses, straight = script(0, "Counting")
    first, _ = script(0, "Counting", stop_after=STOP - 1, folder=tmp_path, resume="auto")
    after, resumed = script(1, "Counting", folder=tmp_path, resume="auto")
    assert {**first, **after} == losses
    assert_bitwise(resumed, straight)
    assert straight["optimizer"]["all"]["steps"] == STEPS


def test_going_back_undoes_what_an_optimizer_changed_in_its_groups_alone(tmp_path):
    """What the script has changed since then stays."""
    torch.manual_seed(0)
    model = Net()
    optimizer = Counting(model.parameters())
    settings = ScriptConfig(folder=tmp_path, save_every=STOP)
    engine = RuntimeEngine(model, optimizer, settings)
    engine.fit(plain_list(), steps=STOP)
    group = optimizer.param_groups[0]
    group["decay"] = 0.25
    engine.fit(plain_list(), steps=STOP + 2)
    assert (group["k"], group["late"]) == (STOP + 2, 2.0)
    assert engine.load(str(STOP))
    found = {key: group[key] for key in ("k", "began", "late", "decay", "total")}
    expected = {"k": STOP, "began": True, "late": 1.0, "decay": 0.25, "total": torch.full((1,), float(STOP))}
    assert_bitwise(found, expected)


def test_state_that_cannot_be_saved_is_refused(tmp_path):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[3] = {"steps": 0}
    with pytest.raises(CheckpointError, match="keeps state under a int; only that of the model's parameters"):
        RuntimeEngine(model, optimizer, ScriptConfig(folder=tmp_path)).fit(plain_list(), steps=1)


@pytest.mark.usefixtures("workers")
def test_a_loader_with_workers_that_persist_keeps_its_order(tmp_path):
    """They had begun before the pass: a loader of a resumed script draws no other number at its beginning."""
    losses, _ = script(0, "SGD", loader="with workers")
    script(0, "SGD", loader="with workers", stop_after=STOP - 1, folder=tmp_path, resume="auto")
    after, _ = script(1, "SGD", loader="with workers", folder=tmp_path, resume="auto")
    assert after == {step: losses[step] for step in range(STOP + 1, STEPS + 1)}


def test_any_saved_step_can_be_gone_back_to(tmp_path):
    losses, straight = script(0, "AdamW", "shuffled")
    script(0, "AdamW", "shuffled", folder=tmp_path, save_every=2, keep=3)
    found = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert found == [f"step-0000000{step}.safetensors" for step in (4, 6, 8)]
    after, resumed = script(1, "AdamW", "shuffled", folder=tmp_path, resume=6)
    assert after == {step: losses[step] for step in (7, 8)}
    assert_bitwise(resumed, straight)
    replayed = nanotrain("ckpt", "replay", str(tmp_path), cwd=tmp_path)
    assert (replayed.code, replayed.out) == (2, "")
    assert "is of a script, not of a recipe: run the script to go on from it" in replayed.err


def test_validation_leaves_trainings_random_numbers_alone():
    """Workers that persist draw one when they begin: those of a resumed script begin once more."""
    losses, _ = script(0, "SGD", loader="shuffled")
    assert script(0, "SGD", loader="shuffled", validation=shuffled(), evaluate_every=2)[0] == losses


def two_ranks(folder, seed, stop_after):
    from nanotrain_core.testing.components.all_reduce_gradients import SummedGradients

    torch.manual_seed(seed)
    model, rank = Net(), torch.distributed.get_rank()
    settings = ScriptConfig(folder=folder, resume="auto", lr_schedule=COSINE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    stop = Records(stop_after)
    engine = RuntimeEngine(model, optimizer, settings, callbacks=[stop], gradient_sync=SummedGradients())
    torch.manual_seed(10 * seed + rank)
    engine.fit(plain_list()[rank:], steps=6)
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_every_rank_of_a_script_finds_its_own_place(tmp_path):
    straight = run_ranks(two_ranks, 2, tmp_path / "straight", 0, 0)
    run_ranks(two_ranks, 2, tmp_path / "stopped", 0, 2)
    resumed = run_ranks(two_ranks, 2, tmp_path / "stopped", 1, 0)
    for rank in range(2):
        assert all(map(torch.equal, resumed[rank], straight[rank]))


def two_calls(seed, first, second, stop_after=0, **config):
    torch.manual_seed(seed)
    model, records = Net(), Records(stop_after)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    engine = RuntimeEngine(model, optimizer, ScriptConfig(**config), callbacks=[records])
    engine.fit(first, steps=2)
    torch.rand(seed)
    engine.fit(second, steps=STEPS)
    return {report.step: report.loss for report in records.reports}


def test_a_script_with_several_calls_of_fit_goes_on_in_the_loader_of_the_right_one(tmp_path):
    """Each call starts its loader anew, also the second of a resumed script, which had lost its position."""
    short = plain_list()[:2]
    losses = two_calls(0, short, shuffled())
    first = two_calls(0, short, shuffled(), stop_after=4, folder=tmp_path, resume="auto")
    assert max(first) == 5
    assert {**first, **two_calls(1, short, shuffled(), folder=tmp_path, resume="auto")} == losses


def test_an_iterator_over_several_calls_of_fit_is_refused_after_a_resume(tmp_path):
    once = iter(many_batches())
    two_calls(0, once, once, stop_after=4, folder=tmp_path, resume="auto")
    again = iter(many_batches())
    with pytest.raises(
        NanotrainError, match="the train_loader is a list_iterator, which can be iterated only"
    ):
        two_calls(0, again, again, folder=tmp_path, resume="auto")


# --- what cannot be resumed -----------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    script(0, "SGD", steps=2, folder=tmp_path)
    return tmp_path


def resume(folder, model, optimizer, loader=None, **config):
    engine = RuntimeEngine(model, optimizer, ScriptConfig(folder=folder, resume="latest", **config))
    before = copy.deepcopy(model.state_dict())
    try:
        engine.fit(loader or plain_list(), steps=4)
    finally:
        assert_bitwise(model.state_dict(), before)
        assert not optimizer.state


def test_another_optimizer_is_refused_by_name(saved):
    model = Net()
    text = "has the state of SGD and the script's optimizer is AdamW: expected SGD"
    with pytest.raises(CheckpointError, match=text):
        resume(saved, model, torch.optim.AdamW(model.parameters()))


def test_other_parameter_groups_are_refused(saved):
    model = Net()
    with pytest.raises(CheckpointError, match=r"group 0 of SGD has embed.weight only in the checkpoint"):
        resume(saved, model, torch.optim.SGD(list(model.parameters())[1:], lr=0.1))
    halves = [{"params": [p]} for p in model.parameters()]
    with pytest.raises(CheckpointError, match="has 1 parameter groups and the script's has 7"):
        resume(saved, model, torch.optim.SGD(halves, lr=0.1))
    with pytest.raises(CheckpointError, match="nesterov is False in the checkpoint and True in this script"):
        resume(saved, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True))


def test_another_model_is_refused_with_what_differs(saved):
    model = Net(width=9)
    text = r"does not fit this run: embed.weight has shape \(11, 8\), expected \(11, 9\)"
    with pytest.raises(CheckpointError, match=text):
        resume(saved, model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_shorter_loader_is_refused_before_a_step(saved):
    torch.manual_seed(0)
    model = Net()
    engine = RuntimeEngine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), ScriptConfig(folder=saved, resume="latest")
    )
    with pytest.raises(CheckpointError, match="ends after 3 batches and the checkpoint was saved 4 batches"):
        engine.fit(plain_list()[:3], steps=4)


def test_a_used_folder_is_not_begun_anew_in(saved):
    with pytest.raises(CheckpointError, match=r'has checkpoints of a run \(steps 2\): resume="auto" goes on'):
        script(0, "SGD", folder=saved)


def test_what_needs_a_folder_says_so(tmp_path):
    with pytest.raises(ValueError, match="save_every needs a folder"):
        ScriptConfig(save_every=3)
    with pytest.raises(ValueError, match="resume needs a folder"):
        ScriptConfig(resume="auto")
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        script(0, "SGD", folder=tmp_path, resume="latest")


def test_parameters_that_are_not_the_models_are_refused():
    model = Net()
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(ValueError, match=r"1 parameters that are not the model's, the first of shape \(3,\)"):
        RuntimeEngine(model, optimizer)


def test_commands_read_a_scripts_checkpoints(saved):
    shown = nanotrain("ckpt", "show", str(saved), cwd=saved)
    assert shown.code == 0
    assert "tensors      buffer: 3" in shown.out
    assert max(map(len, shown.out.splitlines())) < 1100
    assert nanotrain("ckpt", "verify", str(saved), cwd=saved).out == "step 2: whole\n"
