"""The roles that a model declares are correct: sharded by them, it computes the same."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanotrain_core.batch import IGNORE
from nanotrain_core.layout.roles import Role, Tag, tagged
from nanotrain_core.moe.routing import Routing, run_locally, sort_by_expert
from nanotrain_core.precision.gemm import LINEAR_ROLES
from nanotrain_core.recipe.divisibility import divisors_near
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check
from nanotrain_core.testing.checks.model import batch_of, on_meta, parts_of, run_parts
from nanotrain_core.testing.checks.parallel import one_process
from nanotrain_core.testing.compare import EXACT, assert_numbers, assert_same, whole
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import train

#: Degrees to share linear layers out by: the smallest and the largest that divide the units of all of them.
DEGREES = (2, 3, 4, 5)


@check("model", since="0.1")
def roles_are_true(case: Case) -> None:
    """With COLUMN and ROW sharded over ranks in whole units, INNER summed, all gradients are the same."""
    degrees = _degrees(case)
    for degree in sorted({degrees[0], degrees[-1]} if degrees else ()):
        try:
            _assert_same_sliced(case, degree, {"use": "sliced"})
        except Exception as error:
            raise AssertionError(
                f"with each COLUMN and ROW sharded over {degree} ranks: {error}\n"
                "Is each unit a whole head? Does forward read the number of heads from tensors, and not from "
                "the config? Has what lies between COLUMN and ROW the role INNER?"
            ) from None


@check("model", since="0.3", promise="sequence_parallel")
def sequence_parallel_is_exact(case: Case) -> None:
    """Under sequence parallelism, a share of each sequence between sharded layers, gradients are the same."""
    for degree in _degrees(case)[:1]:
        try:
            _assert_same_sliced(case, degree, {"use": "sliced", "sequence_parallel": True})
        except Exception as error:
            raise AssertionError(
                f"with the tokens between sharded layers split over {degree} ranks: {error}\n"
                "Does forward take the length of sequences from batch.tokens, or what a COLUMN returned, and "
                "not from hidden states between layers? Is attention all that reads other tokens than its "
                "own? Does no loss term come from hidden states outside of the HEAD, such as a penalty on "
                "them? It would be of a rank's tokens, and reported for tensor-parallel rank 0 alone. Else "
                "declare supports={'sequence_parallel': Support.UNSUPPORTED}."
            ) from None


def _degrees(case: Case) -> list[int]:
    """Return the degrees that divide the units of all linear layers; none if there are no such layers."""
    (part,) = on_meta(case)
    units = [
        module.weight.shape[found.role is Role.ROW] // found.unit  # type: ignore[index]
        for _, module, found in tagged(part)
        if found.role in (Role.COLUMN, Role.ROW)
    ]
    return [n for n in DEGREES if units and all(count % n == 0 for count in units)]


def _assert_same_sliced(case: Case, degree: int, wrapper: dict[str, Any]) -> None:
    """Compare a step with one process: gradients and loss."""
    wrapped = {
        "run": {"steps": 1, "ranks": degree},
        "topology": {"tp": degree},
        "parallel": [wrapper, {"use": "summed"}],
    }
    ranks = run_ranks(train, degree, case.alone(), wrapped)
    alone = one_process(case, **{"run": {"steps": 1}})
    assert_same(whole([t.gradients for t in ranks], atol=EXACT), whole([alone.gradients]), "gradients")
    for trace in ranks:
        assert_numbers([trace.reports[0].loss], [alone.reports[0].loss], "loss", atol=EXACT)


@check("model", since="0.1")
def experts_may_be_anywhere(case: Case) -> None:
    """EXPERTS give the same for a share of tokens, for some of the experts, and summed along ``split``."""
    for name, module, found, (x, routing) in _calls(case, {Role.EXPERTS}):
        expected = module(x, routing)
        every = len(next(module.parameters()))
        order, counts = sort_by_expert(routing.experts, every)
        rows = x.flatten(0, -2)[order // routing.experts.shape[-1]]
        results = {
            "run_locally of its compute": (run_locally(module.compute, x, routing, every), expected),  # type: ignore[arg-type]
            "a share of the tokens": (_every_second(module, x, routing), expected[:, ::2]),
            "some of the experts at a time": (
                _by_experts(module, rows, counts),
                _compute(module, rows, counts),
            ),
            "the parts of its width, added up": (
                _by_width(module, found, rows, counts),
                _compute(module, rows, counts),
            ),
        }
        for what, (got, wanted) in results.items():
            assert_same({name: got}, {name: wanted}, what)


@check("model", since="0.3")
def linear_layers_and_heads_add_nothing(case: Case) -> None:
    """COLUMN, ROW and REPLICATED are ``x @ weight.T + bias``, HEAD the cross-entropy of ``x @ weight.T``."""
    generator = torch.Generator().manual_seed(0)
    for name, module, found, args in _calls(case, {*LINEAR_ROLES, Role.HEAD}):
        # A bias that is zero at first, or a cap of small logits, shows with larger weights alone.
        for parameter in module.parameters():
            parameter.normal_(generator=generator)
        x = torch.empty_like(args[0]).normal_(generator=generator)
        try:
            if found.role is Role.HEAD:
                _assert_plain_head(name, module, x, *args[1:])
            else:
                wanted = F.linear(x, module.get_parameter("weight"), module.bias)  # type: ignore[arg-type]
                assert_same({name: module(x)}, {name: wanted}, f"{found.role.name}, x @ weight.T + bias")
        except Exception as error:
            raise AssertionError(
                f"{error}\nWrappers, precisions and schedules compute that in place of its forward. What "
                f"else {name} computes, such as a scale, belongs in the module around it; a projection whose "
                "logits get a bias or a cap is REPLICATED, with the loss in the model's part."
            ) from None


def _assert_plain_head(
    name: str, module: nn.Module, x: torch.Tensor, targets: torch.Tensor, table: torch.Tensor | None
) -> None:
    logits = F.linear(x, module.get_parameter("weight") if table is None else table)
    assert_same({name: module(x, None, table)}, {name: logits}, "HEAD without targets, x @ weight.T")
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    assert_same({name: module(x, targets, table)}, {name: loss}, "HEAD's loss, of x @ weight.T", rtol=EXACT)


def _calls(case: Case, roles: Collection[Role]) -> Iterator[tuple[str, nn.Module, Tag, tuple[Any, ...]]]:
    """Pass a batch through the model and yield (name, module, tag, inputs) of the modules of ``roles``."""
    parts = parts_of(case)
    seen: dict[nn.Module, Any] = {}
    modules = [each for part in parts for each in tagged(part) if each[2].role in roles]
    handles = [
        module.register_forward_pre_hook(lambda module, args: seen.setdefault(module, args) and None)
        for _, module, _ in modules
    ]
    with torch.no_grad():
        run_parts(parts, batch_of(case))
        for handle in handles:
            handle.remove()
        for name, module, found in modules:
            assert module in seen, f"{name} is never called, or not as a module"
            yield name, module, found, seen[module]


def _every_second(module: nn.Module, x: torch.Tensor, routing: Routing) -> torch.Tensor:
    share = replace(routing, experts=routing.experts[:, ::2], weights=routing.weights[:, ::2])
    result: torch.Tensor = module(x[:, ::2], share)
    return result


def _compute(module: nn.Module, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = module.compute(rows, counts)  # type: ignore[operator]
    return result


def _by_experts(module: nn.Module, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    axes, blocks, found = {name: 0 for name, _ in module.named_parameters()}, _blocks(len(counts)), []
    shares = torch.split(rows, [int(counts[block].sum()) for block in blocks])
    for block, share in zip(blocks, shares, strict=True):
        with _holding(module, axes, block):
            found.append(_compute(module, share, counts[block]))
    return torch.cat(found)


def _by_width(module: nn.Module, found: Tag, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    if not found.split:
        return _compute(module, rows, counts)
    widths = {module.get_parameter(name).shape[axis] for name, axis in found.split.items()}
    assert len(widths) == 1, (
        f"the tag's split {dict(found.split)} is along axes of different lengths {widths}"
    )
    total = torch.zeros((), dtype=rows.dtype)
    for block in _blocks(widths.pop()):
        with _holding(module, found.split, block):
            total = total + _compute(module, rows, counts)
    return total


def _blocks(length: int) -> list[slice]:
    """Split a length into as few equal blocks as possible."""
    count = next(iter(divisors_near(length, 1)), 1)
    return [slice(length // count * n, length // count * (n + 1)) for n in range(count)]


@contextmanager
def _holding(module: nn.Module, axes: Mapping[str, int], block: slice) -> Iterator[None]:
    """Give a module a block of each parameter in ``axes``, as a wrapper does, and restore it afterwards."""
    whole = {name: module.get_parameter(name) for name in axes}
    for name, axis in axes.items():
        share = whole[name][(*[slice(None)] * axis, block)].clone()
        _assign(module, name, nn.Parameter(share, requires_grad=whole[name].requires_grad))
    try:
        yield
    finally:
        for name, weight in whole.items():
            _assign(module, name, weight)


def _assign(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, last = name.rpartition(".")
    setattr(module.get_submodule(owner), last, parameter)
