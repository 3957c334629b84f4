"""Every metric of a step on one process is what its definition, written apart, says."""

import pytest
import torch
from definitions import ADAMW, HISTOGRAMS, STEP, Sees, matching
from health_runs import Told
from nanotrain_health.attention import attended

from nanotrain_core.api import Bins
from nanotrain_core.api.torch import IGNORE, Monitor
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine

MODEL = {"layers": 3, "width": 128, "heads": 4, "kv_heads": 2, "init_std": 0.1}
#: A standard deviation is told from two sums, so with half the digits.
ROUNDED = {"gradients/parameters/{statistic}/{parameter}", "weights/parameters/{statistic}/{parameter}"}


def masked(batch_of, every):
    """Return the same function with every so many targets ignored."""

    def give(*args):
        batch = batch_of(*args)
        batch.targets[:, ::every] = IGNORE
        return batch

    return give


@pytest.fixture(scope="module")
def seen():
    case = Case("monitor", use="health", config={"level": "debug", "queries": 99}, overrides={"model": MODEL})
    told = Told()
    changes = {"optimizer": ADAMW, "run": {"steps": 1}, "evaluation": {"every": 1, "sequences": 8}}
    engine = make_engine(case, changes, callbacks=[told])
    data = engine.run.feed.data
    data.train_batch, data.validation_batch = masked(data.train_batch, 3), masked(data.validation_batch, 5)
    second = next(b.tensor for b in engine.run.optimizer.blocks() if b.name == "exp_avg_sq/head.weight")
    second[1, 2] = torch.inf  # its weight stays; the rest moves
    sees = Sees(engine)
    engine.events.monitors = [*engine.events.monitors, sees]
    engine.fit()
    values = {}
    for report in told.reports:
        values |= report.values
    sees.histograms = next(report.histograms for report in told.reports if report.histograms)
    return values, sees


@pytest.mark.parametrize("metric", STEP)
def test_what_is_told_of_a_step_is_what_the_definition_says(seen, metric):
    values, sees = seen
    found = list(matching(metric, values))
    assert found
    for name, words in found:
        rel, abs_ = (1e-6, 1e-7) if metric in ROUNDED else (1e-9, 1e-9)
        assert values[name] == pytest.approx(float(STEP[metric](sees, **words)), rel=rel, abs=abs_), name


@pytest.mark.parametrize("metric", HISTOGRAMS)
def test_histograms_count_every_element(seen, metric):
    _, sees = seen
    found = list(matching(metric, sees.histograms))
    assert len(found) == len(sees.blocks)
    for name, words in found:
        told, sizes = sees.histograms[name], HISTOGRAMS[metric](sees, **words).abs()
        assert told.edges == Bins(low=1e-12, high=1e4, count=64, log=True).edges
        assert sum(told.counts) + told.below + told.above == len(sizes)
        for low, high, count in zip(told.edges, told.edges[1:], told.counts, strict=False):
            assert count == ((sizes >= low) & (sizes < high)).sum()


def of(tensors, block):
    return torch.cat([x.flatten() for name, x in tensors.items() if name.startswith(f"{block}.")])


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


def test_attention_of_documents_is_that_of_each_alone():
    """Of a sequence in which three documents share queries that are all read, and of each by itself."""
    torch.manual_seed(0)
    q, k = (torch.randn(1, 9, heads, 8, dtype=torch.float64) for heads in (4, 2))
    begins = torch.tensor([[0, 0, 0, 3, 3, 5, 5, 5, 5]])
    parts = (slice(3), slice(3, 5), slice(5, 9))
    alone = [attended(q[:, part], k[:, part], None, 9) for part in parts]
    sizes, several = torch.tensor([3, 2, 4]), torch.tensor([2, 1, 3])
    most, entropy, ratio = attended(q, k, None, 9, begins)
    assert most == max(each[0] for each in alone)
    torch.testing.assert_close(entropy, (torch.stack([each[1] for each in alone]) * sizes).sum() / 9)
    torch.testing.assert_close(ratio, (torch.stack([each[2] for each in alone]) * several).sum() / 6)


@pytest.mark.parametrize("documents", [False, True])
def test_attention_in_a_window_is_that_to_its_tokens_alone(documents):
    torch.manual_seed(0)
    q, k = (torch.randn(1, 9, heads, 8, dtype=torch.float64) for heads in (4, 2))
    begins = torch.tensor([[0, 0, 0, 3, 3, 5, 5, 5, 5]]) if documents else None
    firsts = [max(0, token - 2) for token in range(9)]
    if begins is not None:
        firsts = [max(pair) for pair in zip(firsts, begins[0].tolist(), strict=True)]
    alone = [attended(q[:, at : at + 1], k[:, first : at + 1], None, 1) for at, first in enumerate(firsts)]
    most, entropy, ratio = attended(q, k, None, 9, begins, 3)
    torch.testing.assert_close(most, max(each[0] for each in alone))
    torch.testing.assert_close(entropy, torch.stack([each[1] for each in alone]).mean())
    several = [each[2] for at, each in enumerate(alone) if firsts[at] < at]
    torch.testing.assert_close(ratio, torch.stack(several).mean())


def test_attention_of_the_last_queries_is_that_of_whole_sequences():
    """Where fewer queries than keys are computed at once, as with context parallelism by all-gather."""
    torch.manual_seed(0)
    q, k = (torch.randn(2, 9, heads, 8, dtype=torch.float64) for heads in (4, 2))
    begins = torch.tensor([[0, 0, 0, 3, 3, 5, 5, 5, 5], [0, 0, 2, 2, 2, 2, 2, 7, 7]])
    for each in (None, begins):
        first = attended(q[:, :5], k[:, :5], None, 9, None if each is None else each[:, :5])
        last = attended(q[:, 5:], k, None, 9, each)
        most, entropy, _ = attended(q, k, None, 9, each)
        torch.testing.assert_close(most, max(first[0], last[0]))
        torch.testing.assert_close(entropy, (5 * first[1] + 4 * last[1]) / 9)
