"""What a terminal shows of a run, on screens of fixed sizes, and of a real run in a pseudo-terminal."""

import fcntl
import io
import math
import os
import pty
import select
import signal
import struct
import sys
import termios
import threading
import time
from itertools import pairwise, product

import attrs
import pyte
import pytest
from rich.console import Console
from rich.text import Text

from nanotrain_core.builtin.configs import ConsoleConfig
from nanotrain_core.contracts import EvaluationReport, MetricsReport, StepReport
from nanotrain_core.monitors import terminal
from nanotrain_core.monitors.console import Console as ConsoleMonitor
from nanotrain_core.monitors.lines import SinceLine, step_fields
from nanotrain_core.monitors.panel import Panel, bar, clock_time
from nanotrain_core.monitors.sparkline import MOST, Points, sparkline
from nanotrain_core.monitors.terminal import LockedConsole, Screen


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def report(step, loss, **more):
    given = {"losses": {"lm": loss}, "grad_norm": 1.25, "lr": 3e-4, "tokens": step, "seconds": 0.083}
    return StepReport(step=step, loss=loss, tokens_per_second=12345.6, **{**given, **more})


class Trained(Panel):
    """Half a second for a step."""

    def run(self, last, *, first=1, seconds=0.5, **more):
        for step in range(first, last + 1):
            self.clock.now += seconds
            self.step(one := report(step, 8.0 / step, **more), step_fields(one, 500, 0.42))


@pytest.fixture
def panel():
    return Trained("laptop", 500, memory=lambda: "memory 12.3 of 141 GB", clock=Clock())


def shown(panel, width=80, height=25, **options):
    return [line.plain.rstrip() for line in panel.lines(width, height, **options)]


def test_a_line_has_the_mean_of_all_steps_since_the_line_before():
    """Reports of steps 4, 6 and 7, after a line for step 3, of 100 tokens a step."""
    since = SinceLine(3)
    for step, seconds in ((4, 1.0), (6, 2.0), (7, 4.0)):
        since.add(last := attrs.evolve(report(step, 1.0, seconds=seconds), tokens_per_second=100 / seconds))
    found = since.mean(last)
    assert found.seconds == (1.0 + 2 * 2.0 + 4.0) / 4
    assert found.tokens_per_second == pytest.approx(400 / 9)
    assert attrs.evolve(found, seconds=4.0, tokens_per_second=25.0) == last


def test_a_line_over_a_border_of_phases_has_the_mean_flops_of_a_token():
    """A step of 100 tokens at 10 FLOPs each, then one of 300 at 30."""
    since = SinceLine(0)
    for step, (tokens, flops) in enumerate([(100.0, 10.0), (300.0, 30.0)], 1):
        last = report(step, 1.0, seconds=2.0)
        since.add(last := attrs.evolve(last, tokens_per_second=tokens / 2, flops_per_token=flops))
    assert since.mean(last).flops_per_token == (100 * 10 + 300 * 30) / 400


def test_a_panel_says_what_matters_in_lines_of_their_own(panel):
    panel.run(100, losses={"lm": 0.07, "mtp": 0.01})
    panel.evaluated(EvaluationReport(50, 3.5, 1.5, 9))
    panel.evaluated(EvaluationReport(100, 4.0, 1.75, 9))
    panel.saved_now(90)
    panel.clock.now += 65
    panel.health = "step 100: gradients are very large: lower lr."
    head, loss, validation, *rest = shown(panel, 120)
    assert head == "laptop      " + "━" * 8 + "━" * 32 + "  100/500  3:20 left"
    assert loss.startswith("loss        0.0800    ██▇")
    assert loss.endswith("▁  lm 0.0700   mtp 0.0100")
    assert validation.startswith("validation  4.0000    ▁█ ")
    assert validation.endswith("at step 100   1.7500 bits/byte   best 3.5000 at step 50")
    assert rest == [
        "speed       12,346 tokens/s   83 ms/step   MFU 42.0%   memory 12.3 of 141 GB",
        "update      grad norm 1.250   lr 3.00e-04",
        "saved       step 90   1:05 ago",
        "health      step 100: gradients are very large: lower lr.",
    ]


