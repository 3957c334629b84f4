"""What each master keeps, against float64 and the formats' definitions."""

import pytest
import torch
from nanotrain_fp4_master.blocks import NF4Blocks, NVFP4Blocks, to_nearest
from nanotrain_fp4_master.lowbit import PARTS, REACH
from nanotrain_fp4_master.packing import FourBits
from pieces import BFLOAT16, FOUR_BIT, master_of, numbers

from nanotrain_core.contracts import ErrorFeedback
from nanotrain_core.precision.uniform import Float32Master
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine

SHAPE = (48, 64)


def train(precision, master, steps, seed=1, size=1e-3):
    """Store what small updates make of a master, and count the steps."""
    for step in range(steps):
        master.store(master.load() + numbers(*master.weight.shape, seed=100 * seed + step, scale=size))
        precision.loss_scale.update(skipped=False)


def bits(x):
    return x.contiguous().view(torch.int32)


# --- bfloat16 and more bits -------------------------------------------------------------------------


def every_kind_of_number():
    """Return float32 numbers: all lower halves under several upper ones, the extremes, and what is none."""
    upper = torch.tensor(
        [0x0000, 0x0001, 0x0080, 0x3F80, 0x3F81, 0x3FFF, 0x7F7F, 0xBF80, 0xC2C9, 0xFF7F, 0x8000]
    )
    both = (upper[:, None] << 16 | torch.arange(2**16)[None]).flatten()
    wrapped = torch.where(both >= 2**31, both - 2**32, both).to(torch.int32)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-45, 3.4028235e38])
    return torch.cat([wrapped.view(torch.float32), special])


def test_a_remainder_makes_every_float32_number_whole_again():
    value = every_kind_of_number()
    _, master = master_of(torch.zeros(len(value), 1), "bf16", "remainder")
    master.store(value.unsqueeze(1))
    assert torch.equal(bits(master.load()), bits(value.unsqueeze(1)))


def test_beside_a_remainder_the_parameter_is_the_nearest_bfloat16_number():
    value = numbers(1000, 64, seed=3)
    _, master = master_of(torch.zeros(1000, 64), "bf16", "remainder")
    master.store(value)
    middle = bits(value) & 0xFFFF == 0x8000  # where either neighbor is as near
    assert torch.equal(master.weight[~middle], value.bfloat16()[~middle])
    ties = torch.tensor([[1.0 + 2**-8, 1.0 + 3 * 2**-8, -1.0 - 2**-8]])
    _, master = master_of(torch.zeros(1, 3), "bf16", "remainder")
    master.store(ties)
    assert master.weight.tolist() == [[1.0 + 2**-7, 1.0 + 2**-6, -1.0 - 2**-7]]


def test_eight_more_bits_are_within_a_128th_of_half_the_distance():
    value = torch.cat([numbers(1000, 64, seed=3), numbers(1000, 64, seed=4, scale=1e-20)])
    _, master = master_of(torch.zeros(2000, 64), "bf16", "residual")
    master.store(value)
    assert torch.equal(master.weight, value.bfloat16())
    _, exponent = torch.frexp(value.double())
    half = torch.ldexp(torch.ones_like(value, dtype=torch.float64), exponent - 9)
    error = (master.load().double() - value.double()).abs()
    assert (error <= half / 128).all()
    assert error.mean() < (half / 128).mean() / 2


def test_a_float32_master_and_a_remainder_train_alike_bit_for_bit():
    wide = numbers(*SHAPE).bfloat16().float()
    _, master = master_of(numbers(*SHAPE), "bf16", "remainder")
    for step in range(50):
        update = numbers(*SHAPE, seed=step, scale=1e-5)
        wide = wide + update
        master.store(master.load() + update)
    assert torch.equal(bits(master.load()), bits(wide))


# --- four bits --------------------------------------------------------------------------------------

BLOCKS = {"nvfp4": NVFP4Blocks(), "nf4": NF4Blocks()}


def in_blocks(weight, form):
    return weight.float().reshape(-1, BLOCKS[form].block)


def rounded(weight, form):
    """Return a weight rounded to nearest, whole tensor at once."""
    blocks = in_blocks(weight, form)
    return to_nearest(blocks, BLOCKS[form].fit(blocks.abs().max())).view(weight.shape)


