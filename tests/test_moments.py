"""AdamW's moments in bfloat16 and in 8 bits: their numbers, bytes and checkpoints, alone and sharded."""

import tempfile
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from called_operators import CalledOperators

from nanotrain_core.builtin.transformer_config import TransformerConfig
from nanotrain_core.errors import NanotrainError, RecipeError
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.placement import Piece, Placement
from nanotrain_core.optim import moment_groups, moments
from nanotrain_core.optim.moments import FIRST, GROUP, SECOND, LowPrecisionAdamW
from nanotrain_core.testing import Case, failures, run_ranks, trials
from nanotrain_core.testing.compare import assert_bitwise, assert_same, whole
from nanotrain_core.testing.probe import make_run, push, train

SETTINGS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}
FORMS = ("bfloat16", "int8")
CODES = {FIRST: torch.arange(-127, 128, dtype=torch.int8), SECOND: torch.arange(256).to(torch.uint8)}


def kept_as(name, shape):
    """Return room for one moment in 8 bits."""
    return moments.empty_codes(name, CODES[name].dtype, torch.zeros(shape))


# --- numbers ----------------------------------------------------------------------------------------


def by_hand(weight, gradients, lr, betas, eps, decay, rounded):
    """AdamW on one tensor, both moments rounded after every step."""
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, gradient in enumerate(gradients, start=1):
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient**2
        weight = weight * (1 - lr * decay)
        unbiased = (second / (1 - betas[1] ** step)).sqrt() + eps
        weight = weight - lr * first / (1 - betas[0] ** step) / unbiased
        first, second = rounded(FIRST, first), rounded(SECOND, second)
    return weight, first, second


def eight_bits(name, value):
    """Round as the module's docstring says, in float64; scales by torch's bfloat16 and its next number."""
    blocks = value.double().numpy().reshape(-1, GROUP)
    scales = []
    for largest in np.abs(blocks).max(axis=1):
        near = torch.tensor(largest, dtype=torch.float32).bfloat16()
        up = (
            near
            if near.item() >= largest
            else torch.nextafter(near, torch.tensor(torch.inf, dtype=near.dtype))
        )
        scales.append(up.item())
    scale = np.array(scales)[:, None]
    ratio = blocks / np.where(scale == 0, 1, scale)
    if name == FIRST:
        code = np.round(127 * 2 * ratio / (1 + np.abs(ratio)))
        back = (code / 127) / (2 - np.abs(code / 127))
    else:
        code = np.maximum(np.round(255 * np.sqrt(ratio)), ratio > 0)
        back = (code / 255) ** 2
    return torch.tensor(back * scale).reshape(value.shape)


def states(form, length):
    if form == "bfloat16":
        return {name: torch.zeros(length, dtype=torch.bfloat16) for name in (FIRST, SECOND)}
    return {**kept_as(FIRST, length), **kept_as(SECOND, length)}


def to_bfloat16(name, value):
    return value.bfloat16().to(value.dtype)


