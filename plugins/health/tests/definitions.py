"""What metrics of a step are: written apart, from plain tensors, by the name that they are declared under.

Tests compare every published value with its definition; tests/test_catalogue.py asks for one of each metric
of the catalogue.
"""

import math
import re
from collections.abc import Callable, Mapping
from statistics import median

import torch
import torch.nn.functional as F

from nanotrain_core.api.torch import IGNORE, Monitor, rope, rope_frequencies, rope_rotation

PEAK_LR, WARMUP, CLIP, HEAD_SIZE = 0.01, 4, 0.5, 32
ADAMW = {
    "use": "adamw",
    "lr": PEAK_LR,
    "clip_norm": CLIP,
    "lr_schedule": {"use": "cosine", "warmup_steps": 4},
}


class Sees(Monitor):
    """Keeps tensors of the last step as plain hooks and the optimizer show them."""

    def __init__(self, engine):
        self.engine, self.outputs, self.heads, self.validation = engine, {}, [], []
        for name, module in engine.run.stages[0].named_modules():
            if name.startswith(("layers.", "norm")):
                module.register_forward_hook(self.keep(name))
        engine.run.stages[0].head.register_forward_pre_hook(self.at_head)

    def keep(self, name):
        def hook(module, args, output):
            if torch.is_grad_enabled():
                self.outputs.setdefault(name, []).append(output.detach().clone())

        return hook

    def at_head(self, module, args):
        """Keep what logits are made of, and the targets."""
        kept = self.heads if torch.is_grad_enabled() else self.validation
        kept.append((args[0].detach().clone(), args[1]))

    def weights(self):
        return {p.placement.name: p.parameter.detach().clone() for p in self.engine.run.placed}

    def on_before_update(self, update):
        self.before = self.weights()
        self.gradients = {found.name: found.tensor.clone() for found in update.gradients()}
        self.validation.clear()  # of an evaluation before the step

    def on_after_update(self, update):
        self.after = self.weights()
        self.changes = {name: self.after[name] - self.before[name] for name in self.before}
        self.state = [b.tensor for b in self.engine.run.optimizer.blocks() if b.name.startswith("exp_avg")]

    # --- what definitions are made of ---

    def of(self, tensors, block):
        """Return one long vector of all elements of a layer."""
        return torch.cat([x.flatten() for name, x in tensors.items() if name.startswith(f"{block}.")])

    def whole(self, tensors):
        return torch.cat([x.flatten() for x in tensors.values()])

    @property
    def clip(self):
        """What gradients are multiplied by: torch's ``clip_grad_norm_`` adds 1e-6 to the norm."""
        return min(1.0, CLIP / (self.whole(self.gradients).norm().item() + 1e-6))

    @property
    def lr(self):
        return PEAK_LR / WARMUP

    @property
    def layers(self):
        return [f"layers.{n}" for n in range(len(self.engine.run.stages[0].layers))]

    @property
    def blocks(self):
        return [*self.layers, "embed", "norm", "head"]

    def proxy(self, block):
        return (
            self.lr * self.clip * self.of(self.gradients, block).norm() / self.of(self.before, block).norm()
        )

    def proxies(self):
        return sorted(self.proxy(block).item() for block in self.blocks)

    def output(self, name):
        return torch.cat(self.outputs[name])

    def attention(self, block):
        """Return the largest logit, and of each query entropy and share of what is possible."""
        q, k = (self.output(f"{block}.attn.{name}").unflatten(-1, (-1, HEAD_SIZE)) for name in "qk")
        frequencies = rope_frequencies(HEAD_SIZE, 10000.0, None, length=q.shape[1], device=q.device)
        turn = rope_rotation(q.shape[1], frequencies, like=q)
        q, k = rope(q, *turn), rope(k, *turn)
        most, entropies, shares = -math.inf, [], []
        group = q.shape[2] // k.shape[2]
        for b in range(q.shape[0]):
            for h in range(q.shape[2]):
                for row in range(q.shape[1]):
                    scores = k[b, : row + 1, h // group] @ q[b, row, h] / math.sqrt(HEAD_SIZE)
                    most = max(most, scores.max().item())
                    p = scores.softmax(0)
                    entropies.append(-(p * p.log()).sum().item())
                    shares += [entropies[-1] / math.log(row + 1)] if row else []
        return most, sum(entropies) / len(entropies), sum(shares) / len(shares)

    def cross_entropy(self, kept, weights):
        hidden, targets = (torch.cat(each) for each in zip(*kept, strict=True))
        logits = hidden @ weights["head.weight"].T
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE).item()

    def loss(self):
        return self.cross_entropy(self.heads, self.before)

    def validation_loss(self):
        return self.cross_entropy(self.validation, self.after)

    def targets(self, kept):
        return torch.cat([targets.flatten() for _, targets in kept])

    def taught(self, kept):
        """Return how many targets the loss does not ignore."""
        return (self.targets(kept) != IGNORE).sum().item()


def ignored(seen, kept):
    return 1 - seen.taught(kept) / len(seen.targets(kept))


def rms(x):
    return x.square().mean().sqrt()


def outliers(x):
    return (x.abs() > 10 * x.square().mean(-1, keepdim=True).sqrt()).double().mean()


