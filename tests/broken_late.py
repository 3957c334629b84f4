"""Optimizers, monitors and data that go wrong late: after the first step, the fourth, a skip or an epoch.

See ``broken_twins.py``.
"""

import numpy as np
import torch
from broken_twins import twin

from nanotrain_core import hookimpl
from nanotrain_core.batch import Shard
from nanotrain_core.builtin import configs
from nanotrain_core.contracts import Monitor
from nanotrain_core.data.order import ShuffledOrder
from nanotrain_core.data.synthetic import Synthetic
from nanotrain_core.optim.adamw import AdamW
from nanotrain_core.optim.sgd import SGD

# --- optimizers ------------------------------------------------------------------------------------


class Rated:
    """Steps with other learning rates than those it is given."""

    first = None

    def rates(self, now):
        self.first = self.first or now
        return self.first

    def step(self, **options):
        groups = self.inner.param_groups
        now = [group["lr"] for group in groups]
        for group, rate in zip(groups, self.rates(now), strict=True):
            group["lr"] = rate
        stats = super().step(**options)
        for group, rate in zip(groups, now, strict=True):
            group["lr"] = rate
        return stats


class KeepsItsFirstRate(Rated, SGD):
    """Reads the learning rate once."""


class FollowsOneGroup(Rated, AdamW):
    """Has the schedule move the first group of parameters alone."""

    def rates(self, now):
        return [now[0], *super().rates(now)[1:]]


class IsOneStepLate(Rated, SGD):
    """Takes the rate of the step before."""

    def rates(self, now):
        late, self.first = self.first or now, now
        return late


class CountsSkippedSteps(SGD):
    """Its rate falls with a count of steps, which goes on where a step is skipped."""

    count = 0

    def step(self, **options):
        for group in self.inner.param_groups:
            group["lr"] *= 0.9**self.count
        stats = super().step(**options)
        for group in self.inner.param_groups:
            group["lr"] /= 0.9**self.count
        self.count = self.counted(bool(stats.skipped))
        return stats

    def counted(self, skipped):
        return self.count + 1

    def meta(self):
        return {"count": self.count}

    def load_meta(self, meta):
        self.count = meta["count"]


class ForgetsAtASkip(CountsSkippedSteps):
    """Begins to count anew where a step is skipped."""

    def counted(self, skipped):
        return 0 if skipped else self.count + 1


class DecaysItsMomentsAnyway(AdamW):
    """A step that is skipped halves the first moment."""

    def step(self, **options):
        stats = super().step(**options)
        if stats.skipped:
            for state in self.inner.state.values():
                state["exp_avg"].mul_(0.5)
        return stats


# --- monitors --------------------------------------------------------------------------------------


class DrawsLate(Monitor):
    """Draws a random number from the fifth step on."""

    def __init__(self, config):
        self.config = config

    def on_step(self, report):
        if report.step > 4:
            torch.rand(1)


class ChangesGradientsLate(DrawsLate):
    """Changes a gradient from the sixth step on."""

    on_step = Monitor.on_step

    def on_start(self, run):
        self.placed = run.placed

    def on_before_update(self, update):
        if update.step > 5:
            self.placed[0].parameter.grad.mul_(1.5)


class PublishesLate(DrawsLate):
    """Publishes a name that it does not declare from the tenth step on."""

    on_step = Monitor.on_step

    def on_start(self, run):
        self.metrics = run.metrics

    def on_before_update(self, update):
        if update.step > 9:
            self.metrics.scalar("ratio", 1.0)


class ForgetsLate(DrawsLate):
    """Remembers no more than four steps of those that it says it has seen."""

    seen = 0

    def on_step(self, report):
        self.seen += 1

    def meta(self):
        return {"seen": self.seen}

    def load_meta(self, meta):
        self.seen = min(4, meta["seen"])


class BeginsAnewAtStart(ForgetsLate):
    """Sets what it has loaded back when the run starts."""

    def on_start(self, run):
        self.seen = 0

    def load_meta(self, meta):
        self.seen = meta["seen"]


# --- data ------------------------------------------------------------------------------------------