@pytest.mark.parametrize(("form", "rounded"), [("bfloat16", to_bfloat16), ("int8", eight_bits)])
def test_moments_are_rounded_after_every_step_and_nothing_else_is(form, rounded):
    """In float64, where no last bit decides which way a moment is rounded."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4 * GROUP).double())
    optimizer = LowPrecisionAdamW([{"params": [weight], "weight_decay": 0.1}], **SETTINGS)
    optimizer.state[weight] = state = {"step": torch.zeros(()), **states(form, 4 * GROUP)}
    gradients = list(torch.randn(10, 4 * GROUP).double() * torch.logspace(-4, 1, 4 * GROUP))
    expected = by_hand(weight.detach().clone(), gradients, *SETTINGS.values(), 0.1, rounded)
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    torch.testing.assert_close(weight.detach(), expected[0], rtol=0, atol=1e-7)
    for name, wanted in zip((FIRST, SECOND), expected[1:], strict=True):
        torch.testing.assert_close(moments.load(state, name, torch.float64), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
def test_moments_of_many_weights_are_updated_in_as_many_calls_as_of_one(found_inf):
    """And with the same result as one weight after the other."""
    lengths, runs, calls = (3, 4 * GROUP, 8), [], []
    for together in (True, False):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(length)) for length in lengths]
        groups = [weights] if together else [[weight] for weight in weights]
        optimizers = [LowPrecisionAdamW(group, **SETTINGS) for group in groups]
        for optimizer in optimizers:
            for weight in optimizer.param_groups[0]["params"]:
                kept = states("bfloat16", len(weight))
                optimizer.state[weight] = {"step": torch.zeros(()), **kept}
        for skip in (0.0, found_inf):
            for weight in weights:
                weight.grad = torch.randn(len(weight))
            for optimizer in optimizers:
                optimizer.found_inf = None if skip is None else torch.tensor(skip)
                with CalledOperators() as operators:
                    optimizer.step()
                calls.append(len([each for each in operators.called if "empty" not in str(each)]))
        runs.append([*weights, *(x for each in optimizers for s in each.state.values() for x in s.values())])
    assert_bitwise(dict(enumerate(runs[0])), dict(enumerate(runs[1])), "together and apart")
    assert max(calls[:2]) == max(calls[2:])


@pytest.mark.parametrize("name", [FIRST, SECOND])
def test_every_code_under_every_scale_is_stored_as_itself(name):
    """So a moment that does not change never drifts. All 128 mantissas of a bfloat16 scale, far exponents."""
    codes = CODES[name]
    codes = torch.cat([codes, codes[: -len(codes) % (GROUP - 1)]]).view(-1, GROUP - 1)
    codes = torch.cat([codes, codes.new_full((len(codes), 1), int(codes.max()))], dim=1)
    for exponent in (-60, 0, 60):
        scales = torch.ldexp(1 + torch.arange(128) / 128, torch.tensor(exponent))
        state = kept_as(name, (128, codes.numel()))
        state[name + moments.CODE].copy_(codes.flatten().expand(128, -1))
        state[name + moments.SCALE].copy_(scales[:, None].expand(-1, len(codes)))
        before = {key: tensor.clone() for key, tensor in state.items()}
        moments.store(state, name, moments.load(state, name, torch.float32))
        assert_bitwise(state, before, f"{name}, scales near 2^{exponent}")


def test_eight_bits_are_as_near_as_their_curves_allow():
    """Half a step of the code, and the scale's own rounding, wherever in its group a number is."""
    value = torch.randn(200, GROUP, generator=torch.Generator().manual_seed(1)).double()
    value *= torch.logspace(-15, 3, 200).double()[:, None]
    scale = value.abs().amax(dim=1, keepdim=True) * (1 + 2**-7)
    first, second = kept_as(FIRST, value.shape), kept_as(SECOND, value.shape)
    moments.store(first, FIRST, value)
    error = (moments.load(first, FIRST, torch.float64) - value).abs()
    slope = (1 + value.abs() / scale) ** 2 / 2  # of the curve's inverse; half a step further out it is larger
    assert (error <= scale * slope * 1.02 / 254).all()
    moments.store(second, SECOND, value**2)
    root = moments.load(second, SECOND, torch.float64).sqrt()
    few = value.abs() < scale / 510  # which are raised to the first code above 0
    assert ((root - value.abs()).abs() <= scale * 1.001 / 510)[~few].all()
    assert (root > 0)[value != 0].all()
    assert (root <= scale * 1.01 / 255)[few].all()


def test_a_group_of_zeros_and_numbers_too_small_for_bfloat16_are_no_nan():
    for name in (FIRST, SECOND):
        state = kept_as(name, 3 * GROUP)
        value = torch.zeros(3 * GROUP)
        value[GROUP : 2 * GROUP] = 1e-45
        value[2 * GROUP] = 3e38
        moments.store(state, name, value)
        found = moments.load(state, name, torch.float32)
        assert found.isfinite().all()
        assert not found[:GROUP].any()
        assert found[2 * GROUP] == pytest.approx(3e38, rel=2**-7)


# --- in a run ---------------------------------------------------------------------------------------

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
    assert kinds == (codes if form == "int8" else {FIRST, SECOND})


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


