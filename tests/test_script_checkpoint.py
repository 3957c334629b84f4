"""A script that is stopped and run again goes on bit by bit, from what its folder has."""

import copy
import gc
from itertools import islice

import pytest
import torch
from command import nanotrain
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from nanotrain_core import RuntimeEngine
from nanotrain_core.builtin.configs import GuardConfig
from nanotrain_core.contracts import Monitor
from nanotrain_core.errors import CheckpointError, Diverged, NanotrainError
from nanotrain_core.monitors.guard import Guard
from nanotrain_core.recipe.tree import LRScheduleConfig
from nanotrain_core.run.stop import Rollback
from nanotrain_core.script import ScriptConfig
from nanotrain_core.testing import run_ranks

COSINE = LRScheduleConfig(use="cosine", warmup_steps=2)


class Records(Monitor):
    """Keeps reports, and stops after a step."""

    def __init__(self, stop_after=0):
        self.stop_after, self.reports, self.rollbacks = stop_after, [], []

    def on_step(self, report):
        self.reports.append(report)
        return "stop" if report.step == self.stop_after else None

    def on_rollback(self, report):
        self.rollbacks.append(report)


class Net(nn.Module):
    """Random numbers in forward, statistics in buffers, and a head that no batch uses."""

    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.2)
        self.heads = nn.ModuleList(nn.Linear(width, 11) for _ in range(2))

    def forward(self, tokens):
        x = self.norm(self.embed(tokens).flatten(0, 1)).view(*tokens.shape, -1)
        return self.heads[0](self.dropout(x))


def tokens_and_targets(rows=20):
    tokens = torch.randint(11, (rows, 6), generator=torch.Generator().manual_seed(1))
    return tokens, (tokens * 3 + 1) % 11


def plain_list():
    return list(zip(*(tensor.split(4) for tensor in tokens_and_targets()), strict=True))


def shuffled(generator=None, **options):
    data = TensorDataset(*tokens_and_targets())
    return DataLoader(data, batch_size=4, shuffle=True, generator=generator, **options)


def with_workers():
    return shuffled(num_workers=1, persistent_workers=True)


LOADERS = {
    "list": lambda seed: plain_list(),
    "shuffled": lambda seed: shuffled(),
    "with a generator": lambda seed: shuffled(torch.Generator().manual_seed(seed)),
    "with workers": lambda seed: with_workers(),
}

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.05),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
}

#: Five batches are a pass over the loader: the stop is in the second, the end in the fourth.
STEPS, STOP = 8, 4


def script(seed, optimizer, stop_after=0, loader="list", width=8, steps=STEPS, validation=None, **config):
    """Run a whole script; return its losses, and all that it has learned."""
    torch.manual_seed(seed)
    model = Net(width)
    inner, records = OPTIMIZERS[optimizer](model.parameters()), Records(stop_after)
    settings = ScriptConfig(accumulate=2, clip_norm=0.5, lr_schedule=COSINE, **config)
    engine = RuntimeEngine(model, inner, settings, callbacks=[records])
    engine.fit(LOADERS[loader](seed), validation, steps=steps)
    losses = {report.step: (report.loss, report.grad_norm, report.lr, report.loss_scale, report.tokens)
              for report in records.reports}  # fmt: skip
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = {names.get(key, key): found for key, found in inner.state.items()}
    return losses, copy.deepcopy({"model": model.state_dict(), "optimizer": state})


def assert_bitwise(found, expected, where=""):
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_bitwise(found[key], value, f"{where}/{key}")
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.device) == (expected.dtype, expected.device), where
        assert torch.equal(found, expected), where
    else:
        assert found == expected, where


