"""Which parameters get what, what a recipe may ask for, and what all that costs."""

import gc
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from nanotrain_fp4_master import FP4MasterConfig
from nanotrain_fp4_master.precision import FP4Master
from pieces import pack

from nanotrain_core.cli import main
from nanotrain_core.errors import CheckpointError, Diverged, Exit, NanotrainError, RecipeError
from nanotrain_core.precision.quantized_storage import PackedWeight, storage_of
from nanotrain_core.recipe import write_resolved
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine, make_run, push

ADAMW = {"use": "adamw", "lr": 0.01}


def case(optimizer=ADAMW, model=None, **config):
    overrides = {"optimizer": optimizer, "model": model or {}}
    return Case("precision", use="fp4_master", config=config, overrides=overrides)


# --- what each parameter gets -----------------------------------------------------------------------


def masters(case):
    """Return the name of every parameter with the class of its master."""
    run = make_run(case, {})
    return {shard.placement.name: type(shard.master).__name__ for shard in run.optimizer.master_shards}


def test_matrices_of_linear_layers_are_low_and_all_else_is_kept():
    found = masters(case())
    low = {name for name, kind in found.items() if kind == "Residual"}
    assert {name.split(".", 2)[2] for name in low if name.startswith("layers.1")} == {
        "attn.q.weight",
        "attn.k.weight",
        "attn.v.weight",
        "attn.o.weight",
        "ffn.gate.weight",
        "ffn.up.weight",
        "ffn.down.weight",
    }
    assert {kind for name, kind in found.items() if name not in low} == {"Remainder"}


@pytest.mark.parametrize("pattern", ["layers.0.*", "layers.0"])
def test_a_recipe_chooses_roles_and_keeps_what_matches_a_pattern(pattern):
    """Or what is in a module that does, as ``nanotrain check`` accepts it."""
    found = masters(case(roles=["row"], keep=[pattern]))
    assert {name for name, kind in found.items() if kind == "Residual"} == {
        "layers.1.attn.o.weight",
        "layers.1.ffn.down.weight",
    }


def test_routers_are_kept_and_experts_are_low():
    routed = {"use": "routed", "vocab": 64}
    run = make_run(case(model=routed), {})
    kinds = {shard.placement.name: type(shard.master).__name__ for shard in run.optimizer.master_shards}
    experts = {kind for name, kind in kinds.items() if "experts" in name}
    routers = {kind for name, kind in kinds.items() if "router" in name}
    assert experts == {"Residual"}
    assert routers <= {"Remainder", "LiveMaster"}
    assert routers


def test_the_table_says_what_each_got_and_counts_every_parameter():
    run = make_run(case(keep=["layers.0.attn.*"]), {})
    precision = FP4Master(FP4MasterConfig(keep=("layers.0.attn.*",)))
    (part,) = run.stages.values()
    precision.convert(part)
    rows = precision.table(part.named_parameters())
    assert sum(row.parameters for row in rows) == sum(p.numel() for p in part.parameters())
    assert {(row.role, row.weights, row.bytes_each) for row in rows} == {
        ("column", "nvfp4 residual", 1.5625),
        ("row", "nvfp4 residual", 1.5625),
        ("pattern", "bf16 remainder", 4.0),
        ("norm", "bf16 remainder", 4.0),
        ("vocab", "bf16 remainder", 4.0),
        ("head", "bf16 remainder", 4.0),
    }


def test_what_is_described_counts_bytes_of_all_weights_and_masters():
    run = make_run(case(), {})
    row = {each.split()[0]: each for each in run.described[1:]}
    low = sum(placed.parameter.numel() for placed in run.placed if placed.parameter.dim() > 1)
    kept = sum(placed.parameter.numel() for placed in run.placed) - low
    for placed in run.placed:
        if placed.placement.name in KEPT:
            low, kept = low - placed.parameter.numel(), kept + placed.parameter.numel()
    assert f"{low + kept:,} x {(1.5625 * low + 4 * kept) / (low + kept):.4g} bytes" in row["all"]
    assert "nvfp4 residual" in row["row"]


def test_a_pattern_that_keeps_nothing_is_refused_with_the_nearest_name():
    with pytest.raises(
        NanotrainError, match=r"precision\.keep: 'layer\.0\.attn\.q\.weight' .*'layers\.0\.attn"
    ):
        make_run(case(keep=["layer.0.attn.q.weight"]), {})


