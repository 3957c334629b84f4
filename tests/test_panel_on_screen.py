"""A panel on screens of fixed sizes, and of a real run in a pseudo-terminal."""

import fcntl
import io
import os
import pty
import select
import signal
import struct
import sys
import termios
import threading
import time

import pyte
import pytest
from panels import Clock, Trained, shown
from rich.console import Console
from rich.text import Text

from nanotrain_core.monitors import terminal
from nanotrain_core.monitors.terminal import LockedConsole, Screen


@pytest.fixture
def panel():
    return Trained("laptop", 500, memory=lambda: "memory 12.3 of 141 GB", clock=Clock())


class Drawn:
    """A screen as a terminal of some size shows it."""

    def __init__(self, panel, width, height, monkeypatch):
        monkeypatch.setattr(terminal, "INTERVAL", 1000.0)  # it is drawn here, when the test says so
        self.file = io.StringIO()
        self.console = Console(
            file=self.file, force_terminal=True, width=width, height=height, soft_wrap=True, highlight=False
        )
        self.pyte = pyte.Screen(width, height)
        self.stream = pyte.Stream(self.pyte)
        self.screen = Screen(lambda w, h, plain: panel.lines(w, h, ascii_only=plain), self.console)
        self.screen.start()

    def look(self):
        self.screen._draw()
        return self.seen()

    def seen(self):
        self.stream.feed(self.file.getvalue().replace("\n", "\r\n"))
        self.file.seek(0)
        self.file.truncate()
        return [line.rstrip() for line in self.pyte.display if line.strip()]

    def resize(self, width, height):
        """As terminals that do not wrap what is there anew, which pyte is one of."""
        self.pyte.resize(height, width)
        self.console.size = (width, height)


@pytest.fixture
def draw(panel, monkeypatch):
    """Return a function that shows the panel on a screen of some size, until the test ends."""
    screens = []

    def begin(width, height):
        screens.append(Drawn(panel, width, height, monkeypatch))
        return screens[-1]

    yield begin
    for each in screens:
        each.screen.stop()


def test_what_is_printed_meanwhile_stands_above(panel, draw):
    drawn = draw(60, 20)
    panel.run(3)
    assert drawn.look() == shown(panel, 60)
    long = "key=" + "value" * 20
    drawn.screen.print("a line [with brackets]")
    drawn.screen.print(long)
    panel.run(9, first=4)
    drawn.screen.print("another")
    lines = drawn.look()
    assert lines == ["a line [with brackets]", long[:60], long[60:], "another", *shown(panel, 60)]
    drawn.screen.stop()
    drawn.screen.stop()
    assert drawn.seen() == lines
    assert not drawn.pyte.cursor.hidden


def test_many_more_lines_than_the_screen_has_leave_one_panel(panel, draw):
    drawn = draw(60, 12)
    for step in range(1, 40):
        panel.run(step, first=step)
        drawn.screen.print(f"line {step}\nof two")
        drawn.look()
    lines = drawn.look()
    assert lines[-4:] == shown(panel, 60)
    assert sum(line.startswith("laptop") for line in lines) == 1


def test_a_wider_terminal_is_used_at_the_next_look(panel, draw):
    drawn = draw(30, 20)
    panel.run(3)
    drawn.look()
    drawn.resize(100, 20)
    panel.run(4, first=4)
    assert drawn.look() == shown(panel, 100)


