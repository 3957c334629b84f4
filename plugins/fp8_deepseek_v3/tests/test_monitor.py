"""The monitor counts what rounding does to each operand, and leaves every number of the run as it is.

Counts are held against ml_dtypes' rounding, tile by tile, which shares no code with the plugin.
"""

import json
from collections import Counter
from functools import partialmethod
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import torch
from nanotrain_fp8_deepseek_v3.formats import E4M3, E5M2
from nanotrain_fp8_deepseek_v3.gemm import EmulatedFP8, FP8Recipe
from nanotrain_fp8_deepseek_v3.precision import Codec
from nanotrain_fp8_deepseek_v3.tallies import Figures
from nanotrain_fp8_deepseek_v3.watched import Watch, Watched, WatchedCodec
from torch import nn

from nanotrain_core.errors import NanotrainError
from nanotrain_core.layout.roles import Role, tag
from nanotrain_core.metrics.reducer import MetricReducer
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.gemm import QuantizedActivations, use_gemm
from nanotrain_core.testing import Case, conformance
from nanotrain_core.testing.checks.parallel import trained
from nanotrain_core.testing.probe import make_engine

WITH_FP8 = {"precision": {"use": "fp8_deepseek_v3"}}
NUMPY = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
TILED, POWERS = FP8Recipe(), FP8Recipe(input_power_of_two=True, gradient_power_of_two=True)
HYBRID = FP8Recipe(tile=0, gradients=E5M2)


def counted_here(tallies, rows):
    """Return the figures of this rank alone."""
    return {
        row: Figures(
            tallies[row].elements,
            tallies[row].amax.item(),
            *(count / tallies[row].elements for count in tallies[row].counts.tolist()),
        )
        for row in rows
        if row in tallies
    }


test_conformance = conformance(
    Case(
        "monitor",
        use="fp8",
        config={"every": 2},
        topology={"dp": 2},
        overrides={**WITH_FP8, "parallel": [{"use": "summed"}]},
    ),
    # The first tier has them of the core's own monitors; in tests/test_fp8_monitor.py a run over ranks has
    # the numbers of one without this monitor.
    slow=pytest.mark.full,
    marks={"changes_nothing": pytest.mark.full, "publishes_what_it_declares": pytest.mark.full},
)

# Two ranks promise all that one does.
test_exhaustively = pytest.mark.full(
    conformance(
        Case("monitor", use="fp8", overrides=WITH_FP8),
        Case("monitor", use="fp8", config={"every": 1}, overrides={"precision": {"use": "fp8_hybrid"}}),
    )
)


def rounded(x, tile, form, *, power_of_two=False):
    """Return codes and values of a float32 array, by ml_dtypes, and count nothing yet."""
    codes, values = np.empty_like(x), np.empty_like(x)
    largest = np.float32(ml_dtypes.finfo(NUMPY[form]).max)
    height, width = (size or length for size, length in zip(tile, x.shape, strict=True))
    for r in range(0, len(x), height):
        for c in range(0, x.shape[1], width):
            place = slice(r, r + height), slice(c, c + width)
            scale = np.float32(np.abs(x[place]).max() / largest)
            if power_of_two:
                scale = np.float32(2.0 ** np.ceil(np.log2(np.float64(scale))))
            codes[place] = (x[place] / scale).astype(NUMPY[form]).astype(np.float32)
            values[place] = codes[place] * scale
    return codes, values


def counted(x, codes, form):
    largest = float(ml_dtypes.finfo(NUMPY[form]).max)
    return [x.size, int(((codes == 0) & (x != 0)).sum()), 0, int((np.abs(codes) == largest).sum())]


