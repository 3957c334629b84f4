"""Low-bit masters beside the other plugins: sharded by zero12, saved and loaded on any layout, split by tp.

Checkpoints are bitwise on the layout they are of, and have the same weights on every other.
"""

import tempfile
from pathlib import Path

import attrs
import pytest
import torch

from nanotrain_core.errors import NanotrainError
from nanotrain_core.precision.quantized_storage import storage_key, storage_of
from nanotrain_core.testing import Case, conformance, run_ranks
from nanotrain_core.testing.compare import assert_bitwise, whole
from nanotrain_core.testing.probe import make_engine, push, train

ADAMW = {"use": "adamw", "lr": 0.01, "clip_norm": 0.5}
ZERO = {**ADAMW, "use": "zero12", "stage": 2, "bucket_mb": 0.02}
NARROW = {**ZERO, "moment_dtype": "bfloat16"}
EIGHT = {**ZERO, "moment_dtype": "int8"}
#: Every width a multiple of a block of 16, also over two ranks.
EXPERTS = {
    "use": "deepseek",
    "layers": 2,
    "width": 32,
    "heads": 2,
    "vocab": 64,
    "dense_layers": 1,
    "q_rank": 16,
    "kv_rank": 16,
    "nope_size": 16,
    "rope_size": 16,
    "value_size": 16,
    "ffn": 64,
    "experts": 4,
    "top_k": 2,
    "shared_experts": 1,
    "expert_ffn": 32,
    "init_std": 0.2,
}
LAYOUTS = {
    "one": ({}, ADAMW, []),
    "dp2": ({"dp": 2}, ADAMW, [{"use": "ddp"}]),
    "zero2": ({"dp": 2}, ZERO, []),
    "tp2": ({"tp": 2}, ADAMW, [{"use": "tp"}, {"use": "ddp"}]),
    "narrow2": ({"dp": 2}, NARROW, []),
    "int8": ({"dp": 2}, EIGHT, []),
    "zero2-tp2": ({"dp": 2, "tp": 2}, ZERO, [{"use": "tp"}]),
    "pp2": ({"pp": 2}, ADAMW, []),
    "experts": ({}, ADAMW, []),
    "ep2": ({"dp": 2, "ep": 2}, ZERO, [{"use": "ep_deepseek"}]),
}


def on(layout, variant, form="nvfp4", checkpoint="simple"):
    topology, optimizer, parallel = LAYOUTS[layout]
    overrides = {"optimizer": optimizer, "parallel": parallel, "checkpoint": {"use": checkpoint}}
    overrides |= {"model": EXPERTS} if layout in ("experts", "ep2") else {}
    overrides |= {"schedule": {"use": "1f1b"}} if layout == "pp2" else {}
    config = {"variant": variant, "format": form}
    return Case("precision", use="fp4_master", config=config, topology=topology, overrides=overrides)


def run(case, folder, steps=4, **options):
    """Train; return weights and state, whole, and each rank's own blocks."""
    changes = {"run": {"steps": steps}}
    found = run_ranks(train, case.world_size, case, changes, folder=Path(folder), **options)
    own = [{f"{b.name}@{b.offset}": b.tensor for b in [*t.weights, *t.state]} for t in found]
    return whole([[*t.weights, *t.state] for t in found]), own


