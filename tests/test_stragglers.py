"""Who makes the others wait is told from what each rank does itself."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from nanotrain_sharded_ckpt_v2.save_in_progress import SaveInProgress
from structlog.testing import capture_logs

from nanotrain_core.builtin.configs import StragglersConfig
from nanotrain_core.contracts import Monitor, RollbackReport
from nanotrain_core.monitors.stragglers import Found, Stragglers, slowest
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_engine
from nanotrain_core.watch.progress import TimeSpent

MONITOR = {"use": "stragglers", "every": 2, "patience": 2, "least": 0.05, "links": 0}


@pytest.mark.parametrize(
    ("data", "compute", "found"),
    [
        ((0.3, 0.1), (0.2, 0.1), "data"),
        ((0.3, 0.1), (0.5, 0.1), "compute"),
        ((0.15, 0.1), (0.12, 0.1), None),
        ((0.004, 0.001), (0.0, 0.0), None),
    ],
)
def test_a_rank_far_above_the_median_is_slow(data, compute, found):
    told = [Found("data", 3, *data), Found("compute", 1, *compute)]
    answer = slowest(told, 2.0, 0.01)
    assert (answer and answer.phase) == found


def test_seconds_after_a_rollback_are_of_steps_since_it():
    """Steps take a second; from 23 back to 14, compared every 10 steps."""
    told, spent = [], {}
    progress = SimpleNamespace(time_device=lambda device: None, measured=lambda: dict(spent))
    mesh = SimpleNamespace(gather=lambda own: [own])
    metrics = SimpleNamespace(per_rank=lambda name, value: told.append(value) if "data" in name else None)
    monitor = Stragglers(StragglersConfig(every=10, links=0))
    monitor.on_start(
        SimpleNamespace(
            mesh=mesh, device="cpu", progress=progress, first_step=0, metrics=metrics, pipeline_share=1.0
        )
    )
    for steps in (range(1, 24), range(15, 31)):
        for step in steps:
            spent["data"] = TimeSpent(spent.get("data", TimeSpent()).seconds + 1.0)
            monitor.on_step(SimpleNamespace(step=step))
        monitor.on_rollback(RollbackReport(23, 23, 14, (0, 1), 1, "a spike"))
    assert told == [1.0] * 4


def fit(case, slow, delay):
    """Return what is logged of a run in which ``delay`` makes rank ``slow`` slow."""
    engine = make_engine(case, {"run": {"steps": 8}, "monitor": [MONITOR]})
    if engine.run.mesh.rank == slow:
        delay(engine)
    with capture_logs() as logs:
        engine.fit()
    return [entry["event"] for entry in logs if entry["log_level"] == "warning"]


def slow_data(engine):
    take = engine.run.feed.data.train_batch
    engine.run.feed.data.train_batch = lambda *args: (time.sleep(0.15), take(*args))[1]


def slow_compute(engine):
    for part in engine.run.stages.values():
        part.register_forward_pre_hook(lambda *_: time.sleep(0.12))


def slow_optimizer(engine):
    step = engine.run.optimizer.step
    engine.run.optimizer.step = lambda **options: (time.sleep(0.15), step(**options))[1]


DP = Case("parallel", use="ddp", topology={"dp": 2})
WITH_DDP = {"parallel": [{"use": "ddp"}]}


def test_the_slow_rank_is_named_once_by_rank_0():
    said = run_ranks(fit, 2, DP, 1, slow_data)
    assert said == [["rank 1 is slow: others wait for its data"], []]


@pytest.mark.full_cases("dp2-tp2")
@pytest.mark.parametrize(
    ("case", "slow"),
    [
        (DP, 1),
        pytest.param(Case("parallel", use="tp", topology={"tp": 2}), 0, marks=pytest.mark.full),
        (Case("schedule", use="1f1b", topology={"pp": 2}), 1),
        (Case("parallel", use="tp", topology={"dp": 2, "tp": 2}, overrides=WITH_DDP), 2),
        pytest.param(
            Case("schedule", use="1f1b", topology={"dp": 2, "pp": 2}, overrides=WITH_DDP),
            3,
            marks=pytest.mark.full,
        ),
    ],
    ids=["dp2", "tp2", "pp2", "dp2-tp2", "dp2-pp2"],
)
def test_a_rank_that_computes_slowly_is_named_though_all_wait_in_collectives(case, slow):
    said = run_ranks(fit, case.world_size, case, slow, slow_compute)
    assert said[0] == [f"rank {slow} is slow: others wait for its compute"]


@pytest.mark.full
def test_a_slow_optimizer_is_compute():
    assert run_ranks(fit, 2, DP, 0, slow_optimizer)[0] == ["rank 0 is slow: others wait for its compute"]


def test_nobody_is_named_where_all_are_as_fast():
    assert run_ranks(fit, 2, DP, -1, slow_data) == [[], []]


def fit_while_saving(case, slow, folder):
    """A save is on its way from the second step to the last: ranks agree on it in every step."""
    saving = {"checkpoint": {"use": "sharded_v2", "every": 2, "keep": 1}, "run": {"steps": 7}}
    engine = make_engine(case, {**saving, "monitor": [MONITOR]}, folder=folder)
    due = engine.run.checkpoint.due
    engine.run.checkpoint.due = lambda step: step == 2 and due(step)
    ended = threading.Event()
    with pytest.MonkeyPatch.context() as patched, capture_logs() as logs:
        write = SaveInProgress.write
        patched.setattr(SaveInProgress, "write", lambda flight, held: (ended.wait(20), write(flight, held)))
        engine.events.monitors = [*engine.events.monitors, EndsAt(6, ended)]
        if engine.run.mesh.rank == slow:
            slow_compute(engine)
        engine.fit()
    return [entry["event"] for entry in logs if entry["log_level"] == "warning"]


class EndsAt(Monitor):
    def __init__(self, step, ended):
        self.step, self.ended = step, ended

    def on_step(self, report):
        if report.step >= self.step:
            self.ended.set()


def test_a_slow_rank_is_named_while_a_checkpoint_is_on_its_way(tmp_path):
    said = run_ranks(fit_while_saving, 2, DP, 0, tmp_path)
    assert said[0] == ["rank 0 is slow: others wait for its compute"]


def slow_link(case):
    """Return what is logged where messages to rank 2 take long; nobody computes slowly."""
    monitor = {**MONITOR, "links": 2}
    engine = make_engine(case, {"run": {"steps": 4}, "monitor": [monitor]})
    begin = dist.batch_isend_irecv

    def slowly(operations):
        works = begin(operations)
        time.sleep(0.1 * (engine.run.mesh.rank == 2))  # before it is told that its message came
        return works

    with pytest.MonkeyPatch.context() as patched, capture_logs() as logs:
        patched.setattr(dist, "batch_isend_irecv", slowly)
        engine.fit()
    return [(entry["event"], entry["device"]) for entry in logs if entry["log_level"] == "warning"]


def test_a_slow_link_is_named_with_both_ends():
    case = Case("parallel", use="ddp", topology={"dp": 3}, overrides={"batch": {"sequences": 6}})
    said = run_ranks(slow_link, 3, case)
    assert said[0] == [("the link from rank 1 to rank 2 is slow", "cpu")]
