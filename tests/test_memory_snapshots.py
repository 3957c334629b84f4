"""Any rank of any layout may be killed: a step is lost, and the end is the undisturbed run's, bit by bit."""

import shutil
from random import Random

import pytest
import torch.distributed as dist
from broken_runs import attempt, same
from structlog.testing import capture_logs

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
    copies = [row["from_neighbors"] for row in logs if row["event"] == "restored from memory"]
    return ran.first, same(ran, whole), copies


def from_memory(tmp_path, layout, harmed, hosts=1):
    """Return of each rank the step that it went back to, whether it ended with the bits of the whole run."""
    recipe = (
        RECIPE.replace("steps = 12", "steps = 9") + 'every = 100\n[[monitor]]\nuse = "memory_snapshots"\n'
    )
    ran = run_ranks(broken, 4, tmp_path, recipe + LAYOUTS[layout], harmed, hosts, timeout=600)
    assert ran[0][2] == [len(harmed)]
    return [each[:2] for each in ran]


def test_ranks_agree_on_a_step_and_a_rank_gets_back_what_its_neighbor_kept(tmp_path):
    assert from_memory(tmp_path, "zero12 and tp", (2,)) == [(5, True)] * 4


@pytest.mark.full
@pytest.mark.parametrize("harmed", [(0, 1), (2, 3)], ids=str)
def test_all_ranks_of_one_of_two_hosts_may_lose_their_memory(tmp_path, harmed):
    assert from_memory(tmp_path, "zero12 and tp", harmed, hosts=2) == [(5, True)] * 4


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("harmed", [(0,), (3,), (0, 2), ()], ids=str)
def test_on_every_layout_any_ranks_but_neighbors_may_lose_their_memory(tmp_path, layout, harmed):
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
