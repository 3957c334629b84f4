"""Finds the first cause of an attempt's end among all failures that resulted from it."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from nanotrain_core.errors import Exit, NanotrainError
from nanotrain_core.run import log
from nanotrain_core.run.files import read_each, write_text_atomically
from nanotrain_core.watch.hang import Hang
from nanotrain_core.watch.scratch import RankFile


@attrs.define(frozen=True)
class Cause:
    """The cause of a failure, as it is reported."""

    text: str
    code: int
    trace: str = ""
    mistake: bool = False
    """Whether it was raised on purpose, as a :class:`NanotrainError` that a restart would raise again."""
    echo: bool = False
    """Whether it only reports that another rank is gone, or that ranks wait, perhaps for another one."""

    def tell(self, what_now: str = "") -> None:
        """Print it to stderr, followed by ``what_now``, a clause on what happens next."""
        print(self.trace, file=sys.stderr, end="", flush=True)
        log.say(f"{self.text}{what_now}")

    def error(self) -> NanotrainError:
        """Return it as the error that the rank raised."""
        return NanotrainError(self.text).with_code(self.code)


#: Error texts of gloo, NCCL and torch's stores when a rank that they wait for is gone, or late.
ECHOES = (
    "onnection closed by remote peer",
    "remote process exited",
    "ncclRemoteError",
    "NCCL communicator was aborted",
    "onnection closed by peer",
    "onnection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Application timeout caused pair closure",
    "onnection was likely closed",
    "Gloo connectFullMesh failed with",
    "wait timeout after",
    "Timeout waiting for key",
)


class PeerLostError(NanotrainError):
    """Another rank failed or is gone: raised by ranks that only noticed it, with that rank's exit code."""


class AttemptEnded(BaseException):
    """The launcher ends an attempt on this rank, as another one has failed.

    Like KeyboardInterrupt, no handler of a plugin's own errors should catch it.
    """


def error_text(problem: BaseException) -> str:
    """Return an error's text: alone if it was raised on purpose, otherwise after its class."""
    kind = "" if isinstance(problem, NanotrainError) else type(problem).__name__
    return f"{kind}: {problem}".strip(": ")


def exit_code_of(problem: BaseException) -> int:
    """Return the exit code of a rank that ends with an error."""
    return problem.exit_code if isinstance(problem, NanotrainError) else Exit.FAILED


def is_echo(problem: BaseException) -> bool:
    """Return whether an error only reports that another rank is gone.

    Errors of files and sockets, and those raised on purpose, are this rank's own, even with the text of a
    connection's end: of a checkpoint's store, or of a data loader. Those of torch.distributed are neither.
    """
    if isinstance(problem, (PeerLostError, AttemptEnded)):
        return True
    own = isinstance(problem, (NanotrainError, OSError))
    return not own and any(sign in str(problem) for sign in ECHOES)


def leave_failure(scratch: Path, rank: int, problem: BaseException) -> bool:
    """Leave for the launcher why ``rank`` fails; return whether that only reports another rank."""
    echo = is_echo(problem)
    on_purpose = isinstance(problem, (NanotrainError, AttemptEnded))
    failure = {
        "rank": rank,
        "time": time.time(),
        "text": error_text(problem),
        "echo": echo,
        "names_another": isinstance(problem, PeerLostError),
        "restart_helps": getattr(problem, "restart_helps", True),
        "trace": None if on_purpose else "".join(traceback.format_exception(problem)),
        "code": exit_code_of(problem),
    }
    # Atomically: the launcher may read it, or kill this rank, meanwhile.
    with contextlib.suppress(OSError):  # disk full: only the exit code remains
        write_text_atomically(RankFile.FAILURE.of(scratch, rank), json.dumps(failure))
    return echo


def first_cause(scratch: Path, codes: Mapping[int, int], hang: Hang | None) -> Cause:
    """Return the first cause: a hang, an exception, a rank that died, or a user error.

    An echo, which only reports that another rank is gone, counts only if there is none of these. So does a
    SIGTERM that a rank reports: the launcher sends it to the remaining ranks.

    Args:
        scratch: where ranks left their errors.
        codes: exit status of each rank's process.
        hang: the launcher's report of ranks that hung and that it has killed.
    """
    if hang is not None:
        return Cause(hang.text, Exit.HUNG, echo=hang.waits)
    reports = [json.loads(text) for _, text in read_each(scratch, RankFile.FAILURE.pattern)]
    reports.sort(key=lambda report: (report["echo"], report["trace"] is not None, report["time"]))
    killed = _killed(codes, reports)
    stopped = [report for report in reports if report["code"] == Exit.PREEMPTED]
    others = [report for report in reports if report["code"] != Exit.PREEMPTED]
    if stopped and not killed and all(report["echo"] for report in others):
        others = stopped
    first = others[0] if others else None
    crashed = first is not None and first["trace"] is not None and not first["echo"]
    silent = _silent(codes, reports)
    if silent and not killed and (first is None or first["echo"]):
        ranks = ", ".join(map(str, silent))
        how = f"exited during the run with exit code {codes[silent[0]]}, without reporting an error"
        return Cause(f"rank {ranks} {how}", Exit.FAILED)
    if killed and not crashed:
        said = [f"rank {rank} was killed by {signal.Signals(-codes[rank]).name}" for rank in killed]
        return Cause("; ".join(said), Exit.FAILED)
    if first and first["trace"] is None and not first["echo"]:
        return Cause(first["text"], first["code"], mistake=not first.get("restart_helps"))
    if first:
        if first.get("names_another"):
            return Cause(first["text"], first["code"], echo=True)
        text = f"rank {first['rank']} failed: {first['text']}"
        trace = "" if first["echo"] else first["trace"]  # it would show a collective that is not the cause
        return Cause(text, Exit.FAILED, trace, echo=first["echo"])
    return Cause(f"rank {min(codes)} ended with exit code {codes[min(codes)]}", Exit.FAILED)


def _killed(codes: Mapping[int, int], reports: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the ranks that a signal ended.

    NCCL's watchdog aborts a process whose collective fails (SIGABRT): that is no cause next to a rank that
    has reported an error of its own.
    """
    own_error = any(not report["echo"] and report["code"] != Exit.PREEMPTED for report in reports)
    dead = {rank: -code for rank, code in codes.items() if code < 0}
    return sorted(rank for rank, number in dead.items() if not (own_error and number == signal.SIGABRT))


def _silent(codes: Mapping[int, int], reports: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the ranks that ended by themselves, without reaching their end, and left no error."""
    return sorted(
        {rank for rank, code in codes.items() if code >= 0} - {report["rank"] for report in reports}
    )