@pytest.mark.parametrize(("form", "variant"), FOUR_BIT)
def test_the_parameter_holds_numbers_of_the_format_and_nothing_else(form, variant):
    precision, master = master_of(numbers(*SHAPE), form, variant)
    for steps in (0, 30):
        train(precision, master, steps)
        assert torch.equal(master.weight.float(), rounded(master.weight, form))


@pytest.mark.parametrize(("form", "variant"), FOUR_BIT)
def test_a_parameter_is_its_codes_and_scales_without_loss(form, variant):
    """So packed codes beside it would hold nothing new."""
    precision, master = master_of(numbers(*SHAPE), form, variant)
    train(precision, master, 10)
    packing = FourBits(BLOCKS[form])
    rows = packing.pack(master.weight.flatten())
    assert torch.equal(packing.unpack(rows).view(SHAPE), master.weight)
    assert rows.nbytes * 8 == {"nvfp4": 4.5, "nf4": 4.25}[form] * master.weight.numel()


@pytest.mark.parametrize(("form", "variant"), [*FOUR_BIT, *BFLOAT16])
def test_storing_what_was_loaded_changes_nothing_however_often_it_was_trained(form, variant):
    precision, master = master_of(numbers(*SHAPE), form, variant)
    for _ in range(20):
        train(precision, master, 3)
        before = [master.weight.clone(), *(t.clone() for t in master.state().values())]
        for _ in range(3):
            master.store(master.load())
        assert all(map(torch.equal, before, [master.weight, *master.state().values()]))


@pytest.mark.parametrize("form", ["nvfp4", "nf4"])
def test_a_residual_is_within_one_part_of_the_master(form):
    precision, master = master_of(numbers(*SHAPE), form, "residual")
    for step in range(20):
        value = master.load() + numbers(*SHAPE, seed=step, scale=3e-3)
        master.store(value)
        precision.loss_scale.update(skipped=False)
        blocks = in_blocks(master.weight, form)
        scales = BLOCKS[form].scales_of(blocks)
        half = (BLOCKS[form].half_gap(blocks / scales) * scales).view(SHAPE)
        assert ((master.load().double() - value.double()).abs() <= half * (1 + 2**-8) / PARTS).all()
        assert ((master.load() - master.weight).abs() <= half * (1 + 2**-8) * REACH / PARTS).all()


def test_a_residual_starts_with_the_weights_that_were_drawn():
    value = numbers(*SHAPE).bfloat16().float()
    errors = {}
    for variant in ("residual", "naive"):
        _, master = master_of(value, "nvfp4", variant)
        errors[variant] = (master.load() - value).norm() / value.norm()
    assert errors["residual"] < 0.005
    assert 0.08 < errors["naive"] < 0.11


@pytest.mark.parametrize(
    ("form", "variant"),
    [("nvfp4", "residual"), pytest.param("nf4", "residual", marks=pytest.mark.full), ("bf16", "eco")],
)
def test_updates_far_below_the_rounding_arrive_in_the_mean(form, variant):
    """Four hundred updates, each a small part of what changes a residual."""
    precision, master = master_of(numbers(*SHAPE), form, variant)
    before, update = master.load().double(), 5e-6
    for _ in range(400):
        master.store(master.load() + update)
        precision.loss_scale.update(skipped=False)
    moved = (master.load().double() - before).mean()
    assert moved == pytest.approx(400 * update, rel=0.05)


def test_updates_far_below_the_rounding_never_arrive_without_any_help():
    _precision, master = master_of(numbers(*SHAPE), "nvfp4", "naive")
    before = master.load()
    for _ in range(100):
        master.store(master.load() + 2e-6)
    assert torch.equal(master.load(), before)