def test_a_narrower_terminal_has_wrapped_what_was_there_and_all_of_it_is_erased(panel, draw):
    drawn = draw(100, 20)
    panel.run(3)
    drawn.look()
    before = [line.cell_len for line in panel.lines(100)]
    drawn.console.size = (40, 20)
    drawn.screen._draw()
    wrapped = sum(-(-length // 40) - 1 for length in before)
    up = "\x1b[2K\x1b[1A"
    assert wrapped == 3
    assert drawn.file.getvalue().count("\x1b[1A") == wrapped + len(before) - 1
    assert drawn.file.getvalue().startswith(up * wrapped)


def test_a_screen_is_drawn_again_only_when_there_is_something_new(panel, draw):
    drawn = draw(60, 20)
    panel.run(3)
    drawn.look()
    drawn.screen._draw()
    assert drawn.file.getvalue() == ""


RECIPE = """
[run]
name = "tiny"
steps = 100000
device = "cpu"
ranks = 1
[batch]
sequences = 2
microbatch = 2
length = 8
[model]
use = "transformer"
vocab = 64
width = 16
layers = 1
heads = 2
[data]
use = "synthetic"
vocab = 64
[[monitor]]
use = "console"
[[monitor]]
use = "talks"
"""


def test_what_threads_print_is_not_overwritten_by_a_panel_that_grows_meanwhile(monkeypatch):
    """A print moves up by the height of the panel: another thread changed it before the print was written."""
    monkeypatch.setenv("TERM", "xterm-256color")
    out, turn, count = io.StringIO(), [0], 150
    console = LockedConsole()
    console.file, console.is_interactive, console._force_terminal = out, True, True
    shown = Screen(lambda *_: [Text(f"panel {turn[0]}.{row}") for row in range(1 + turn[0] % 5)], console)

    def talk():
        for number in range(count):
            shown.print(f"line {number} of it")

    talking, before = threading.Thread(target=talk), sys.getswitchinterval()
    shown.live.start()
    sys.setswitchinterval(1e-5)
    try:
        talking.start()
        while talking.is_alive():
            turn[0] += 1
            shown._draw()
    finally:
        sys.setswitchinterval(before)
    shown.live.stop()
    screen = pyte.Screen(80, count + 50)
    pyte.Stream(screen).feed(out.getvalue().replace("\n", "\r\n"))
    lines = [line.rstrip() for line in screen.display if line.startswith("line")]
    assert lines == [f"line {number} of it" for number in range(count)]


TALKS = """
import sys, attrs, structlog
from nanotrain_core.api import Component, hookimpl
@attrs.define(frozen=True, kw_only=True)
class Config:
    '''Talks.'''
@hookimpl
def nanotrain_register_monitor(register):
    register(Component(name="talks", config=Config, factory="talks:make"))
def make(config):
    from nanotrain_core.api.torch import Monitor
    class Talks(Monitor):
        def on_step(self, report):
            if report.step == 20:
                structlog.get_logger("x").warning("logged", long="x" * 100)
                print("printed")
    return Talks()
"""


def test_a_run_in_a_terminal_that_is_interrupted_leaves_it_as_it_was(tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "talks.py").write_text(TALKS)
    words = ["nanotrain_core.cli", "run", "recipe.toml", "--plugin", "talks.py", "--folder", "run"]
    pid, terminal_fd = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.environ.update(TERM="xterm-256color")
        for name in ("NO_COLOR", "COLUMNS", "LINES"):
            os.environ.pop(name, None)
        os.execv(sys.executable, [sys.executable, "-m", *words])
    fcntl.ioctl(terminal_fd, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 90, 0, 0))
    before = termios.tcgetattr(terminal_fd)
    screen = pyte.Screen(90, 30)
    stream, until, interrupted = pyte.ByteStream(screen), time.monotonic() + 60, False
    while time.monotonic() < until:
        if select.select([terminal_fd], [], [], 0.1)[0]:
            try:
                stream.feed(os.read(terminal_fd, 65536))
            except OSError:  # its other end is closed
                break
        begun = [line.split()[0] for line in screen.display if line.strip()]
        if not interrupted and {"printed", "update"} <= {*begun}:
            interrupted = True
            assert screen.cursor.hidden
            assert termios.tcgetattr(terminal_fd) == before
            os.write(terminal_fd, b"\x03")
    else:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(terminal_fd)
    lines = [line.rstrip() for line in screen.display if line.strip()]
    assert os.waitstatus_to_exitcode(status) == 130, lines
    assert not screen.cursor.hidden
    at = {
        word: [n for n, line in enumerate(lines) if word in line] for word in ("logged", "printed", "/100000")
    }
    assert [len(found) for found in at.values()] == [1, 1, 1], lines
    assert at["logged"] < at["printed"] < at["/100000"]
    assert "xxx" in lines[at["logged"][0] + 1]  # a long line goes on in the next, and is not cut
    assert "  interrupted" in lines[at["/100000"][0]]
    assert any(line.startswith("interrupted after step") for line in lines[at["/100000"][0] :])
