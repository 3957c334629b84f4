"""Initial weights are a function of seed and name, whatever block of a tensor a rank holds."""

import threading

import pytest
import torch

from nanotrain_core.contracts import Initializer, ModelPart
from nanotrain_core.errors import PluginError
from nanotrain_core.layout import initialization
from nanotrain_core.layout.initialization import initial_block
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.placement import Placement, place
from nanotrain_core.registry.contract_checks import check_part

NORMAL, UNIFORM = Initializer("normal", 0.02), Initializer("uniform", 0.5)
LAYOUT = Layout({"dense": View(("dp", "tp"), (1, 4))})


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("ones", 1.0),
        ("Constant", 0.1),
        ("normal", -0.1),
        ("uniform", -0.1),
        ("normal", float("nan")),
        ("normal", "0.1"),
    ],
)
def test_an_initializer_that_means_nothing_is_refused(kind, value):
    """It was drawn as if it were normal."""
    with pytest.raises(PluginError, match=rf"Initializer\('{kind}', .*\): expected 'normal' with a standard"):
        Initializer(kind, value)


def draw(shape, axis=None, index=0, count=1, *, name="layers.0.ffn.up.weight", seed=1, of=NORMAL):
    placement = Placement.whole(name, shape, LAYOUT)
    if axis is not None:
        placement = placement.split(axis, "tp", index, count)
    return initial_block(of, seed, placement)


@pytest.mark.parametrize("shape", [(24, 6), (8, 4, 6), (12,)])
@pytest.mark.parametrize("chunk", [7, 48, 2**20])
@pytest.mark.parametrize("of", [NORMAL, UNIFORM], ids=["normal", "uniform"])
def test_blocks_of_any_split_put_together_are_the_whole(monkeypatch, shape, chunk, of):
    monkeypatch.setattr(initialization, "CHUNK", chunk)
    whole = draw(shape, of=of)
    for axis in range(len(shape)):
        for count in (2, 4):
            if shape[axis] % count == 0:
                blocks = [draw(shape, axis, index, count, of=of) for index in range(count)]
                assert torch.equal(torch.cat(blocks, axis), whole)


def test_a_uniform_is_within_its_bound_on_both_sides():
    values = draw((100, 100), of=UNIFORM)
    assert values.abs().max() <= 0.5
    assert (values.min() < -0.49) & (values.max() > 0.49)
    assert values.std() == pytest.approx(1 / 12**0.5, rel=0.02)


def test_seed_and_name_decide():
    assert torch.equal(draw((4, 4)), draw((4, 4)))
    assert not torch.equal(draw((4, 4)), draw((4, 4), seed=2))
    assert not torch.equal(draw((4, 4)), draw((4, 4), name="layers.1.ffn.up.weight"))


def test_rows_of_different_chunks_are_independent(monkeypatch):
    monkeypatch.setattr(initialization, "CHUNK", 1000)
    rows = draw((400, 100))
    similarity = torch.corrcoef(rows).fill_diagonal_(0).abs().max()
    assert similarity < 0.5
    assert rows.std() == pytest.approx(0.02, rel=0.02)


def test_a_large_weight_is_drawn_by_several_threads(monkeypatch):
    """One thread takes half a minute for 2B weights, whatever the machine has."""
    monkeypatch.setattr(initialization, "CHUNK", 100)
    expected = draw((4, 100))
    together, drawn = threading.Barrier(2, timeout=20), initialization._normal

    def both(shape, seed):
        together.wait()
        return drawn(shape, seed)

    monkeypatch.setattr(initialization, "_normal", both)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert torch.equal(draw((4, 100)), expected)


def test_the_draw_is_pinned():
    """A change of these numbers changes every run ever started from a seed."""
    assert draw((2,), name="norm.weight").tolist() == pytest.approx([-0.009620516, -0.040368345], abs=1e-8)


def test_a_part_with_a_buffer_is_refused():
    class Bad(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.zeros(1))

    with pytest.raises(PluginError, match="cache"):
        initialization.materialize([Bad()], {}, 0, torch.device("cpu"))


def test_what_a_part_lacks_is_told_with_its_base():
    class Plain(torch.nn.Linear):
        """Has no buffers, and needs no ``constant``."""

        def initializer(self, name):
            return Initializer("constant", 0.0)

        def forward(self, inputs, batch):
            return super().forward(inputs)

    part = Plain(1, 1)
    check_part("model 'mine'", part)
    part.register_buffer("cache", torch.zeros(1))
    inherit = r"\(inherit from nanotrain_core.api.torch.ModelPart\)"
    with pytest.raises(PluginError, match=f"model 'mine': build returned a Plain without constant {inherit}"):
        check_part("model 'mine'", part)
    with pytest.raises(PluginError, match=f"returned a Linear without initializer {inherit}"):
        check_part("model 'mine'", torch.nn.Linear(1, 1))
    with pytest.raises(PluginError, match=f"returned a NoneType without initializer {inherit}"):
        check_part("model 'mine'", None)
    with pytest.raises(PluginError, match=r"Misspelt has a method constants, .* not constant of ModelPart"):
        check_part("model 'mine'", type("Misspelt", (ModelPart,), {"constants": print})())
    nameless = type("Nameless", (ModelPart,), {"initializer": lambda self: None})
    wanted = r"Nameless.initializer\(self\) cannot be called: .*; expected initializer\(self, name\)"
    with pytest.raises(PluginError, match=wanted):
        check_part("model 'mine'", nameless())


def test_a_part_knows_no_parameter_and_no_buffer_unless_it_says_so():
    part = ModelPart()
    part.weight = torch.nn.Parameter(torch.empty(1, device="meta"))
    placements = place([part], LAYOUT)
    with pytest.raises(PluginError, match="no initializer for parameter weight"):
        initialization.materialize([part], placements, 0, torch.device("cpu"))
    with pytest.raises(
        PluginError, match=r"buffer cache would be .* give the part a method constant\(name\)"
    ):
        part.constant("cache")
