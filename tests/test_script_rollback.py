"""A script whose training goes wrong is taken back, and its data left out."""

from itertools import islice

import pytest
import torch
from resumed_script import (
    MANY,
    Net,
    Records,
    many_batches,
    tokens_and_targets,
    with_workers,
    workers,  # noqa: F401, of usefixtures
)
from torch import nn
from torch.nn import functional as F

from nanotrain_core import RuntimeEngine
from nanotrain_core.builtin.configs import GuardConfig
from nanotrain_core.contracts import Monitor
from nanotrain_core.errors import Diverged, NanotrainError
from nanotrain_core.monitors.guard import Guard
from nanotrain_core.run.stop import Rollback
from nanotrain_core.script import ScriptConfig

BAD = range(22, 25)


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