class LosesItsEpoch(Synthetic):
    """Says its place in an epoch, and not in which."""

    def meta(self):
        return {**super().meta(), "position": self.position % self.train}


class BeginsEpochsAnew(Synthetic):
    """Goes on with the first batch of an epoch that is not the first."""

    def load_meta(self, meta):
        super().load_meta(meta)
        if self.position > self.train:
            self.position -= self.position % self.train


class StopsAtTheFirstEpoch(Synthetic):
    """Never says that it is further than one epoch."""

    epochs = 1

    def meta(self):
        return {**super().meta(), "position": min(self.position, self.epochs * self.train)}


class StopsAtTheSecondEpoch(StopsAtTheFirstEpoch):
    """Never says that it is further than two epochs."""

    epochs = 2


class ShufflesByRank(Synthetic):
    """Each shard has an order of its own in the second epoch."""

    def train_batch(self, sequences, shard):
        if self.position >= self.train:
            self._train_order = ShuffledOrder(self.train, self.seed + shard.index)
        return super().train_batch(sequences, shard)


class HashedOrder:
    """Later epochs are drawn from the hash of a text, which each machine's Python salts in its own way."""

    def __init__(self, order):
        self.order = order

    def at(self, positions):
        count = self.order.count
        later = np.random.default_rng(abs(hash("epoch"))).permutation(count)
        places = (at if at < count else at - at % count + later[at % count] for at in positions)
        return self.order.at(places)


class HashesItsEpoch(Synthetic):
    """Each machine has an order of its own in the second epoch."""

    def order(self, seed, *, validation):
        order = super().order(seed, validation=validation)
        return order if validation else HashedOrder(order)


class RotatesRows(Synthetic):
    """Each shard has the next one's rows in the second epoch."""

    epochs = 1

    def shard(self, shard):
        return Shard((shard.index + 1) % shard.count, shard.count)

    def train_batch(self, sequences, shard):
        late = self.position >= self.epochs * self.train
        return super().train_batch(sequences, self.shard(shard) if late else shard)


class RotatesRowsLater(RotatesRows):
    """Each shard has the next one's rows in the third epoch."""

    epochs = 2


class RepeatsTheFirstShard(RotatesRows):
    """All shards have the first one's rows in the second epoch."""

    def shard(self, shard):
        return Shard(0, shard.count)


class ForgetsItsSeed(Synthetic):
    """Its fingerprint says nothing of the seed."""

    def named(self, length, seed):
        return f"sequences of {length}"

    def open(self, *, length, seed):
        super().open(length=length, seed=seed)
        self.fingerprint = self.named(length, seed)


class ForgetsItsLength(ForgetsItsSeed):
    """Its fingerprint says nothing of the length."""

    def named(self, length, seed):
        return f"seed {seed}"


class ForgetsWhatItIs(ForgetsItsSeed):
    """Its fingerprint is its name."""

    def named(self, length, seed):
        return "synthetic"


@hookimpl
def nanotrain_register_optimizer(register):
    for cls in (KeepsItsFirstRate, IsOneStepLate, CountsSkippedSteps, ForgetsAtASkip):
        register(twin(cls, configs.SGDConfig))
    for cls in (FollowsOneGroup, DecaysItsMomentsAnyway):
        register(twin(cls, configs.AdamWConfig))


@hookimpl
def nanotrain_register_monitor(register):
    for cls in (DrawsLate, ChangesGradientsLate, PublishesLate, ForgetsLate, BeginsAnewAtStart):
        register(twin(cls))


@hookimpl
def nanotrain_register_data(register):
    for cls in (
        LosesItsEpoch,
        BeginsEpochsAnew,
        StopsAtTheFirstEpoch,
        StopsAtTheSecondEpoch,
        ShufflesByRank,
        HashesItsEpoch,
        RotatesRows,
        RotatesRowsLater,
        RepeatsTheFirstShard,
        ForgetsItsSeed,
        ForgetsItsLength,
        ForgetsWhatItIs,
    ):
        register(twin(cls, configs.SyntheticConfig))
