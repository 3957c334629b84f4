"""The auxiliary loss of the global batch: f counts the whole batch of the step before, on every layout.

Against a loop over experts in one process; then every layout against one process, and from a checkpoint.
"""

import attrs
import pytest
import torch
from as_one_process import assert_trains_as_one_process
from compositions import Composition, compiled

from nanotrain_core.contracts import Monitor
from nanotrain_core.moe.load_balancing import load_balancing_loss
from nanotrain_core.moe.routing import counting_routers
from nanotrain_core.testing import RankFailure, run_ranks
from nanotrain_core.testing.compare import assert_same, whole
from nanotrain_core.testing.probe import make_engine, train

GLOBAL = {"load_balancing_type": "global_aux_loss", "aux_loss_coeff": 1.0}
ADAMW = {"use": "adamw", "lr": 0.01, "clip_norm": 0.5}


def layout(**choices):
    defaults = {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "etp": 1, "schedule": "accumulate", "sp": False}
    more = {"model": "moe", "tied": False, "microbatch": 2, "experts_first": False, "zero": 0}
    return Composition(**(defaults | more | choices))


def case_of(composition):
    case = composition.case()
    model = {**case.overrides["model"], **GLOBAL}
    return attrs.evolve(case, overrides={**case.overrides, "model": model})


LAYOUTS = {
    "pp2-dp2-ep2": layout(pp=2, dp=2, ep=2, schedule="1f1b", recompute=True),
    "tp2-sp-ep2": layout(tp=2, sp=True, ep=2),
    "cp2-dp2": layout(cp=2, dp=2),
    "dp3": layout(dp=3),
    "tp2-ep2-etp2-zb": layout(tp=2, pp=2, etp=2, schedule="zb_h1"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_one_process(name):
    assert_trains_as_one_process(case_of(LAYOUTS[name]))


class Loads(Monitor):
    """Keeps what each step reports, and what its routers received."""

    def __init__(self):
        self.loads, self.losses = [], []

    def on_after_update(self, update):
        self.loads.append({name: load.clone() for name, load in update.loads.items()})

    def on_step(self, report):
        self.losses.append(report.losses["aux"])


def test_f_counts_the_whole_batch_of_the_step_before():
    seen, scores = Loads(), []
    engine = make_engine(case_of(layout()).alone(), {"run": {"steps": 3}}, callbacks=[seen])
    for name, router in counting_routers(engine.run.stages.values()).items():
        note(router, lambda found, n=name: scores.append((n, found)))
    engine.fit()
    each = len(scores) // 3
    before = {name: torch.ones(8, dtype=torch.int64) for name in seen.loads[0]}
    for step, loss in enumerate(seen.losses):
        sums = []
        for name, scores_BSE in scores[step * each : (step + 1) * each]:
            load, p_BE = before[name].tolist(), scores_BSE.mean(1).tolist()
            sums += [sum(8 * f / sum(load) * p for f, p in zip(load, p_E, strict=True)) for p_E in p_BE]
        assert loss == pytest.approx(sum(sums) / len(sums), abs=1e-9)
        before = seen.loads[step]
    assert seen.losses[0] == pytest.approx(1.0, abs=1e-12), "even load before the first step"
    assert abs(seen.losses[2] - 1.0) > 1e-3


def note(router, keep):
    """Call ``keep`` with the scores of every pass in training."""
    score = router.score

    def noted(logits_BSE):
        found = score(logits_BSE)
        if router.training:
            keep(found.detach())
        return found

    router.score = noted


def test_experts_chosen_too_often_are_pushed_down():
    scores = torch.rand(3, 5, 4, dtype=torch.float64).softmax(-1).requires_grad_()
    load = torch.tensor([30, 10, 0, 0])
    load_balancing_loss(scores, torch.zeros(3, 5, 1, dtype=torch.int64), load).backward()
    wanted = 4 * load.double() / 40 / 5
    assert torch.allclose(scores.grad, wanted.expand_as(scores.grad))


def run(composition, folder, *, model=None, **options):
    changes = {"optimizer": ADAMW, "checkpoint": {"use": "sharded_v2"}, "model": model or {}}
    return run_ranks(train, composition.ranks, case_of(composition), changes, folder=folder, **options)


@pytest.mark.full
def test_goes_on_from_a_checkpoint_on_another_layout(tmp_path):
    straight = run(LAYOUTS["pp2-dp2-ep2"], tmp_path, save_at=2)
    found = run(layout(), tmp_path, resume="2")
    for part in ("weights", "state"):
        got, want = (whole([getattr(t, part) for t in traces], atol=1e-9) for traces in (found, straight))
        assert_same(got, want, part, atol=1e-9)
    losses = [traces[0].reports[-1].losses["aux"] for traces in (found, straight)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)


@pytest.mark.full
def test_a_checkpoint_of_the_other_loss_is_refused(tmp_path):
    run(layout(), tmp_path, save_at=2)
    with pytest.raises(RankFailure, match="it holds 'router' tensors"):
        run(layout(), tmp_path, resume="2", model={"load_balancing_type": "seq_aux_loss"})


@pytest.mark.full
def test_compiled_layers_count_it_too():
    case = case_of(layout()).alone()
    traces = [run_ranks(train, 1, each, {}, timeout=300)[0] for each in (case, compiled(case))]
    eager, found = ([r.losses["aux"] for r in trace.reports] for trace in traces)
    assert found == pytest.approx(eager, abs=1e-9)
    assert_same(whole([traces[1].weights]), whole([traces[0].weights]), "weights", atol=1e-9)
