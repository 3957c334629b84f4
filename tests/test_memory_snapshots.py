"""Any rank of any layout may be killed: a step is lost, and the end is the undisturbed run's, bit by bit."""

from random import Random

import pytest

from nanotrain_core.testing.chaos.bench import Bench, Settings
from nanotrain_core.testing.chaos.memory import KillBesideMemory, MemoryGone

pytestmark = pytest.mark.full

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


@pytest.fixture(scope="module", params=LAYOUTS)
def bench(request, tmp_path_factory):
    """A bench for one layout, whose undisturbed run is made once."""
    root = tmp_path_factory.mktemp("memory")
    (root / "small.toml").write_text(RECIPE + LAYOUTS[request.param])
    return Bench(
        Settings(recipe=str(root / "small.toml"), ranks=4, steps=12, every=4, hang_timeout=60.0),
        root / "runs",
    )


@pytest.mark.parametrize("row", [KillBesideMemory, MemoryGone], ids=lambda row: row.__name__)
@pytest.mark.parametrize("rank", range(4))
def test_any_rank_may_be_killed(bench, rank, row):
    class One(row):
        def victim(self, trial, random):
            return rank

    outcome = One().run(bench, f"{row.__name__}-{rank}", Random(rank))
    assert outcome.problems == []
    assert outcome.steps_lost <= 1
