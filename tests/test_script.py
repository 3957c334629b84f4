"""A script: a model, an optimizer and loaders, trained as a plain loop would."""

import copy
import time

import pytest
import torch
from plain_script import Recorder, make_loader, make_model, plain_loop
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from nanotrain_core import RuntimeEngine
from nanotrain_core.batch import IGNORE, Batch
from nanotrain_core.builtin.configs import ConsoleConfig
from nanotrain_core.contracts import Monitor
from nanotrain_core.errors import NanotrainError, PluginError
from nanotrain_core.layout.gradients import AllReduceGradients
from nanotrain_core.monitors.console import Console
from nanotrain_core.recipe.tree import LRScheduleConfig
from nanotrain_core.script import ScriptConfig
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import rank


class Seen(nn.Embedding):
    """Notes the first token of each row that it trains on."""

    def __init__(self):
        super().__init__(16, 16)
        self.rows = []

    def forward(self, tokens):
        self.rows += tokens[:, 0].tolist() if self.training else []
        return super().forward(tokens)


def test_a_distributed_sampler_has_another_order_in_each_epoch():
    tokens = torch.arange(8)[:, None].repeat(1, 3)
    data = TensorDataset(tokens, tokens)
    sampler = DistributedSampler(data, num_replicas=2, rank=1, shuffle=True, seed=3)
    model, loader = Seen(), DataLoader(data, batch_size=2, sampler=sampler)
    engine = RuntimeEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), ScriptConfig())
    engine.fit(loader, steps=4)
    engine.fit(loader, steps=6)
    expected = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        expected += list(sampler)
    assert model.rows == expected


def test_it_trains_as_a_plain_loop_does():
    ours, loader = make_model(), make_loader()
    theirs, recorder = copy.deepcopy(ours), Recorder()
    loss = lambda output, targets: F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")  # noqa: E731
    engine = RuntimeEngine(
        ours,
        torch.optim.AdamW(ours.parameters(), lr=0.05),
        ScriptConfig(accumulate=3, clip_norm=0.5),
        callbacks=[recorder],
        loss=loss,
    )
    end = engine.fit(loader, steps=5)
    losses, norms = plain_loop(theirs, torch.optim.AdamW(theirs.parameters(), lr=0.05), loader, 5, 3, 0.5)
    assert [report.loss for report in recorder.steps] == pytest.approx(losses, abs=1e-12)
    assert [report.grad_norm for report in recorder.steps] == pytest.approx(norms, abs=1e-12)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
    assert (end.step, end.reason) == (5, "done")


def evaluate_unevenly():
    model = make_model()
    engine = RuntimeEngine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), gradient_sync=AllReduceGradients()
    )
    with pytest.raises(NanotrainError, match=r"ranks 0 to 1 have \[2, 3\] batches: expected equally many"):
        engine.fit(make_loader(), make_loader(2 + rank()), steps=1)


def test_ranks_with_different_numbers_of_validation_batches_are_told_so():
    """Gloo had aborted them, or they had waited for one another."""
    run_ranks(evaluate_unevenly, 2)


def test_validation_is_the_mean_over_all_targets():
    model, loader, recorder = make_model(), make_loader(), Recorder()
    engine = RuntimeEngine(model, torch.optim.SGD(model.parameters(), lr=0.0), callbacks=[recorder])
    began = time.monotonic()
    engine.fit(loader, loader, steps=1)
    took = time.monotonic() - began
    tokens = torch.cat([tokens for tokens, _ in loader])
    targets = torch.cat([targets for _, targets in loader])
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).item()
    (report,) = recorder.evaluations
    assert report.loss == pytest.approx(expected, rel=1e-6)
    assert report.tokens == int((targets != IGNORE).sum())
    assert report.positions == targets.numel()
    assert 0 < report.seconds < took


