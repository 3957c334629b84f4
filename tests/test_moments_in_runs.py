"""AdamW's moments in bfloat16 and in 8 bits in runs: their bytes, sharded, resumed, moved between layouts."""

import tempfile
from pathlib import Path

import attrs
import pytest
import torch

from nanotrain_core.builtin.transformer_config import TransformerConfig
from nanotrain_core.errors import NanotrainError, RecipeError
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.placement import Piece, Placement
from nanotrain_core.models.kernels import TorchKernels
from nanotrain_core.optim import moments
from nanotrain_core.optim.moments import FIRST, GROUP, SECOND
from nanotrain_core.testing import Case, failures, run_ranks, trials
from nanotrain_core.testing.compare import assert_bitwise, assert_same, whole
from nanotrain_core.testing.probe import make_run, push, train

FORMS = ("bfloat16", "int8")
#: Rows that are no multiple of a group: those of the embedding's neighbor, the bias of the head's layers.
MODEL = {"width": 64, "ffn": 128, "heads": 2, "vocab": 64}
ODD = {**MODEL, "ffn": 72, "bias": True, "activation": "gelu", "norm": "layernorm"}


def on(use, ranks, form, *, precision="bf16", model=MODEL, **topology):
    optimizer = {"use": use, "lr": 0.01, "clip_norm": 0.5, "moment_dtype": form}
    optimizer |= {"stage": 2, "bucket_mb": 0.02} if use == "zero12" else {}
    sync = [{"use": "summed"}] if use == "adamw" and (ranks > 1 or topology) else []
    overrides = {"optimizer": optimizer, "precision": {"use": precision}, "model": model}
    parallel = [{"use": "tp"}] if "tp" in topology else []
    overrides |= {"parallel": [*parallel, *sync]}
    return Case("topology", use="grid", topology={"dp": ranks, **topology}, overrides=overrides)


def run(case, folder, **options):
    changes = {"run": {"steps": 6}, "batch": {"sequences": 8, "microbatch": 2}}
    traces = run_ranks(train, case.world_size, case, changes, folder=Path(folder), **options)
    return whole([t.weights for t in traces]), whole([t.state for t in traces])


@pytest.mark.full
@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_sharded_or_not_the_moments_are_the_same(form):
    """The update is the same, and so is the rounding; in float64, where sums have no order."""
    with tempfile.TemporaryDirectory() as folder:
        one = run(on("adamw", 1, form, precision="fp64"), f"{folder}/1")
        two = run(on("zero12", 2, form, precision="fp64"), f"{folder}/2")
    for wanted, found, what in zip(one, two, ("weights", "state"), strict=True):
        assert_same(found, wanted, what, atol=1e-9)


@pytest.mark.full
def test_shards_of_fsdp2_may_cut_vectors_anywhere(tmp_path):
    """Three ranks have 22, 22 and 20 of a norm's 64 weights: it was refused by ranks, after the check."""
    alone = on("adamw", 1, "int8", precision="fp64")
    sharded = attrs.evolve(
        alone, topology={"dp": 3}, world_size=3, overrides={**alone.overrides, "parallel": [{"use": "fsdp2"}]}
    )
    one, three = run(alone, tmp_path / "1"), run(sharded, tmp_path / "3")
    for wanted, found, what in zip(one, three, ("weights", "state"), strict=True):
        assert_same(found, wanted, what, atol=1e-9)


@pytest.mark.full_cases("zero12-int8", "zero12-bfloat16", "adamw-int8", "adamw-bfloat16")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("use", ["adamw", "zero12"])
def test_a_resumed_run_has_every_bit_of_one_that_went_through(use, form):
    case = on(use, 2 if use == "zero12" else 1, form, model=ODD)
    with tempfile.TemporaryDirectory() as folder:
        through = run(case, folder, save_at=3)
        resumed = run(case, folder, save_at=3, resume="3")
    for wanted, found, what in zip(through, resumed, ("weights", "state"), strict=True):
        assert_bitwise(found, wanted, what)


MOVES = [
    (("adamw", 1), ("zero12", 2)),
    (("zero12", 4), ("adamw", 1)),
    (("zero12", 2), ("adamw", 1, {"tp": 2})),
]


