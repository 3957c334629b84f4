"""Tensors that data give to the model with a batch, beside tokens and targets."""

from pathlib import Path

import pytest
import torch
from as_one_process import assert_trains_as_one_process
from nanotrain_sample.evaluate.measure import validation

from nanotrain_core.batch import IGNORE, Batch, Shard
from nanotrain_core.contracts import Monitor
from nanotrain_core.errors import PluginError
from nanotrain_core.recipe.tree import BatchConfig, EvaluationConfig
from nanotrain_core.run.feed import DataFeed
from nanotrain_core.testing import Case
from nanotrain_core.testing.checks.data import shards_make_up_the_global_batch
from nanotrain_core.testing.probe import make_engine

PLUGIN = str(Path(__file__).parent / "own_tensors.py")


def made(rows=4, length=6):
    tokens = torch.arange(rows * length).view(rows, length)
    return Batch(
        tokens,
        tokens + 1,
        per_sequence={"score": torch.arange(rows) / 2, "name": torch.arange(rows * 2).view(rows, 2)},
        per_token={"teacher": tokens[..., None] * torch.ones(3)},
    )


@pytest.mark.parametrize(
    ("degrees", "more"),
    [
        ({"dp": 2}, {}),
        ({"pp": 2}, {"schedule": {"use": "staged"}}),
        ({"dp": 3}, {"batch": {"sequences": 8, "microbatch": 2, "length": 16}}),
    ],
    ids=["dp2", "pp2", "uneven"],
)
def test_a_loss_of_own_tensors_trains_as_in_one_process(degrees, more):
    parallel = [{"use": "summed"}] if "dp" in degrees else []
    overrides = {"model": {"use": "weighted"}, "data": {"use": "scored"}, "parallel": parallel, **more}
    assert_trains_as_one_process(
        Case("data", use="scored", plugins=(PLUGIN,), overrides=overrides, topology=degrees)
    )


def test_microbatches_have_their_own_rows():
    first, second = made().split(3)
    assert first.per_sequence["score"].tolist() == [0, 0.5, 1]
    assert second.per_token["teacher"].shape == (1, 6, 3)
    assert second.per_token["teacher"][0, :, 0].tolist() == second.tokens[0].tolist()


def test_parts_of_sequences_have_their_own_tokens():
    parts = [made().part(index, 4) for index in range(4)]
    joined = torch.cat([part.per_token["teacher"] for part in parts], 1)
    assert torch.equal(joined, made().per_token["teacher"])
    assert all(torch.equal(part.per_sequence["score"], made().per_sequence["score"]) for part in parts)
    (half,) = made().part(1, 2).split(4)
    assert torch.equal(half.whole.per_token["teacher"], made().per_token["teacher"])


@pytest.mark.parametrize("parts", [1, 2])
def test_later_tokens_have_theirs(parts):
    later = made().part(parts - 1, parts).shifted(2)
    assert torch.equal(later.per_token["teacher"][:, :, 1], later.tokens.float())
    assert (later.targets[:, -2:] == IGNORE).all()
    assert torch.equal(later.per_sequence["name"], made().per_sequence["name"])


def test_all_tensors_are_listed_in_one_order():
    batch = made()
    turned = Batch(
        batch.tokens,
        batch.targets,
        per_sequence=dict(reversed(batch.per_sequence.items())),
        per_token=batch.per_token,
    )
    assert [t.shape for t in batch.tensors()] == [t.shape for t in turned.tensors()]
    assert len(batch.clone().tensors()) == 5


def test_the_last_validation_batch_is_padded():
    data = Case("data", use="scored", plugins=(PLUGIN,)).build()
    data.open(length=8, seed=1)
    batch = data.validation_batch(1, 8, Shard())
    for tensor, shape in ((batch.per_sequence["score"], (8,)), (batch.per_token["weight"], (8, 8))):
        assert tensor.shape == shape
        assert not tensor[4:].any()


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({"per_sequence": {"score": torch.zeros(3)}}, r"per_sequence\['score'\] of \[3\]; .*\[4, ...\]"),
        (
            {"per_token": {"teacher": torch.zeros(4, 5)}},
            r"per_token\['teacher'\] of \[4, 5\]; .*\[4, 6, ...\]",
        ),
        ({"per_sequence": {"score": [1.0] * 4}}, r"per_sequence\['score'\] of list; .*\[4, ...\]"),
    ],
    ids=["rows", "tokens", "list"],
)
def test_other_shapes_are_refused(own, told):
    class Own:
        bytes_per_token = None

        def train_batch(self, sequences, shard):
            return Batch(made().tokens, made().targets, **own)

        def meta(self):
            return {}

    shape = BatchConfig(sequences=4, microbatch=2, length=6)
    data = Own()
    fed = DataFeed(data, data, shape, EvaluationConfig(), Shard(), torch.device("cpu"))
    with pytest.raises(PluginError, match=told):
        fed.microbatches()


