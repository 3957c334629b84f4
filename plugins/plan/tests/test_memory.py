"""What ``nanotrain plan`` says of the memory of ranks, hosts and checkpoints."""

import json
import re
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from nanotrain_plan.budget import checkpoints
from nanotrain_plan.hardware import shipped

from nanotrain_core.api import newest_evaluated
from nanotrain_core.cli import main
from nanotrain_core.registry.registry import load_plugins


def test_state_and_flops_are_those_of_arithmetic(recipe, planned):
    code, plan = planned(recipe, "--hardware", "cpu")
    D, F, V, S, L = 64, plan["parameters"]["by_kind"]["other"], 256, 32, 3
    assert code == 0
    assert plan["parameters"]["by_kind"]["embedding"] == plan["parameters"]["by_kind"]["head"] == V * D
    total = 2 * V * D + F
    (rank,) = plan["memory"]["ranks"]
    assert plan["parameters"]["total"] == total
    # float32: the weight is its own master, AdamW has two moments and a step counter of each tensor.
    assert rank["between_steps"]["weights"] == 4 * total
    assert rank["between_steps"]["masters"] == 0
    assert 8 * total < rank["between_steps"]["optimizer"] < 8 * total + 4 * 100
    attention = 3 * L * 2 * S * D  # scores and values, causal, forward and backward
    assert plan["flops_per_token"]["attention"] == attention
    norms = (2 * L + 1) * D
    assert plan["flops_per_token"]["matmul"] == 6 * (total - V * D - norms)
    parts = plan["flops_per_token"]["by_part"]
    assert parts["head"] == plan["flops_per_token"]["head"] == 6 * V * D
    assert (parts["experts"], parts["mtp"], parts["attention"]) == (0, 0, attention)
    assert sum(parts.values()) == plan["flops_per_token"]["model"]
    assert sum(rank["at_peak"].values()) == rank["peak"]


@pytest.mark.parametrize(
    ("keep", "saves", "evaluates", "kept"),
    [(2, 10, 20, 3), (2, 10, 30, 4), (2, 10, 5, 3), (1, 10, 7, 3), (1, 10, 10, 2), (2, 10, 0, 3)],
)
def test_checkpoints_on_disk_are_those_of_a_walk_through_the_run(recipe, keep, saves, evaluates, kept):
    """Retention keeps the newest, and the newest that an evaluation came after: ``newest_evaluated``."""
    there, most, last = list[int](), 0, None
    for step in range(1, 500):
        last = step if evaluates and step % evaluates == 0 else last
        if step % saves == 0:
            there.append(step)
            most = max(most, len(there))
            there = sorted({*there[-keep:], *newest_evaluated(there, {"evaluated": last})})
    recipe = SimpleNamespace(
        run=SimpleNamespace(steps=499, folder=None),
        evaluation=SimpleNamespace(every=evaluates, sequences=8),
        checkpoint=SimpleNamespace(use="simple", config=SimpleNamespace(every=saves, keep=keep)),
    )
    stages = SimpleNamespace(pp=1, layout=SimpleNamespace(world_size=1), step_of=mock.Mock())
    stages.step_of.return_value.saved, stages.step_of.return_value.frozen = 1.0, 0.0
    hardware = SimpleNamespace(devices_per_node=8, disk_gb_s=1.0)
    assert checkpoints(recipe, load_plugins(), stages, hardware).kept == most == kept


def test_a_checkpoint_that_is_gathered_takes_the_memory_and_the_time_of_one_host(recipe, tmp_path, capsys):
    """Weights, masters and both moments in float32, and a step count; ``simple`` gathers them on rank 0."""
    text = resources.files("nanotrain_plan").joinpath("hardware/h100.toml").read_text()
    for host_gb, code in ((20.0, 2), (2000.0, 0)):
        file = tmp_path / f"{host_gb}.toml"
        file.write_text(re.sub(r"(?m)^host_memory_gb.*", f"host_memory_gb = {host_gb}", text))
        large = ["--set", "model.width=8192", "--set", "model.heads=64"]  # 3.2 billion parameters
        words = [recipe, "--hardware", str(file), "--ranks", "8", *large]
        assert main(["plan", *words, "--json"]) == code
        plan = json.loads(capsys.readouterr().out)
        host, saved = plan["host_memory"], plan["checkpoints"]
        assert host["checkpoint"] == saved["bytes"] >= 3 * 4 * plan["parameters"]["total"]
        assert saved["seconds"] == pytest.approx(saved["bytes"] / (plan["hardware"]["disk_gb_s"] * 1e9))
        assert host["fits"] == (code == 0)
        assert plan["memory"]["fits"]
        main(["plan", *words])
        out = " ".join(capsys.readouterr().out.split())
        assert ("does not fit its hosts' memory" in out) == (code == 2)
        assert ("too little; a checkpoint of which every rank writes a share" in out) == (code == 2)