def test_such_a_pattern_is_refused_before_ranks_start(tmp_path, capsys):
    (tmp_path / "recipe.toml").write_text(write_resolved(case(keep=["layers.0.*", "*.q.weigth"]).recipe()))
    assert main(["check", str(tmp_path / "recipe.toml")]) == Exit.USER
    wrong = r"recipe\.toml:\d+: precision\.keep\.1: .* no module or parameter '\*\.q\.weigth' \(did you mean "
    assert re.search(wrong, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ({"format": "nvfp4"}, {"format": "nf4", "block_size": 16}),
        ({"format": "nf4", "block_size": 64}, {"format": "nf4", "block_size": 32}),
        ({"format": "bf16", "variant": "eco"}, {"format": "nvfp4", "variant": "eco"}),
    ],
)
def test_a_checkpoint_in_another_format_is_refused_though_its_tensors_look_alike(saved, wanted):
    old, new = (FP4Master(FP4MasterConfig(**config)) for config in (saved, wanted))
    with pytest.raises(CheckpointError, match=r"weights are .*precision\.format.*--weights"):
        new.loss_scale.load_meta(old.loss_scale.meta())
    with_packing = FP4Master(FP4MasterConfig(**saved, packed=False))
    old.loss_scale.update(False)
    with_packing.loss_scale.load_meta(old.loss_scale.meta())
    assert with_packing.clock.step == 1


def packed_after(change):
    """Return a part that ``change`` was done to before it was converted and packed, and the precision."""
    (part,) = make_run(case(packed=False), {}).stages.values()
    change(part)
    precision = FP4Master(FP4MasterConfig())
    precision.convert(part)
    pack(part, precision)
    return part, precision


def test_a_frozen_weight_stays_as_it_is_since_no_master_would_keep_what_rounding_loses():
    kept = {}

    def freeze(part):
        weight = part.layers["0"].ffn.up.weight.requires_grad_(False)
        weight.data.view(-1).copy_(torch.linspace(-1, 1, weight.numel()))
        kept["weight"] = weight.clone()

    part, precision = packed_after(freeze)
    assert torch.equal(part.layers["0"].ffn.up.weight, kept["weight"])
    found = {row.weights: row.parameters for row in precision.table(part.named_parameters())}
    assert found["bf16, frozen"] == kept["weight"].numel()
    assert isinstance(part.layers["1"].ffn.up.weight, PackedWeight)


def test_a_step_after_a_weight_grew_beyond_the_largest_is_not_taken():
    """It is told by a gradient that is not finite; nothing goes on with another weight in its place."""
    engine = make_engine(case(), {"run": {"steps": 2}})
    shard = next(
        shard
        for shard in engine.run.optimizer.master_shards
        if shard.placement.name == "layers.1.ffn.up.weight"
    )
    value = shard.master.load()
    value[0, 0] = 3000.0
    shard.master.store(value)
    with pytest.raises(Diverged, match="the last 2 of 2 steps were skipped"):
        engine.fit()


# --- what a recipe may ask for ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "optimizer", "text"),
    [
        ({"variant": "remainder", "format": "nvfp4"}, ADAMW, r"precision\.format: .*expected 'bf16'"),
        ({"format": "nvfp4", "block_size": 32}, ADAMW, r"precision\.block_size: 32 .*nvfp4: 16"),
        ({"block_size": 0}, ADAMW, r"precision\.block_size: 0 .*nvfp4: 16"),
        ({"roles": []}, ADAMW, r"precision\.roles: .*at least one role"),
        ({"format": "nf4", "block_size": 48}, ADAMW, r"precision\.block_size: 48 .*nf4: 64, 32, 16"),
        ({"format": "bf16", "block_size": 16}, ADAMW, r"precision\.block_size: 16 .*has no blocks"),
        ({"variant": "eco"}, {"use": "sgd", "lr": 0.1}, r"optimizer\.momentum: 'eco'"),
        ({"variant": "eco"}, {**ADAMW, "betas": [0.0, 0.9]}, r"optimizer\.betas: 'eco'"),
        ({"variant": "best"}, ADAMW, r"precision\.variant"),
        ({"roles": ["router"]}, ADAMW, r"precision\.roles"),
    ],
)
def test_what_does_not_exist_is_refused_before_anything_starts(config, optimizer, text):
    with pytest.raises(RecipeError, match=text):
        case(optimizer, **config).recipe()


def test_a_remainder_needs_no_format():
    assert FP4MasterConfig(variant="remainder").form == "bf16"
    assert FP4MasterConfig().form == "nvfp4"
    assert FP4MasterConfig(format="nf4").block == 64


# --- what it costs ----------------------------------------------------------------------------------

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


class Costs(NamedTuple):
    """A row of the README's table: bytes of a parameter."""

    variant: str
    form: str
    weight: float
    beside: float
    totals: dict[str, float]
    """With moments in each dtype."""


