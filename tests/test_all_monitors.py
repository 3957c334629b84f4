"""Losses, weights and random streams are bitwise those of a run without monitors: with each, and with all."""

from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
import pytest
from test_looking import FOUR

import nanotrain_core
from nanotrain_core.api import load_plugins
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.checks.parallel import assert_same_reports
from nanotrain_core.testing.compare import assert_bitwise
from nanotrain_core.testing.probe import train

#: Whatever a monitor has, as often as it can be had.
CONFIGS = {
    "alerts": {"rules": [{"metric": "loss", "above": 0.0}], "to": {"file": "alerts.jsonl"}},
    "dump": {"steps": "1:5", "what": ["weights", "gradients", "updates", "activations"]},
    "fp8": {"every": 1},
    "health": {"level": "debug"},
    "memory": {"account_every": 1},
    "moe": {"loads_every": 1},
    "object_store": {"url": "memory://all/{folder}"},
    "probes": {"every": 1},
    "profiler": {"steps": "2:3"},
    "replay": {"every": 1},
    "sample": {"tokens": 4, "every": 1},
    "stragglers": {"every": 1},
    "wandb": {"mode": "offline"},
}
#: Every monitor that is installed.
ALL = load_plugins().names("monitor")
#: With text, experts and operands in FP8, so that no monitor has nothing to look at.
AROUND = {
    "run": {"steps": 5},
    "evaluation": {"every": 2, "sequences": 4},
    "precision": {"use": "fp8_hybrid"},
    "data": {"use": "text", "paths": [str(Path(nanotrain_core.__file__).parent / "recipe")]},
}
DP = Case(
    "parallel",
    use="ddp",
    topology={"dp": 2},
    overrides={**AROUND, "model": {"use": "routed", "vocab": 256, "layers": 1}},
)


def ranks(case, names):
    """Train with these monitors, in a folder of its own, with a save in between."""
    monitors = [{"use": name, **CONFIGS.get(name, {})} for name in names]
    with TemporaryDirectory() as folder:
        return run_ranks(traced, case.world_size, case, monitors, Path(folder), timeout=240)


def traced(case, monitors, folder):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("WANDB_ERROR_REPORTING", "false")
        return train(case, {"monitor": monitors}, folder=folder, save_at=2)


def assert_same_bits(case, names, alone):
    for rank, (ours, theirs) in enumerate(zip(ranks(case, names), alone, strict=True)):
        assert_same_reports(ours, theirs, atol=0.0)
        assert ours.evaluations == theirs.evaluations
        assert_bitwise(ours.streams, theirs.streams, f"random-number streams of rank {rank}")
        for what in ("weights", "state"):
            found, wanted = ({b.name: b.tensor for b in getattr(each, what)} for each in (ours, theirs))
            assert_bitwise(found, wanted, f"{what} of rank {rank}")


@pytest.fixture(scope="module")
def alone():
    return ranks(DP, [])


@pytest.mark.full  # each monitor alone has this check in its conformance
def test_all_monitors_at_once_change_no_bit(alone):
    """But the profiler, which takes its time."""
    assert_same_bits(DP, [name for name in ALL if name != "profiler"], alone)


@pytest.mark.full
@pytest.mark.parametrize("name", ALL)
def test_a_monitor_changes_no_bit(alone, name):
    assert_same_bits(DP, [name], alone)


@pytest.mark.full
def test_on_eight_ranks_all_monitors_at_once_change_no_bit():
    """DeepSeek-V3 over pp, tp with sequence parallelism, dp, ep and ZeRO, with recomputed layers."""
    case = FOUR.case()
    case = attrs.evolve(case, overrides={**case.overrides, "run": {"steps": 5}})
    names = [name for name in ALL if name not in ("fp8", "sample")]  # of other precisions, and of text
    assert_same_bits(case, names, ranks(case, []))