@pytest.mark.parametrize("form", ["nvfp4", pytest.param("nf4", marks=pytest.mark.full), "bf16"])
def test_random_rounding_has_the_mean_of_what_is_rounded(form):
    """All but those near the largest of their block, which a scale that was rounded down cannot reach."""
    value, turns = numbers(16, 64, scale=1.0), 1500
    precision, master = master_of(value, form, "eco")
    total, squares = torch.zeros(2, 16, 64, dtype=torch.float64)
    for _ in range(turns):
        master.store(value)
        precision.loss_scale.update(skipped=False)
        kept = master.load().double()
        total, squares = total + kept, squares + kept**2
    mean = total / turns
    deviation = (squares / turns - mean**2).clamp(min=0).sqrt() / turns**0.5
    size = {"nvfp4": 16, "nf4": 64, "bf16": 1}[form]
    share = value.view(-1, size).abs()
    share = (share / share.amax(dim=1, keepdim=True)).view(value.shape)
    tried = (share < 8 / 9) | (share == 1)
    # The farther of two numbers may be so far that it never came up.
    deviation = deviation + {"nvfp4": 1.0, "nf4": 1.0, "bf16": 2**-7}[form] * value.abs().amax() / turns
    if form == "nf4":  # whose grid is itself rounded to bfloat16: by half a bit, of a scale that changes
        deviation = deviation + value.abs() * 2**-9
    beyond = ((mean - value.double()).abs() > 4.5 * deviation + 1e-12) & tried
    assert beyond.sum() == 0


@pytest.mark.parametrize("form", ["nvfp4", "nf4", "bf16"])
def test_the_error_is_what_was_not_kept_and_only_eco_tells(form):
    _, master = master_of(numbers(*SHAPE), form, "eco")
    value = numbers(*SHAPE, seed=9)
    master.store(value)
    assert isinstance(master, ErrorFeedback)
    assert torch.equal(master.error(value), value - master.load())
    assert master.error(value).norm() > 0.001 * value.norm()
    for variant in ("residual", "naive"):
        assert not isinstance(master_of(value, form, variant)[1], ErrorFeedback)


@pytest.mark.parametrize(("form", "variant"), [*FOUR_BIT, *BFLOAT16])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_visible(form, variant, wrong):
    _, master = master_of(numbers(*SHAPE), form, variant)
    value = numbers(*SHAPE, seed=2)
    value[3, 5] = wrong
    master.store(value)
    assert not master.weight[3, 5].isfinite()


@pytest.mark.parametrize(("form", "variant"), FOUR_BIT)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 13), (2, 3, 50)])
def test_odd_shapes_and_ragged_last_blocks(form, variant, shape):
    value = numbers(*shape)
    precision, master = master_of(value, form, variant)
    train(precision, master, 5, size=1e-2)
    assert master.load().shape == shape
    assert master.weight.isfinite().all()
    before = master.weight.clone()
    master.store(master.load())
    assert torch.equal(master.weight, before)


@pytest.mark.parametrize(("form", "variant"), FOUR_BIT)
def test_a_matrix_of_zeros_learns(form, variant):
    precision, master = master_of(torch.zeros(32, 64), form, variant)
    assert not master.load().any()
    for _ in range(5):
        master.store(master.load() + 0.01)
        precision.loss_scale.update(skipped=False)
    assert master.load().mean() == pytest.approx(0.05, rel=0.3)


# --- in training ------------------------------------------------------------------------------------


def trained_masters(case):
    engine = make_engine(case, {"run": {"steps": 12}})
    engine.fit()
    return [shard.master.load().clone() for shard in engine.run.optimizer.master_shards]


def away_from_zero(self, value):
    """Store as ``Float32Master`` does, but round the middle between two bfloat16 numbers away from zero."""
    self.master.copy_(value)
    self.weight.view(torch.int16).copy_((value.contiguous().view(torch.int32) + 2**15) >> 16)


def test_training_with_remainders_is_training_with_float32_masters_bit_for_bit(monkeypatch):
    """Through forward, backward and AdamW; in the middle both round the same way."""
    monkeypatch.setattr(Float32Master, "store", away_from_zero)
    monkeypatch.setattr(Float32Master, "plain", None)
    adamw = {"optimizer": {"use": "adamw", "lr": 0.01}}
    wide = trained_masters(Case("precision", use="bf16", overrides=adamw))
    exact = Case("precision", use="fp4_master", config={"variant": "remainder"}, overrides=adamw)
    assert all(map(torch.equal, trained_masters(exact), wide))