@pytest.mark.full
def test_a_checkpoint_has_the_weights_that_are_packed_in_memory(recipe, planned):
    """Each in 2 bytes, beside what the precision and the optimizer keep."""
    pytest.importorskip("nanotrain_fp4_master")
    _, plan = planned(recipe, "--set", "precision.use=fp4_master")
    held = plan["memory"]["ranks"][0]["between_steps"]
    weights = 2 * plan["parameters"]["total"]
    assert held["weights"] < 0.6 * weights
    assert plan["checkpoints"]["bytes"] == weights + held["masters"] + held["optimizer"]


def test_offloaded_activations_wait_in_the_hosts_memory(recipe, tmp_path, planned):
    pytest.importorskip("nanotrain_activation_offload")
    moved = tmp_path / "moved.toml"
    moved.write_text(
        Path(recipe).read_text() + '[[parallel]]\nuse = "activation_offload"\nmin_mb = 0.0\nkeep = 0\n'
    )
    (_, plain), (_, after) = (planned(path, "--ranks", "2") for path in (recipe, str(moved)))
    assert plain["host_memory"]["activations"] == 0
    kept, left = (sum(a["bytes"] * a["count"] for a in p["memory"]["activations"]) for p in (plain, after))
    assert 0 < left < kept / 2
    assert after["host_memory"]["activations"] == pytest.approx(2 * (kept - left), rel=0.01)
    total = sum(
        after["host_memory"][each] for each in ("processes", "offloaded", "activations", "checkpoint")
    )
    assert after["host_memory"]["total"] == total


def test_buckets_of_gradient_sync_are_held_between_steps(recipe, planned):
    pytest.importorskip("nanotrain_zero12")
    zero2 = ["--set", 'optimizer={use="zero12", stage=2, bucket_mb=0.05}', "--set", "model.layers=1"]
    _, plan = planned(recipe, "--hardware", "cpu", "--ranks", "2", *zero2)
    (rank,) = plan["memory"]["ranks"]
    held = rank["between_steps"]
    assert {*held} == {"weights", "masters", "optimizer", "gradients", "buffers", "other"}
    tokens = 2 * 8 * 4 * 32  # and targets, of a rank's batch, which at the peak are not the step's
    assert held["buffers"] == pytest.approx(rank["at_peak"]["buffers"] + tokens, abs=512)
    assert held["buffers"] > 0.05e6  # a bucket at least
    assert sum(held.values()) < rank["peak"]


def test_sgd_holds_no_moments(recipe, planned):
    """Its fused kernel, which runs where a step may be skipped on the device, is planned too."""
    sgd = [recipe, "--hardware", "h100", "--set"]
    _, plain = planned(*sgd, 'optimizer={use="sgd",lr=0.1}')
    _, heavy = planned(*sgd, 'optimizer={use="sgd",lr=0.1,momentum=0.9}')
    states = [plan["memory"]["ranks"][0]["between_steps"]["optimizer"] for plan in (plain, heavy)]
    assert states == [0, 4 * plain["parameters"]["total"]]


OFFLOADED = """
[topology]
pp = 4
[schedule]
use = "1f1b"
[[parallel]]
use = "activation_offload"
min_mb = 0.0
keep = 0
"""


def test_a_host_has_the_ranks_that_are_on_it(recipe, tmp_path, planned):
    """Of a pipeline within a node the first rank has four microbatches in flight, and the last one."""
    pytest.importorskip("nanotrain_activation_offload")
    pytest.importorskip("nanotrain_pp_1f1b")
    path, single = tmp_path / "pipeline.toml", tmp_path / "single.toml"
    path.write_text(Path(recipe).read_text().replace("layers = 3", "layers = 8") + OFFLOADED)
    text = shipped()["h100"].read_text()
    single.write_text(re.sub(r"(?m)^devices_per_node.*", "devices_per_node = 1", text))
    (_, together), (_, apart) = (
        planned(str(path), "--ranks", "4", "--hardware", each) for each in ("h100", str(single))
    )
    fullest = apart["host_memory"]["activations"]
    assert together["host_memory"]["activations"] == pytest.approx(fullest * (4 + 3 + 2 + 1) / 4, rel=0.1)
    assert together["host_memory"]["tensors"] == 0
    _, cpu = planned(recipe, "--ranks", "2", "--hardware", "cpu")
    host = cpu["host_memory"]
    assert host["tensors"] == 2 * cpu["memory"]["peak"]
    assert host["total"] == host["processes"] + host["tensors"] + host["checkpoint"]
