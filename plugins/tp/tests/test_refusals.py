"""What does not divide is refused, with the sizes that would."""

from types import SimpleNamespace

import pytest
import torch
from nanotrain_tp import TensorParallelConfig
from nanotrain_tp.collectives import Ranks, SplitError
from nanotrain_tp.tensor_parallel import TensorParallel

from nanotrain_core.builtin.transformer_config import TransformerConfig
from nanotrain_core.errors import NanotrainError, RecipeError
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.placement import Placement, place
from nanotrain_core.layout.roles import Role, note_added, tag
from nanotrain_core.models.transformer import Transformer
from nanotrain_core.pipeline.actions import Part
from nanotrain_core.testing import Case

SIZES = {"layers": 1, "width": 48, "heads": 6, "kv_heads": 3, "ffn": 96, "vocab": 60}


class Paper:
    """A mesh of which only the layout is needed."""

    def __init__(self, tp):
        self.layout = Layout({"dense": View(("dp", "tp"), (1, tp))})

    def size(self, dim):
        return self.layout.size(dim)

    def degree(self, dim):
        return self.layout.degree(dim)

    def coordinate(self, dim):
        return 0

    def group(self, *dims):
        return SimpleNamespace(group_name="none")


def apply(tp, **sizes):
    part = Transformer(TransformerConfig(**{**SIZES, **sizes})).build(Part.whole(1))
    mesh = Paper(tp)
    placements = place([part], mesh.layout)
    TensorParallel(TensorParallelConfig()).apply(part, placements, mesh)
    return part, placements


@pytest.mark.parametrize(
    ("tp", "sizes", "words"),
    [
        (2, {"heads": 3}, ["attn.q.weight has 48 = 3 units of 16", "tp = 2", "1 or 3", "32 or 64"]),
        (4, {"kv_heads": 6}, ["attn.q.weight has 48 = 6 units of 8", "3 or 6", "32 or 64"]),
        (3, {"ffn": 100}, ["layers.0.ffn.gate.weight has 100", "2 or 4", "99 or 102"]),
        (6, {"vocab": 5}, ["embed.weight has 5"]),
    ],
)
def test_sizes_that_do_not_divide(tp, sizes, words):
    with pytest.raises(ValueError, match="do not divide by tp") as caught:
        apply(tp, **sizes)
    assert isinstance(caught.value, NanotrainError), "shown without a traceback"
    for word in words:
        assert word in str(caught.value)


def test_placements_are_of_the_blocks_left():
    part, placements = apply(3, tied=True, bias=True)
    for name, parameter in part.named_parameters():
        assert tuple(parameter.shape) == placements[name].shape
    split = {name for name, placement in placements.items() if "tp" in placement.sharded}
    whole = {name for name, placement in placements.items() if "tp" in placement.summed}
    assert split | whole == set(placements)
    assert whole == {n for n in placements if "norm" in n or n.endswith(("o.bias", "down.bias"))}
    assert placements["layers.0.attn.o.weight"].shape == (48, 16)
    assert placements["embed.weight"].shape == (20, 48)


def test_sequences_with_less_than_a_token_for_each_rank_are_refused_before_a_process_starts():
    case = Case("parallel", use="tp", topology={"tp": 4}, overrides={"batch": {"length": 3}})
    reason = r"batch.length: 3 tokens are fewer than tp = 4 ranks, .* for sequence_parallel; nearest: 4"
    with pytest.raises(RecipeError, match=reason):
        case.recipe()


def test_short_sequences_will_do_where_they_stay_whole():
    config = {"sequence_parallel": False}
    around = {"batch": {"length": 3}}
    Case("parallel", use="tp", config=config, topology={"tp": 4}, overrides=around).recipe()


SHIFTS = """
import attrs
from nanotrain_core.api import Component, ModelConfig, Support, hookimpl

@attrs.define(frozen=True)
class Config(ModelConfig):
    pass

@hookimpl
def nanotrain_register_model(register):
    no = {"sequence_parallel": Support.UNSUPPORTED}
    register(Component(name="shifts", config=Config, factory=f"{__name__}:Config", supports=no))
"""


def test_a_model_whose_layers_need_whole_sequences_is_refused_with_sequence_parallelism(tmp_path):
    (tmp_path / "shifts.py").write_text(SHIFTS)

    def recipe(tp, **config):
        around = {"model": {"use": "shifts"}, "parallel": [{"use": "recompute"}, {"use": "tp"}]}
        plugins = [str(tmp_path / "shifts.py")]
        case = Case(
            "parallel", use="tp", config=config, topology={"tp": tp}, overrides=around, plugins=plugins
        )
        return case.recipe()

    reason = r"parallel.1.sequence_parallel: model 'shifts' declares .* write sequence_parallel = false"
    with pytest.raises(RecipeError, match=reason):
        recipe(2)
    recipe(2, sequence_parallel=False)
    recipe(1)


