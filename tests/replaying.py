"""Runs with the monitor ``replay``, on this rank: of sound hardware, and of a layer that computes wrongly."""

import torch

from nanotrain_core.api import Corrupted
from nanotrain_core.api.torch import Monitor
from nanotrain_core.testing.probe import make_engine, train

REPLAY = {"monitor": [{"use": "replay", "every": 1}]}


class Faulty(Monitor):
    """From a step on, a rank's layer flips a low bit of a number that it computes."""

    def __init__(self, rank, layer, backward=False, calls=None):
        self.rank, self.layer, self.backward, self.left = rank, layer, backward, calls
        self.step = 0

    def on_start(self, run):
        if run.rank != self.rank:
            return
        modules = {name: module for part in run.parts for name, module in part.named_modules()}
        modules[self.layer].register_forward_hook(self.look)

    def on_before_update(self, update):
        """Called before ``replay`` is: faults begin with its first pass."""
        self.step = update.step

    def look(self, module, args, output):
        if self.step < 2 or not torch.is_grad_enabled() or self.left == 0:
            return
        self.left = None if self.left is None else self.left - 1
        if self.backward:
            output.register_hook(flipped)
        else:
            return flipped(output)


def flipped(tensor):
    wrong = tensor.detach().clone()
    # Not the last bit: rounding may hide it where the number is added to the larger residual stream.
    wrong.view(-1)[-1] *= 1 + 2**10 * torch.finfo(tensor.dtype).eps
    return tensor + (wrong - tensor).detach()


def trained(case, fault):
    """Return what the run ended with, if not with success."""
    engine = make_engine(case, {**REPLAY, "run": {"steps": 3}})
    engine.events.monitors = [fault, *engine.events.monitors]
    try:
        engine.fit()
    except Corrupted as problem:
        return str(problem)
    return None


def both(case, table):
    """Train without and with replays."""
    return train(case, {"optimizer": table}), train(case, {"optimizer": table, **REPLAY})
