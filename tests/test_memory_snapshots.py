"""Any rank of any layout may be killed: a step is lost, and the end is the undisturbed run's, bit by bit."""

import json
import shutil
import signal
import time
from pathlib import Path
from random import Random

import pytest
import torch.distributed as dist
from broken_runs import attempt, same
from command import finish, nanotrain, start
from structlog.testing import capture_logs
from test_restart import endpoint, listens

from nanotrain_core.errors import Exit
from nanotrain_core.testing import run_ranks
from nanotrain_core.testing.chaos.bench import Bench, Settings
from nanotrain_core.testing.chaos.memory import KillBesideMemory, MemoryGone

RECIPE = """
[run]
name = "small"
steps = 12
ranks = 4
device = "cpu"
deterministic = true
[batch]
sequences = 8
microbatch = 2
length = 16
[precision]
use = "bf16"
[data]
use = "synthetic"
vocab = 64
[checkpoint]
use = "sharded_v2"
"""
LLAMA = """
[model]
use = "transformer"
layers = 4
width = 32
heads = 4
vocab = 64
"""
DEEPSEEK = """
[model]
use = "deepseek"
layers = 2
dense_layers = 1
width = 32
vocab = 64
heads = 2
q_rank = 16
kv_rank = 8
nope_size = 8
rope_size = 4
value_size = 8
ffn = 48
experts = 4
top_k = 2
expert_ffn = 16
bias_update_rate = 0.02
"""
DDP = """
[optimizer]
use = "adamw"
lr = 0.01
[[parallel]]
use = "ddp"
"""
ZERO_AND_TP = """
[topology]
use = "grid"
tp = 2
[[parallel]]
use = "tp"
sequence_parallel = true
[optimizer]
use = "zero12"
stage = 2
lr = 0.01
"""
PP = """
[topology]
use = "grid"
pp = 2
[schedule]
use = "1f1b"
[optimizer]
use = "zero12"
stage = 1
lr = 0.01
"""
EP = """
[topology]
use = "grid"
ep = 2
[[parallel]]
use = "ep_deepseek"
[[parallel]]
use = "ddp"
[optimizer]
use = "adamw"
lr = 0.01
"""
LAYOUTS = {"ddp": LLAMA + DDP, "zero12 and tp": LLAMA + ZERO_AND_TP, "pp": LLAMA + PP, "ep": DEEPSEEK + EP}


def broken(folder, recipe, harmed, hosts):
    """Run undisturbed; then break off before the end of step 6, lose the memory of some ranks, and go on."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GROUP_RANK", str(dist.get_rank() * hosts // dist.get_world_size()))
        return broken_here(folder, recipe, harmed)


def broken_here(folder, recipe, harmed):
    whole = attempt(folder, "whole", recipe=recipe)
    attempt(folder, "broken", recipe=recipe, dies_at=6)
    dist.barrier()
    if dist.get_rank() in harmed:
        (memory,) = folder.glob(f"nanotrain-snapshots-*-{dist.get_rank():05d}")
        shutil.rmtree(memory)
    dist.barrier()
    with capture_logs() as logs:
        ran = attempt(folder, "broken", recipe=recipe, again=True)
    copies = [row["from_neighbours"] for row in logs if row["event"] == "restored from memory"]
    return ran.first, same(ran, whole), copies


def from_memory(tmp_path, layout, harmed, hosts=1):
    """Return of each rank the step that it went back to, whether it ended with the bits of the whole run."""
    recipe = (
        RECIPE.replace("steps = 12", "steps = 9") + 'every = 100\n[[monitor]]\nuse = "memory_snapshots"\n'
    )
    ran = run_ranks(broken, 4, tmp_path, recipe + LAYOUTS[layout], harmed, hosts, timeout=600)
    assert ran[0][2] == [len(harmed)]
    return [each[:2] for each in ran]


def test_ranks_agree_on_a_step_and_a_rank_gets_back_what_its_neighbour_kept(tmp_path):
    assert from_memory(tmp_path, "zero12 and tp", (2,)) == [(5, True)] * 4


@pytest.mark.full
@pytest.mark.parametrize("harmed", [(0, 1), (2, 3)], ids=str)
def test_all_ranks_of_one_of_two_hosts_may_lose_their_memory(tmp_path, harmed):
    assert from_memory(tmp_path, "zero12 and tp", harmed, hosts=2) == [(5, True)] * 4


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("harmed", [(0,), (3,), (0, 2), ()], ids=str)
def test_on_every_layout_any_ranks_but_neighbours_may_lose_their_memory(tmp_path, layout, harmed):
    assert from_memory(tmp_path, layout, harmed) == [(5, True)] * 4


@pytest.fixture(scope="module", params=LAYOUTS)
def bench(request, tmp_path_factory):
    """A bench for one layout, whose undisturbed run is made once."""
    root = tmp_path_factory.mktemp("memory")
    (root / "small.toml").write_text(RECIPE + LAYOUTS[request.param])
    return Bench(
        Settings(recipe=str(root / "small.toml"), ranks=4, steps=12, every=4, hang_timeout=60.0),
        root / "runs",
    )


@pytest.mark.full
@pytest.mark.parametrize("row", [KillBesideMemory, MemoryGone], ids=lambda row: row.__name__)
@pytest.mark.parametrize("rank", range(4))
def test_any_rank_may_be_killed(bench, rank, row):
    class One(row):
        def victim(self, trial, random):
            return rank

    outcome = One().run(bench, f"{row.__name__}-{rank}", Random(rank))
    assert outcome.problems == []
    assert outcome.steps_lost <= 1


HOLDS = """
import time
from pathlib import Path
import attrs
from nanotrain_core import hookimpl
from nanotrain_core.component import Component

