"""Learning-rate schedules, as factors for ``torch.optim.lr_scheduler.LambdaLR``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import cos, pi
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from nanotrain_core.recipe.tree import LRScheduleConfig


def factor(config: LRScheduleConfig, steps: int) -> Callable[[int], float]:
    """Return the multiplier of the peak rate as a function of the steps already done, from 0.

    Warm-up rises linearly: the first step has 1 / warmup_steps, the last of warm-up the full rate.
    Decay begins at the full rate and would reach ``final_ratio`` one step after the run's last step.

    Source: cosine from Loshchilov and Hutter, arXiv 1608.03983 (half a period of the cosine, no restart); WSD
    from Hu et al., arXiv 2404.06395 (with linear decay).
    """
    decay = config.decay_steps
    if decay is None:
        # The first step of a decay still has the full rate: with less than 2 steps there would be no decay.
        decay = max(2, steps // 10) if config.use == "wsd" else max(1, steps - config.warmup_steps)
    decay_begins = steps - decay

    def at(done: int) -> float:
        if done < config.warmup_steps:
            return (done + 1) / config.warmup_steps
        if config.use == "constant" or done <= decay_begins:
            return 1.0
        progress = min(1.0, (done - decay_begins) / decay)
        remaining = (1 + cos(pi * progress)) / 2 if config.use == "cosine" else 1 - progress
        return config.final_ratio + (1 - config.final_ratio) * remaining

    return at


def copied(rate: Any) -> Any:
    """Return a rate as it is now: ``LambdaLR`` writes in place into one that is a tensor."""
    return rate.detach().clone() if isinstance(rate, torch.Tensor) else rate


class Scheduler(LambdaLR):
    """Advances after a skipped step too, even the first, without torch's warning about it."""

    def step(self, epoch: int | None = None) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            super().step(epoch)
        self._note()

    def _note(self) -> None:
        """Record the rates, by which :func:`lr_scheduler` knows those that a script sets."""
        for group in self.optimizer.param_groups:
            group["scheduled_lr"] = copied(group["lr"])

    def set_peak(self, rate: float, of: float) -> None:
        """Apply the schedule's factors, including that of the next step, to another peak rate.

        Args:
            rate: instead of ``of``, the config's. Groups with different rates keep their ratio to it.
        """
        own = [group["initial_lr"] for group in self.optimizer.param_groups]
        self.base_lrs = [rate if each == of else each * rate / of for each in own]
        factors = [factor(self.last_epoch) for factor in self.lr_lambdas]
        self._last_lr = [base * factor for base, factor in zip(self.base_lrs, factors, strict=True)]
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr
        self._note()


def lr_scheduler(
    optimizer: torch.optim.Optimizer, config: LRScheduleConfig, steps: int, *, done: int = 0
) -> Scheduler:
    """Return the scheduler of a run of ``steps`` optimizer steps, ``done`` of them before a resume.

    The rate depends only on the step, so a resumed run may change its peak. A rate that a script has set
    since the last schedule of the optimizer is the new peak.
    """
    for group in optimizer.param_groups:
        if float(group.get("scheduled_lr", group["lr"])) != float(group["lr"]):
            group["initial_lr"] = copied(group["lr"])
        group.setdefault("initial_lr", copied(group["lr"]))
    return Scheduler(optimizer, factor(config, steps), last_epoch=done - 1)
