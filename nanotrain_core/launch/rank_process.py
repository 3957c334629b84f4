"""The main function of a rank's process: its attempts at the run, one after the other.

Without ``run.in_process_restart`` there is one, with which the process ends. With it, a rank that has failed
only because another one did ends its attempt and waits for the launcher, which starts the failed rank in a
new process, and lets the others begin again in theirs. What an attempt has created is released: the engine
with its model, process groups, compiled code. What a process has is kept: its modules, its context on a GPU,
its host's memory. The next attempt composes the run anew and resumes it as new processes would, from
snapshots in memory or a checkpoint: no state of the interrupted step is used.

Most ranks notice that another one is gone: gloo closes its connections, which ends a collective with an
error, and so on from rank to rank. One that does not within a second, for example in the barrier of a
transport of its own or in an NCCL collective, is interrupted: by a signal to its main thread, and then by
aborting NCCL's communicators, which ends kernels that wait for the dead rank with undefined results. The
signal comes first, so that the main thread executes nothing after them. This is done without in-process
restarts too: an attempt that ends in order tells its monitors, so that alerts are sent. Snapshots and
checkpoints of such a step are never used, as the dead rank has none. A process that does not end its attempt
in time, or keeps threads or a setting of it (:mod:`~nanotrain_core.launch.process_state`), is replaced like a
dead one: a restart is never worse than with new processes.

Source of the idea: the in-process restart of NVIDIA's Resiliency Extension (nvidia-resiliency-ext), which
restarts a training function in the processes that survive.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import queue
import signal
import threading
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

import attrs

from nanotrain_core.errors import Exit, describe
from nanotrain_core.launch.cause import AttemptEnded, exit_code_of, leave_failure
from nanotrain_core.launch.cuda import survive_aborts
from nanotrain_core.launch.environment import Ranks
from nanotrain_core.launch.process_groups import abort_process_groups
from nanotrain_core.launch.process_state import THREADS, ProcessState
from nanotrain_core.launch.worker import Job
from nanotrain_core.run import log
from nanotrain_core.run.folder_owner import is_alive
from nanotrain_core.run.stop import SIGNALS, end_on_sigterm, handle_ending_signals
from nanotrain_core.watch.progress import FAILED, START, Progress
from nanotrain_core.watch.scratch import RankFile

#: Messages between the launcher and a rank: a rank has returned from its job; it has ended an attempt that
#: another rank's failure ended; the launcher asks it to.
DONE, LEFT, LEAVE = "done", "left", "leave"
#: Seconds for a rank to notice by itself that another one is gone, before its main thread is interrupted.
NOTICE = 1.0
#: Seconds between two looks at whether an attempt ends.
POLL = 0.05
ENDED = "another rank is gone, and the launcher ends the attempt"
#: Interrupts the main thread. Schedulers do not send it, and without a handler it has no effect.
INTERRUPT = signal.SIGURG


def serve(connection: Connection, job: Job) -> None:
    """Run ``job`` as one rank whenever the launcher sends the environment of an attempt, until it sends None.

    A failure is left in the scratch folder for the launcher to report, and ends the process immediately: a
    failed rank must not wait for others in a destructor.
    """
    os.setpgid(0, 0)  # the terminal's Ctrl-C reaches only the launcher, which forwards it once
    threading.Thread(target=_exit_with_launcher, args=(job.launcher_pid,), daemon=True).start()
    if job.in_process_restart:
        survive_aborts()
    process = RankProcess(connection)
    while (environment := process.inbox.get()) is not None:
        os.environ.update(environment)
        connection.send(process.attempt(job))


def _exit_with_launcher(pid: int | None) -> None:
    """End this rank when its launcher is gone, for whatever reason: no other process would stop it."""
    while pid is not None:
        time.sleep(1)
        if not is_alive(pid):
            os._exit(Exit.FAILED)


class RankProcess:
    """Runs attempts in the main thread, and ends one when the launcher asks for it."""

    def __init__(self, connection: Connection) -> None:
        """Begin to receive what the launcher sends through ``connection``."""
        self.connection = connection
        self.inbox: queue.SimpleQueue[dict[str, str] | None] = queue.SimpleQueue()
        self.progress = Progress()
        """What the engine has begun in the attempt."""
        self.before: ProcessState | None = None
        """The state of this process before the first attempt."""
        self._within = self._asked = False
        """Whether there is an attempt, and whether it is to end."""
        self._left = threading.Event()
        """Set while there is no attempt."""
        self._left.set()
        self._told = threading.Event()
        """Set once the launcher has asked for the end of the attempt."""
        self._pid = Path()
        """The file in the launcher's folder that has this process's id."""
        threading.Thread(target=self._receive, name="launcher", daemon=True).start()

    def attempt(self, job: Job) -> tuple[str, str | int]:
        """Return :data:`DONE` and how the run ended or, if the process can be used again, :data:`LEFT` and
        the exit code that it would have."""
        ranks = Ranks.detect()
        assert ranks is not None
        assert job.scratch is not None
        scratch = Path(job.scratch)
        pid = self._pid = RankFile.PID.of(scratch, ranks.rank)
        end_on_sigterm(partial(leave_failure, scratch, ranks.rank))  # until training handles signals
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        pid.write_text(str(os.getpid()))
        self.progress = Progress()
        job = attrs.evolve(job, process=self)
        signal.signal(INTERRUPT, self._interrupted)
        if job.in_process_restart:
            self.before = self.before or ProcessState()
        try:
            self._within = True
            if self._asked:
                raise AttemptEnded(ENDED)
            end = job.run(ranks)
            self._within = False
            self._left.set()
            handle_ending_signals(signal.SIG_DFL)  # outside an attempt there is nothing to end in order
            pid.unlink(missing_ok=True)
            return DONE, end
        except BaseException as problem:
            self._within = False
            self._left.set()
            handle_ending_signals(signal.SIG_DFL)
            echo, code = leave_failure(scratch, ranks.rank, problem), exit_code_of(problem)
            if not (job.in_process_restart and echo) or self.progress.phase == START:
                if echo:
                    self._told.wait(1)  # let the launcher detect the rank that went away first
                os._exit(code)
        # Only here, without the exception and its frames, nothing refers to the engine.
        pid.unlink(missing_ok=True)  # it outlives another rank, and must not be killed for that
        with open(os.devnull, "w") as nowhere:
            # A destructor may wait for a collective that no rank will end, without giving way to a thread.
            faulthandler.dump_traceback_later(2 * THREADS, exit=True, file=nowhere)
            assert self.before is not None
            left = release(self.before)
            faulthandler.cancel_dump_traceback_later()
        if left:
            log.say(f"rank {ranks.rank} gets a new process: its attempt has left {left}", level="warning")
            os._exit(code)
        return LEFT, code

    def _receive(self) -> None:
        while True:
            try:
                message = self.connection.recv()
            except (EOFError, OSError):  # the launcher is gone
                os._exit(Exit.FAILED)
            if message == LEAVE:
                try:
                    self._told.set()
                    self._leave()
                except Exception:  # of an abort: without this thread the process cannot be used
                    os._exit(Exit.FAILED)
                continue
            if message is not None:
                self._asked = False
                self._told.clear()
                self._left.clear()
            self.inbox.put(message)

    def _leave(self) -> None:
        """Interrupt an attempt that does not end; let one that does be told to monitors, such as alerts."""
        if not self._left.wait(NOTICE):
            self.interrupt()
        while not self._left.wait(POLL):
            if self.progress.phase == FAILED:
                self._pid.unlink(missing_ok=True)  # from now on it may outlive another rank
                return

    def interrupt(self) -> None:
        """End the attempt, from another thread. After a failure its main thread is left to end in order."""
        self._asked = True
        if self._within:
            if self.progress.phase != FAILED:
                signal.pthread_kill(threading.main_thread().ident or 0, INTERRUPT)
            abort_process_groups()

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self._asked and self._within:  # otherwise someone else has sent the signal
            self._within = False
            raise AttemptEnded(ENDED)


def release(before: ProcessState) -> str:
    """Free what an attempt has left in this process; return what cannot be, such as a thread; or ""."""
    import torch

    try:
        torch._dynamo.reset()  # compiled code, which refers to modules and process groups
        gc.unfreeze()
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
            torch.accelerator.empty_cache()
    except Exception as problem:  # the device is unusable
        return describe(problem)
    return before.left()
