"""AdamW's moments in bfloat16 and in 8 bits: how they are rounded. In runs: test_moments_in_runs.py."""

import numpy as np
import pytest
import torch
from called_operators import CalledOperators

from nanotrain_core.contracts import Kernels
from nanotrain_core.errors import PluginError
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.placement import Piece, Placement
from nanotrain_core.optim import moment_groups, moments
from nanotrain_core.optim.moments import FIRST, GROUP, SECOND, LowPrecisionAdamW
from nanotrain_core.testing.compare import assert_bitwise

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


class Halves(Kernels):
    """Kernels that take every second weight, to which they do nothing but count."""

    found = ()

    def low_precision_adamw(self, weights, states, group, found_inf):
        self.found = *self.found, (len(weights), [*states[0]], group["lr"], found_inf)
        return weights[1::2]


def test_weights_that_kernels_take_are_left_to_them():
    weights = [torch.nn.Parameter(torch.ones(GROUP)) for _ in range(3)]
    optimizer = LowPrecisionAdamW(weights, kernels=(kernels := Halves()), **SETTINGS)
    for weight in weights:
        optimizer.state[weight] = {"step": torch.zeros(()), **states("int8", GROUP)}
        weight.grad = torch.ones(GROUP)
    optimizer.step()
    assert kernels.found == ((3, ["step", *kept_as(FIRST, 1), *kept_as(SECOND, 1)], 0.01, None),)
    assert [optimizer.state[weight]["step"].item() for weight in weights] == [0, 1, 0]
    assert [bool((weight == 1).all()) for weight in weights] == [True, False, True]


def test_kernels_that_return_no_weights_are_named(monkeypatch):
    monkeypatch.setattr(Halves, "low_precision_adamw", lambda *given: None)
    optimizer = LowPrecisionAdamW([torch.nn.Parameter(torch.ones(GROUP))], kernels=Halves())
    with pytest.raises(PluginError, match="kernels Halves: its low_precision_adamw returned None"):
        optimizer.step()


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