STATISTICS: Mapping[str, Callable] = {
    "norm": torch.Tensor.norm,
    "mean": torch.mean,
    "std": lambda x: x.std(correction=0),
}


def first_last(values):
    return values[0] / values[-1]


def norms(seen, tensors):
    return [seen.of(tensors, layer).norm().item() for layer in seen.layers]


#: By declared name: the value of a step from what was seen of it, and from the words of the name.
STEP: Mapping[str, Callable] = {
    "loss": lambda s: s.loss(),
    "losses/lm": lambda s: s.loss(),
    "loss/nonfinite": lambda s: float(not math.isfinite(s.loss())),
    "loss/perplexity": lambda s: math.exp(s.loss()),
    "validation/loss": lambda s: s.validation_loss(),
    "validation/perplexity": lambda s: math.exp(s.validation_loss()),
    "validation/ignored": lambda s: ignored(s, s.validation),
    "tokens": lambda s: len(s.targets(s.heads)),
    "data/tokens_per_update": lambda s: len(s.targets(s.heads)),
    "data/effective_tokens": lambda s: s.taught(s.heads),
    "data/effective_tokens_per_update": lambda s: s.taught(s.heads),
    "data/ignored": lambda s: ignored(s, s.heads),
    "data/epochs": lambda s: sum(len(x) for x, _ in s.heads) / s.engine.run.recipe.data.config.sequences,
    "grad_norm": lambda s: s.whole(s.gradients).norm(),
    "gradients/clip_coefficient": lambda s: s.clip,
    "gradients/clipped": lambda s: float(s.clip < 1),
    "gradients/norm/{block}": lambda s, block: s.of(s.gradients, block).norm(),
    "gradients/first_last": lambda s: first_last(norms(s, s.gradients)),
    "gradients/share/{block}": lambda s, block: (
        s.of(s.gradients, block).norm() / median(norms(s, s.gradients))
    ),
    "gradients/parameters/{statistic}/{parameter}": lambda s, statistic, parameter: STATISTICS[statistic](
        s.gradients[parameter]
    ),
    "updates/proxy": lambda s: s.lr * s.clip * s.whole(s.gradients).norm() / s.whole(s.before).norm(),
    "updates/proxy/{block}": lambda s, block: s.proxy(block),
    "updates/proxy_median": lambda s: median(s.proxies()),
    "updates/proxy_p95": lambda s: s.proxies()[math.ceil(0.95 * len(s.proxies())) - 1],
    "updates/proxy_max": lambda s: s.proxies()[-1],
    "updates/proxy_first_last": lambda s: first_last([s.proxy(layer) for layer in s.layers]),
    "updates/norm/{block}": lambda s, block: s.of(s.changes, block).norm(),
    "updates/ratio": lambda s: s.whole(s.changes).norm() / s.whole(s.before).norm(),
    "updates/ratio_at_full_lr": lambda s: (
        PEAK_LR / s.lr * s.whole(s.changes).norm() / s.whole(s.before).norm()
    ),
    "updates/ratio/{block}": lambda s, block: s.of(s.changes, block).norm() / s.of(s.before, block).norm(),
    "updates/parameters/norm/{parameter}": lambda s, parameter: s.changes[parameter].norm(),
    "updates/parameters/ratio/{parameter}": lambda s, parameter: (
        s.changes[parameter].norm() / s.before[parameter].norm()
    ),
    "weights/norm": lambda s: s.whole(s.before).norm(),
    "weights/norm/{block}": lambda s, block: s.of(s.before, block).norm(),
    "weights/spread": lambda s: max(norms(s, s.before)) / min(norms(s, s.before)),
    "weights/parameters/{statistic}/{parameter}": lambda s, statistic, parameter: STATISTICS[statistic](
        s.before[parameter]
    ),
    "optimizer/nonfinite": lambda s: sum(not x.isfinite().all() for x in s.state),
    "lr": lambda s: s.lr,
    "loss_scale": lambda s: 1.0,  # but for float16
    "skipped": lambda s: float(not s.whole(s.gradients).isfinite().all()),
    "attention/max_logit/{block}": lambda s, block: s.attention(block)[0],
    "attention/entropy/{block}": lambda s, block: s.attention(block)[1],
    "attention/entropy_ratio/{block}": lambda s, block: s.attention(block)[2],
    "residual/rms/{block}": lambda s, block: rms(s.output(block)),
    "residual/max_abs/{block}": lambda s, block: s.output(block).abs().max(),
    "residual/outliers/{block}": lambda s, block: outliers(s.output(block)),
    "norms/rms/{norm}": lambda s, norm: rms(s.output(norm)),
    "norms/max_abs/{norm}": lambda s, norm: s.output(norm).abs().max(),
}

#: Of a step: how many elements of a vector are in each bin.
HISTOGRAMS: Mapping[str, Callable] = {
    "gradients/histogram/{block}": lambda s, block: s.of(s.gradients, block),
    "weights/histogram/{block}": lambda s, block: s.of(s.before, block),
}


def matching(pattern, names):
    """Yield the names that a declared one stands for, each with its words for the placeholders."""
    regex = re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(pattern)))
    for name in names:
        if found := regex.fullmatch(name):
            yield name, found.groupdict()
