"""Every composition trains the same as one process: loss terms, gradients, their norm, weights at the end.

What a monitor is offered of gradients is the same, too: names, and the norm of each.

In float64, to 1e-9. Weights after plain SGD steps, because Adam would hide a gradient of the wrong scale.
"""

from functools import cache
from itertools import combinations
from operator import attrgetter
from random import Random

import attrs
import pytest
from compositions import (
    BATCH,
    OPTIMIZERS,
    Composition,
    compiled,
    everything,
    pairwise,
    splits_backward,
    to_compile,
    train_each,
)

from nanotrain_core.testing.case import Case
from nanotrain_core.testing.compare import assert_numbers, assert_same, whole
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import Trace

TOLERANCE = 1e-9

#: Drawn from all the others for the exhaustive tier.
DRAWN = 120


@cache
def alone(model: str, layers: int, tied: bool, optimizer: str, steps: int = 3) -> Trace:
    """Train in one process, with the batch whole: how it is cut must not matter."""
    any_of_them = next(c for c in everything() if (c.model, c.layers, c.tied) == (model, layers, tied))
    case = of_steps(any_of_them.case(), steps).alone()
    whole_batch = {**BATCH, "microbatch": BATCH["sequences"]}
    case = attrs.evolve(case, overrides={**case.overrides, "batch": whole_batch})
    (traces,) = run_ranks(train_each, 1, case, {optimizer: OPTIMIZERS[optimizer]})
    return traces[optimizer]


def of_steps(case: Case, steps: int) -> Case:
    """Return the same run with another number of steps."""
    return attrs.evolve(case, overrides={**case.overrides, "run": {"steps": steps}})


def assert_trains_the_same(composition: Composition, *of_optimizers: str, steps: int = 3) -> None:
    """Compare every rank's reports, and the tensors that all ranks hold together, with one process.

    Trained with those of its optimizers, or with all of them.
    """
    optimizers = composition.optimizers()
    optimizers = {name: optimizers[name] for name in of_optimizers or optimizers}
    ranks = run_ranks(train_each, composition.ranks, of_steps(composition.case(), steps), optimizers)
    for name in optimizers:
        want = alone(composition.model, composition.layers, composition.tied, name, steps)
        traces = [each[name] for each in ranks]
        gradients, weights = (
            whole([getattr(t, part) for t in traces], atol=TOLERANCE) for part in ("gradients", "weights")
        )
        assert_same(gradients, whole([want.gradients]), f"{name}: first gradients", atol=TOLERANCE)
        assert_same(weights, whole([want.weights]), f"{name}: weights after {steps} steps", atol=TOLERANCE)
        for rank, trace in enumerate(traces):
            got, ours = numbers(trace), numbers(want)
            assert_numbers(got, ours, f"{name}, rank {rank}: loss terms and norm", atol=TOLERANCE)
            for step, (norms, expected_norms) in enumerate(zip(trace.norms, want.norms, strict=True), 1):
                assert list(norms) == list(expected_norms)
                each = f"{name}, rank {rank}, step {step}: norm of each gradient"
                assert_numbers([*norms.values()], [*expected_norms.values()], each, atol=TOLERANCE)


def assert_compiled_trains_the_same(composition: Composition) -> None:
    """Compare a compiled run, with one of its optimizers, with an eager one in one process."""
    name, table = next(iter(composition.optimizers().items()))
    want = alone(composition.model, composition.layers, composition.tied, name)
    ranks = run_ranks(train_each, composition.ranks, compiled(composition.case()), {name: table}, timeout=300)
    traces = [each[name] for each in ranks]
    for what in ("gradients", "weights"):
        found = whole([getattr(trace, what) for trace in traces], atol=TOLERANCE)
        assert_same(found, whole([getattr(want, what)]), f"{name}: {what}", atol=TOLERANCE)
    for rank, trace in enumerate(traces):
        got, ours = (numbers(attrs.evolve(each, evaluations=[])) for each in (trace, want))
        assert_numbers(got, ours, f"{name}, rank {rank}: loss terms and norm", atol=TOLERANCE)


def numbers(trace: Trace) -> list[float]:
    """Return loss, each of its terms, and the gradient norm of every step, and the validation losses."""
    steps = [(r.loss, r.grad_norm, *(r.losses[name] for name in sorted(r.losses))) for r in trace.reports]
    return [*trace.evaluations, *(number for step in steps for number in step)]


@pytest.mark.parametrize("composition", pairwise(), ids=lambda c: c.id)
def test_pairwise(composition):
    """With ``zero12``, where that is the composition's, else with SGD, which shows a gradient's scale.

    The second step has all that a later one has: moments, moved biases of routers, updated weights.
    """
    assert_trains_the_same(composition, *([] if composition.zero else ["sgd"]), steps=2)


@pytest.mark.full
@pytest.mark.parametrize("composition", [c for c in pairwise() if not c.zero], ids=lambda c: c.id)
def test_pairwise_with_adamw(composition):
    assert_trains_the_same(composition, "adamw")


def others() -> list[Composition]:
    in_order = attrgetter(*(field.name for field in attrs.fields(Composition)))
    rest = sorted(set(everything()) - set(pairwise()), key=in_order)
    return Random(0).sample(rest, DRAWN)


@pytest.mark.full
@pytest.mark.parametrize("composition", others(), ids=lambda c: c.id)
def test_many_more(composition):
    assert_trains_the_same(composition)


@pytest.mark.full
@pytest.mark.parametrize("composition", to_compile(), ids=lambda c: c.id)
def test_compiled(composition):
    """Layers compiled with ``aot_eager`` in some of these compositions, against the same eager process."""
    assert_compiled_trains_the_same(composition)


@pytest.mark.full
@pytest.mark.parametrize(
    "composition",
    [each for each in pairwise() if not splits_backward(each) and each.cp == 1],  # cp: no layer is compiled
    ids=lambda c: c.id,
)
def test_compiled_pairwise(composition):
    assert_compiled_trains_the_same(composition)


def test_every_two_choices_that_can_meet_do():
    """The pairwise matrix is what it says, by counting."""

    def pairs(compositions):
        return {p for c in compositions for p in combinations(attrs.asdict(c).items(), 2)}

    assert pairs(pairwise()) == pairs(everything())
