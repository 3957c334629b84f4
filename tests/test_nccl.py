"""What is asked of NCCL, and of torch on GPUs, as far as a machine without a GPU can tell."""

import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from nanotrain_core.batch import Batch
from nanotrain_core.compile.options import compiler_options, group_timeout
from nanotrain_core.launch import worker
from nanotrain_core.launch.cuda import record_collectives, set_allocator, survive_aborts
from nanotrain_core.launch.environment import Ranks
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import Placement
from nanotrain_core.recipe import load_recipe
from nanotrain_core.watch import watchdog
from nanotrain_core.watch.collectives import keep_collectives
from nanotrain_core.watch.progress import Progress
from nanotrain_core.watch.watchdog import Watchdog

TIMEOUT = timedelta(seconds=60)


@pytest.fixture
def nccl(monkeypatch):
    """Stand in for the parts of torch that a build for CPUs lacks; return the calls that were made."""
    calls = []
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    for name in ("new_group", "init_process_group", "barrier"):
        monkeypatch.setattr(dist, name, lambda *args, _name=name, **named: calls.append((_name, args, named)))
    return calls


class Options:
    def __init__(self, *, is_high_priority_stream):
        self.is_high_priority_stream = is_high_priority_stream


def test_groups_of_a_mesh_are_connected_at_once_on_streams_of_high_priority(nccl):
    layout = Layout({"dense": View(("dp", "tp"), (2, 2))})
    Mesh(layout, rank=2, device=torch.device("cuda", 1), timeout=TIMEOUT)
    made = [named for name, _, named in nccl if name == "new_group" and "device_id" in named]
    assert [(named["group_desc"], named["device_id"]) for named in made] == [
        ("dp", torch.device("cuda", 1)),
        ("tp", torch.device("cuda", 1)),
    ]
    for named in made:
        assert named["pg_options"].is_high_priority_stream
        assert named["pg_options"]._timeout == named["timeout"] == TIMEOUT  # torch warns if they differ


def test_groups_of_gloo_are_asked_for_nothing_of_that(nccl, monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "gloo")
    layout = Layout({"dense": View(("dp", "tp"), (2, 2))})
    for device in ("cpu", "cuda:0"):
        Mesh(layout, rank=0, device=device, timeout=TIMEOUT)
    assert len(nccl) == 4
    assert not any({"device_id", "pg_options"} & named.keys() for _, _, named in nccl)


@pytest.mark.parametrize(("shared", "backend"), [("false", "nccl"), ("true", "gloo")])
def test_the_world_is_connected_by_a_barrier_and_splits_no_group(
    shared, backend, nccl, monkeypatch, tmp_path
):
    """With a ``device_id`` torch would split groups from the world, for which it takes all of its ranks."""
    monkeypatch.setattr(worker, "agree", lambda *args: None)
    monkeypatch.setattr(worker, "record_collectives", lambda folder: nccl.append(("record", (folder,), {})))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    changes = ["run.device=cuda", f"run.share_device={shared}", "run.timeout=60", "run.hang_timeout=30"]
    recipe = load_recipe("laptop.toml", overrides=changes, ranks=2)
    job = worker.Job(recipe="laptop.toml", scratch=str(tmp_path), one_host=True, claimed=str(tmp_path))
    registry = SimpleNamespace(versions=dict, plugins=())
    worker.join_ranks(job, Ranks(0, 2, 0, 2), recipe, torch.device("cuda", 0), registry)
    made = {name: (args, named) for name, args, named in nccl}
    assert made["init_process_group"][0] == (backend,)
    assert "device_id" not in made["init_process_group"][1]
    if shared == "true":
        assert list(made) == ["init_process_group"]
        return
    assert list(made) == [
        "record",
        "init_process_group",
        "barrier",
    ]  # NCCL reads how much to remember as it begins
    assert made["init_process_group"][1]["pg_options"].is_high_priority_stream
    assert made["barrier"][1] == {"device_ids": [0]}


