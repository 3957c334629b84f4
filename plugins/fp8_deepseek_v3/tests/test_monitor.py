"""The monitor counts what rounding does, and leaves every number of the run as it is."""

import json

import pytest
import torch
from nanotrain_fp8_deepseek_v3.formats import E4M3
from nanotrain_fp8_deepseek_v3.monitor import Tally
from nanotrain_fp8_deepseek_v3.products import Recipe

from nanotrain_core.errors import NanotrainError
from nanotrain_core.testing import Case, conformance
from nanotrain_core.testing.checks.parallel import traces
from nanotrain_core.testing.compare import assert_bitwise
from nanotrain_core.testing.probe import make_engine

WITH_FP8 = {"precision": {"use": "fp8_deepseek_v3"}}

test_conformance = conformance(Case("monitor", use="fp8", overrides=WITH_FP8))


def test_counts_of_a_row_that_is_known():
    x = torch.zeros(2, 256)
    x[0, 0], x[0, 1], x[0, 2] = 448.0, 2.0**-11, 2.0**-9  # the second is a quarter of the smallest number
    x[1, 128:] = -3.0
    tally = Tally()
    tally.add(x, Recipe(), E4M3, power_of_two=False)
    tally.add(x, Recipe(), E4M3, power_of_two=False)
    assert tally == Tally(amax=448.0, elements=1024, lost=2, top=2 * (1 + 128))


def test_an_element_that_is_not_finite_is_seen():
    for worst in (float("inf"), float("nan")):
        tally = Tally()
        for last in (worst, 1.0):
            tally.add(torch.tensor([[1.0, last]]), Recipe(), E4M3, power_of_two=False)
        assert str(tally.amax) == str(worst)


def test_every_fp8_module_is_told_of_on_watched_steps_and_weights_stay_as_they_are(tmp_path, capsys):
    case = Case("monitor", use="fp8", config={"every": 2}, overrides=WITH_FP8)
    make_engine(case, {}, folder=tmp_path).fit()
    lines = [json.loads(line) for line in (tmp_path / "fp8.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 3]
    operands = lines[0]["operands"]
    assert {"layers.0.attn.q input", "layers.1.ffn.down gradient"} <= set(operands)
    assert len(operands) == 2 * 2 * 7  # two layers of seven products, inputs and gradients
    assert all(each["amax"] > 0 for each in operands.values())
    assert all(0 <= each["underflow"] < 0.05 for each in operands.values())
    assert "fp8 of rank 0: most underflow" in capsys.readouterr().out
    (seen,), (unseen,) = traces(case), traces(case, monitor=[])
    for ours, theirs in zip(seen.weights, unseen.weights, strict=True):
        assert_bitwise({"weight": ours.tensor}, {"weight": theirs.tensor}, ours.name)


def test_it_is_refused_beside_another_precision():
    with pytest.raises(NanotrainError, match="fp8_products"):
        Case("monitor", use="fp8").recipe()
