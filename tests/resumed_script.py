"""A script with a folder: its model, its loaders and optimizers, trained to some step."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nanotrain_core import RuntimeEngine
from nanotrain_core.contracts import Monitor
from nanotrain_core.recipe.tree import LRScheduleConfig
from nanotrain_core.script import ScriptConfig

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


MANY = 40


def many_batches():
    generator = torch.Generator().manual_seed(2)
    tokens = [torch.randint(11, (4, 6), generator=generator) for _ in range(MANY)]
    return [(each, (each * 3 + 1) % 11) for each in tokens]


@pytest.fixture
def workers(monkeypatch):
    """Let the garbage collector end a loader's workers, in the time between two of their checks."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    yield
    gc.collect()
