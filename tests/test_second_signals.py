"""Which signals are one request, for the launcher and for ranks alike, and which are a second."""

import os
import signal
import subprocess
import sys
import time

import pytest
from command import finish, start

from nanotrain_core.errors import Exit
from nanotrain_core.launch.process_groups import ending_process_groups
from nanotrain_core.launch.signal_forwarding import SignalForwarder
from nanotrain_core.run import stop
from nanotrain_core.run.stop import REPEAT_WINDOW, StopRequest

INT, TERM, HUP, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1

#: Signals with the seconds between, and whether the last is a second request.
CASES = [
    (TERM, 0.0, HUP, False),
    (HUP, 0.0, TERM, False),
    (USR1, 0.0, USR1, False),
    (USR1, 2 * REPEAT_WINDOW, TERM, True),
    (TERM, REPEAT_WINDOW / 2, TERM, False),
    (TERM, 2 * REPEAT_WINDOW, TERM, True),
    (TERM, 2 * REPEAT_WINDOW, HUP, True),
    (TERM, 0.0, INT, True),
    (TERM, 2 * REPEAT_WINDOW, INT, True),
    (INT, 0.0, INT, True),
    (INT, 0.0, TERM, True),
]


@pytest.fixture
def clock(monkeypatch):
    """Yield the time that passes for the code, and for it alone."""

    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr("nanotrain_core.launch.signal_forwarding.time", clock)
    monkeypatch.setattr(stop, "time", clock)
    return clock


@pytest.mark.parametrize(("first", "seconds", "last", "is_second"), CASES)
def test_a_launcher_kills_at_a_second_request(clock, tmp_path, first, seconds, last, is_second):
    launcher = SignalForwarder(tmp_path, grace=100.0)
    launcher._receive(first, None)
    assert launcher._deadline == clock.now + 100
    clock.now += seconds
    launcher._receive(last, None)
    assert (launcher._deadline <= clock.now) == is_second
    assert launcher.received == first  # ranks are told of one


@pytest.mark.parametrize(("first", "seconds", "last", "is_second"), CASES)
def test_a_rank_acts_as_without_us_at_a_second_request(clock, first, seconds, last, is_second):
    came = []
    before = {
        number: signal.signal(number, lambda number, frame: came.append(number))
        for number in (INT, TERM, HUP, USR1)
    }
    try:
        request = StopRequest()
        with request.on_signals():
            signal.raise_signal(first)
            clock.now += seconds
            signal.raise_signal(last)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert came == ([last] if is_second else [])
    assert request._requested == {stop.SIGNALS[first]}


def test_a_script_keeps_its_own_use_of_sigusr1():
    """Such as faulthandler's, which Python does not tell from none; a command handles it from its start."""
    before = signal.signal(USR1, signal.SIG_DFL)
    try:
        with StopRequest().on_signals():
            assert signal.getsignal(USR1) == signal.SIG_DFL
    finally:
        signal.signal(USR1, before)


#: A process whose last act, when the interpreter is gone, takes a second.
ENDS = """
import ctypes, sys
from nanotrain_core.run.stop import keep_exit_code
libc = ctypes.CDLL(None)
libc.on_exit(libc.sleep, None)  # sleep(code)
print("ends", flush=True)
sys.exit(keep_exit_code(1))
"""


def test_a_signal_while_the_interpreter_shuts_down_does_not_change_the_exit_code():
    process = subprocess.Popen([sys.executable, "-c", ENDS], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ends\n"
    for _ in range(5):
        time.sleep(0.2)
        process.send_signal(TERM)
    assert process.wait(timeout=60) == 1


#: A process that is terminated in code which catches what a handler raises, or makes another error of it.
STARTS = """
import signal
from nanotrain_core.run.stop import end_on_sigterm
class Field:
    def __set_name__(self, owner, name): signal.raise_signal(signal.SIGTERM)
end_on_sigterm(lambda problem: print(problem, flush=True))
try:
    class Options: field = Field()
except Exception:
    pass
print("not ended", flush=True)
"""


def test_no_code_can_swallow_a_signal_while_a_run_starts():
    done = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True, check=False)
    text = (
        "ended by SIGTERM outside of a training step: nothing was saved, only complete checkpoints remain\n"
    )
    assert (done.returncode, done.stdout) == (Exit.PREEMPTED, text)


#: A command that is terminated as soon as it imports anything.
IMPORTS = """
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the tests' process may ignore it, and children inherit that
from nanotrain_core.cli import main
class Terminates:
    def find_spec(self, name, path=None, target=None): signal.raise_signal(signal.SIGTERM)
sys.meta_path.insert(0, Terminates())
main({words!r})
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["run", "small.toml"], Exit.PREEMPTED),
        (["doctor", "--then", "nanotrain", "run", "small.toml"], Exit.PREEMPTED),
        (["check", "small.toml"], -TERM),
    ],
)
def test_a_command_that_trains_handles_signals_before_it_imports_anything(words, code):
    """As the first process of a container it would lose them without a handler."""
    program = IMPORTS.format(words=words)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    said = (
        "nanotrain: ended by SIGTERM before training began: nothing was saved\n"
        if code == Exit.PREEMPTED
        else ""
    )
    assert (done.returncode, done.stderr) == (code, said)


QUICK = {("1", 0.4), ("1", 1.5), ("4", 1.6)}


@pytest.mark.full_cases("4-1.6")
@pytest.mark.parametrize(
    ("ranks", "seconds"),
    [
        pytest.param(ranks, seconds, marks=[] if (ranks, seconds) in QUICK else pytest.mark.full)
        for ranks in ("1", "4")
        for seconds in (0.4, 0.7, 1.0, 1.3, 1.5, 1.6, 1.9, 2.2, 2.5, 2.8)
    ],
)
def test_ctrl_c_ends_a_run_that_starts_without_a_traceback(tmp_path, ranks, seconds):
    """The terminal interrupts all processes of its group, in the midst of torch's import, or elsewhere.

    The last line says that nothing was saved, if so: the one before may have promised a checkpoint.
    """
    process = start("run", "laptop", "--nproc", ranks, cwd=tmp_path, start_new_session=True)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    ended = finish(process)
    assert ended.code == Exit.INTERRUPTED
    assert "Traceback" not in ended.err
    told = ended.err.splitlines()
    saved = [*tmp_path.glob("runs/*/checkpoints/step-*")]
    assert len(told) == 1 or (len(told) == 2 and "stopping after this step and a checkpoint" in told[0])
    assert saved or "nothing was saved" in told[-1] or "without a last checkpoint" in told[-1]


def test_process_groups_end_without_a_torch_that_is_imported_in_part(monkeypatch):
    import torch.distributed

    monkeypatch.setattr(torch.distributed.__spec__, "_initializing", True, raising=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", None)
    with pytest.raises(KeyboardInterrupt), ending_process_groups(kept=True):
        raise KeyboardInterrupt
