"""Every metric of a run on one process is what its summary says, written apart from plain tensors."""

import math
from statistics import median

import pytest
import torch
from health_runs import Told

from nanotrain_core.api import Bins
from nanotrain_core.api.torch import Monitor, rope, rope_frequencies, rope_rotation
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine

MODEL = {"layers": 3, "width": 128, "heads": 4, "kv_heads": 2, "init_std": 0.1}
ADAMW = {"use": "adamw", "lr": 0.01, "clip_norm": 0.5, "lr_schedule": {"use": "cosine", "warmup_steps": 4}}


class Sees(Monitor):
    """Keeps tensors of a step as plain hooks and the optimizer show them."""

    def __init__(self, engine):
        self.engine, self.outputs, self.calls, self.weights = engine, {}, {}, {}
        for name, module in engine.run.stages[0].named_modules():
            if name.startswith(("layers.", "norm")):
                module.register_forward_hook(self.keep(self.outputs, name))

    def keep(self, where, name):
        def hook(module, args, output):
            if torch.is_grad_enabled():
                where.setdefault(name, []).append(output.detach().clone())

        return hook

    def on_before_update(self, update):
        self.before = {p.placement.name: p.parameter.detach().clone() for p in self.engine.run.placed}
        self.gradients = {found.name: found.tensor.clone() for found in update.gradients()}

    def on_after_update(self, update):
        self.after = {p.placement.name: p.parameter.detach().clone() for p in self.engine.run.placed}


@pytest.fixture(scope="module")
def seen():
    case = Case(
        "monitor",
        use="health",
        config={"level": "debug", "queries": 99},
        overrides={"model": MODEL},
    )
    told = Told()
    changes = {"optimizer": ADAMW, "run": {"steps": 1}, "evaluation": {"every": 1, "sequences": 8}}
    engine = make_engine(case, changes, callbacks=[told])
    sees = Sees(engine)
    engine.events.monitors = [*engine.events.monitors, sees]
    engine.fit()
    values = {}
    for report in told.reports:
        values |= report.values
    sees.histograms = next(report.histograms for report in told.reports if report.histograms)
    return values, sees


def of(tensors, prefix):
    """Return one long vector of all elements of a layer."""
    return torch.cat([x.flatten() for name, x in tensors.items() if name.startswith(f"{prefix}.")])


def test_norms_of_layers_and_parameters(seen):
    values, sees = seen
    change = {name: sees.after[name] - sees.before[name] for name in sees.before}
    for what, tensors in (("gradients", sees.gradients), ("weights", sees.before), ("updates", change)):
        for block in ("layers.0", "layers.1", "layers.2", "embed", "head", "norm"):
            assert values[f"{what}/norm/{block}"] == pytest.approx(of(tensors, block).norm().item(), rel=1e-9)
        for name, x in tensors.items():
            assert values[f"{what}/parameters/norm/{name}"] == pytest.approx(x.norm().item(), rel=1e-9)
    for name, x in change.items():
        ratio = (x.norm() / sees.before[name].norm()).item()
        assert values[f"updates/parameters/ratio/{name}"] == pytest.approx(ratio, rel=1e-9)
    for name, x in sees.gradients.items():
        assert values[f"gradients/parameters/mean/{name}"] == pytest.approx(x.mean().item(), abs=1e-12)
        std = x.std(correction=0).item()
        assert values[f"gradients/parameters/std/{name}"] == pytest.approx(std, rel=1e-6, abs=1e-9)


def test_ratios_of_updates_and_of_depth(seen):
    values, sees = seen
    norm = torch.cat([x.flatten() for x in sees.gradients.values()]).norm().item()
    clip = min(1.0, 0.5 / norm)
    assert values["gradients/clip_coefficient"] == pytest.approx(clip, rel=1e-5)
    assert values["gradients/clipped"] == 1.0
    proxies = {}
    for block in ("layers.0", "layers.1", "layers.2", "embed", "head", "norm"):
        weight, change = of(sees.before, block), of(sees.after, block) - of(sees.before, block)
        gradient = of(sees.gradients, block)
        proxies[block] = (values["lr"] * clip * gradient.norm() / weight.norm()).item()
        assert values[f"updates/proxy/{block}"] == pytest.approx(proxies[block], rel=1e-5)
        true = (change.norm() / weight.norm()).item()
        assert values[f"updates/ratio/{block}"] == pytest.approx(true, rel=1e-9)
    for name, found in (("median", median(proxies.values())), ("max", max(proxies.values()))):
        assert values[f"updates/proxy_{name}"] == pytest.approx(found, rel=1e-5)
    assert values["updates/proxy_first_last"] == pytest.approx(proxies["layers.0"] / proxies["layers.2"])
    before, after = (torch.cat([x.flatten() for x in each.values()]) for each in (sees.before, sees.after))
    whole = ((after - before).norm() / before.norm()).item()
    assert values["weights/norm"] == pytest.approx(before.norm().item(), rel=1e-9)
    assert values["updates/ratio"] == pytest.approx(whole, rel=1e-9)
    assert values["updates/ratio_at_full_lr"] == pytest.approx(whole * 0.01 / values["lr"], rel=1e-9)
    layers = [of(sees.gradients, f"layers.{n}").norm().item() for n in range(3)]
    assert values["gradients/first_last"] == pytest.approx(layers[0] / layers[2], rel=1e-9)
    assert values["gradients/share/layers.1"] == pytest.approx(layers[1] / median(layers), rel=1e-9)
    sizes = [of(sees.before, f"layers.{n}").norm().item() for n in range(3)]
    assert values["weights/spread"] == pytest.approx(max(sizes) / min(sizes), rel=1e-9)
    assert values["optimizer/nonfinite"] == 0