def test_the_schedule_drives_the_scripts_optimizer():
    model, recorder = make_model(), Recorder()
    config = ScriptConfig(lr_schedule=LRScheduleConfig(use="linear", warmup_steps=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    RuntimeEngine(model, optimizer, config, callbacks=[recorder]).fit(make_loader(), steps=6)
    assert [report.lr for report in recorder.steps] == pytest.approx([0.2, 0.4, 0.4, 0.3, 0.2, 0.1])


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_rate_that_is_set_between_two_calls_is_the_new_peak(kind):
    """The first call's schedule had overwritten it."""
    model, recorder = make_model(), Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=kind(0.1))
    config = ScriptConfig(lr_schedule=LRScheduleConfig(warmup_steps=2))
    engine = RuntimeEngine(model, optimizer, config, callbacks=[recorder])
    engine.fit(make_loader(), steps=4)
    optimizer.param_groups[0]["lr"] = kind(0.001)
    engine.fit(make_loader(), steps=6)
    RuntimeEngine(model, optimizer, config, callbacks=[recorder]).fit(make_loader(), steps=3)
    rates = [report.lr for report in recorder.steps]
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.1, 0.001, 0.001, 0.0005, 0.001, 0.001], rel=1e-6)


def test_a_rate_that_is_a_tensor_stays_the_peak_of_a_second_call():
    """The schedule writes in place into the tensor, which was also remembered as the peak."""
    model, recorder = make_model(), Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.4))
    config = ScriptConfig(lr_schedule=LRScheduleConfig(use="linear", warmup_steps=0))
    engine = RuntimeEngine(model, optimizer, config, callbacks=[recorder])
    engine.fit(make_loader(), steps=2)
    engine.fit(make_loader(), steps=4)
    assert [report.lr for report in recorder.steps] == pytest.approx([0.4, 0.2, 0.2, 0.1])
    optimizer.param_groups[0]["lr"].fill_(0.8)
    engine.fit(make_loader(), steps=5)
    assert recorder.steps[-1].lr == pytest.approx(0.16)


def test_a_callback_can_stop_the_run():
    class Stop(Monitor):
        def on_step(self, report):
            return "stop" if report.step == 2 else None

    model = make_model()
    engine = RuntimeEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[Stop()])
    end = engine.fit([Batch(*pair) for pair in make_loader()], steps=10)
    assert end.reason == "stopped"
    assert end.step < 5


@pytest.mark.parametrize(
    ("callback", "text"),
    [
        (object(), r"callback object: derive from nanotrain_core.api.torch.Monitor: it is a object without"),
        (Monitor, r"callback Monitor is a class; expected an object of it: Monitor\(...\)"),
        (
            type("Mine", (Monitor,), {"on_step": lambda self: None})(),
            r"callback Mine: Mine.on_step\(self\) cannot be called: .* expected on_step\(self, report\)",
        ),
    ],
    ids=["without base", "class", "signature"],
)
def test_a_callback_that_could_not_be_called_is_refused(callback, text):
    model = make_model()
    engine = RuntimeEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[callback])
    with pytest.raises(PluginError, match=text):
        engine.fit(make_loader(), steps=1)


@pytest.mark.parametrize(("loader", "error"), [(None, TypeError), ([], ValueError)])
def test_a_missing_or_empty_loader_is_said_plainly(loader, error):
    model = make_model()
    engine = RuntimeEngine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(error, match="train_loader"):
        engine.fit(loader, steps=1)


def test_fit_goes_on_after_a_stop():
    class StopOnce(Monitor):
        def on_step(self, report):
            return "stop" if report.step == 2 else None

    model = make_model()
    engine = RuntimeEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[StopOnce()])
    assert engine.fit(make_loader(), steps=6).reason == "stopped"
    end = engine.fit(make_loader(), steps=6)
    assert (end.step, end.reason) == (6, "done")