def test_the_harness_finds_scores_of_other_rows():
    sound = Case("data", use="scored", plugins=(PLUGIN,))
    shards_make_up_the_global_batch(sound, "2")
    with pytest.raises(AssertionError, match="2 shards against one"):
        shards_make_up_the_global_batch(
            Case("data", use="scored", plugins=(PLUGIN,), config={"lost": True}), "2"
        )


class Evaluated(Monitor):
    def on_start(self, run):
        self.parts, self.data = run.parts, run.data

    def on_evaluation(self, report):
        self.report = report

    def on_metrics(self, report):
        self.values = {**getattr(self, "values", {}), **report.values}


def test_an_evaluation_reports_every_term_of_the_loss(capsys):
    """Also of an uneven number of held-out sequences: padding counts for no term."""
    monitor = Evaluated()
    changes = {"run": {"steps": 1}, "evaluation": {"sequences": 100}, "monitor": [{"use": "console"}]}
    case = Case("data", use="scored", plugins=(PLUGIN,), overrides={"model": {"use": "weighted"}})
    make_engine(case, changes, callbacks=[monitor]).fit()
    ((part,), total, counted) = monitor.parts, 0.0, 0.0
    for number in range(2):
        batch = monitor.data.validation_batch(number, 8, Shard())
        with torch.no_grad():
            total += part(batch.tokens, batch).losses["weighted"].item()
        counted += batch.per_token["weight"].sum().item()
    assert monitor.report.losses == {
        "lm": monitor.report.loss,
        "weighted": pytest.approx(total / counted, abs=1e-12),
    }
    assert monitor.values["validation/losses/weighted"] == monitor.report.losses["weighted"]
    assert "validation/losses/lm" not in monitor.values
    assert f" validation_weighted={monitor.report.losses['weighted']:.4f}" in capsys.readouterr().out


REWARD = {"model": {"use": "weighted", "reward": True}, "data": {"use": "scored"}}


def evaluated():
    """Return what a step's monitor saw, and what `nanotrain eval` measures."""
    monitor = Evaluated()
    case = Case("data", use="scored", plugins=(PLUGIN,), overrides=REWARD)
    end = {
        "run": {"steps": 1},
        "evaluation": {"sequences": 100},
        "monitor": [{"use": "console"}, {"use": "health"}],
    }
    engine = make_engine(case, end, callbacks=[monitor])
    engine.fit()
    return monitor, validation(engine.run)


def test_a_model_without_a_next_token_loss_reports_what_it_is_trained_on(capsys):
    """It reported nothing. The weighted sum of the terms is the loss, as in training."""
    monitor, measured = evaluated()
    ((part,), total) = monitor.parts, 0.0
    for number in range(2):
        batch = monitor.data.validation_batch(number, 8, Shard())
        with torch.no_grad():
            total += part(batch.tokens, batch).losses["reward"].item()
    report = monitor.report
    assert report.losses == {"reward": pytest.approx(total / 12, abs=1e-12)}
    assert report.loss == pytest.approx(0.5 * total / 12, abs=1e-12)
    assert (report.tokens, report.bits_per_byte) == (0, None)
    assert (measured.loss, measured.tokens, measured.perplexity) == (report.loss, 0, None)
    assert "validation/perplexity" not in monitor.values
    assert "loss/perplexity" not in monitor.values
    assert monitor.values["validation/loss"] == report.loss
    assert f"validation_loss={report.loss:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("degrees", "more"),
    [({"dp": 2}, {"parallel": [{"use": "summed"}]}), ({"pp": 2}, {"schedule": {"use": "staged"}})],
    ids=["dp2", "pp2"],
)
def test_a_model_without_a_next_token_loss_trains_as_in_one_process(degrees, more):
    case = Case("data", use="scored", plugins=(PLUGIN,), overrides={**REWARD, **more}, topology=degrees)
    assert_trains_as_one_process(case)