@pytest.mark.parametrize("role", [Role.HEAD, Role.REPLICATED])
@pytest.mark.parametrize("what", ["parameter", "buffer"])
def test_a_head_with_more_than_its_weight_is_refused_and_a_replicated_one_is_not(role, what):
    part = Transformer(TransformerConfig(**SIZES)).build(Part.whole(1))
    add = part.head.register_parameter if what == "parameter" else part.head.register_buffer
    add("bias", torch.nn.Parameter(torch.empty(SIZES["vocab"], device="meta")))
    tag(part.head, role)
    mesh = Paper(2)
    placements = place([part], mesh.layout)
    wrapper = TensorParallel(TensorParallelConfig(sequence_parallel=False))
    if role is Role.REPLICATED:
        wrapper.apply(part, placements, mesh)
        return
    with pytest.raises(NanotrainError, match=r"head.bias: tp computes .* Tag the projection Role.REPLICATED"):
        wrapper.apply(part, placements, mesh)


@pytest.mark.parametrize(("p", "whole"), [(0.1, True), (0.0, True), (0.1, False)])
def test_dropout_is_refused_where_ranks_have_the_same_tokens(p, whole):
    part = Transformer(TransformerConfig(**SIZES)).build(Part.whole(1))
    part.layers["0"].drop = torch.nn.Dropout(p)
    placements, mesh = place([part], Paper(2).layout), Paper(2)
    wrapper = TensorParallel(TensorParallelConfig(sequence_parallel=not whole))
    if not (p and whole):
        wrapper.apply(part, placements, mesh)
        return
    with pytest.raises(NanotrainError, match=r"layers.0.drop: Dropout with p = 0.1 draws another mask"):
        wrapper.apply(part, placements, mesh)


def with_addition(name, *, tokens, later, summed=False, role=None):
    """Return the placement of a parameter that another wrapper adds before or after ``tp``."""
    part, mesh = Transformer(TransformerConfig(**SIZES)).build(Part.whole(1)), Paper(2)
    placements = place([part], mesh.layout)
    wrapper = TensorParallel(TensorParallelConfig(sequence_parallel=tokens))

    def add():
        owner, _, key = name.rpartition(".")
        holder = part.get_submodule(owner)
        holder.register_parameter(key, torch.nn.Parameter(torch.empty(1, device="meta")))
        note_added(holder.get_parameter(key), "another")
        if role:
            tag(holder, role)
        placed = Placement.whole(name, (1,), mesh.layout)
        placements[name] = placed.sum_over("tp") if summed else placed

    for step in (wrapper.apply, add) if later else (add, wrapper.apply):
        step(*(() if step is add else (part, placements, mesh)))
    return placements[name]


@pytest.mark.parametrize("later", [False, True])
def test_a_parameter_added_to_the_part_is_placed_by_its_wrapper_where_sequences_stay_whole(later):
    """A soft prompt, which is read outside of split layers, was refused: ranks' gradients of it are equal."""
    assert "tp" in with_addition("prompt", tokens=False, later=later).same
    assert "tp" in with_addition("temperature", tokens=False, later=later, summed=True).summed
    assert ("tp" in with_addition("prompt", tokens=True, later=later).summed) is not later


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("layers.0.attn.o.scale", None),
        ("norm.scale", None),
        ("layers.0.attn.scale", Role.INNER),
        ("layers.0.ffn.scale", Role.ROUTER),
        ("layers.0.ffn.scale", Role.EXPERTS),
    ],
)
def test_what_later_wrappers_declare_is_respected(name, role, tokens, summed):
    """One that completed a gradient itself had it summed over ranks once more."""
    placed = with_addition(name, tokens=tokens, later=True, role=role, summed=summed)
    assert ("tp" in placed.summed, "tp" in placed.same) == (summed, not summed)


class Halved(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


@pytest.mark.parametrize("name", ["q", "o"])
def test_a_linear_layer_that_computes_more_is_refused(name):
    part = Transformer(TransformerConfig(**SIZES)).build(Part.whole(1))
    attn, role = part.layers["0"].attn, {"q": Role.COLUMN, "o": Role.ROW}[name]
    setattr(attn, name, tag(Halved(48, 48, bias=False, device="meta"), role, unit=8))
    placements, mesh = place([part], Paper(2).layout), Paper(2)
    reason = rf"layers.0.attn.{name}: Halved has a forward of its own, and tp splits a {role.name} as x @ .*"
    with pytest.raises(NanotrainError, match=reason):
        TensorParallel(TensorParallelConfig()).apply(part, placements, mesh)


def test_what_is_not_this_ranks_share_is_refused_in_forward():
    with pytest.raises(SplitError, match=r"axis 1 of \[2, 2, 3\] is not the share of 7 .*rank 0 .*is 1"):
        Ranks(Paper(4)).all_gather(torch.zeros(2, 2, 3), 1, 7)
