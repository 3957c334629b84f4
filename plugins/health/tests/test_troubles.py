"""A planted trouble is named within 20 steps, and a healthy run hears nothing."""

import math
from itertools import count

import attrs
import pytest
import torch
from health_runs import run
from health_troubles import TROUBLES

#: In the first tier: one that a rule on weights finds, and one that is looked for in activations.
FIRST = ("lr / 1000", "collapsed attention")

GPT = {"activation": "gelu", "norm": "layernorm", "positions": "learned", "max_length": 64}
SGD = {"use": "sgd", "lr": 0.1, "clip_norm": 1.0}
BYTES = {"data": {"use": "text"}, "model": {"vocab": 256}}
ROUTED = {"use": "routed", "width": 64}

HEALTHY = {
    "llama": {},
    "lr 1e-2": {"optimizer": {"lr": 1e-2}},
    "lr 1e-3": {"optimizer": {"lr": 1e-3}},
    "lr 3e-4": {"optimizer": {"lr": 3e-4}},
    "sgd": {"optimizer": SGD},
    "sgd with momentum": {"optimizer": SGD | {"lr": 0.05, "momentum": 0.9}},
    "gpt": {"model": GPT},
    "gpt of text": {"model": GPT | {"vocab": 256}, "data": {"use": "text"}},
    "large weights": {"model": {"init_std": 0.2}},
    "text": BYTES,
    "wide": {**BYTES, "model": {"vocab": 256, "width": 192, "init_std": 0.04}},
    "grouped queries": {"model": {"kv_heads": 2}},
    "long": {"batch": {"length": 128}},
    "deep": {"model": {"layers": 8}},
    "fp16": {"precision": {"use": "fp16"}},
    "bf16": {"precision": {"use": "bf16"}},
    "experts": {"model": ROUTED},
    "recomputed": {"parallel": [{"use": "recompute"}], "run": {"seed": 99}},
    "warming up": {"optimizer": {"lr_schedule": {"use": "cosine", "warmup_steps": 1000}}},
    "cooling down": {"optimizer": {"lr_schedule": {"use": "cosine", "warmup_steps": 2, "final_ratio": 0.0}}},
    "small batches": {"batch": {"sequences": 4, "microbatch": 2}, "run": {"seed": 5}},
}
#: Those with more steps: some rules are over 100 logged steps.
LONGER = ("llama", "gpt of text", "text", "sgd", "small batches", "experts")


def assert_named(name):
    trouble = TROUBLES[name]
    told = run(dict(trouble.changes), trouble.plant)
    said = [sentence for sentence in told.sentences if trouble.says in sentence]
    assert said, told.sentences


@pytest.mark.parametrize("name", FIRST)
def test_a_planted_trouble_is_named(name):
    assert_named(name)


def converse(engine):
    """Have data with conversations, of which the loss takes some of a batch's tokens, by turns more."""
    data = engine.run.feed.data
    data.answer_prompt = lambda messages: ([], frozenset())
    for name in ("train_batch", "validation_batch"):
        setattr(data, name, partly(getattr(data, name)))


def partly(batch_of):
    """Return the same function with 50% to 90% of the targets ignored."""
    calls = count()

    def give(*args):
        batch = batch_of(*args)
        if batch is None:
            return None
        targets = batch.targets.clone()
        targets[:, 6 * (1 + next(calls) % 5) :] = -100
        return attrs.evolve(batch, targets=targets)

    return give


@pytest.mark.parametrize(("value", "lost"), [(1e25, 0), (math.inf, 1), (math.nan, 1)])
def test_only_moments_that_are_not_finite_are_lost(value, lost):
    """Large ones were counted, too: the square of 1e20 is infinite in float32."""

    def plant(engine):
        second = next(
            b.tensor for b in engine.run.optimizer.blocks() if b.name == "exp_avg_sq/layers.0.attn.q.weight"
        )
        assert second.dtype == torch.float32
        second[1, 2] = value

    told = run({}, plant, steps=1)
    assert told.reports[0].values["optimizer/nonfinite"] == lost


def test_what_a_conversation_masks_by_design_is_no_trouble():
    told = run({"evaluation": {"every": 4, "sequences": 8}}, converse, steps=8)
    assert told.sentences == []
    values = {name: x for report in told.reports for name, x in report.values.items()}
    assert 0.5 < values["data/masked"] < 0.95
    assert 0.5 < values["validation/masked"] < 0.95
    assert not {"data/ignored", "validation/ignored", "data/drift"} & {*values}


@pytest.mark.full
@pytest.mark.parametrize("name", sorted({*TROUBLES} - {*FIRST}))
def test_every_planted_trouble_is_named(name):
    assert_named(name)


@pytest.mark.full
@pytest.mark.parametrize("name", LONGER)
def test_a_healthy_run_hears_nothing_once_windows_of_100_steps_are_full(name):
    assert run(HEALTHY[name], steps=125).sentences == []


@pytest.mark.full
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_hears_nothing(name):
    assert run(HEALTHY[name], steps=30).sentences == []
