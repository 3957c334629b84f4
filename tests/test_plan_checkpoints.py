"""Planned bytes of a checkpoint, which are those of the run and not of its layout."""

from types import SimpleNamespace

import attrs
import pytest
from nanotrain_plan.budget import checkpoint_bytes, checkpoints
from nanotrain_plan.stages import dry_stages

from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import train

LLAMA = {
    "use": "transformer",
    "layers": 2,
    "width": 128,
    "heads": 4,
    "kv_heads": 4,
    "ffn": 128,
    "vocab": 1024,
    "tied": True,
}
MOE = {
    "use": "deepseek",
    "layers": 3,
    "dense_layers": 1,
    "width": 128,
    "vocab": 1024,
    "heads": 4,
    "q_rank": 32,
    "kv_rank": 32,
    "nope_size": 32,
    "rope_size": 16,
    "value_size": 32,
    "ffn": 128,
    "experts": 8,
    "top_k": 2,
    "shared_experts": 1,
    "expert_ffn": 128,
    "groups": 4,
    "group_limit": 2,
    "mtp": 0,
}
TP = [{"use": "tp", "sequence_parallel": True}]
DDP = [{"use": "ddp"}]


def case(model, topology, wrappers=(), optimizer="adamw"):
    """Return one whose parameters have unlike bytes of state for an element: norms keep float32."""
    overrides = {
        "batch": {"sequences": 8, "microbatch": 1, "length": 32},
        "model": model,
        "optimizer": {"use": optimizer, "moment_dtype": "int8"},
        "precision": {"use": "fp4_master", "variant": "naive"},
        "schedule": {"use": "1f1b" if "pp" in topology else "accumulate"},
        "parallel": [*wrappers],
    }
    return Case("topology", use="grid", topology=topology, overrides=overrides)


def planned(*of):
    """Return the bytes of a checkpoint."""
    recipe, registry = (given := case(*of)).recipe(), given.registry()
    layout = registry.build(recipe.topology).layout(recipe.run.ranks)
    return checkpoint_bytes(dry_stages(recipe, registry, layout, host=True))


@pytest.mark.full
def test_a_checkpoint_of_a_pipeline_with_a_tied_embedding_has_the_planned_bytes(tmp_path):
    changes = {"checkpoint": {"use": "sharded_v2"}, "run": {"steps": 1}}  # which saves one, at its end
    run_ranks(train, 2, case(LLAMA, {"pp": 2}), changes, folder=tmp_path)
    written = sum(path.stat().st_size for path in tmp_path.rglob("shard-*"))  # the rest is small in a model
    assert planned(LLAMA, {"pp": 2}) == pytest.approx(written, rel=0.01)


@pytest.mark.full_cases("tp", "zero12", "ep", "tied_pp")
@pytest.mark.parametrize(
    ("model", "topology", "wrappers", "optimizer"),
    [
        (LLAMA, {"pp": 2}, [], "adamw"),
        (LLAMA, {"tp": 4}, TP, "adamw"),
        (LLAMA, {"tp": 2, "dp": 2}, TP, "zero12"),
        (MOE, {"tp": 4}, TP, "adamw"),
        (MOE, {"dp": 8, "ep": 8}, [{"use": "ep_deepseek"}, *DDP], "adamw"),
    ],
    ids=["tied_pp", "tp", "zero12", "experts_tp", "ep"],
)
def test_a_checkpoint_is_as_large_as_that_of_one_rank(model, topology, wrappers, optimizer):
    """But for counts of steps, of which each block of a parameter is taken to have its own."""
    assert planned(model, topology, wrappers, optimizer) == pytest.approx(planned(model, {}), rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "qlora"])
def test_later_checkpoints_of_lora_write_the_planned_bytes(tmp_path, precision):
    lora = case({**LLAMA, "tied": False}, {"tp": 2}, [{"use": "tp"}, {"use": "lora", "rank": 4}])
    saves = {"use": "sharded_v2", "every": 1}
    overrides = {**lora.overrides, "precision": {"use": precision}, "checkpoint": saves}
    overrides["optimizer"] = {"use": "adamw"}
    lora = attrs.evolve(lora, overrides=overrides)
    run_ranks(train, 2, lora, {"run": {"steps": 2}}, folder=tmp_path, save_at=1)
    first, later = ([*path.glob("shard-*")] for path in sorted(tmp_path.glob("checkpoints/step-*")))
    recipe, registry = lora.recipe(), lora.registry()
    layout = registry.build(recipe.topology).layout(recipe.run.ranks)
    stages = dry_stages(recipe, registry, layout, host=True)
    plan = checkpoints(recipe, registry, stages, SimpleNamespace(devices_per_node=8, disk_gb_s=1.0))
    headers = 40_000  # of small tensors, on two ranks
    assert 0 <= sum(path.stat().st_size for path in first) - plan.bytes < headers
    written = sum(path.stat().st_size for path in later if path.stat().st_nlink == 1)
    assert 0 <= written - plan.later_bytes < headers
    assert plan.later_bytes < plan.bytes / 4
    assert plan.disk == plan.later_bytes * plan.kept + 2 * (plan.bytes - plan.later_bytes)
