"""Runs all checks of a component in a few parallel processes: one that hangs or dies is replaced.

The list is made in each process, in the same order; the command only deals out numbers.
"""

from __future__ import annotations

import fnmatch
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from multiprocessing.connection import wait
from typing import Any

import attrs

from nanotrain_core.errors import NanotrainError, did_you_mean
from nanotrain_core.testing.pool import PRELOAD
from nanotrain_core.testing.trial_process import Listed, Listing, Outcome, Refusal, serve
from nanotrain_core.testing.worker import signal_name

#: Seconds after which a check counts as hung. The longest, which kills a rank at every write of a save,
#: takes 15 on two cores.
TIMEOUT = 180.0

#: Modules that a process has loaded when it begins.
LOADED = [*PRELOAD, "nanotrain_core.testing.trial_process", "nanotrain_core.testing.conformance"]


class Verdict(Enum):
    """The result of a check."""

    PASSED = "passed"
    FAILED = "failed"
    HUNG = "hung"
    SKIPPED = "skipped"
    EXPECTED = "failed as expected"
    UNEXPECTED = "passed, though a failure was expected"

    @property
    def bad(self) -> bool:
        """Whether the command fails because of it."""
        return self in (Verdict.FAILED, Verdict.HUNG, Verdict.UNEXPECTED)


@attrs.define(frozen=True)
class Result:
    """A line of the output of ``nanotrain conformance``."""

    id: str
    label: str
    verdict: Verdict
    invariant: str
    reason: str = ""
    seconds: float = 0.0
    since: str = ""


def id_in(text: str) -> str:
    """Return the id of a check in a line that the command or pytest printed; other text unchanged.

    >>> id_in("FAILED tp-w2-weights_equal[sgd]: weights after some steps equal one process's")
    'tp-w2-weights_equal[sgd]'
    >>> id_in("tests/test_tp.py::test_conformance[tp-w2-weights_equal[sgd]] - AssertionError: ...")
    'tp-w2-weights_equal[sgd]'
    """
    text = re.sub(r"^(ok|FAILED|HUNG|xfail|XPASS)\s+", "", text.strip())
    of_pytest = re.match(r"\S+::\w+\[(.*)\]( - |$)", text)
    return of_pytest[1] if of_pytest else text.partition(": ")[0]


@attrs.define(frozen=True, kw_only=True)
class Options:
    """Options for running the checks."""

    quick: bool = False
    jobs: int = attrs.field(factory=lambda: max(1, min(4, os.cpu_count() or 1)))
    """Processes that run checks at the same time."""
    timeout: float = TIMEOUT
    """Seconds for one check, and for loading the plugin."""
    keyword: str = attrs.field(default="", converter=id_in)
    """Run the checks whose id contains this, or fits it as a shell pattern. A printed line will do."""
    first: bool = False
    """Stop at the first that fails."""
    expected: Sequence[str] = ()
    """Labels of checks that are to fail."""
    without: Sequence[str] = ()
    """Labels of checks to leave out."""

    def wants(self, trial: Listed) -> bool:
        """Return whether ``keyword`` selects a check."""
        if trial.label in self.without:
            return False
        return self.keyword in trial.id or fnmatch.fnmatchcase(trial.id, self.keyword)