@pytest.mark.parametrize(
    ("optimizer", "loader", "precision"),
    [
        *((optimizer, "shuffled", "fp32") for optimizer in OPTIMIZERS),
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


class Counting(torch.optim.Optimizer):
    """Keeps state outside that of parameters: in its groups, as Prodigy and schedule-free do, and by name."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "decay": 0.5, "k": 0, "began": False, "late": 1.0})
        self.state["all"] = {"sum": torch.zeros(()), "steps": 0}
        self.state["scale"] = 1.0

    @torch.no_grad()
    def step(self, closure=None):
        whole = self.state["all"]
        whole["steps"] += 1
        self.state["scale"] *= 0.9
        for group in self.param_groups:
            group["k"], group["began"] = group["k"] + 1, True
            group.setdefault("total", torch.zeros(1)).add_(1)
            group["late"] = 2.0 if group["k"] > STOP else group["late"]
            gradients = [p for p in group["params"] if p.grad is not None]
            for parameter in gradients:
                whole["sum"] += parameter.grad.square().sum()
                rate = group["lr"] * self.state["scale"] * group["late"]
                rate /= group["k"] + group["total"].item()
                parameter.sub_(rate * parameter.grad / (whole["sum"] + whole["steps"]).sqrt())
                parameter.mul_(1 - rate * group["decay"])


OPTIMIZERS["Counting"] = Counting


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


@pytest.fixture
def workers(monkeypatch):
    """Let the garbage collector end a loader's workers, in the time between two of their checks."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    yield
    gc.collect()


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


# --- going back -----------------------------------------------------------------------------------

MANY = 40
BAD = range(22, 25)


def many_batches():
    generator = torch.Generator().manual_seed(2)
    tokens = [torch.randint(11, (4, 6), generator=generator) for _ in range(MANY)]
    return [(each, (each * 3 + 1) % 11) for each in tokens]


def guarded(loader, steps, callbacks, **config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Dropout(0.1), nn.Linear(8, 11))

    def loss(output, targets):
        return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine = RuntimeEngine(model, optimizer, ScriptConfig(**config), callbacks=callbacks, loss=loss)
    engine.fit(loader, steps=steps)
    return model


def hostile(batches):
    """Make a few batches contradict the others: a loss that stays high."""
    bad = {number: (tokens, (targets + 5) % 11) for number, (tokens, targets) in enumerate(batches)}
    return [bad[number] if number in BAD else pair for number, pair in enumerate(batches)]


def test_the_guard_takes_a_script_back_and_leaves_its_data_out(tmp_path):
    records, loader = Records(), hostile(many_batches())
    guard = Guard(GuardConfig(warmup=8, window=16, patience=2, threshold=3.0))
    model = guarded(loader, 30, [guard, records], folder=tmp_path, save_every=5)
    (back,) = records.rollbacks
    first, end = back.skipped
    assert first < BAD[0] < end
    assert back.restored == 20
    kept = [pair for number, pair in enumerate(loader) if not first <= number < end]
    straight = guarded(kept, 30, [])
    assert all(map(torch.equal, model.parameters(), straight.parameters()))


class BackOnce(Monitor):
    """Asks for a rollback after a step, which leaves its data out."""

    every_step = True

    def __init__(self, after):
        self.after = after

    def on_step(self, report):
        if report.step == self.after:
            self.after = 0
            return Rollback(report.step, "a test")
        return None


@pytest.mark.usefixtures("workers")
def test_going_back_into_the_first_pass_keeps_the_order_of_a_loader_with_workers(tmp_path):
    """Its workers had begun since, and no longer drew a random number before the order."""
    torch.manual_seed(0)
    seen = []
    model = Net()
    model.embed.register_forward_pre_hook(lambda _, args: seen.extend(map(tuple, args[0].tolist())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = ScriptConfig(folder=tmp_path, save_every=1, keep=9)
    RuntimeEngine(model, optimizer, settings, callbacks=[BackOnce(2)]).fit(with_workers(), steps=4)
    assert len(seen) == 20, "a pass"
    assert {*seen} == {*map(tuple, tokens_and_targets()[0].tolist())}


def test_a_guard_with_nothing_to_go_back_to_says_what_it_needs():
    guard = Guard(GuardConfig(warmup=8, window=16, patience=2, threshold=3.0))
    with pytest.raises(Diverged, match=r"saves no checkpoints to roll back to: .*folder=.*, save_every="):
        guarded(hostile(many_batches()), 30, [guard])


def test_an_iterator_cannot_be_gone_back_in(tmp_path):
    guard = Guard(GuardConfig(warmup=8, window=16, patience=2, threshold=3.0))
    with pytest.raises(
        NanotrainError, match="the train_loader is a generator, which can be iterated only once"
    ):
        guarded((pair for pair in hostile(many_batches())), 30, [guard], folder=tmp_path, save_every=5)


def test_an_iterator_can_be_resumed_in(tmp_path):
    straight = guarded(many_batches(), 12, [])
    guarded(islice(many_batches(), MANY), 12, [Records(stop_after=5)], folder=tmp_path)
    resumed = guarded(islice(many_batches(), MANY), 12, [], folder=tmp_path, resume="latest")
    assert all(map(torch.equal, resumed.parameters(), straight.parameters()))


def test_commands_read_a_scripts_checkpoints(saved):
    shown = nanotrain("ckpt", "show", str(saved), cwd=saved)
    assert shown.code == 0
    assert "tensors      buffer: 3" in shown.out
    assert max(map(len, shown.out.splitlines())) < 1100
    assert nanotrain("ckpt", "verify", str(saved), cwd=saved).out == "step 2: whole\n"
