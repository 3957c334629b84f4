"""The built-in optimizers against torch's own, stepped plainly on the same gradients."""

import attrs
import pytest
import torch
from torch import nn

from nanotrain_core.builtin.configs import AdamWConfig, PrecisionConfig, SGDConfig
from nanotrain_core.contracts import Optimizer
from nanotrain_core.errors import NanotrainError
from nanotrain_core.layout.gradients import LocalGradients
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import place, placed_parameters
from nanotrain_core.optim.adamw import AdamW
from nanotrain_core.optim.master_optimizer import MasterOptimizer
from nanotrain_core.optim.sgd import SGD
from nanotrain_core.precision.uniform import Float32Master, LiveMaster, bf16, fp32, fp64
from nanotrain_core.recipe.tree import OptimizerConfig

STEPS = 4


def make_model(dtype):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 2)).to(dtype)


def gradients_of(model, step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator).double() for p in model.parameters()]


def train_ours(make, config, precision, *, loss_scale=1.0):
    precision = precision(PrecisionConfig())
    model = make_model(precision.parameter_dtype)
    mesh = Mesh(Layout({"dense": View(("dp",), (1,))}))
    placed = placed_parameters([model], place([model], mesh.layout))
    gradients, optimizer = LocalGradients(), make(config)
    gradients.attach(placed, mesh, precision.gradient_dtype)
    optimizer.setup(placed, precision, gradients, mesh)
    norms = []
    for step in range(STEPS):
        for parameter, gradient in zip(model.parameters(), gradients_of(model, step), strict=True):
            parameter.grad = (gradient * loss_scale).to(precision.gradient_dtype)
        norms.append(optimizer.step(loss_scale=loss_scale).grad_norm.item())
        gradients.zero()
    return model, optimizer, norms


def train_plainly(model, make, decay, clip_norm):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    optimizer, norms = make(groups), []
    for step in range(STEPS):
        for parameter, gradient in zip(model.parameters(), gradients_of(model, step), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip_norm or float("inf")).item())
        optimizer.step()
    return norms


CASES = {
    "adamw": (
        AdamW,
        AdamWConfig(lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, clip_norm=2.0),
        lambda groups: torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), eps=1e-6),
    ),
    "adamw never clipping": (
        AdamW,
        AdamWConfig(lr=0.01, weight_decay=0.1, clip_norm=0.0),
        lambda groups: torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95)),
    ),
    "sgd with momentum": (
        SGD,
        SGDConfig(lr=0.1, momentum=0.9, weight_decay=0.2, clip_norm=1.0),
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    ),
    "sgd": (SGD, SGDConfig(lr=0.1, clip_norm=0.0), lambda groups: torch.optim.SGD(groups, lr=0.1)),
}


@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
@pytest.mark.parametrize("case", CASES)
def test_it_steps_as_torchs_own(case, loss_scale):
    ours, config, theirs = CASES[case]
    model, _, norms = train_ours(ours, config, fp64, loss_scale=loss_scale)
    plain = make_model(torch.float64)
    plain_norms = train_plainly(plain, theirs, config.weight_decay, config.clip_norm)
    assert norms == pytest.approx(plain_norms, rel=1e-12)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


def test_a_config_without_weight_decay_decays_nothing():
    class Plain(MasterOptimizer):
        def make(self, groups):
            return torch.optim.SGD(groups, lr=self.config.lr)

        def initial_state(self, weight):
            return {}

    config = OptimizerConfig(lr=0.1, clip_norm=0.0)
    ours, optimizer, _ = train_ours(Plain, config, fp64)
    theirs, _, _ = train_ours(SGD, SGDConfig(lr=0.1, clip_norm=0.0, weight_decay=0.0), fp64)
    assert {group["weight_decay"] for group in optimizer.inner.param_groups} == {0.0}
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_inner_optimizer_with_two_sets_of_weights_is_refused():
    class TwoSets(torch.optim.SGD):
        train = eval = lambda self: None

    class ScheduleFree(SGD):
        def make(self, groups):
            return TwoSets(groups, lr=self.config.lr)

    with pytest.raises(NanotrainError, match=r"TwoSets trains at other weights .*: expected one without"):
        train_ours(ScheduleFree, SGDConfig(), fp64)


def test_a_bfloat16_model_follows_its_float32_master_rounded_once():
    _, config, theirs = CASES["adamw"]
    _, optimizer, _ = train_ours(AdamW, config, bf16)
    plain = make_model(torch.bfloat16).float()
    train_plainly(plain, theirs, config.weight_decay, config.clip_norm)
    for shard, other in zip(optimizer.master_shards, plain.parameters(), strict=True):
        torch.testing.assert_close(shard.master.load(), other.detach(), rtol=0, atol=1e-6)
        assert torch.equal(shard.parameter, shard.master.load().bfloat16())