def test_the_flight_recorder_is_on_and_writes_into_the_run_folder(tmp_path):
    found = {}
    record_collectives(None, found)
    assert found == {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    record_collectives(tmp_path, found)
    assert found["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "collectives" / "rank-")
    assert (tmp_path / "collectives").is_dir()


def test_what_the_user_has_set_stays_under_its_old_name_too(tmp_path):
    users = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "7",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/mine",
        "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync",
    }
    found = dict(users)
    record_collectives(tmp_path, found)
    set_allocator(found)
    assert found == users


def test_a_process_outlives_the_abort_of_its_communicators():
    found = {"NCCL_NVLS_ENABLE": "1"}
    survive_aborts(found)
    assert found == {"NCCL_NVLS_ENABLE": "1", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}


def test_the_allocator_extends_its_segments():
    found = {}
    set_allocator(found)
    assert found == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_a_rank_that_hangs_keeps_its_last_collectives_before_it_is_ended(tmp_path, monkeypatch):
    from torch._C import _distributed_c10d as c10d

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(c10d, "_dump_nccl_trace", lambda: b"all-reduce 7", raising=False)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "gloo")
    keep_collectives(tmp_path, 3)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
    order = []
    monkeypatch.setattr(Watchdog, "_give_up", lambda self: order.append(sorted(tmp_path.rglob("rank-*"))))
    watch = Watchdog(Progress(), 3, timeout=0.02, folder=tmp_path, scratch=None)
    while not order:
        watch.done.wait(0.01)
    watch.stop()
    assert order[0] == [tmp_path / "collectives" / "rank-3"]
    assert order[0][0].read_bytes() == b"all-reduce 7"
    assert watchdog.KEPT < 1


def test_a_batch_on_its_way_to_the_host_is_complete_when_it_is_returned(monkeypatch):
    asked = []
    monkeypatch.setattr(
        torch.Tensor, "to", lambda x, device, **named: asked.append((device.type, named["non_blocking"])) or x
    )
    batch = Batch(torch.zeros(1, 4, dtype=torch.int64))
    batch.to(torch.device("cuda", 0))
    batch.to(torch.device("cpu"))
    assert asked == [("cuda", True), ("cpu", False)]


def test_the_compilation_of_earlier_stages_is_no_timeout_of_nccl():
    def timeout(device, *changes):
        changes = ["run.timeout=60", "run.hang_timeout=30", *changes]
        return group_timeout(load_recipe("laptop.toml", overrides=changes, ranks=2), device)

    assert timeout("cuda") == 5 * TIMEOUT
    assert timeout("cuda", "run.compile=false") == timeout("cpu") == TIMEOUT


@pytest.mark.parametrize(
    ("tp", "backend", "options"),
    [(2, "inductor", {"deterministic": True}), (1, "inductor", {}), (2, "aot_eager", {})],
)
def test_ranks_that_compute_the_same_gradient_choose_kernels_without_benchmarks(tp, backend, options):
    layout = Layout({"dense": View(("dp", "tp"), (2, tp))})
    norm = Placement.whole("norm.weight", (4,), layout)
    assert compiler_options(backend, [norm], layout) == options
    sharded = norm.split(0, "tp", 0, tp)
    assert compiler_options(backend, [sharded], layout) == {}
    from torch._inductor import config

    assert all(hasattr(config, name) for name in options)


FAILS = """
import sys
import torch.distributed as dist
from nanotrain_core.errors import NanotrainError
from nanotrain_core.launch.process_groups import ending_process_groups

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.get_backend = lambda group=None: sys.argv[1]
dist.destroy_process_group = lambda group=None: print("destroyed", flush=True)
with ending_process_groups():
    if sys.argv[2] == "fails":
        raise NanotrainError("a mistake").with_code(2)
"""


@pytest.mark.full_cases("gloo-fails-destroyed-1", "nccl-succeeds-destroyed-0")
@pytest.mark.parametrize(
    ("backend", "end", "told", "code"),
    [
        ("nccl", "fails", "", 2),
        ("gloo", "fails", "destroyed", 1),
        ("nccl", "succeeds", "destroyed", 0),
    ],
)
def test_a_rank_that_fails_on_nccl_reports_it_and_does_not_wait_for_the_others(backend, end, told, code):
    ended = subprocess.run(
        [sys.executable, "-c", FAILS, backend, end], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.stdout.strip(), ended.returncode) == (told, code), ended.stderr
    assert ("a mistake" in ended.stderr) == (end == "fails")