def expected(recipe, x, weight, d_y):
    """Return elements, lost, not finite and at the largest of each operand."""
    tile = recipe.tile
    by_input, by_gradient = recipe.input_power_of_two, recipe.gradient_power_of_two
    of_x, values = rounded(x, (1, tile) if tile else (0, 0), E4M3, power_of_two=by_input)
    of_w, _ = rounded(weight, (tile, tile), E4M3)
    gradients = recipe.gradients
    of_dy, _ = rounded(d_y, (1, tile) if tile else (0, 0), gradients, power_of_two=by_gradient)
    found = {
        "x": counted(x, of_x, E4M3),
        "W": counted(weight, of_w, E4M3),
        "dy": counted(d_y, of_dy, gradients),
    }
    if tile:
        twice, _ = rounded(values, (tile, 1), E4M3, power_of_two=by_input)
        transposed, _ = rounded(d_y, (tile, 1), gradients, power_of_two=by_gradient)
        found |= {"x of dW": counted(x, twice, E4M3), "dy of dW": counted(d_y, transposed, gradients)}
    return found


def spread_over_rows(rows, columns, seed):
    """Rows of very different sizes: alike within tiles along a row, far apart within those along a column."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(3 * rng.normal(size=(rows, 1)))
    return (rng.normal(size=(rows, columns)) * sizes).astype(np.float32)


def watched(recipe, module=None):
    """Return products and what counts them, on."""
    watch = Watch()
    watch.begin(on=True)
    return Watched(EmulatedFP8(recipe), watch, "m", module or nn.Identity()), watch


def multiply(products, x, weight, d_y):
    (y,), kept = products.forward(x, weight)
    return y, products.dgrad(d_y, weight), products.wgrad(d_y, kept)


def shares(watch, recipe):
    """Return elements and counts of each operand."""
    found = counted_here(watch.tallies, [("m", operand) for operand in recipe.operands])
    return {
        operand: [
            f.elements,
            *(round(share * f.elements) for share in (f.underflow, f.overflow, f.at_largest)),
        ]
        for (_, operand), f in found.items()
    }


RECIPES = pytest.mark.parametrize("recipe", [TILED, POWERS, HYBRID], ids=["tiled", "powers", "hybrid"])


@RECIPES
def test_what_each_operand_of_the_three_products_loses_is_what_ml_dtypes_loses(recipe):
    x, d_y = spread_over_rows(300, 200, 0), spread_over_rows(300, 130, 1)
    weight = spread_over_rows(130, 200, 2)
    products, watch = watched(recipe)
    multiply(products, *map(torch.from_numpy, (x, weight, d_y)))
    assert shares(watch, recipe) == expected(recipe, x, weight, d_y)


def test_a_gradient_whose_rows_differ_in_size_loses_little_by_rows_and_much_by_columns():
    d_y = spread_over_rows(1024, 256, 0)
    products, watch = watched(TILED)
    x, weight = torch.randn(1024, 128), torch.randn(256, 128)
    multiply(products, x, weight, torch.from_numpy(d_y))
    found = shares(watch, TILED)
    wanted = expected(TILED, x.numpy(), weight.numpy(), d_y)
    assert found == wanted
    lost = {operand: found[operand][1] / found[operand][0] for operand in ("dy", "dy of dW")}
    assert lost["dy"] < 1e-4
    assert 0.05 < lost["dy of dW"] < 0.15


@RECIPES
def test_rows_of_each_expert_have_tiles_of_their_own(recipe):
    rows, counts = spread_over_rows(300, 200, 0), [130, 0, 170]
    d_y, weights = spread_over_rows(300, 130, 1), spread_over_rows(3 * 130, 200, 2).reshape(3, 130, 200)
    products, watch = watched(recipe)
    multiply(products.grouped(torch.tensor(counts)), *map(torch.from_numpy, (rows, weights, d_y)))
    found, begin = shares(watch, recipe), 0
    wanted = {operand: np.zeros(4, int) for operand in recipe.operands}
    for count, weight in zip(counts, weights, strict=True):
        place = slice(begin, begin := begin + count)
        if not count:
            wanted["W"] += expected(recipe, rows[:1], weight, d_y[:1])["W"]
            continue
        for operand, numbers in expected(recipe, rows[place], weight, d_y[place]).items():
            wanted[operand] += numbers
    assert found == {operand: numbers.tolist() for operand, numbers in wanted.items()}


def test_an_input_that_is_made_again_is_counted_as_it_is_then_and_as_often():
    x, other = (torch.from_numpy(spread_over_rows(140, 128, seed)) for seed in (0, 1))
    weight, d_y = torch.randn(128, 128), torch.randn(140, 128)
    products, watch = watched(TILED)
    for _ in range(2):  # microbatches: one begins before the other ends
        products.forward(x, weight)
        products.forward(x, weight)
        products.wgrad(d_y, products.save_for_wgrad(other))
    found = shares(watch, TILED)
    once = expected(TILED, other.numpy(), weight.numpy(), d_y.numpy())
    assert found["x of dW"] == [2 * number for number in once["x of dW"]]
    wanted = expected(TILED, x.numpy(), weight.numpy(), d_y.numpy())
    assert found["x"] == [4 * number for number in wanted["x"]]
    assert found["W"] == wanted["W"]  # of a step, not of each microbatch


def test_passes_that_do_not_train_and_those_that_run_again_are_not_counted():
    module, passes = tag(nn.Linear(128, 128), Role.COLUMN), Passes()
    products, watch = watched(TILED, module)
    use_gemm(module, {"weight": products}, passes)
    x, weight = torch.randn(4, 128), torch.randn(128, 128)
    module.eval()
    products.forward(x, weight)
    module.train()
    with passes.backward():
        products.forward(x, weight)
    assert shares(watch, TILED) == {}
    products.forward(x, weight)
    assert shares(watch, TILED)["x"][0] == x.numel()


@pytest.mark.parametrize("quantized", [True, False])
def test_what_is_watched_holds_activations_as_it_did(quantized):
    x, behind = torch.randn(4, 128).bfloat16(), EmulatedFP8(FP8Recipe(quantize_swiglu=quantized))
    found, expected = (each.quantize(x) for each in (Watched(behind, Watch(), "m", nn.Identity()), behind))
    assert isinstance(watched(TILED)[0], QuantizedActivations)
    assert (found is not None) == (expected is not None) == quantized
    assert not quantized or all(map(torch.equal, found, expected))


def test_a_tile_with_an_element_that_is_not_finite_is_told_of():
    for worst in (float("inf"), float("nan")):
        products, watch = watched(TILED)
        x = torch.ones(2, 256)
        x[1, 3] = worst
        products.forward(x, torch.ones(8, 256))
        found = counted_here(watch.tallies, [("m", "x"), ("m", "x of dW")])
        by_row, by_column = found.values()
        assert str(by_row.amax) == str(worst)
        assert by_row.overflow == 128 / 512
        assert by_row.at_largest == (512 - 128) / 512
        assert by_row.underflow == 0
        assert by_column.overflow == 2 * 128 / 512


def test_rows_on_their_way_to_experts_are_counted_and_sent_as_they_are():
    rows = torch.from_numpy(spread_over_rows(256, 40, 0).T.copy())  # sizes differ along each row
    watch = Watch()
    watch.begin(on=True)
    codec = WatchedCodec(Codec(), watch, "m", nn.Identity())
    assert torch.equal(codec.encode(rows), Codec().encode(rows))
    codes, _ = rounded(rows.numpy(), (1, 128), E4M3, power_of_two=True)
    (found,) = counted_here(watch.tallies, [("m", "sent")]).values()
    wanted = counted(rows.numpy(), codes, E4M3)
    assert wanted[1] > 0
    assert [found.elements, round(found.underflow * found.elements)] == wanted[:2]


def test_gradients_on_their_way_to_experts_are_counted_and_rows_that_are_recomputed_are_not():
    module, passes, watch = tag(nn.Linear(40, 40), Role.ROW), Passes(), Watch()
    use_gemm(module, {"weight": EmulatedFP8(TILED)}, passes)
    watch.begin(on=True)
    codec, rows = WatchedCodec(Codec(), watch, "m", module), torch.randn(8, 40)

    def counted():
        return watch.tallies["m", "sent"].elements

    codec.encode(rows.requires_grad_())
    assert counted() == rows.numel()
    with passes.backward():
        codec.encode(rows)
        assert counted() == rows.numel()
        codec.encode(rows.detach())
    assert counted() == 2 * rows.numel()


@pytest.mark.full
def test_ranks_talk_at_the_start_alone_and_publish_in_watched_steps():
    around = {**WITH_FP8, "parallel": [{"use": "summed"}]}
    case = Case("monitor", use="fp8", config={"every": 2}, topology={"dp": 2}, overrides=around)
    options = {"check_collectives": True, "log_collectives": True}
    silent = {"monitor": [{"use": "console"}]}  # as many monitors, and none that talks
    with_it, without = (trained(case, changes, **options) for changes in ({}, silent))
    for ours, theirs in zip(with_it, without, strict=True):
        more = Counter(ours.collectives) - Counter(theirs.collectives)
        # Ranks agree that their monitors are here, before the gather of the start.
        assert more.pop(("allreduce_.default", (0, 1), ("int64[8]",))) == 1
        # All else is the metrics': two of float64 in each step, with names in the first, and at the end.
        reduced = {entry: times for entry, times in more.items() if entry[0] == "allreduce_.default"}
        assert all(shapes[0].startswith("float64") for _, _, shapes in reduced)
        assert sum(reduced.values()) <= 2 * (3 + 1 + 1)


def lines(folder):
    return [json.loads(line) for line in (folder / "fp8.jsonl").read_text().splitlines()]


def test_every_operand_of_every_fp8_module_is_told_of_on_watched_steps(tmp_path, capsys):
    case = Case("monitor", use="fp8", config={"every": 2}, overrides=WITH_FP8)
    make_engine(case, {"evaluation": {"every": 1, "sequences": 8}}, folder=tmp_path).fit()
    assert [line["step"] for line in lines(tmp_path)] == [1, 3]
    modules = lines(tmp_path)[1]["modules"]
    linear = ("attn.q", "attn.k", "attn.v", "attn.o", "ffn.gate", "ffn.up", "ffn.down")
    assert set(modules) == {f"layers.{layer}.{name}" for layer in (0, 1) for name in linear}
    tokens, width = 8 * 16, 32
    for name, operands in modules.items():
        assert set(operands) == {"x", "W", "dy", "x of dW", "dy of dW"}, name
        assert all(0 < each["amax"] < 100 for each in operands.values()), name
        assert all(each["overflow"] == 0 and 0 < each["at_largest"] < 1 for each in operands.values()), name
    attention = modules["layers.0.attn.q"]
    assert {operand: each["elements"] for operand, each in attention.items()} == {
        operand: width * width if operand == "W" else tokens * width for operand in attention
    }
    assert "step=3 fp8: most underflow" in capsys.readouterr().out


def test_figures_that_arrive_a_logged_step_late_are_of_the_step_that_was_watched(tmp_path):
    """As on a GPU. They were labeled with the step that was watched when they arrived."""
    case = Case("monitor", use="fp8", config={"every": 2}, overrides=WITH_FP8)
    found = []
    for late in (False, True):
        (folder := tmp_path / str(late)).mkdir()
        with mock.patch.object(
            MetricReducer, "__init__", partialmethod(late_reducer, MetricReducer.__init__, late)
        ):
            make_engine(case, {"run": {"steps": 6, "log_every": 2}}, folder=folder).fit()
        found.append(lines(folder))
    assert [line["step"] for line in found[0]] == [1, 3, 5]
    assert found[1] == found[0]


def late_reducer(reducer, begin, late, *args, **kwargs):
    begin(reducer, *args, **kwargs)
    reducer.late = late


def test_one_scale_for_a_tensor_has_no_other_operands_for_the_gradient_of_the_weight(tmp_path):
    case = Case("monitor", use="fp8", overrides={"precision": {"use": "fp8_hybrid"}})
    make_engine(case, {}, folder=tmp_path).fit()
    (line,) = lines(tmp_path)
    assert all(set(operands) == {"x", "W", "dy"} for operands in line["modules"].values())


def test_it_is_refused_beside_another_precision():
    with pytest.raises(NanotrainError, match="fp8_products"):
        Case("monitor", use="fp8").recipe()