def table():
    """Yield the rows of the README's table, and those that it says `nf4` has, with blocks of 64."""
    assert "`nf4` takes 0.03125 less than `nvfp4` with blocks of 64" in README
    for line in README.splitlines():
        cells = [cell.replace("`", "").strip(" ()") for cell in line.split("|")[1:-1]]
        if len(cells) != 8 or not cells[7].endswith("/N"):
            continue
        beside = 0.0 if cells[3] == "nothing" else float(cells[3].split(":")[0])
        totals = dict(zip(("float32", "bfloat16", "int8"), map(float, cells[4:7]), strict=True))
        row = Costs(cells[0], cells[1], float(cells[2]), beside, totals)
        yield row
        if row.form == "nvfp4":
            less = {dtype: total - 0.03125 for dtype, total in totals.items()}
            yield row._replace(form="nf4", weight=row.weight - 0.03125, totals=less)


ROWS = [*table()]
assert len(ROWS) == 11
REMAINDER = next(row for row in ROWS if row.variant == "remainder")
#: One layer: what is kept is little beside it.
MODEL = {"width": 64, "ffn": 1024, "layers": 1}
KEPT = {"embed.weight", "head.weight"}


def bytes_of(tensors):
    """Return the bytes of the storages of ``tensors``, each once and whole."""
    found = [storage_of(tensor).untyped_storage() for tensor in tensors]
    storages = {storage.data_ptr(): storage.nbytes() for storage in found}
    return sum(storages.values())


def live_bytes():
    """Return the bytes of all tensors that this process made since, and holds."""
    gc.collect()
    return bytes_of(found for found in gc.get_objects() if issubclass(type(found), torch.Tensor))


@pytest.fixture(scope="module", autouse=True)
def _made_once():
    """Make what is made once in a process, and look only at what comes after: there is much before."""
    make_run(case(), {})
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def held_by(case):
    """Return the low parameters of a run, the others, and bytes by what they are, after two steps.

    ``total`` is all that the run adds to this process, ``gradients`` all that it forgets with these.
    """
    before = live_bytes()
    run = make_run(case, {})
    shards = run.optimizer.master_shards
    for step in range(2):
        push(run, step, 1.0)
        run.optimizer.step()
        full = live_bytes() if step else 0
        run.gradients.zero()
    total = live_bytes()
    kept = sum(s.size for s in shards if s.placement.name in KEPT or len(s.placement.shape) < 2)
    state = run.optimizer.inner.state
    return {
        "low": sum(s.size for s in shards) - kept,
        "kept": kept,
        "vectors": sum(s.size for s in shards if len(s.placement.shape) < 2),
        "weights": bytes_of(placed.parameter for placed in run.placed),
        "masters": bytes_of(t for s in shards for t in s.master.state().values()),
        "moments": bytes_of(t for s in shards for t in state[s.weight].values() if t.shape),
        "gradients": full - total,
        "total": total - before,
    }


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full), "int8"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.form}-{row.variant}".strip("-"))
def test_a_parameter_takes_the_bytes_of_the_table(row, dtype):
    """Two percent for all else that is alive in the process, however it came there."""
    optimizer = {**ADAMW, "moment_dtype": dtype}
    found = held_by(case_of(row, optimizer))
    low, kept = found["low"], found["kept"]
    assert low > 20 * kept
    other = REMAINDER if row.form else row
    not_rounded = found["vectors"] * (8 - moments(other, dtype)) if dtype == "int8" else 0
    wanted = {
        "weights": row.weight * low + other.weight * kept,
        "masters": row.beside * low + other.beside * kept,
        "moments": moments(row, dtype) * low + moments(other, dtype) * kept + not_rounded,
        "gradients": 4 * (low + kept),
    }
    for what, size in wanted.items():
        assert found[what] == pytest.approx(size, rel=1e-3), what
    total = row.totals[dtype] * low + other.totals[dtype] * kept + not_rounded
    assert total == pytest.approx(sum(wanted.values()) - wanted["gradients"])
    assert found["total"] == pytest.approx(total, rel=0.02)


def case_of(row, optimizer):
    if row.form:
        return case(optimizer, MODEL, format=row.form, variant=row.variant)
    return Case("precision", use="bf16", overrides={"optimizer": optimizer, "model": MODEL})


def moments(row, dtype):
    return row.totals[dtype] - row.weight - row.beside


def test_float32_takes_twelve_bytes():
    found = held_by(Case("precision", use="fp32", overrides={"optimizer": ADAMW, "model": MODEL}))
    assert found["total"] == pytest.approx((found["low"] + found["kept"]) * (4 + 8), rel=0.02)
