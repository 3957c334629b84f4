"""Memory of a GPU from the allocator's counters, here a fake's; of the host from the system's."""

import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from nanotrain_performance import MemoryConfig, declared, host, memory
from nanotrain_performance.accounts import bytes_of, weight_bytes
from nanotrain_performance.memory import Memory
from torch import nn

from nanotrain_core.contracts import Monitor
from nanotrain_core.run import run_info
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_engine
from nanotrain_core.watch.progress import Progress

MIB = 2**20
STATS = {
    "allocated_bytes.all.current": 40 * MIB,
    "allocated_bytes.all.peak": 92 * MIB,
    "reserved_bytes.all.current": 96 * MIB,
    "reserved_bytes.all.peak": 97 * MIB,
    "num_alloc_retries": 3,
}


def nothing(*_, **__):
    pass


def test_what_the_allocator_counts_is_told_with_what_the_accounts_leave(monkeypatch):
    stats = dict(STATS)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100 * MIB)
    )
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 40 * MIB)
    told = {}
    part = nn.Linear(MIB // 4, 1, bias=False)  # 1 MiB
    metrics = SimpleNamespace(per_rank=told.__setitem__, scalar=told.__setitem__, histogram=nothing)
    run = SimpleNamespace(
        device=torch.device("cuda", 0),
        metrics=metrics,
        placed=[SimpleNamespace(parameter=part.weight)],
        parts=[part],
        optimizer_device_bytes=lambda: 2 * MIB,
        progress=Progress(),
        rank=0,
        world_size=1,
    )
    monitor = Memory(MemoryConfig())
    monitor.on_start(run)
    stats["num_alloc_retries"] = 5
    monitor.on_before_update(SimpleNamespace(logged=True, gradient_bytes=lambda: 4 * MIB))
    monitor.on_step(None)
    monitor.on_end(None)
    found = {name.removesuffix("/{over}").removeprefix("memory/"): value for name, value in told.items()}
    expected = {
        "allocated": 40.0,
        "allocated_peak": 92.0,
        "allocated_fraction": 0.92,
        "reserved": 96.0,
        "reserved_peak": 97.0,
        "reserved_fraction": 0.97,
        "weights": 1.0,
        "gradients": 4.0,
        "optimizer": 2.0,
        "activations": 85.0,
        "device_growth": 0.0,
        "retries": 2,
    }
    assert {name: found[name] for name in expected} == expected
    rules = {metric.name: metric.rule for metric in declared.MEMORY if metric.rule}
    verdicts = [
        rules[f"memory/{name}_fraction/max"].judge(found[f"{name}_fraction"])
        for name in ("allocated", "reserved")
    ]
    assert verdicts == ["warn", "bad"]
    assert rules["memory/retries"].judge(2) == "warn"


class Published(Monitor):
    """Keeps the names that each logged step tells."""

    def __init__(self):
        self.told, self.with_ranks = [], []

    def on_metrics(self, report):
        names = {name for name in report.published if name.startswith("memory/")}
        self.told.append(names - {"memory/ranks"})  # of which not every step tells
        if "memory/ranks" in names:
            self.with_ranks.append(report.step)


def names_of_steps():
    """Train on two ranks of which one's clock is late; return what each logged step tells, and which of them
    tell every rank's memory."""
    case = Case("monitor", use="memory", topology={"dp": 2}, overrides={"parallel": [{"use": "summed"}]})
    published = Published()
    engine = make_engine(case, {"run": {"steps": 7}, "monitor": [{"use": "memory"}]}, callbacks=[published])
    with pytest.MonkeyPatch.context() as patched:
        ticks = iter(range(0, 1000, 2 if engine.run.mesh.rank else 1))
        patched.setattr(memory, "time", SimpleNamespace(monotonic=lambda: 0.3 * next(ticks)))
        engine.fit()
    return published.told, published.with_ranks


def test_ranks_publish_in_the_same_steps_whatever_their_clocks():
    told, with_ranks = run_ranks(names_of_steps, 2)[0]
    assert len(told) >= 7
    assert {"memory/host/rank", "memory/weights/max", "memory/optimizer/mean"} <= told[0]
    accounts = {name for name in told[0] if name.split("/")[1] in ("weights", "gradients", "optimizer")}
    assert len(accounts) == 12
    growth = {f"memory/host_growth/{over}" for over in ("max", "mean", "median", "rank")}
    assert told[:7] == [told[0], *[growth] * 4, told[0] - accounts, told[0]]
    assert with_ranks == [1, 7]  # the last one, too


def test_state_that_appears_with_the_first_update_is_counted_then():
    """As of torch's AdamW in a script; a step that is skipped makes none."""
    state = [0, 0, 3 * MIB]
    metrics = SimpleNamespace(per_rank=nothing, scalar=nothing, histogram=nothing)
    monitor = Memory(MemoryConfig())
    monitor.on_start(
        SimpleNamespace(
            device=torch.device("cpu"),
            metrics=metrics,
            placed=[],
            parts=[],
            optimizer_device_bytes=lambda: state.pop(0),
            rank=0,
            world_size=1,
            steps=9,
        )
    )
    found = []
    for step in range(1, 5):
        monitor.on_before_update(SimpleNamespace(logged=True, gradient_bytes=lambda: 0))
        monitor.on_step(SimpleNamespace(step=step))
        found.append(monitor.accounts["optimizer"] / MIB)
    monitor.on_end(None)
    assert (found, state) == ([0.0, 0.0, 3.0, 3.0], [])


def test_what_is_offloaded_takes_nothing_of_the_device():
    kept = [SimpleNamespace(tensor=torch.zeros(4, device=device)) for device in ("cpu", "meta", "meta")]
    run = SimpleNamespace(
        mesh=SimpleNamespace(device=torch.device("meta")), optimizer=SimpleNamespace(blocks=lambda: kept)
    )
    assert run_info._optimizer_device_bytes(run) == 2 * 16


def test_memory_that_tensors_share_counts_once():
    whole = torch.zeros(100)
    assert bytes_of([whole, whole[:10], whole.view(10, 10), torch.zeros(3)]) == 400 + 12
    layer = nn.Linear(4, 4)
    layer.register_buffer("count", torch.zeros(2))
    parameters = [layer.weight, nn.Parameter(layer.weight.detach()[:2]), layer.bias]
    placed = [SimpleNamespace(parameter=each) for each in parameters]
    assert weight_bytes(placed, [layer]) == 4 * (16 + 4 + 2)


@pytest.mark.skipif(not os.path.exists(host.STATM), reason="needs Linux")
def test_resident_memory_is_the_kernels():
    counts = host.Statm()
    before = counts.read()
    kept = mmap.mmap(
        -1, 128 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )  # pages of its own: an allocator may have some that are resident
    for at in range(0, len(kept), mmap.PAGESIZE):  # no second copy, whose pages an allocator may keep
        kept[at] = 1
    after = counts.read()
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    # Other threads of this process may take or free a few MiB meanwhile.
    assert after.total == pytest.approx(int(lines["VmRSS"].split()[0]) * 1024, rel=0.1)
    assert after.own == pytest.approx(int(lines["RssAnon"].split()[0]) * 1024, rel=0.1)
    assert after.own - before.own == pytest.approx(len(kept), rel=0.3)
    assert host.peak() > 0.9 * after.total
    counts.close()
    assert counts.read() is None


def test_the_hosts_share_is_the_larger_of_machine_and_control_group(tmp_path):
    assert host.share_in_use(tmp_path) is None
    group = tmp_path / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 600 kB\n")
    assert host.share_in_use(tmp_path) == pytest.approx(0.4)
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")  # the limit is that of the job
    for name, text in {"max": "1000", "current": "900", "stat": "inactive_file 50\n"}.items():
        (group / f"memory.{name}").write_text(text)
    assert host.share_in_use(tmp_path) == pytest.approx(0.85)
    (group / "memory.max").write_text("max")
    assert host.share_in_use(tmp_path) == pytest.approx(0.4)
