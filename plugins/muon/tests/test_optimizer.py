"""What Muon updates and what AdamW does, steps as of torch's own, steps that are skipped on a device."""

from unittest import mock

import pytest
import torch
from nanotrain_muon import MuonConfig

from nanotrain_core.api import Role
from nanotrain_core.api.torch import Mesh, Placement
from nanotrain_core.cli import main
from nanotrain_core.errors import Exit
from nanotrain_core.recipe import write_resolved
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_run, push

ROUTED = {"model": {"use": "routed"}, "batch": {"sequences": 8}}


def updated_by(case):
    """Return the names of parameters by the state that they have."""
    found = {"momentum": set(), "exp_avg": set(), "exp_avg_sq": set(), "step": set()}
    for block in make_run(case, {}).optimizer.blocks():
        state, _, name = block.name.partition("/")
        found.setdefault(state, set()).add(name)
    return found


def test_linear_layers_have_a_momentum_and_all_else_two_moments():
    (found,) = run_ranks(updated_by, 1, Case("optimizer", use="muon"))
    assert found["exp_avg"] == found["exp_avg_sq"] == found["step"]
    assert found["momentum"].isdisjoint(found["exp_avg"])
    assert {"embed.weight", "head.weight", "norm.weight", "layers.0.attn_norm.weight"} <= found["exp_avg"]
    assert {"layers.0.attn.q.weight", "layers.1.ffn.down.weight"} <= found["momentum"]


def test_experts_have_a_momentum_and_routers_two_moments():
    (found,) = run_ranks(updated_by, 1, Case("optimizer", use="muon", overrides=ROUTED))
    assert any("experts" in name for name in found["momentum"]), found
    assert any("router" in name for name in found["exp_avg"]), found
    assert not any("router" in name for name in found["momentum"])


@pytest.mark.parametrize("name", ["layers.*.attn.q.*", "layers.*.attn.q", "layers.0.attn.q.weight"])
def test_named_matrices_are_left_to_adamw(name):
    config = {"adamw_names": [name]}
    (found,) = run_ranks(updated_by, 1, Case("optimizer", use="muon", config=config))
    assert "layers.0.attn.q.weight" in found["exp_avg"]
    assert "layers.0.attn.k.weight" in found["momentum"]


def test_a_name_of_no_parameter_is_refused_before_ranks_start(tmp_path, capsys):
    """It would have left its matrix to Muon without a word."""
    case = Case("optimizer", use="muon", config={"adamw_names": ["layers.0.*", "layers.*.atn.q"]})
    (tmp_path / "recipe.toml").write_text(write_resolved(case.recipe()))
    assert main(["check", str(tmp_path / "recipe.toml")]) == Exit.USER
    told = "optimizer.adamw_names.1: the model has no module or parameter 'layers.*.atn.q' (did you mean '"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("role", "shape", "expected"),
    [
        (Role.COLUMN, (4, 6), True),
        (Role.ROW, (4, 6), True),
        (Role.REPLICATED, (4, 6), True),
        (Role.EXPERTS, (2, 4, 6), True),
        (Role.EXPERTS, (2, 4), False),  # one bias for each expert
        (Role.COLUMN, (4,), False),
        (Role.COLUMN, (4, 1, 3), False),  # a convolution
        (Role.ROUTER, (4, 6), False),
        (Role.VOCAB, (4, 6), False),
        (Role.HEAD, (4, 6), False),
        (Role.POSITION, (4, 6), False),
        (Role.PER_HEAD, (4, 6), False),
        (None, (4, 6), False),
    ],
)
def test_roles_decide(role, shape, expected):
    from nanotrain_muon.optimizer import Muon

    placement = Placement("w", shape, shape, (0,) * len(shape), role=role)
    assert Muon(MuonConfig()).is_matrix(placement) is expected


def with_torch(case):
    """Return the largest difference from weights that torch's Muon and AdamW update."""
    run = make_run(case, {"precision": {"use": "fp64"}})
    config = run.recipe.optimizer.config
    theirs, matrices, others = {}, [], []
    matrix = {placed.placement.name for placed in run.placed if run.optimizer.is_matrix(placed.placement)}
    for placed in run.placed:
        name = placed.placement.name
        theirs[name] = torch.nn.Parameter(placed.parameter.detach().clone())
        (matrices if name in matrix else others).append(theirs[name])
    vectors = [each for each in others if each.dim() < 2]
    tables = [each for each in others if each.dim() >= 2]
    adjust = {"moonlight": "match_rms_adamw", "original": "original"}[config.scale]
    options = {"momentum": config.momentum, "nesterov": config.nesterov, "adjust_lr_fn": adjust}
    muon = torch.optim.Muon(matrices, lr=config.lr, weight_decay=config.weight_decay, **options)
    adamw = torch.optim.AdamW(
        [{"params": tables, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=config.lr * config.adamw_lr_ratio,
        betas=config.adamw_betas,
        eps=config.adamw_eps,
    )
    for step in range(4):
        push(run, step, 1.0)
        for placed in run.placed:
            theirs[placed.placement.name].grad = run.gradients.gradient(placed.parameter).clone()
        run.optimizer.step()
        run.gradients.zero()
        with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):  # what torch computes in
            muon.step()
        adamw.step()
    return max((placed.parameter - theirs[placed.placement.name]).abs().max().item() for placed in run.placed)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"scale": "original", "adamw_lr_ratio": 0.25},
        {"nesterov": False, "adamw_betas": [0.8, 0.9]},
        {"momentum": 0.0},
    ],
)
def test_steps_are_those_of_torch(config):
    config = {"lr": 0.01, "clip_norm": 0.0, "weight_decay": 0.1, **config}
    (difference,) = run_ranks(with_torch, 1, Case("optimizer", use="muon", config=config))
    assert difference < 1e-9


def skipping(case):
    """Return the bits of weights and state after two good steps, one that overflows, and one more."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Mesh, "device_is_async", True)
        run = make_run(case, {"precision": {"use": "bf16"}})
        found, skipped = [], []
        for step, scale in enumerate((1.0, 1.0, float("inf"), 1.0)):
            push(run, step, scale)
            skipped.append(run.optimizer.step().skipped)
            run.gradients.zero()
            tensors = [*(p.parameter for p in run.placed), *(b.tensor for b in run.optimizer.blocks())]
            found.append([tensor.detach().clone() for tensor in tensors])
        return found, skipped


@pytest.mark.parametrize("config", [{}, {"nesterov": False}, {"momentum": 0.0}])
def test_a_step_that_a_device_skips_leaves_every_bit(config):
    """Where the host would have to wait for the norm, it does not read it: ``skipped`` is a tensor."""
    ((found, skipped),) = run_ranks(skipping, 1, Case("optimizer", use="muon", config=config))
    assert [bool(each) for each in skipped] == [False, False, True, False]
    assert all(isinstance(each, torch.Tensor) for each in skipped)
    assert all(map(torch.equal, found[1], found[2]))
    assert not all(map(torch.equal, found[2], found[3]))
    assert all(tensor.isfinite().all() for tensor in found[3])


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"lr": 0.5, "weight_decay": 2.0}, "lr x weight_decay = 0.5 x 2 = 1 of each weight away"),
        (
            {"lr": 0.5, "weight_decay": 0.5, "adamw_lr_ratio": 4.0},
            "lr x adamw_lr_ratio x weight_decay = 0.5 x 4 x 0.5 = 1 of an embedding away",
        ),
    ],
)
def test_a_decay_beyond_zero_is_refused(config, text):
    with pytest.raises(ValueError, match=text):
        MuonConfig(**config)
