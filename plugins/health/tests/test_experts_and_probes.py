"""Corners of ``moe`` and ``probes`` that a run does not come to; when tensors are looked at."""

import math
from types import SimpleNamespace

import pytest
import torch
from health_runs import Told
from nanotrain_health import MoEConfig, probes
from nanotrain_health.activations import outliers, sizes
from nanotrain_health.moe import MoE
from structlog.testing import capture_logs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanotrain_core.api.torch import IGNORE, RollbackReport, Shard, counting_routers
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine


def test_histograms_are_told_at_growing_intervals_at_the_end_and_anew_after_a_rollback():
    """Intervals 1, 2, 4, 8, and then the 10 of the recipe; from step 40 back to 10 they begin again."""
    told = []
    metrics = SimpleNamespace(scalar=lambda *_: None, histogram=lambda name, *_, **__: told.append(step))
    layout = SimpleNamespace(views={"dense": SimpleNamespace(dims=())})
    mesh = SimpleNamespace(layout=layout, rank=0, gather=lambda value: [value])
    monitor = MoE(MoEConfig(loads_every=10))
    monitor.on_start(SimpleNamespace(parts=[], mesh=mesh, metrics=metrics, steps=40))
    monitor._publish = lambda *_: None
    for steps in (range(1, 41), range(11, 41)):
        for step in steps:
            monitor.on_after_update(SimpleNamespace(logged=True, step=step, loads={"r": torch.ones(2)}))
        monitor.on_rollback(RollbackReport(40, 40, 10, (0, 1), 1, "a spike"))
    assert told == [1, 2, 4, 8, 16, 26, 36, 40, 11, 12, 14, 18, 26, 36, 40]


@pytest.mark.parametrize(("model", "warned"), [("transformer", True), ("routed", False)])
def test_a_model_without_experts_is_said_to_have_nothing_to_publish(model, warned):
    case = Case("monitor", use="moe", overrides={"model": {"use": model}})
    with capture_logs() as logs:
        make_engine(case, {"run": {"steps": 1}}).fit()
    assert any("moe" in each["event"] for each in logs) == warned


class Largest(TorchDispatchMode):
    """Knows the elements of the largest tensor of numbers that was allocated, but for those given."""

    def __init__(self, *given):
        super().__init__()
        self.given, self.elements = {x.untyped_storage().data_ptr() for x in given}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            wanted = isinstance(each, torch.Tensor) and each.is_floating_point()
            if wanted and each.untyped_storage().data_ptr() not in self.given:
                self.elements = max(self.elements, each.numel())
        return found


def test_probes_work_on_few_logits_at_a_time(monkeypatch):
    monkeypatch.setattr(probes, "ELEMENTS", 7 * 11)
    generator = torch.Generator().manual_seed(3)
    one, other = (torch.randn(3, 40, 11, generator=generator).bfloat16() for _ in range(2))
    other[-1] = one[-1]
    targets = torch.randint(11, (120,), generator=generator)
    targets[:5] = IGNORE
    with Largest(one, other) as largest:
        found = dict(probes.predictions(one.flatten(0, 1), targets, 4))
        seen = probes.leak(one, other)
    assert largest.elements == 7 * 11
    p = one.flatten(0, 1).double().softmax(-1)
    right = p[5:].gather(1, targets[5:, None])
    assert found["loss"].item() == pytest.approx(-right.log().mean().item(), rel=1e-6)
    assert found["entropy"].item() == pytest.approx(-(p * p.log()).sum(-1).mean().item(), rel=1e-6)
    top = p.sort(-1, descending=True).values[:, :4].sum(-1).mean().item()
    assert found["top_mass"].item() == pytest.approx(top, rel=1e-6)
    x = one[:2, :20].double()
    size = (x - x.mean(-1, keepdim=True)).flatten(1).norm(dim=1)
    change = (x - other[:2, :20].double()).flatten(1).norm(dim=1)
    assert seen.item() == pytest.approx((change / size).mean().item(), rel=1e-6)


@pytest.mark.parametrize("length", [16, 7])
def test_a_probe_s_documents_do_not_see_one_another(length, tmp_path):
    """Of data that masks them: its loss is then the one that validation measures."""
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text("abcdefgh"[number % 5 :])
    case = Case(
        "monitor",
        use="probes",
        config={"every": 1, "sequences": 3, "length": length},
        overrides={
            "model": {"vocab": 256, "positions": "learned", "max_length": 16, "init_std": 0.5},
            "data": {"use": "text", "paths": [str(tmp_path)], "mask_documents": True},
        },
    )
    told = Told()
    engine = make_engine(case, {"run": {"steps": 1}}, callbacks=[told])
    engine.fit()
    batch = probes.cut(engine.run.feed.data.validation_batch(0, 3, Shard()), length)
    assert batch.document_starts.shape == batch.tokens.shape
    assert batch.document_starts.any()
    (part,) = engine.run.stages.values()
    loss = part(batch.tokens, batch).losses["lm"] / batch.target_tokens()
    assert told.reports[0].values["probes/loss"] == pytest.approx(loss.item(), rel=1e-6)


def test_the_norm_of_the_balancing_bias_leaves_out_a_frozen_weight():
    case = Case("monitor", use="moe", overrides={"model": {"use": "routed"}})
    told = Told()
    engine = make_engine(case, {"run": {"steps": 1}}, callbacks=[told])
    for router in counting_routers(engine.run.stages.values()).values():
        router.register_buffer("balancing", torch.arange(float(router.experts)))
        router.register_buffer("frozen", torch.ones(router.experts, 5))
    engine.fit()
    found = [x for name, x in told.reports[0].values.items() if name.startswith("moe/bias_norm/")]
    assert found == [pytest.approx(math.sqrt(sum(n * n for n in range(router.experts))))] * len(found) != []


def test_an_outlier_is_an_element_beyond_ten_times_its_token_s_size():
    x = torch.randn(4, 400, generator=torch.Generator().manual_seed(0))
    assert outliers(x, *sizes(x)) == 0
    x[1, 7] = 1e3
    assert outliers(x, *sizes(x)) == pytest.approx(1 / x.numel())
    x[2, 9] = -1e3
    assert outliers(x, *sizes(x)) == pytest.approx(2 / x.numel())
    narrow = torch.ones(4, 100) * 1e9
    assert outliers(narrow, *sizes(narrow)) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sizes_of_rows_are_those_of_the_definition(dtype):
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    rms, most = sizes(x)
    assert rms.dtype == most.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(rms.double(), x.double().square().mean(-1).sqrt())
    assert torch.equal(most.double(), x.double().abs().amax(-1))
    x[1, 2, 3] = torch.nan
    assert [found.isnan().nonzero().tolist() for found in sizes(x)] == [[[1, 2]]] * 2