@pytest.mark.full_cases("before1-after1-int8", "before2-after2-int8")
@pytest.mark.parametrize("form", [pytest.param("bfloat16", marks=pytest.mark.full), "int8"])
@pytest.mark.parametrize(("before", "after"), MOVES)
def test_moments_move_between_optimizers_and_layouts_bit_by_bit(before, after, form):
    """Loaded without a step: every code and every scale."""

    def case(use, ranks, topology=None):
        return on(use, ranks, form, **(topology or {}))

    with tempfile.TemporaryDirectory() as folder:
        weights, state = run(case(*before), folder, save_at=6)
        loaded_weights, loaded_state = run(case(*after), folder, resume="6")
    assert_bitwise(loaded_weights, weights, "weights")
    assert_bitwise(loaded_state, state, "state")
    kinds = {name.partition("/")[0] for name in state} - {"step", "master"}
    codes = {f"{name}{part}" for name in (FIRST, SECOND) for part in (moments.CODE, moments.SCALE)}
    assert kinds == {FIRST, SECOND, *(codes if form == "int8" else ())}  # of vectors, float32


@pytest.mark.full_cases("int8-float32-it has no tensor exp_avg/|it holds 'exp_avg_code' tensors")
@pytest.mark.parametrize(
    ("saved", "wanted", "text"),
    [
        ("float32", "bfloat16", r"exp_avg/\S+ is kept in F32, expected BF16"),
        ("bfloat16", "float32", r"exp_avg/\S+ is kept in BF16, expected F32"),
        ("bfloat16", "int8", r"it has no tensor exp_avg_code/|it holds 'exp_avg' tensors"),
        ("int8", "float32", r"it has no tensor exp_avg/|it holds 'exp_avg_code' tensors"),
    ],
)
def test_moments_of_another_form_are_refused_by_name(saved, wanted, text):
    with tempfile.TemporaryDirectory() as folder:
        run(on("adamw", 1, saved), folder, save_at=6)
        with pytest.raises(Exception, match=text):
            run(on("adamw", 1, wanted), folder, resume="6")


@pytest.mark.parametrize("use", ["adamw", "zero12"])
@pytest.mark.parametrize("form", FORMS)
def test_a_beta2_that_rounding_undoes_is_refused(use, form):
    config = {"moment_dtype": form, "betas": [0.9, 0.999]}
    with pytest.raises(
        RecipeError, match=r"optimizer\.betas: .* expected beta2 of at most 0\.99, or moment_dtype"
    ):
        Case("optimizer", use=use, config=config).recipe()


def test_a_split_that_would_cut_a_group_is_refused_with_one_that_does_not():
    whole = Placement.whole("layers.0.attn.o.weight", (8, 64), Layout({"dense": View(("tp",), (4,))}))
    assert moments.in_groups(Piece(None, whole.split(1, "tp", 1, 2)))
    with pytest.raises(
        NanotrainError, match=r"attn\.o\.weight: .*rows of 64 are split over 4 .*at most 2, or"
    ):
        moments.in_groups(Piece(None, whole.split(1, "tp", 0, 4)))


HEADS = (
    "optimizer.moment_dtype: with 'int8' 32 neighbors in a row share a scale, but 4 heads make rows of 64, "
    "of which tp = 4 leaves 16 on a rank; expected tp of at most 2, or 'bfloat16'"
)


@pytest.mark.parametrize("use", ["adamw", "zero12"])
def test_such_a_split_is_refused_before_a_process_starts(use):
    model = {**MODEL, "heads": 4}
    with pytest.raises(RecipeError) as caught:
        on(use, 1, "int8", model=model, tp=4).recipe()
    assert HEADS in caught.value.lines
    for form, tp in (("bfloat16", 4), ("int8", 2)):
        on(use, 1, form, model=model, tp=tp).recipe()
    on(use, 1, "int8", model={**model, "head_size": 6}, tp=4).recipe()  # 24 in a row: float32 moments


@pytest.mark.parametrize(
    ("changes", "tp", "what"),
    [
        ({"ffn": 96}, 2, "96 columns of the feed-forward layer make rows of 96"),
        ({"kv_heads": 2, "bias": True}, 2, None),
        ({"kv_heads": 1, "bias": True, "head_size": 32}, 2, None),
    ],
)
def test_every_row_that_is_cut_is_found(changes, tp, what):
    case = on("adamw", 1, "int8", model={**MODEL, "heads": 4, **changes}, tp=tp)
    if what is None:
        run_ranks(bytes_of_moments, tp, case)
        return
    with pytest.raises(RecipeError, match=what):
        case.recipe()