def test_the_console_says_how_many_tokens_a_step_has(capsys):
    model, loader = make_model(), [Batch(*pair) for pair in make_loader()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    console, recorder = Console(ConsoleConfig(style="lines")), Recorder()
    engine = RuntimeEngine(model, optimizer, ScriptConfig(accumulate=2), callbacks=[console, recorder])
    engine.fit(iter(loader), steps=2)
    assert f"{2 * 3 * 6} tokens a step" in capsys.readouterr().out
    assert [report.tokens for report in recorder.steps] == [36, 72]  # no batch was lost by looking ahead


def test_a_recipes_engine_takes_callbacks_beside_the_recipes_monitors():
    case, recorder = Case("monitor", use="jsonl"), Recorder()
    recipe = case.recipe(run={"steps": 2})
    engine = RuntimeEngine.from_recipe(recipe, registry=case.registry(), callbacks=[recorder])
    engine.fit()
    assert [report.step for report in recorder.steps] == [1, 2]
    assert [type(monitor).__name__ for monitor in engine.run.monitors] == ["Jsonl", "Recorder"]


def autocast_loop(model, loader, dtype, scale):
    """What a script would write itself for mixed precision."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05), []
    for step in range(6):
        tokens, targets = loader[step % len(loader)]
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        loss = loss / (targets != IGNORE).sum()
        (loss * scale).backward()
        for parameter in model.parameters():
            parameter.grad /= scale
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("precision", "dtype", "scale"), [("bf16", torch.bfloat16, 1.0), ("fp16", torch.float16, 2.0**16)]
)
def test_a_narrow_precision_is_autocast_with_a_loss_scale_where_it_is_needed(precision, dtype, scale):
    ours, loader, recorder = make_model().float(), make_loader(), Recorder()
    theirs, exact = copy.deepcopy(ours), copy.deepcopy(ours)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.05)
    RuntimeEngine(ours, optimizer, ScriptConfig(precision=precision), callbacks=[recorder]).fit(
        loader, steps=6
    )
    losses = autocast_loop(theirs, loader, dtype, scale)
    assert [report.loss for report in recorder.steps] == pytest.approx(losses, rel=1e-6)
    assert {report.loss_scale for report in recorder.steps} == {scale}
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.dtype is torch.float32
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
    assert autocast_loop(exact, loader, torch.float32, 1.0) != pytest.approx(losses, rel=1e-6)


def test_a_step_that_overflows_in_float16_changes_nothing_and_halves_the_scale():
    model, recorder = make_model().float(), Recorder()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    large = lambda output, targets: 1e4 * output.float().square().sum()  # noqa: E731
    engine = RuntimeEngine(
        model, optimizer, ScriptConfig(precision="fp16", clip_norm=1.0), callbacks=[recorder], loss=large
    )
    engine.fit(make_loader(), steps=1)
    assert all(map(torch.equal, model.parameters(), before))
    assert not optimizer.state
    engine.fit(make_loader(), steps=20)
    skipped = [report.skipped for report in recorder.steps]
    assert skipped[0]
    assert not skipped[-1]
    scales = [report.loss_scale for report in recorder.steps]
    assert scales[: sum(skipped)] == [2.0 ** (16 - n) for n in range(sum(skipped))]
    assert not all(map(torch.equal, model.parameters(), before))


def test_a_script_says_how_many_steps_to_train():
    """Without, it had trained none, and said that it was done."""
    model = nn.Linear(4, 4)
    engine = RuntimeEngine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"fit needs steps=\.\.\., the total number of optimizer steps"):
        engine.fit(make_loader())


class StrictlyFails(Monitor):
    """Observes the model, and then refuses to start."""

    def on_start(self, run):
        run.observe_outputs(lambda name, output: None, ["0"])
        raise NanotrainError("planted")


def test_a_monitor_that_refuses_to_start_leaves_no_tap_on_the_model():
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
    engine = RuntimeEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[StrictlyFails()])
    with pytest.raises(NanotrainError, match="planted"):
        engine.fit(make_loader(), steps=1)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
