"""``run.in_process_restart``: a rank that is gone gets a new process, the others begin again in theirs."""

import _thread
import threading
import time
from contextlib import contextmanager
from random import Random

import pytest
import torch
from command import nanotrain
from test_memory_snapshots import LAYOUTS, RECIPE
from test_run import SMALL
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook

from nanotrain_core.errors import RecipeError
from nanotrain_core.launch import process_groups
from nanotrain_core.launch.process_state import ProcessState
from nanotrain_core.recipe import load_recipe
from nanotrain_core.testing.chaos.bench import Bench, Settings
from nanotrain_core.testing.chaos.memory import KillInProcess


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_is_replaced_and_the_run_ends_with_the_same_bits(tmp_path, layout):
    (tmp_path / "small.toml").write_text(RECIPE + LAYOUTS[layout])
    settings = Settings(recipe=str(tmp_path / "small.toml"), ranks=4, steps=12, every=4, hang_timeout=60.0)
    outcome = KillInProcess().run(Bench(settings, tmp_path / "runs"), layout, Random(3))
    assert outcome.problems == []
    assert outcome.steps_lost <= 1


MONITOR = '''
import gc
import os
import signal
import threading
import time

import attrs
import torch

from nanotrain_core import hookimpl
from nanotrain_core.component import Component
from nanotrain_core.contracts import Monitor


@attrs.define(frozen=True, kw_only=True)
class Config:
    """Has rank 1 killed, or let exit, in step 3 of the first attempt."""

    exits: bool = False

    busy: bool = False
    """Whether rank 0 then sleeps, and rank 2 leaves something in its process."""

    leaves: str = "a thread"


class Attempts(Monitor):
    every_step = True

    def __init__(self, config):
        self.busy, self.exits, self.leaves = config.busy, config.exits, config.leaves
        self.first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    def on_start(self, run):
        from nanotrain_core.engine import RuntimeEngine

        gc.unfreeze()  # get_objects leaves out what is frozen
        engines = sum(isinstance(each, RuntimeEngine) for each in gc.get_objects())
        with open(run.folder / f"attempts-{run.rank}", "a") as file:
            file.write(f"{os.getpid()} {engines}\\n")
        self.rank = run.rank

    def on_step(self, report):
        if not self.first or report.step != 3:
            return
        if self.rank == 1 and self.exits:
            os._exit(3)
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.busy and self.rank == 0:
            time.sleep(100)
        if self.busy and self.leaves == "no gradients":
            torch.set_grad_enabled(False)
        elif self.busy:
            threading.Thread(target=time.sleep, args=(100,), name="of a plugin", daemon=True).start()


@hookimpl
def nanotrain_register_monitor(register):
    register(Component(name="attempts", config=Config, factory=f"{__name__}:Attempts"))
'''


@pytest.fixture
def run(tmp_path):
    """Train 6 steps on 3 ranks, of which one is killed; return processes and engines by rank, and stderr."""

    def go(*changes):
        (tmp_path / "recipe.toml").write_text(SMALL + '\n[[monitor]]\nuse = "attempts"\n')
        (tmp_path / "attempts.py").write_text(MONITOR)
        command = ["run", "recipe.toml", "--plugin", "attempts.py", "--folder", "run", "--nproc", "3"]
        changes = ("run.in_process_restart=true", "run.steps=6", "batch.sequences=6", *changes)
        command += ["--max-restarts", "2", *(word for change in changes for word in ("--set", change))]
        ended = nanotrain(*command, cwd=tmp_path)
        assert ended.code == 0, ended.err
        lines = [(tmp_path / "run" / f"attempts-{rank}").read_text().split() for rank in range(3)]
        return [line[::2] for line in lines], [line[1::2] for line in lines], ended.err

    return go


@pytest.mark.full
def test_without_snapshots_the_checkpoint_is_resumed_and_nothing_of_the_old_engine_is_left(run):
    processes, engines, err = run()
    for rank, (before, after) in enumerate(processes):
        assert (before == after) == (rank != 1)
    assert engines == [["1", "1"]] * 3
    assert "rank 1 was killed by SIGKILL; restarting (1 of 2)" in err
    assert "these ranks keep their processes: 0, 2\n" in err