def test_rows_of_experts_are_cut_by_etp():
    experts = {"use": "deepseek", "layers": 1, "width": 64, "heads": 2, "vocab": 64, "dense_layers": 0}
    experts |= {"kv_rank": 8, "nope_size": 4, "rope_size": 4, "value_size": 16, "ffn": 64, "experts": 2}
    experts |= {"top_k": 1, "shared_experts": 0}
    degrees = {"dp": 2, "etp": 2}
    for width, refused in ((96, True), (64, False), (90, False)):
        overrides = {"model": {**experts, "expert_ffn": width}, "parallel": [{"use": "ep_deepseek"}]}
        adamw = {"moment_dtype": "int8"}
        case = Case("optimizer", use="adamw", config=adamw, topology=degrees, overrides=overrides)
        if refused:
            with pytest.raises(
                RecipeError, match="96 columns of an expert make rows of 96, of which etp = 2"
            ):
                case.recipe()
        else:
            run_ranks(bytes_of_moments, 2, case)


def test_the_harness_holds_rows_against_what_is_built(monkeypatch):
    true = [*TransformerConfig(layers=1, **MODEL).divisibility()]
    case = Case("model", use="transformer", config={"layers": 1, **MODEL})
    (trial,) = (trial for trial in trials(case) if trial.label == "divisibility_is_true")
    assert failures([trial]) == {}
    for extent in (extent for extent in true if extent.row):
        said = [attrs.evolve(e, row=e.row + (e == extent)) for e in true]
        monkeypatch.setattr(TransformerConfig, "divisibility", lambda self, said=said: said)
        (error,) = failures([trial]).values()
        assert str(error).startswith(
            "rows said by divisibility(), but nothing that is built has them: [Divisible("
        )


# --- bytes ------------------------------------------------------------------------------------------


def bytes_of_moments(case):
    """Return the elements of matrices and of vectors, and the bytes of this rank's moments after a step."""
    made = make_run(case, {})
    push(made, 0, 1.0)
    made.optimizer.step()
    held = sum(b.tensor.nbytes for b in made.optimizer.blocks() if b.name.startswith(FIRST))
    sizes = [
        [p.parameter.numel() for p in made.placed if (p.parameter.dim() > 1) is m] for m in (True, False)
    ]
    return *map(sum, sizes), held


@pytest.mark.parametrize(("form", "each"), [("float32", 8), ("bfloat16", 4), ("int8", 2 + 4 / GROUP)])
@pytest.mark.parametrize(("use", "ranks"), [("adamw", 1), ("zero12", 2)])
def test_moments_take_the_bytes_of_their_form(use, ranks, form, each):
    found = run_ranks(bytes_of_moments, ranks, on(use, ranks, form))
    matrices, vectors, _ = found[0]
    wanted = matrices * each + vectors * max(each, 8 if form == "int8" else 0)
    assert sum(held for *_, held in found) == pytest.approx(wanted, rel=0.001)


def test_vectors_and_rows_that_are_no_groups_keep_float32_moments():
    (kinds,) = run_ranks(kinds_of_moments, 1, on("adamw", 1, "int8", model=ODD))
    wide = {name for name, kept in kinds.items() if FIRST in kept}
    assert {name for name in wide if "norm" not in name and "bias" not in name} == {
        f"layers.{n}.ffn.down.weight" for n in (0, 1)
    }
    assert wide >= {name for name in kinds if "norm" in name or "bias" in name} != set()


def kinds_of_moments(case):
    made = make_run(case, {})
    return {
        shard.placement.name: set(made.optimizer.inner.state[shard.weight])
        for shard in made.optimizer.master_shards
    }


def test_a_first_moment_that_carries_errors_is_bfloat16_under_eight_bits():
    case = on("adamw", 1, "int8", precision="coarse")
    (kinds,) = run_ranks(kinds_of_moments, 1, case)
    for name, kept in kinds.items():
        assert kept == {
            "step",
            FIRST,
            *([SECOND] if "norm" in name else [f"{SECOND}_code", f"{SECOND}_scale"]),
        }


def test_an_optimizer_has_the_kernels_of_its_run(monkeypatch):
    monkeypatch.setattr(TorchKernels, "low_precision_adamw", lambda self, weights, *rest: [])
    made = make_run(on("adamw", 1, "int8"), {"kernels": {"use": "torch"}})
    push(made, 0, 1.0)
    before = [shard.weight.clone() for shard in made.optimizer.master_shards]
    made.optimizer.step()
    assert all(
        torch.equal(shard.weight, old)
        for shard, old in zip(made.optimizer.master_shards, before, strict=True)
    )