def second_moment(form, beta2):
    """Return the mean second moment 3,000 steps after gradients became 10 times smaller, over that before."""
    state = moments.initial_moments(torch.zeros(8, 64), Piece(None, FLAT), form, carries=False)
    random, found = torch.Generator().manual_seed(1), []
    for step in range(3300):
        gradient = torch.randn(8, 64, generator=random) * (1.0 if step < 300 else 0.1)
        second = moments.load(state, SECOND, torch.float32)
        moments.store(state, SECOND, beta2 * second + (1 - beta2) * gradient**2)
        if step in (299, 3299):
            found.append(moments.load(state, SECOND, torch.float32).mean().item())
    return found[1] / found[0]


FLAT = Placement.whole("w", (8, 64), Layout({"dense": View(("dp",), (1,))}))


@pytest.mark.full_cases("bfloat16")
@pytest.mark.parametrize("form", FORMS)
def test_a_rounded_second_moment_falls_with_the_largest_beta2_and_stays_at_the_default_of_torch(form):
    assert second_moment(form, moment_groups.MOST_BETA2) == pytest.approx(
        second_moment("float32", moment_groups.MOST_BETA2), rel=0.1
    )
    assert second_moment("float32", 0.999) < 0.1
    assert second_moment(form, 0.999) > 0.9


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_weights_of_several_dtypes_in_one_group_are_updated_as_each_alone(form, dtypes):
    """As of a precision that has norms in float64: the moments of all had the dtype of the first weight."""

    def updated(weights):
        leaves = [torch.nn.Parameter(weight.clone(), requires_grad=False) for weight in weights]
        optimizer = LowPrecisionAdamW(leaves, **SETTINGS, fused=True)
        for leaf in leaves:
            state = moments.initial_moments(leaf, Piece(None, FLAT), form, carries=False)
            optimizer.state[leaf] = {"step": torch.zeros(()), **state}
            leaf.grad = leaf.cos()
        optimizer.step()
        return leaves

    weights = [torch.linspace(0.1, n, 512).view(8, 64).to(dtype) for n, dtype in enumerate(dtypes, start=1)]
    for together, weight in zip(updated(weights), weights, strict=True):
        assert torch.equal(together, *updated([weight]))


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
        ({"kv_heads": 2, "bias": True}, 2, "2 key and value heads make rows of 32"),
        ({"kv_heads": 2}, 2, None),
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
    """Return parameters, and the bytes of this rank's moments after a step."""
    made = make_run(case, {})
    push(made, 0, 1.0)
    made.optimizer.step()
    held = sum(b.tensor.nbytes for b in made.optimizer.blocks() if b.name.startswith(FIRST))
    return sum(p.parameter.numel() for p in made.placed), held


@pytest.mark.parametrize(("form", "each"), [("float32", 8), ("bfloat16", 4), ("int8", 2 + 4 / GROUP)])
@pytest.mark.parametrize(("use", "ranks"), [("adamw", 1), ("zero12", 2)])
def test_moments_take_the_bytes_of_their_form(use, ranks, form, each):
    found = run_ranks(bytes_of_moments, ranks, on(use, ranks, form))
    assert sum(held for _, held in found) == pytest.approx(found[0][0] * each, rel=0.001)


def test_rows_that_are_no_groups_keep_float32_moments():
    (kinds,) = run_ranks(kinds_of_moments, 1, on("adamw", 1, "int8", model=ODD))
    wide = {name for name, kept in kinds.items() if FIRST in kept}
    assert wide == {f"layers.{n}.ffn.{rest}" for n in (0, 1) for rest in ("up.bias", "down.weight")}


def kinds_of_moments(case):
    made = make_run(case, {})
    return {
        slot.placement.name: set(made.optimizer.inner.state[slot.weight]) for slot in made.optimizer.slots
    }


def test_a_first_moment_that_carries_errors_is_bfloat16_under_eight_bits():
    case = on("adamw", 1, "int8", precision="coarse")
    (kinds,) = run_ranks(kinds_of_moments, 1, case)
    for kept in kinds.values():
        assert kept == {"step", FIRST, SECOND + moments.CODE, SECOND + moments.SCALE}
