"""Runs the checks of a component's kind: as a pytest test, or from ``nanotrain conformance``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs

from nanotrain_core.errors import NanotrainError, did_you_mean
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import Check, checks_of, every_check
from nanotrain_core.testing.pool import COLLECTIVE_CHECKS
from nanotrain_core.testing.variants import Skip, Variant, variants_of


@attrs.define(frozen=True)
class Trial:
    """One check of one case, in one of the check's variants."""

    case: Case
    check: Check
    variant: str | None

    @property
    def label(self) -> str:
        """``weights_equal[adamw]``: what ``expected_failures`` names."""
        return f"{self.check.name}[{self.variant}]" if self.variant else self.check.name

    @property
    def id(self) -> str:
        return f"{self.case.id}-{self.label}"

    def run(self) -> None:
        """Run the check.

        Raises:
            AssertionError: the component breaks the invariant; the text has the numbers.
        """
        arguments = (self.variant,) if self.variant else ()
        with _torch_as_it_is():
            self.check.function(self.case, *arguments)


@contextlib.contextmanager
def _torch_as_it_is() -> Iterator[None]:
    """Disable torch's comparison of collectives between ranks, unless the user requests it.

    It does so at the debug level DETAIL, at which it fails with some of its own, as DistributedDataParallel.
    """
    asked = COLLECTIVE_CHECKS in os.environ
    os.environ.setdefault(COLLECTIVE_CHECKS, "off")
    try:
        yield
    finally:
        if not asked:
            del os.environ[COLLECTIVE_CHECKS]


def trials(case: Case) -> Iterator[Trial]:
    """Yield everything that is checked about a case; for one without a recipe, only that there is none."""
    refused = case.kind != "topology" and _refusal(case) is not None
    for check in [MAKES_A_RECIPE] if refused else checks_of(case):
        for variant in check.variants or (None,):
            yield Trial(case, check, variant)


def planned(case: Case, *, quick: bool = False) -> tuple[list[Trial], list[Skip]]:
    """Return what is checked about a component in all variants that it admits, and those skipped.

    Args:
        case: the component, and what its author puts around it.
        quick: only the case as it is, as :func:`trials` does.
    """
    listed: list[Trial] = []
    skipped: list[Skip] = []
    for each in variants_of(case, quick=quick):
        if isinstance(each, Skip):
            skipped.append(each)
            continue
        alone = each.name != ""
        skipped += _unpromised(each)
        listed += [
            trial
            for trial in trials(each.case)
            if each.has(trial.check.kind, trial.check.name, trial.label)
            and not (alone and trial.check.of_component)
        ]
    return listed, skipped


def _unpromised(each: Variant) -> Iterator[Skip]:
    """Yield the checks of a variant to which its component is not held."""
    for check in every_check():
        mine = check.kind == each.case.kind and each.has(check.kind, check.name, check.name)
        if mine and (check.promise or check.limit) and check.applies(each.case):
            reason = check.declined(each.case)
            if reason:
                yield Skip("-".join(filter(None, (each.name, check.name))), reason)


def _refusal(case: Case) -> NanotrainError | None:
    try:
        case.recipe()
    except NanotrainError as error:
        return error
    return None


def makes_a_recipe(case: Case) -> None:
    """The component and what the case puts around it make a recipe that can run."""
    refusal = _refusal(case)
    if refusal is not None:
        raise AssertionError(str(refusal))  # `assert` would let pytest indent the lines


#: Told once, in place of every check that would fail for this one reason.
MAKES_A_RECIPE = Check("every", makes_a_recipe.__name__, "0.1", (), lambda case: True, makes_a_recipe)


def failures(listed: Iterable[Trial]) -> dict[str, Exception]:
    """Run trials and return what went wrong, by label."""
    found: dict[str, Exception] = {}
    for trial in listed:
        try:
            trial.run()
        except Exception as error:
            found[trial.label] = error
    return found


#: The checks of a kind that run many steps, or go through the core alone.
SLOW: Mapping[str, tuple[str, ...]] = {
    "data": ("every_process_has_the_same_epochs",),
    "model": ("roles_are_true", "sequence_parallel_is_exact"),
    "monitor": (
        "its_failure_does_not_stop_training",
        "publishes_what_it_declares",
        "publishes_what_one_process_does",
        "publishing_waits_for_nothing",
        "state_is_restored",
    ),
    "optimizer": (
        "a_parameter_may_be_used_later",
        "any_number_of_microbatches",
        "lost_weights_are_carried_or_refused",
        "resumed_twice_is_the_same_run",
    ),
    "parallel": (
        "a_parameter_may_be_used_later",
        "accumulation_changes_nothing",
        "any_number_of_microbatches",
        "collectives_in_one_order",
        "twenty_steps_are_those_of_one_process",
    ),
    "precision": ("evaluation_changes_nothing", "going_back_is_bit_equal", "loss_follows_float32"),
}


def conformance(
    *cases: Case,
    expected_failures: Mapping[str, str] | None = None,
    marks: Mapping[str, Any] | None = None,
    slow: Any = None,
    everywhere: bool = False,
) -> Callable[..., None]:
    """Return a pytest test with one parametrised item for every check of every case::

        test_conformance = conformance(Case("parallel", use="tp", topology={"tp": 2}))

    Args:
        expected_failures: label of a check -> why it fails. A check listed here that passes is a failure.
        marks: label of a check -> a mark of pytest's that it gets: one that takes long may be left to a
            second tier, ``marks={"killed_rank_leaves_the_last[last]": pytest.mark.slow}``.
        slow: a mark for the checks of a kind that take longest. A repository with several components of
            a kind may leave them to a second tier for all but one.
        everywhere: run each case in all variants that its component admits, as ``nanotrain
            conformance`` does, and not only as it is.

    Raises:
        ValueError: an expected failure or a mark names no check of these cases.
    """
    import pytest

    expected, marked = dict(expected_failures or {}), dict(marks or {})
    found = (planned(case)[0] if everywhere else trials(case) for case in cases)
    listed = list(_without_repeats(trial for each in found for trial in each))
    if all(trial.check is not MAKES_A_RECIPE for trial in listed):
        labels = {trial.label for trial in listed}
        _check_labels("expected_failures", expected, labels)
        _check_labels("marks", marked, labels)

    def parameter(trial: Trial) -> Any:
        reason = expected.get(trial.label)
        given = [marked[trial.label]] if trial.label in marked else []
        if slow is not None and trial.check.name in SLOW.get(trial.check.kind, ()):
            given.append(slow)
        if reason:
            given.append(pytest.mark.xfail(reason=reason, strict=True))
        return pytest.param(trial, id=trial.id, marks=given)

    @pytest.mark.parametrize("trial", [parameter(trial) for trial in listed])
    def test_conformance(trial: Trial) -> None:
        trial.run()

    return test_conformance


def _without_repeats(listed: Iterable[Trial]) -> Iterator[Trial]:
    """Yield trials except those of a component alone that an earlier case of it already has."""
    seen = set()
    for trial in listed:
        key = (trial.label, trial.case.kind, trial.case.use, trial.case.plugins)
        if not trial.check.of_component or key not in seen:
            yield trial
        seen.add(key)


def _check_labels(argument: str, given: Iterable[str], labels: set[str]) -> None:
    for label in given:
        if label not in labels:
            near = did_you_mean(label, sorted(labels))
            raise ValueError(f"{argument}: no check is named '{label}'{near}")