@attrs.define(frozen=True, kw_only=True)
class Config:
    reached: str

def build(config):
    from nanotrain_core.contracts import Monitor

    class Holds(Monitor):
        every_step = True

        def on_start(self, run):
            self.run = run

        def on_step(self, report):
            reached = Path(config.reached)
            if report.step == 6 and self.run.rank == 3 and not reached.exists():
                reached.touch()
                time.sleep(600)

    return Holds()

@hookimpl
def nanotrain_register_monitor(register):
    register(Component(name="holds", config=Config, factory=f"{__name__}:build", summary="holds a run"))
"""


@pytest.mark.full
def test_a_host_that_is_replaced_gets_the_memory_of_its_neighbour(tmp_path):
    """Two launchers on one machine: the second is killed, its snapshots go, and another takes its place."""
    memory, reached = tmp_path / "memory", tmp_path / "reached"
    memory.mkdir()
    (tmp_path / "holds.py").write_text(HOLDS)
    kept = f'[[monitor]]\nuse = "memory_snapshots"\nfolder = "{memory}"\n'
    held = f'[[monitor]]\nuse = "holds"\nreached = "{reached}"\n'
    (tmp_path / "small.toml").write_text(RECIPE + LAYOUTS["zero12 and tp"] + kept + held)
    words = ["run", "small.toml", "--plugin", "holds.py"]
    at = endpoint()
    lost = [*words, "--nnodes", "2", "--nproc", "2", "--rdzv-endpoint", at, "--max-restarts", "2"]
    first = start(*lost, "--folder", "lost", cwd=tmp_path)
    until = time.monotonic() + 60
    while not listens(at) and time.monotonic() < until:
        time.sleep(0.1)
    second = start(*lost, "--folder", "lost", cwd=tmp_path)
    until = time.monotonic() + 200
    while not reached.exists() and time.monotonic() < until:
        time.sleep(0.1)
    second.send_signal(signal.SIGKILL)
    second.wait()
    time.sleep(2)  # its ranks end within a second
    gone = [folder for rank in (2, 3) for folder in memory.glob(f"*-{rank:05d}")]
    for folder in gone:
        shutil.rmtree(folder)
    replaced = start(*lost, "--folder", "lost", cwd=tmp_path)
    ends = [finish(host, timeout=300) for host in (replaced, first)]
    assert [end.code for end in ends] == [Exit.DONE] * 2
    log = (tmp_path / "lost" / "run.log.jsonl").read_text().splitlines()
    restored = [row for row in map(json.loads, log) if row["event"] == "restored from memory"]
    assert [(row["step"], row["steps_lost"], row["from_neighbours"]) for row in restored] == [(5, 1, 2)]
    assert [*memory.iterdir()] == []
    nanotrain(*words, "--nproc", "4", "--folder", "whole", cwd=tmp_path)
    assert end_of(tmp_path / "lost") == end_of(tmp_path / "whole")


def end_of(folder: Path) -> dict[str, bytes]:
    """Return the files of a run's last checkpoint."""
    last = max((folder / "checkpoints").glob("step-*"))
    return {path.name: path.read_bytes() for path in last.iterdir() if path.suffix == ".safetensors"}
