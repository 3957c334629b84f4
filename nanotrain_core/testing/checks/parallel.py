"""A parallel wrapper changes which rank computes what, but not the results."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from nanotrain_core.recipe import check_combination as resolve_layout
from nanotrain_core.testing.altered import train_with_extra, train_with_more_roles, train_with_replaced
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check, distributed, syncs_distributed, trains_the_model
from nanotrain_core.testing.compare import EXACT, assert_numbers, assert_same, whole
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import Trace, placements, train

SGD = {"use": "sgd", "lr": 0.1, "clip_norm": 0.5}
ADAMW = {"use": "adamw", "lr": 0.01, "clip_norm": 0.5}


def traces(case: Case, **changes: Any) -> list[Trace]:
    """Train the case on its ranks; return each rank's trace."""
    return trained(case, changes)


#: How many runs of one process are kept, the latest.
KEPT = 16
_kept: dict[str, Trace] = {}


def one_process(case: Case, **changes: Any) -> Trace:
    """Train the case in one process, without layout, wrappers or pipeline; return its trace.

    It is kept for the next check that asks for the same recipe, of this case or of another wrapper's: do
    not change it.
    """
    plain = case.alone()
    key = repr((plain.tables(**changes), plain.plugins))
    if key not in _kept:
        if len(_kept) == KEPT:
            del _kept[next(iter(_kept))]
        (_kept[key],) = traces(plain, **changes)
    return _kept[key]


def trained(case: Case, changes: dict[str, Any], **options: Any) -> list[Trace]:
    """Train with options of :func:`run_ranks` and of :func:`train`."""
    found: list[Trace] = run_ranks(train, case.world_size, case, changes, **options)
    return found


def assert_same_reports(actual: Trace, expected: Trace, *, atol: float) -> None:
    """Compare losses and gradient norms of every step."""
    for field in ("loss", "grad_norm"):
        got, want = ([getattr(r, field) for r in t.reports] for t in (actual, expected))
        assert_numbers(got, want, f"{field} of each step", atol=atol)


@check("parallel", since="0.1", variants=("fp64", "fp32"))
def gradients_equal(case: Case, precision: str) -> None:
    """Loss, gradients and their norm equal those of one process: to 1e-10 in float64, 1e-5 in float32."""
    rtol = 1e-5 if precision == "fp32" else 0.0
    atol = 1e-6 if precision == "fp32" else EXACT
    changes: dict[str, Any] = {"precision": {"use": precision}, "run": {"steps": 1}}
    if precision == "fp32":  # plain kernels exchange through process groups, as they do between hosts
        changes["kernels"] = {"use": "torch"}
    ranks = trained(case, changes)
    alone = one_process(case, **changes)
    expected = whole([alone.gradients])
    assert_same(whole([t.gradients for t in ranks], atol=atol), expected, "gradients", atol=atol, rtol=rtol)
    for trace in ranks:
        assert_same_reports(trace, alone, atol=max(atol, 1e-5 * rtol))


@check("parallel", since="0.1", variants=("sgd", "adamw"))
def weights_equal(case: Case, optimizer: str) -> None:
    """After 3 clipped steps, weights and each step's loss and norm equal those of one process to 1e-10."""
    changes = {"optimizer": SGD if optimizer == "sgd" else ADAMW}
    ranks, alone = traces(case, **changes), one_process(case, **changes)
    assert_same(whole([t.weights for t in ranks]), whole([alone.weights]), "weights after 3 steps")
    for trace in ranks:
        assert_same_reports(trace, alone, atol=EXACT)


def _dims_to_use(case: Case) -> list[str]:
    """Return the dimensions with more than one rank that the component declares to handle."""
    layout = resolve_layout(case.recipe(), case.registry())
    return sorted(dim for dim in case.component().mesh_dims if layout.degree(dim) > 1)


@check("parallel", since="0.1", applies=distributed)
def its_dimensions_are_used(case: Case) -> None:
    """Along each of its mesh dimensions some parameter is sharded, or has a gradient that must be summed."""
    held = [placement for rank in run_ranks(placements, case.world_size, case) for placement in rank]
    used = {dim for placement in held for dim in placement.sharded | placement.summed}
    alike = {dim for placement in held for dim in placement.same} - used
    idle = [dim for dim in _dims_to_use(case) if dim in alike]
    assert not idle, (
        f"mesh_dims has {idle}, but all ranks along it hold the same parameters and compute the same "
        "gradients: `apply` must split or sum_over the placements of what it transforms"
    )


