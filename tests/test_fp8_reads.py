"""Layers that read one input quantize it once, and a weight is quantized once a step: counted, and bit-equal.

The ``torch`` backend runs here with its products made on a CPU.
"""

from collections import Counter

import attrs
import pytest
import torch
from fp8_models import DEEPSEEK, LLAMA
from nanotrain_fp8_deepseek_v3 import backends, scaled
from nanotrain_fp8_deepseek_v3.operand_cache import Last
from nanotrain_fp8_deepseek_v3.scaled import ScaledFP8
from scaled_products import product

from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import train

#: Linear layers, without experts, and the different inputs that they have. In Llama q, k, v, o, gate, up and
#: down have four. In DeepSeek q_a, kv_a, q_b, kv_b and o have four, and the three of SwiGLU two.
COUNTS = {"llama": (LLAMA, 2 * 7, 2 * 4), "deepseek": (DEEPSEEK, 2 * (5 + 3), 2 * (4 + 2))}
MICROBATCHES = 2


@pytest.fixture
def step(monkeypatch):
    """Return a function that trains a step, and returns its trace and how often what was done."""
    on_cpu = attrs.evolve(backends.BACKENDS["torch"], refusal=lambda device, recipe: "")
    monkeypatch.setitem(backends.BACKENDS, "torch", on_cpu)
    monkeypatch.setattr(scaled.F, "scaled_mm", product)
    get, of_weight = Last.get, ScaledFP8._of_weight

    def run(model, backend, precision, *, recompute, shared=True):
        seen = Counter()

        def counted(self, x, how, make):
            def making():
                seen["quantized"] += 1
                return make()

            seen["read"] += 1
            return get(self, x, how, making) if shared else making()

        def counted_weight(self, weight):
            seen["weights"] += weight.dim() == 2
            seen["experts"] += weight.dim() == 3
            return of_weight(self, weight)

        monkeypatch.setattr(Last, "get", counted)
        monkeypatch.setattr(ScaledFP8, "_of_weight", counted_weight)
        around = {"model": model, "parallel": [{"use": "recompute"}] if recompute else []}
        case = Case("precision", use=precision, config={"backend": backend}, overrides=around)
        batch = {"sequences": 2 * MICROBATCHES, "microbatch": 2, "length": 32}
        return train(case, {"run": {"steps": 1}, "batch": batch}), seen

    return run


def assert_same(ours, theirs):
    assert [r.loss for r in ours.reports] == [r.loss for r in theirs.reports]
    for name in ("gradients", "weights"):
        pairs = list(zip(getattr(ours, name), getattr(theirs, name), strict=True))
        assert pairs
        assert all(torch.equal(a.tensor, b.tensor) for a, b in pairs)


@pytest.mark.full_cases(
    "llama-fp8_deepseek_v3-kept",
    "llama-fp8_hybrid-kept",
    "deepseek-fp8_deepseek_v3-kept",
    "deepseek-fp8_hybrid-kept",
    "llama-fp8_deepseek_v3-recomputed",
    "deepseek-fp8_hybrid-recomputed",
)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("precision", ["fp8_deepseek_v3", "fp8_hybrid"])
@pytest.mark.parametrize("name", COUNTS)
def test_an_input_is_quantized_once_for_all_layers_that_read_it(name, precision, recompute, step):
    """Along its rows in each forward pass, and along its columns for the gradients of the weights.

    ``down`` reads, for the gradient of its weight, what SwiGLU makes again in tiles: one more input each.
    """
    model, layers, inputs = COUNTS[name]
    once, seen = step(model, "torch", precision, recompute=recompute)
    apart, before = step(model, "torch", precision, recompute=recompute, shared=False)
    forward, again = 2 if recompute else 1, 2 if precision == "fp8_deepseek_v3" else 0
    assert before["quantized"] == seen["read"] == MICROBATCHES * (layers * (forward + 1) + again)
    assert seen["quantized"] == MICROBATCHES * (inputs * (forward + 1) + again)
    assert_same(once, apart)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", COUNTS)
def test_a_weight_is_quantized_once_in_a_step(name, recompute, step):
    """For all microbatches, forward and backward, and for what is recomputed."""
    model, layers, _ = COUNTS[name]
    _, seen = step(model, "torch", "fp8_deepseek_v3", recompute=recompute)
    assert seen["weights"] == layers
    assert seen["experts"] == (3 if name == "deepseek" else 0)


@pytest.mark.parametrize("name", COUNTS)
def test_the_emulation_quantizes_as_often_and_to_the_same_numbers(name, step):
    model, layers, inputs = COUNTS[name]
    once, seen = step(model, "emulated", "fp8_deepseek_v3", recompute=False)
    apart, before = step(model, "emulated", "fp8_deepseek_v3", recompute=False, shared=False)
    assert before["quantized"] - seen["quantized"] >= MICROBATCHES * 2 * (layers - inputs)
    assert_same(once, apart)