def bits_after(config, make, precision, loss_scale):
    """Return weights, masters, state and norms after a few steps."""
    model, optimizer, norms = train_ours(make, config, precision, loss_scale=loss_scale)
    blocks = {block.name: block.tensor for block in optimizer.blocks()}
    return {**dict(model.named_parameters()), **blocks}, norms, optimizer


@pytest.mark.parametrize("moment_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("precision", [fp32, bf16, fp64])
@pytest.mark.parametrize("case", CASES)
def test_masters_updated_in_place_end_with_the_bits_of_loaded_ones(
    case, precision, moment_dtype, monkeypatch
):
    """All in one call, or each loaded and stored."""
    make, config, _ = CASES[case]
    if make is AdamW:
        config = attrs.evolve(config, moment_dtype=moment_dtype)
    at_once, norms, optimizer = bits_after(config, make, precision, 512.0)
    assert len(optimizer.plain.shards) == 6
    for kind in (LiveMaster, Float32Master):
        monkeypatch.setattr(kind, "plain", None)
    loaded, expected, optimizer = bits_after(config, make, precision, 512.0)
    assert len(optimizer.encoded) == 6
    assert norms == expected
    assert at_once.keys() == loaded.keys()
    for name, tensor in at_once.items():
        assert torch.equal(tensor, loaded[name]), name


@pytest.mark.parametrize("make", [AdamW, SGD])
def test_plain_and_encoded_masters_of_one_model_are_each_updated_once(make, monkeypatch):
    """As where a precision keeps matrices in a form of its own, and norms as they are."""
    config = AdamWConfig(lr=0.01) if make is AdamW else SGDConfig(lr=0.1, momentum=0.9)
    whole, norms, _ = bits_after(config, make, bf16, 1.0)

    def plain(self):
        return (self.master, self.weight) if self.weight.dim() < 2 else None

    monkeypatch.setattr(Float32Master, "plain", property(plain))
    mixed, expected, optimizer = bits_after(config, make, bf16, 1.0)
    assert (len(optimizer.plain.shards), len(optimizer.encoded)) == (4, 2)
    assert norms == expected
    assert whole.keys() == mixed.keys()
    assert all(torch.equal(tensor, mixed[name]) for name, tensor in whole.items())


def test_gradients_are_not_kept_after_a_step():
    for config, make in ((AdamWConfig(), AdamW), (SGDConfig(lr=0.1), SGD)):
        _, optimizer, _ = train_ours(make, config, bf16)
        assert all(shard.weight.grad is None for shard in optimizer.master_shards)


@pytest.mark.parametrize("precision", [fp32, bf16])
def test_blocks_of_some_parameters_are_those_of_all_and_no_others_are_made(precision, monkeypatch):
    _, optimizer, _ = train_ours(AdamW, AdamWConfig(), precision)
    some = {optimizer.master_shards[0].placement.name, optimizer.master_shards[3].placement.name}
    expected = [b for b in optimizer.blocks() if b.name.partition("/")[2] in some]
    made, place_of = [], optimizer.place
    monkeypatch.setattr(optimizer, "place", lambda name, shard: made.append(shard) or place_of(name, shard))
    found = list(optimizer.blocks_of(some))
    assert [(b.name, b.offset) for b in found] == [(b.name, b.offset) for b in expected]
    assert all(a.tensor.data_ptr() == b.tensor.data_ptr() for a, b in zip(found, expected, strict=True))
    assert {shard.placement.name for shard in made} == some
    of_base = Optimizer.blocks_of(optimizer, some)  # of an optimizer that only has blocks()
    assert [b.name for b in of_base] == [b.name for b in expected]


def bytes_of_state(precision):
    model, optimizer, _ = train_ours(AdamW, AdamWConfig(), precision)
    parameters = sum(p.numel() for p in model.parameters())
    scalars = len(optimizer.master_shards) * 4
    return (sum(block.tensor.nbytes for block in optimizer.blocks()) - scalars) / parameters


def test_float32_weights_are_their_own_master_and_bfloat16_weights_have_one_copy():
    assert bytes_of_state(fp32) == 8
    assert bytes_of_state(bf16) == 12


def test_an_overflowing_step_changes_nothing_and_says_so():
    model, optimizer, _ = train_ours(AdamW, AdamWConfig(), fp32)
    before = [p.detach().clone() for p in model.parameters()]
    state = [block.tensor.clone() for block in optimizer.blocks()]
    first = optimizer.master_shards[0]
    first.parameter.grad = torch.full_like(first.parameter, float("inf"))
    stats = optimizer.step()
    assert stats.skipped
    assert all(map(torch.equal, before, model.parameters()))
    assert all(torch.equal(a, block.tensor) for a, block in zip(state, optimizer.blocks(), strict=True))