@pytest.mark.full_cases("no gradients")
@pytest.mark.parametrize(
    ("leaves", "named"),
    [("a thread", "the thread of a plugin"), ("no gradients", "another value of grad mode")],
    ids=["a thread", "no gradients"],
)
def test_a_rank_that_sleeps_is_interrupted_and_one_that_leaves_something_is_replaced(run, leaves, named):
    processes, _, err = run("monitor.0.busy=true", f'monitor.0.leaves="{leaves}"')
    assert [before == after for before, after in processes] == [True, False, False]
    assert f"rank 2 gets a new process: its attempt has left {named}\n" in err


@pytest.mark.full
def test_by_default_all_ranks_get_new_processes_and_one_that_exits_while_others_are_busy_is_named(run):
    processes, _, err = run("run.in_process_restart=false", "monitor.0.busy=true", "monitor.0.exits=true")
    assert [before == after for before, after in processes] == [False, False, False]
    assert "rank 1 exited during the run with exit code 3, without reporting an error; restarting" in err


@pytest.mark.full
def test_compiled_layers_are_compiled_again(run):
    processes, engines, _ = run("run.compile=true", 'kernels.use="torch"')
    assert [before == after for before, after in processes] == [True, False, True]
    assert engines == [["1", "1"]] * 3


def test_without_hang_detection_it_is_refused():
    with pytest.raises(
        RecipeError, match="in_process_restart: a collective that hangs is ended by hang_timeout"
    ):
        load_recipe("laptop", overrides=["run.in_process_restart=true", "run.hang_timeout=0"])


def hooks(module, args, output):
    return None


def default_dtype():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


SETTINGS = {
    "grad mode": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "anomaly detection": torch.autograd.detect_anomaly,
    "the default dtype": contextmanager(default_dtype),
    "function modes": lambda: torch.device("meta"),
    "dispatch modes": FakeTensorMode,
    "hooks on saved tensors": torch.autograd.graph.save_on_cpu,
    "attention's kernels": lambda: sdpa_kernel(SDPBackend.MATH),
    "hooks on all modules": lambda: register_module_forward_hook(hooks),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_torch_that_an_interrupted_statement_has_left_is_found(name):
    before = ProcessState()
    with SETTINGS[name]():
        assert before.left() == f"another value of {name}"
    assert before.left() == ""


def test_a_thread_that_ends_soon_is_waited_for():
    before, done = ProcessState(), threading.Event()
    thread = threading.Thread(target=done.wait, args=(0.3,))
    thread.start()
    assert before.left() == ""
    assert not thread.is_alive()


def test_the_thread_that_fsspec_keeps_for_every_store_does_not_count():
    before, done = ProcessState(), threading.Event()
    threading.Thread(target=done.wait, name="fsspecIO", daemon=True).start()
    assert before.left() == ""
    done.set()


def test_a_thread_of_cpp_that_python_has_seen_does_not_count():
    before, done = ProcessState(), threading.Event()
    threads = threading.enumerate()
    _thread.start_new_thread(lambda: (threading.current_thread(), done.wait()), ())
    while threading.enumerate() == threads:
        time.sleep(0.01)
    assert before.left() == ""
    done.set()


@pytest.mark.parametrize(("kept", "aborted"), [(True, 1), (False, 0)])
def test_after_a_failure_on_nccl_a_process_that_is_kept_aborts_its_communicators(monkeypatch, kept, aborted):
    import torch.distributed as dist

    calls, at_exit = [], []

    def abort():
        calls.append("abort")
        monkeypatch.setattr(dist, "is_initialized", lambda: False)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroy"))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", abort)
    monkeypatch.setattr(process_groups.atexit, "register", lambda *function: at_exit.append(function))
    with pytest.raises(RuntimeError), process_groups.ending_process_groups(kept=kept):
        raise RuntimeError("NCCL communicator was aborted")
    assert calls == ["abort"] * aborted
    assert len(at_exit) == 1 - aborted  # otherwise the process ends without destructors
