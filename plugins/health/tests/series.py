"""What metrics of many steps are, and those of experts and of the fixed batch: written apart, from tensors.

``SERIES`` is by declared name, as ``STEP`` of :mod:`definitions` is.
"""

import math
from collections.abc import Callable, Mapping

import attrs
import torch

from nanotrain_core.api.torch import IGNORE, Batch, Monitor, Shard, counting_routers
from nanotrain_core.testing import Case

#: Of the run, and of the windows as the metrics' summaries have them.
CLIP, CLIPS, SKIPS, KNOWN, EMA, TOP, PROBED = 2.0, 100, 20, 10, 0.98, 4, 2
#: Of these steps the gradient is infinite.
SKIPPED = {3, 4, 5, 50}
#: Steps until each window is full.
STEPS = CLIPS + len(SKIPPED) + 2
MONITORS = [
    {"use": "health", "queries": 0, "every": 1000, "ema": EMA},
    {"use": "moe"},
    {"use": "probes", "every": PROBED, "sequences": 3, "length": 5, "top": TOP},
]
CASE = Case(
    "monitor",
    use="health",
    config={"queries": 0, "every": 1000, "ema": EMA},
    overrides={
        "run": {"steps": STEPS},
        "batch": {"sequences": 4, "microbatch": 4, "length": 8},
        "model": {"use": "routed", "layers": 1},
        "optimizer": {"use": "sgd", "lr": 0.03, "clip_norm": CLIP},
        "evaluation": {"every": 20, "sequences": 8},
        "monitor": MONITORS,
    },
)


def plant(engine):
    """Have steps skipped, targets ignored and tokens come from two sources: on any rank of any layout."""
    data = engine.run.feed.data
    taken = data.train_batch

    def masked(*args):
        batch = taken(*args)
        return attrs.evolve(batch, targets=batch.targets.masked_fill(batch.tokens < 9, IGNORE))

    data.train_batch = masked
    data.tokens_by_source = lambda: mixture(engine.step)

    def overflow(module, args, output):
        x = output if isinstance(output, torch.Tensor) else output[0]
        if x.requires_grad and engine.step + 1 in SKIPPED:
            x.register_hook(lambda gradient: gradient * torch.inf)

    for part in engine.run.stages.values():
        for layer in part.layers.values():
            layer.register_forward_hook(overflow)


def mixture(step):
    """Return tokens by source before a step is over."""
    return {"web": 3 * step + 1, "code": step + 4}


class History(Monitor):
    """Keeps of each step what its metrics follow from; lists begin with the first step."""

    def __init__(self, engine):
        self.engine, self.loss, self.lm, self.norm, self.targets, self.taught = engine, [], [], [], [], []
        self.validation, self.loads, self.bias, self.logits = {}, [], [], {}
        self.experts, self.seen = {}, []
        data = engine.run.feed.data
        whole = data.validation_batch(0, 3, Shard())
        self.batch = Batch(whole.tokens[:, :5], whole.targets[:, :5])
        part = engine.run.stages[0]
        part.head.register_forward_pre_hook(self.at_head)
        for name, router in counting_routers([part]).items():
            self.experts[name] = []
            router.register_forward_hook(self.chosen(name))

    def at_head(self, module, args):
        if module.training and torch.is_grad_enabled():
            self.seen.append(args[1])

    def chosen(self, name):
        def hook(router, args, routing):
            if router.training and torch.is_grad_enabled():
                self.experts[name].append(routing.experts.flatten())

        return hook

    def on_before_update(self, update):
        gradients = [found.tensor.flatten() for found in update.gradients()]
        self.norm.append(torch.cat(gradients).norm().item())
        targets = torch.cat([each.flatten() for each in self.seen])
        self.targets.append(len(targets))
        self.taught.append((targets != IGNORE).sum().item())
        self.seen.clear()

    def on_after_update(self, update):
        part, routers = self.engine.run.stages[0], counting_routers(self.engine.run.stages.values())
        self.loads.append({n: torch.cat(x).bincount(minlength=8).tolist() for n, x in self.experts.items()})
        for kept in self.experts.values():
            kept.clear()
        self.bias.append({name: router.bias.detach().double().clone() for name, router in routers.items()})
        if update.step % PROBED == 0:
            part.eval()  # else routers count these tokens, too
            with torch.no_grad():
                self.logits[update.step] = part(self.batch.tokens, Batch(self.batch.tokens)).value
            part.train()

    def on_step(self, report):
        self.loss.append(report.loss)
        self.lm.append(report.losses["lm"])

    def on_evaluation(self, report):
        self.validation[report.step] = report.loss

    # --- what definitions are made of ---

    def skipped(self, step):
        return float(not math.isfinite(self.norm[step - 1]))

    def probabilities(self, step):
        return self.logits[step].softmax(-1).flatten(0, 1)

    def shares(self, router, step):
        load = self.loads[step - 1][router]
        return [tokens / sum(load) for tokens in load]

    def recent(self, router, step):
        """Return the moving average of shares: of the first step, then a tenth of each next one."""
        each = [self.shares(router, n) for n in range(1, step + 1)]
        return [average(column, 0.9) for column in zip(*each, strict=True)]