@check("parallel", since="0.1", applies=distributed)
def a_precision_may_replace_modules(case: Case) -> None:
    """Gradients are also right when a precision replaces all tagged linear layers."""
    changes = {"run": {"steps": 1}}
    ranks = run_ranks(train_with_replaced, case.world_size, case, changes)
    alone = one_process(case, **changes)
    try:
        assert_same(whole([t.gradients for t in ranks]), whole([alone.gradients]), "gradients")
    except AssertionError as error:
        hint = (
            "if gradients_equal passes: what `apply` changes of a tagged module must be a hook: see "
            "nanotrain_core.api.replace_module"
        )
        raise AssertionError(f"{error}; {hint}") from None


@check("parallel", since="0.1", applies=distributed)
@check("optimizer", since="0.2", applies=syncs_distributed)
def inner_shared_and_biased_layers(case: Case) -> None:
    """Gradients are also right with biases, some frozen, INNER norms, scales PER_HEAD, SHARED inputs."""
    recipe, around = case.recipe(), case.tables().get("parallel", [])
    syncs = any("gradient_sync" in case.registry().get(s.kind, s.use).provides for s in recipe.selections())
    changes = {"run": {"steps": 1}, "parallel": around if syncs else [*around, {"use": "summed"}]}
    ranks = run_ranks(train_with_more_roles, case.world_size, case, changes)
    (alone,) = run_ranks(train_with_more_roles, 1, case.alone(), {"run": {"steps": 1}})
    try:
        assert_same(whole([t.gradients for t in ranks]), whole([alone.gradients]), "gradients")
        for trace in ranks:
            assert_same_reports(trace, alone, atol=EXACT)
    except AssertionError as error:
        hint = (
            "if gradients_equal passes: a rank's gradient of what is INNER is partial: sum_over; what is "
            "SHARED enters the split region as a COLUMN's input does; the bias of a ROW is added once; "
            "what is PER_HEAD is split along axis 0 with the heads, and its placement says so; a bias that "
            "is frozen stays frozen: nn.Parameter(new, requires_grad=old.requires_grad)"
        )
        raise AssertionError(f"{error}; {hint}") from None


@check("parallel", since="0.1")
def nothing_at_degree_one(case: Case) -> None:
    """Applied in a world of one process, the wrapper changes no gradient and no weight."""
    (wrapped,) = traces(attrs.evolve(case, topology={}, world_size=1))
    alone = one_process(case)
    assert_same(whole([wrapped.gradients]), whole([alone.gradients]), "gradients of the first step")
    assert_same(whole([wrapped.weights]), whole([alone.weights]), "weights after 3 steps")


@check("parallel", since="0.1")
def accumulation_changes_nothing(case: Case) -> None:
    """Microbatches of 1 and of 2 sequences give the same gradients and weights."""
    ones, twos = (traces(case, batch={"microbatch": size}) for size in (1, 2))
    for part in ("gradients", "weights"):
        one, two = (whole([getattr(t, part) for t in ranks]) for ranks in (ones, twos))
        assert_same(one, two, f"{part} with microbatches of 1 against 2")


@check("parallel", since="0.1", applies=distributed)
def collectives_in_one_order(case: Case) -> None:
    """The members of every process group call the same collectives on it, in the same order."""
    # Plain kernels exchange through process groups, where they can be seen, and not through shared memory.
    plain = {"kernels": {"use": "torch"}}
    logs = [t.collectives for t in trained(case, plain, check_collectives=None, log_collectives=True)]
    shared = {group for log in logs for _, group, _ in log if len(group) > 1}
    for group in sorted(shared):
        orders = {r: [e for e in logs[r] if e[1] == group and not _message(e[0])] for r in group}
        first = orders[group[0]]
        for rank, order in orders.items():
            assert order == first, f"group {group}: rank {group[0]} calls {first}, rank {rank} calls {order}"


def _message(operator: str) -> bool:
    return operator.startswith(("send", "recv"))


@check("parallel", since="0.1", applies=trains_the_model, variants=("nowhere", "on_one_rank"))
@check("optimizer", since="0.2", applies=syncs_distributed, variants=("nowhere", "on_one_rank"))
def unused_parameter_does_not_hang(case: Case, used: str) -> None:
    """A parameter used by no rank, or by one data rank, gets zero, or that rank's gradient, on all ranks."""
    ranks = run_ranks(train_with_extra, case.world_size, case, {"run": {"steps": 1}}, used)
    gradients = whole([t.gradients for t in ranks])
    alone = one_process(case, run={"steps": 1})
    extra = {name: gradients.pop(name) for name in list(gradients) if name.startswith("extra_")}
    assert_same(gradients, whole([alone.gradients]), "gradients of the used parameters")
    largest = max(torch.linalg.vector_norm(g, torch.inf).item() for g in extra.values())
    if used == "nowhere":
        assert largest == 0.0, f"the unused parameter has a gradient of {largest}"
    else:
        assert largest > 0.0, "the gradient of a parameter that one data rank uses was lost"