def test_histograms_count_every_element(seen):
    _, sees = seen
    found = sees.histograms["gradients/histogram/layers.1"]
    sizes = of(sees.gradients, "layers.1").abs()
    assert sum(found.counts) + found.below + found.above == len(sizes)
    low, high = found.edges[30], found.edges[40]
    assert sum(found.counts[30:40]) == ((sizes >= low) & (sizes < high)).sum().item()
    assert found.edges == Bins(low=1e-12, high=1e4, count=64, log=True).edges


def test_the_residual_stream_and_norms(seen):
    values, sees = seen
    for name in ("layers.0", "layers.1", "layers.2"):
        x = torch.cat(sees.outputs[name])
        rms = x.square().mean(-1, keepdim=True).sqrt()
        assert values[f"residual/rms/{name}"] == pytest.approx(x.square().mean().sqrt().item(), rel=1e-9)
        assert values[f"residual/max_abs/{name}"] == x.abs().max().item()
        assert values[f"residual/outliers/{name}"] == (x.abs() > 10 * rms).double().mean().item()
    for name in ("layers.0.attn_norm", "layers.2.ffn_norm", "norm"):
        x = torch.cat(sees.outputs[name])
        assert values[f"norms/rms/{name}"] == pytest.approx(x.square().mean().sqrt().item(), rel=1e-9)
        assert values[f"norms/max_abs/{name}"] == x.abs().max().item()


def test_attention_of_all_queries(seen):
    """Probabilities as the paper has them, of one query and head at a time."""
    values, sees = seen
    q, k = (torch.cat(sees.outputs[f"layers.1.attn.{name}"]).unflatten(-1, (-1, 32)) for name in "qk")
    turn = rope_rotation(
        q.shape[1], rope_frequencies(32, 10000.0, None, length=q.shape[1], device=q.device), like=q
    )
    q, k = rope(q, *turn), rope(k, *turn)
    most, entropies, shares = -math.inf, [], []
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            for row in range(q.shape[1]):
                scores = k[b, : row + 1, h // 2] @ q[b, row, h] / math.sqrt(32)
                most = max(most, scores.max().item())
                p = scores.softmax(0)
                entropies.append(-(p * p.log()).sum().item())
                shares += [entropies[-1] / math.log(row + 1)] if row else []
    assert values["attention/max_logit/layers.1"] == pytest.approx(most, rel=1e-9)
    assert values["attention/entropy/layers.1"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-9)
    assert values["attention/entropy_ratio/layers.1"] == pytest.approx(sum(shares) / len(shares), rel=1e-9)


def test_loss_and_data(seen):
    values, _ = seen
    assert values["loss/ema"] == values["loss"]
    assert values["loss/nonfinite"] == 0
    assert values["loss/perplexity"] == pytest.approx(math.exp(values["loss"]))
    assert values["validation/perplexity"] == pytest.approx(math.exp(values["validation/loss"]))
    # Of the validation before the first step there is no gap; this is the one after it.
    assert values["validation/gap"] == pytest.approx(values["validation/loss"] - values["loss"])
    tokens = 8 * 16
    assert values["data/tokens_per_update"] == values["data/effective_tokens_per_update"] == tokens
    assert values["data/effective_tokens"] == tokens
    assert values["data/ignored"] == values["validation/ignored"] == 0
    assert values["data/epochs"] == 8 / 64


class Masters(Monitor):
    """Copies the masters around an update."""

    def on_start(self, run):
        self.run = run

    def copied(self):
        return {p.name: x.clone() for x, p in self.run.optimizer_state("master")}

    def on_before_update(self, update):
        self.before = self.copied()

    def on_after_update(self, update):
        self.after = self.copied()


def test_the_update_of_bfloat16_weights_is_that_of_their_masters():
    """At so small a rate hardly a weight's rounding changes; the masters do."""
    case, told, masters = Case("monitor", use="health", overrides={"model": MODEL}), Told(), Masters()
    changes = {"precision": {"use": "bf16"}, "optimizer": {"use": "adamw", "lr": 1e-6}, "run": {"steps": 1}}
    make_engine(case, changes, callbacks=[told, masters]).fit()
    for name in ("layers.0", "layers.2"):
        change = of(masters.after, name).double() - of(masters.before, name).double()
        size = of(masters.before, name).bfloat16().double().norm()
        true = (change.norm() / size).item()
        assert true > 0
        assert told.reports[0].values[f"updates/ratio/{name}"] == pytest.approx(true, rel=1e-4)