def full(*values):
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "variant", "checkpoint"),
    [
        ("zero2", "residual", "simple"),
        ("int8", "eco", "sharded_v2"),
        ("narrow2", "eco", "sharded_v2"),
        ("one", "residual", "simple"),
        ("one", "eco", "sharded_v2"),
        ("zero2", "residual", "sharded_v2"),
        ("tp2", "eco", "simple"),
        ("zero2-tp2", "residual", "sharded_v2"),
        ("pp2", "eco", "simple"),
        ("ep2", "residual", "sharded_v2"),
    ],
)
def test_a_resumed_run_has_every_bit_of_one_that_went_through(layout, variant, checkpoint):
    case = on(layout, variant, checkpoint=checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        _, through = run(case, folder, save_at=2)
        _, resumed = run(case, folder, save_at=2, resume="2")
    for rank, (one, other) in enumerate(zip(through, resumed, strict=True)):
        assert_bitwise(other, one, f"rank {rank}, resumed after step 2")


MOVES = [
    ("one", "zero2", "residual", "simple"),
    ("zero2", "tp2", "residual", "sharded_v2"),
    ("tp2", "zero2", "remainder", "sharded_v2"),
    full("zero2", "one", "residual", "sharded_v2"),
    full("dp2", "tp2", "residual", "simple"),
    full("zero2", "tp2", "eco", "simple"),
    full("one", "zero2-tp2", "residual", "sharded_v2"),
    full("one", "pp2", "residual", "simple"),
]


@pytest.mark.full_cases("one-zero2-residual-simple", "tp2-zero2-remainder-sharded_v2")
@pytest.mark.parametrize(("before", "after", "variant", "checkpoint"), MOVES)
def test_a_checkpoint_has_the_same_weights_on_another_layout(before, after, variant, checkpoint):
    """Loaded and saved again without a step: every code, scale, residual and moment."""
    form = "bf16" if variant == "remainder" else "nvfp4"
    with tempfile.TemporaryDirectory() as folder:
        saved, _ = run(on(before, variant, form, checkpoint), folder, save_at=4)
        loaded, _ = run(on(after, variant, form, checkpoint), folder, resume="4")
    assert_bitwise(loaded, saved, f"{before} on {after}")


def first_steps(case):
    """Return the weights after one step, on this rank."""
    trace = train(case, {"run": {"steps": 1}})
    return trace.weights


@pytest.mark.full_cases("zero2-eco-nvfp4")
@pytest.mark.parametrize(
    ("layout", "variant", "form"),
    [
        ("zero2", "eco", "nvfp4"),
        ("tp2", "residual", "nvfp4"),
        full("zero2", "residual", "nf4"),
        full("tp2", "eco", "bf16"),
        *(full(layout, "residual", "nvfp4") for layout in ("dp2", "zero2", "zero2-tp2", "pp2", "ep2")),
        *(full(layout, "eco", "nvfp4") for layout in ("dp2", "tp2", "zero2-tp2", "pp2", "ep2")),
    ],
)
def test_every_layout_rounds_alike(layout, variant, form):
    """But where gradients differ in their last bits, a few weights in a hundred fall the other way."""
    alone = on("experts" if layout == "ep2" else "one", variant, form)
    one = whole(run_ranks(first_steps, 1, alone))
    case = on(layout, variant, form)
    found = whole(run_ranks(first_steps, case.world_size, case))
    for name, wanted in one.items():
        differing = (found[name] != wanted).float().mean().item()
        assert differing < 0.05, f"{name}: {differing:.1%} differ"


def state_of(case, folder, step):
    engine = make_engine(case, {"run": {"steps": step}}, folder=Path(folder), resume=str(step))
    engine.fit()
    return [shard.master.load() for shard in engine.run.optimizer.master_shards]


def test_masters_of_ranges_are_loaded_from_the_checkpoint():
    with tempfile.TemporaryDirectory() as folder:
        run(on("one", "residual"), folder, steps=3, save_at=3)
        (wanted,) = run_ranks(state_of, 1, on("one", "residual"), folder, 3)
        ranges = run_ranks(state_of, 2, on("zero2", "residual"), folder, 3)
    total = sum(master.double().square().sum() for master in wanted)
    parts = sum(master.double().square().sum() for rank in ranges for master in rank)
    torch.testing.assert_close(parts, total, rtol=1e-12, atol=0)


def refused(case):
    """Return what building the run says, before anything is trained."""
    try:
        make_engine(case, {})
    except NanotrainError as error:
        return str(error)
    return ""


@pytest.mark.full_cases("zero2-tp2-changes3--")
@pytest.mark.parametrize(
    ("layout", "changes", "name", "nearest"),
    [
        ("tp2", {}, "layers.0.attn.o.weight", "1 in place of 2 ranks along its axis 1"),
        ("ep2", {"model": {**EXPERTS, "expert_ffn": 24}}, "", ""),
        ("zero2", {}, "", ""),
        ("zero2-tp2", {"model": {"width": 128, "heads": 4, "ffn": 256}}, "", ""),
    ],
)
def test_a_layout_that_cuts_blocks_of_64_is_refused_before_training(layout, changes, name, nearest):
    """ZeRO's ranges and whole experts cut none; columns of width 32 over two ranks do."""
    case = on(layout, "residual", "nf4")
    case = attrs.evolve(case, overrides={**case.overrides, **changes})
    for text in run_ranks(refused, case.world_size, case):
        assert bool(text) == bool(name), text
        assert text.startswith(name)
        assert nearest in text


README = (Path(__file__).parents[1] / "plugins/fp4_master/README.md").read_text(encoding="utf-8")
#: Variant and format of each row of the README's table, and bytes of every parameter and of a rank's share.
ROWS = {
    (cells[0], cells[1]): tuple(float(part.removesuffix("/N")) for part in cells[-1].split(" + "))
    for cells in ([cell.strip(" ()`") for cell in line.split("|")[1:-1]] for line in README.splitlines())
    if cells and cells[-1].endswith("/N")
}
#: What the README says of `nf4` below it.
ROWS |= {(row[0], "nf4"): (ROWS[row][0] - 0.03125, ROWS[row][1]) for row in [*ROWS] if row[1] == "nvfp4"}


def sharded_case(row):
    """Return a case with few weights that are kept as a remainder, as embedding, head and norms are."""
    variant, form = row
    case = on("int8", variant, form) if form else attrs.evolve(on("int8", variant), use="bf16", config={})
    return attrs.evolve(case, overrides={**case.overrides, "model": {"width": 64, "ffn": 1024, "layers": 1}})


def bytes_of(tensors):
    """Return the bytes of the storages of ``tensors``, each once and whole."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def bytes_of_rank(rows):
    """Return low and other parameters of each row's model, and this rank's bytes, after two steps.

    Of weights, of masters and moments, and of its share of the gradients.
    """
    found = []
    for row in rows:
        run = make_engine(sharded_case(row), {}).run
        for step in range(2):
            push(run, step, 1.0)
            run.optimizer.step()
            run.gradients.zero()
        shards, state = run.optimizer.master_shards, run.optimizer.inner.state
        beside = [t for shard in shards for t in shard.master.state().values()]
        moments = [t for shard in shards for t in state[shard.weight].values() if t.shape]
        low = [p for p in run.placed if p.parameter.dim() > 1 and p.placement.name.startswith("layers.")]
        sizes = [sum(p.parameter.numel() for p in each) for each in (low, run.placed)]
        weights = bytes_of(storage_of(placed.parameter) for placed in run.placed)
        shares = bytes_of(run.gradients.gradient_of(shard.piece) for shard in shards)
        found.append((sizes[0], sizes[1] - sizes[0], weights, bytes_of([*beside, *moments]), shares))
    return found


@pytest.mark.full
def test_a_rank_holds_the_bytes_of_the_table():
    """All weights, and its share of masters, moments and gradients: each row, within two percent."""
    assert len(ROWS) == 11
    for number, found in enumerate(run_ranks(bytes_of_rank, 2, [*ROWS])):
        for row, (low, kept, weights, state, shares) in zip(ROWS, found, strict=True):
            what = f"rank {number}, {row}"
            assert low > 20 * kept
            (every, share), others = ROWS[row], ROWS["remainder", "bf16"] if row[1] else ROWS[row]
            assert weights == pytest.approx(every * low + others[0] * kept, rel=0.02), what
            assert state == pytest.approx((share * low + others[1] * kept) / 2, rel=0.02), what
            assert shares == pytest.approx(4 * (low + kept) / 2, rel=0.02), what


def losses_and_forms(packed):
    """Return the first losses, and what each parameter is held as.

    By kernels that multiply alike with and without a GEMM backend; nanotrain-cpu's round otherwise.
    """
    case = attrs.evolve(on("ep2", "residual"), config={"variant": "residual", "packed": packed})
    trace = train(case, {"run": {"steps": 4}, "kernels": {"use": "torch"}})
    run = make_engine(case, {}).run
    return [report.loss for report in trace.reports], {
        p.placement.name: storage_key(p.parameter) for p in run.placed
    }


def test_experts_latent_attention_and_all_other_matrices_are_packed_and_train_alike():
    (losses, forms), _ = run_ranks(losses_and_forms, 2, True)
    (others, plain), _ = run_ranks(losses_and_forms, 2, False)
    held = {name for name, form in forms.items() if form != "torch.bfloat16"}
    matrices = {name for name in forms if "norm" not in name}
    kept = {"embed.weight", "head.weight", "layers.1.moe.router.weight", "layers.1.moe.router.bias"}
    assert held - {"layers.1.moe.router.bias"} == matrices - kept
    assert {*plain.values()} <= {"torch.bfloat16", "torch.float32"}
    assert losses == others


def test_another_variants_checkpoint_is_refused():
    with tempfile.TemporaryDirectory() as folder:
        run(on("one", "residual"), folder, steps=2, save_at=2)
        with pytest.raises(Exception, match="does not fit this run"):
            run(on("one", "eco"), folder, steps=2, resume="2")


def sharded(variant):
    config = {"format": "nvfp4", "variant": variant}
    zero = {"optimizer": {"use": "zero12", "lr": 0.01, "clip_norm": 1.0, "stage": 2, "bucket_mb": 0.01}}
    return Case(
        "precision", use="fp4_master", config=config, topology={"dp": 2}, overrides=zero, name=variant
    )


test_sharded_residuals = pytest.mark.full(conformance(sharded("residual")))
test_sharded_eco = pytest.mark.full(conformance(sharded("eco")))
