"""A step that is skipped, or broken off, moves nothing: neither weights nor the biases of routers."""

import pytest
import torch
from nanotrain_deepseek.samples import V3

from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.testing import Case


def test_a_skipped_step_moves_no_router_bias():
    model = {**V3, "use": "deepseek", "bias_update_rate": 0.01, "init_std": 0.3}
    case = Case("precision", use="fp16", config={"initial_scale": 2.0**24}, overrides={"model": model})
    engine = RuntimeEngine.from_recipe(case.recipe(), registry=case.registry())
    seen = []
    step = engine.run.optimizer.step

    def remember(**options):
        seen.append(step(**options))
        return seen[-1]

    engine.run.optimizer.step = remember
    before = {p.placement.name: p.parameter.clone() for p in engine.run.placed}
    engine.fit(steps=1)
    assert [stats.skipped for stats in seen] == [True]
    for placed in engine.run.placed:
        assert torch.equal(placed.parameter, before[placed.placement.name]), placed.placement.name


def test_tokens_of_a_step_that_was_broken_off_are_not_counted_in_the_next(monkeypatch):
    model = {**V3, "use": "deepseek", "bias_update_rate": 0.01, "init_std": 0.3}
    case = Case("precision", use="fp64", overrides={"model": model})
    engine = RuntimeEngine.from_recipe(case.recipe(), registry=case.registry())

    def interrupted(action):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine.executor, "_backward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.fit(steps=1)
    engine.fit(steps=1)
    batch = case.recipe().batch
    assert engine.loads
    for name, load in engine.loads.items():
        assert load.sum() == batch.sequences * batch.length * V3["top_k"], name