def test_it_shows_what_every_monitor_says_of_health(panel):
    """A slow rank, said as ``health/stragglers``, was not shown."""
    console = ConsoleMonitor(ConsoleConfig())
    console.panel = panel
    panel.run(1)
    console.on_metrics(MetricsReport(1, {}, texts={"health/stragglers": "rank 3 is slow.", "x": "other"}))
    assert shown(panel)[-1] == "health      rank 3 is slow."
    console.on_metrics(MetricsReport(2, {}, texts={"health": "step 1: bad.", "health/stragglers": "rank 3."}))
    assert shown(panel)[-1] == "health      step 1: bad. rank 3."
    console.on_metrics(MetricsReport(3, {}, texts={"healthy": "other"}))
    assert shown(panel)[-1] == "health      step 1: bad. rank 3."


def test_what_is_said_of_health_has_three_lines_at_most(panel):
    panel.run(1)
    panel.health = "step 1: " + "gradients are very large: lower lr. " * 8
    *_, first, second, third = shown(panel, 60)
    assert first.startswith("health      step 1: gradients are very large")
    assert second.startswith(" " * 12)
    assert third.endswith(" ...")
    panel.health = ""
    assert shown(panel, 60)[-1].startswith("update")


@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_panel_fits_every_terminal(panel, ascii_only):
    for last, first in ((0, 1), (30, 1), (700, 31)):
        panel.run(last, first=first)
        panel.evaluated(EvaluationReport(max(1, last), 3.5, None, 9))
        for width, height in product((1, 2, 5, 13, 20, 30, 40, 80, 200), (2, 4, 25)):
            lines = panel.lines(width, height, ascii_only=ascii_only)
            assert 0 < len(lines) < height
            assert all(line.cell_len < max(2, width) for line in lines)
            assert not ascii_only or all(line.plain.isascii() for line in lines)


def test_before_the_first_step_a_panel_says_what_everybody_waits_for(panel):
    panel.phase = lambda: "forward and backward"
    shown(panel)
    panel.clock.now += 12
    (head,) = shown(panel)
    assert head.endswith("first step 12s")
    panel.phase = lambda: "evaluation"
    shown(panel)
    panel.clock.now += 3
    assert shown(panel)[0].endswith("evaluating 3s")


def test_a_long_checkpoint_is_said_and_a_short_one_is_not(panel):
    panel.run(4)
    panel.phase = lambda: "checkpoint"
    assert shown(panel)[0].endswith("4/500  4:08 left")
    panel.clock.now += 2
    assert shown(panel)[0].endswith("saving a checkpoint 2s")


def test_the_time_left_counts_what_is_no_training_and_begins_anew_after_a_rollback(panel):
    panel.run(10, seconds=1.0)
    panel.clock.now += 90.0  # an evaluation
    panel.run(11, first=11, seconds=1.0)
    assert panel.seconds_left() == pytest.approx((10 + 90) / 10 * 489)
    panel.rolled_back()
    assert panel.seconds_left() is None


def test_a_history_keeps_old_and_new_values_alike_in_bounded_memory():
    points = Points()
    for number in range(10 * MOST):
        points.add(float(number))
        assert len(points.values) < MOST
    steps = {round(b - a, 3) for a, b in pairwise(points.values)}
    assert steps == {16.0}
    assert points.recent()[0] == pytest.approx(5 * MOST, rel=0.05)


def test_a_sparkline_has_values_of_every_sort():
    assert sparkline([], 5) == ""
    assert sparkline([1.0, 1.0], 5) == "▁▁"
    assert sparkline([math.nan, 0.0, 7.0, math.inf], 4) == "!▁█!"
    assert sparkline([0.0, 2.0, 4.0, 6.0], 2) == "▁█"
    assert sparkline([0, 1], 2, ascii_only=True) == "_@"


def test_bars_and_times():
    assert [bar(x, 4).plain for x in (0.0, 0.125, 0.5, 2.0)] == ["━━━━", "╸━━━", "━━━━", "━━━━"]
    assert bar(0.5, 4, ascii_only=True).plain == "##.."
    assert [clock_time(x) for x in (0, 59.6, 3599, 7200, 200000)] == [
        "0s",
        "1:00",
        "59:59",
        "2:00:00",
        "2d 7h",
    ]


# --- on a screen ------------------------------------------------------------------------------------


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