def average(values, kept):
    """Return an exponential moving average, as the sum of what each value still weighs."""
    first, later = values[0], values[:0:-1]  # the latest first
    return kept ** (len(values) - 1) * first + sum((1 - kept) * kept**age * x for age, x in enumerate(later))


def balance(shares):
    """Return the entropy over that of equal shares."""
    return -sum(x * math.log(x) for x in shares if x) / math.log(len(shares))


def drift(h, step):
    usual = average(h.taught[: step - 1], EMA)
    return abs(h.taught[step - 1] / usual - 1)


def clip_rate(h, step):
    norms = [norm for norm in h.norm[:step] if math.isfinite(norm)][-CLIPS:]
    return sum(norm > CLIP for norm in norms) / len(norms)


def clip_mean(h, step):
    norms = [norm for norm in h.norm[:step] if math.isfinite(norm)][-CLIPS:]
    return sum(min(1, CLIP / (norm + 1e-6)) for norm in norms) / len(norms)


def skip_rate(h, step):
    last = range(max(1, step - SKIPS + 1), step + 1)
    return sum(h.skipped(n) for n in last) / len(last)


def gap(h, step):
    return h.validation[step] - average(h.lm[:step], EMA)


def kl(h, step):
    now, before = h.probabilities(step), h.probabilities(step - PROBED)
    return (now * (now / before).log()).sum(-1).mean()


def probe_loss(h, step):
    targets = h.batch.targets.flatten()[:, None]
    return -h.probabilities(step).gather(1, targets).log().mean()


def ordered(h, step):
    return h.probabilities(step).sort(-1, descending=True).values


#: By declared name: the value of a step from the history, and from the words of the name.
SERIES: Mapping[str, Callable] = {
    "loss/ema": lambda h, n: average(h.loss[:n], EMA),
    "loss/spike": lambda h, n: h.loss[n - 1] / average(h.loss[: n - 1], EMA),
    "validation/gap": gap,
    "tokens": lambda h, n: sum(h.targets[:n]),
    "data/effective_tokens": lambda h, n: sum(h.taught[:n]),
    "data/drift": drift,
    "data/mixture/{source}": lambda h, n, source: mixture(n - 1)[source] / sum(mixture(n - 1).values()),
    "skipped": lambda h, n: h.skipped(n),
    "gradients/clip_rate": clip_rate,
    "gradients/clip_mean": clip_mean,
    "optimizer/skip_rate": skip_rate,
    "expert_load": lambda h, n: max(max(h.shares(router, n)) * 8 for router in h.experts),
    "moe/max_load/{router}": lambda h, n, router: max(h.shares(router, n)) * 8,
    "moe/min_load/{router}": lambda h, n, router: min(h.shares(router, n)) * 8,
    "moe/entropy/{router}": lambda h, n, router: balance(h.shares(router, n)),
    "moe/empty/{router}": lambda h, n, router: h.loads[n - 1][router].count(0),
    "moe/balance/{router}": lambda h, n, router: balance(h.recent(router, n)),
    "moe/starved/{router}": lambda h, n, router: sum(x * 8 < 0.02 for x in h.recent(router, n)),
    "moe/bias_norm/{router}": lambda h, n, router: h.bias[n - 1][router].norm(),
    "probes/loss": probe_loss,
    "probes/entropy": lambda h, n: -(h.probabilities(n) * h.probabilities(n).log()).sum(-1).mean(),
    "probes/top_mass": lambda h, n: ordered(h, n)[:, :TOP].sum(-1).mean(),
    "probes/kl": kl,
    "probes/leak": lambda h, n: 0.0,  # of a causal model
    "probes/shifted": lambda h, n: (h.batch.targets[:, :-1] == h.batch.tokens[:, 1:]).double().mean(),
}
