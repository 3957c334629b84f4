"""A schedule-free optimizer trains at weights y and is evaluated, and saved, at weights x."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from nanotrain_core import RuntimeEngine
from nanotrain_core.contracts import Monitor
from nanotrain_core.script import ScriptConfig

STEPS = 6


class ScheduleFree(torch.optim.Optimizer):
    """SGD with the protocol of the package ``schedulefree``: y in the model in training, x for evaluation."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.5, "k": 0, "train_mode": False})

    @torch.no_grad()
    def switch(self, mode, weight):
        for group in self.param_groups:
            if group["train_mode"] != mode:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)
                group["train_mode"] = mode

    def eval(self):
        self.switch(mode=False, weight=1 - 1 / 0.9)

    def train(self):
        self.switch(mode=True, weight=1 - 0.9)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train_mode"], "step() in evaluation mode"
            group["k"] += 1
            c = 1 / group["k"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, c).add_(p.grad, alpha=group["lr"] * (0.9 * (1 - c) - 1))
                z.sub_(p.grad, alpha=group["lr"])


class Records(Monitor):
    def __init__(self, stop_after):
        self.stop_after, self.validation = stop_after, []

    def on_step(self, report):
        return "stop" if report.step == self.stop_after else None

    def on_evaluation(self, report):
        self.validation.append(report.loss)


def batches():
    tokens = torch.randint(16, (STEPS, 4, 8), generator=torch.Generator().manual_seed(1))
    return [(each, (each * 3 + 1) % 16) for each in tokens]


def script(stop_after=0, steps=STEPS, **options):
    """Return the model, its optimizer and validation losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16))
    optimizer, records = ScheduleFree(model.parameters()), Records(stop_after)
    engine = RuntimeEngine(model, optimizer, ScriptConfig(**options), callbacks=[records])
    engine.fit(batches(), batches()[:2], steps=steps)
    return model, optimizer, records.validation


def validation_loss(model):
    with torch.no_grad():
        losses = [F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item() for x, y in batches()[:2]]
    return sum(losses) / len(losses)


def test_it_is_evaluated_and_saved_at_the_weights_for_it(tmp_path):
    model, optimizer, validation = script(folder=tmp_path)
    trained = validation_loss(model)
    optimizer.eval()
    assert validation[-1] == pytest.approx(validation_loss(model), rel=1e-6)
    assert abs(validation_loss(model) - trained) > 1e-3
    saved = load_file(next(tmp_path.glob("checkpoints/*.safetensors")))
    for name, weight in model.state_dict().items():
        assert torch.equal(saved[name], weight)


def test_evaluating_and_saving_change_no_bit_of_training(tmp_path):
    (plain, *_), (often, *_) = script(), script(evaluate_every=1, folder=tmp_path, save_every=1)
    assert all(map(torch.equal, plain.parameters(), often.parameters()))


def test_a_resumed_script_trains_on_at_the_very_weights(tmp_path):
    plain, *_ = script()
    _, stopped, _ = script(stop_after=2, folder=tmp_path, resume="auto")
    assert 0 < stopped.param_groups[0]["k"] < STEPS
    resumed, optimizer, _ = script(folder=tmp_path, resume="auto")
    assert optimizer.param_groups[0]["k"] == STEPS
    assert all(map(torch.equal, plain.parameters(), resumed.parameters()))


def test_a_script_may_evaluate_by_itself_between_calls_of_fit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16))
    optimizer = ScheduleFree(model.parameters())
    engine = RuntimeEngine(model, optimizer)
    engine.fit(batches(), steps=2)
    optimizer.eval()
    engine.fit(batches(), steps=4)
    assert optimizer.param_groups[0]["train_mode"]