class Process:
    """A process that runs checks, from the command's side."""

    def __init__(self, arguments: Mapping[str, Any], quick: bool) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(LOADED)
        self.connection, theirs = context.Pipe()
        told = (theirs, arguments, quick, dict(os.environ), [*sys.path])
        self.process: Any = context.Process(target=serve, args=told)
        self.process.start()
        theirs.close()
        self.running: Listed | None = None
        self.ready = False
        self.deadline = 0.0

    def give(self, trial: Listed, timeout: float) -> None:
        """Send it a check to run."""
        self.running, self.deadline = trial, time.monotonic() + timeout
        self.connection.send(trial.number)

    def receive(self) -> Any:
        """Return its answer, or how it ended."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            return f"the process that ran it {signal_name(self.process.exitcode)}"

    def close(self) -> None:
        """Kill it. Its ranks end with it."""
        self.process.kill()
        self.process.join()
        self.connection.close()


class Campaign:
    """All checks of one component."""

    def __init__(self, arguments: Mapping[str, Any], options: Options) -> None:
        self.arguments, self.options = arguments, options
        self.processes: list[Process] = []

    def close(self) -> None:
        """Kill the processes that are still running."""
        for process in self.processes:
            process.close()
        self.processes.clear()

    def listing(self) -> Listing:
        """Load the plugin in a process and return what is to be checked.

        Raises:
            NanotrainError: it cannot be loaded or does not end, or the command names what is not there.
        """
        process = self._start()
        answer = self._first_answer(process)
        if isinstance(answer, Listing):
            process.ready = True
            self._check_expected(answer)
            return answer
        self.close()
        raise NanotrainError(answer.text if isinstance(answer, Refusal) else answer)

    def _start(self) -> Process:
        process = Process(self.arguments, self.options.quick)
        process.deadline = time.monotonic() + self.options.timeout
        self.processes.append(process)
        return process

    def _first_answer(self, process: Process) -> Any:
        if not wait([process.connection], timeout=self.options.timeout):
            return f"to load it did not end within {self.options.timeout:g} s (--timeout)"
        return process.receive()

    def _check_expected(self, listing: Listing) -> None:
        labels = {trial.label for trial in listing.trials}
        for label in self.options.expected:
            if label not in labels:
                near = did_you_mean(label, sorted(labels))
                raise NanotrainError(
                    f"--expect-failure: no check is named '{label}'{near}; --list shows their names"
                )

    def run(self, listing: Listing) -> Iterator[Result]:
        """Yield results as they arrive: first what is skipped, then the selected checks."""
        for name, reason in listing.skipped:
            yield Result(name, "", Verdict.SKIPPED, "", reason)
        waiting = [trial for trial in listing.trials if self.options.wants(trial)]
        while len(self.processes) < min(self.options.jobs, len(waiting)):
            self._start()
        try:
            yield from _unexpected_last(self._assign(waiting))
        finally:
            self.close()

    def _assign(self, waiting: list[Listed]) -> Iterator[Result]:
        for process in self.processes:
            if process.ready and waiting:
                process.give(waiting.pop(0), self.options.timeout)
        while any(process.running or not process.ready for process in self.processes) or waiting:
            for process in self._wait_for_answers():
                answer: Any = self._answer(process)
                trial, process.running = process.running, None
                if isinstance(answer, Listing):
                    process.ready = True
                elif not isinstance(answer, Outcome):  # it hangs, is dead, or cannot load what others did
                    process.close()
                    self.processes.remove(process)
                    if waiting:
                        self._start()
                if trial is not None:
                    result = self._result(trial, answer)
                    yield result
                    if self.options.first and result.verdict in (Verdict.FAILED, Verdict.HUNG):
                        return
                if process.ready and waiting and process in self.processes:
                    process.give(waiting.pop(0), self.options.timeout)
            if not self.processes and waiting:
                self._start()
            self.processes = [p for p in self.processes if p.running or not p.ready or waiting]

    def _wait_for_answers(self) -> list[Process]:
        """Wait for the next answers, or for a deadline."""
        busy = {p.connection: p for p in self.processes if p.running or not p.ready}
        soonest = min((p.deadline for p in busy.values()), default=time.monotonic())
        ready: Sequence[Any] = wait(list(busy), timeout=max(0.0, soonest - time.monotonic()))
        return [busy[connection] for connection in ready] or [
            p for p in busy.values() if p.deadline <= time.monotonic()
        ]

    def _answer(self, process: Process) -> Any:
        if process.connection.poll():
            return process.receive()
        return TimeoutError(f"did not end within {self.options.timeout:g} s (--timeout)")

    def _result(self, trial: Listed, answer: Any) -> Result:
        seconds = answer.seconds if isinstance(answer, Outcome) else self.options.timeout
        reason = (answer.error or "") if isinstance(answer, Outcome) else str(answer)
        expected = trial.label in self.options.expected
        if isinstance(answer, TimeoutError):
            verdict = Verdict.HUNG
        elif reason:
            verdict = Verdict.EXPECTED if expected else Verdict.FAILED
        else:
            verdict = Verdict.UNEXPECTED if expected else Verdict.PASSED
        return Result(trial.id, trial.label, verdict, trial.invariant, reason, seconds, trial.since)


def _unexpected_last(results: Iterator[Result]) -> Iterator[Result]:
    """Yield results; those that pass against expectation last, as passed if the check failed elsewhere.

    A fault may show in some variants alone.
    """
    held: list[Result] = []
    failed: set[str] = set()
    for result in results:
        if result.verdict is Verdict.UNEXPECTED:
            held.append(result)
            continue
        if result.verdict is Verdict.EXPECTED:
            failed.add(result.label)
        yield result
    for result in held:
        yield attrs.evolve(result, verdict=Verdict.PASSED) if result.label in failed else result


def certify(
    arguments: Mapping[str, Any], options: Options, *, on_listed: Callable[[Listing], None] | None = None
) -> Iterator[Result]:
    """Check a component: yield a result for each check and each skipped variant.

    Args:
        arguments: of :class:`~nanotrain_core.testing.case.Case`.
        options: how.
        on_listed: called with what is checked, before it is.

    Raises:
        NanotrainError: the component cannot be loaded.
    """
    campaign = Campaign(arguments, options)
    try:
        listing = campaign.listing()
        if on_listed is not None:
            on_listed(listing)
        yield from campaign.run(listing)
    finally:
        campaign.close()
