"""What takes long says so: now and then a line, on a terminal a bar, and nothing where it was quick."""

import io
import time

import pytest
import structlog
from structlog.testing import capture_logs

from nanotrain_core.run import progress_bar as module
from nanotrain_core.run.progress_bar import show_progress, silent


class Terminal(io.StringIO):
    def isatty(self):
        return True


def soon(known):
    """Wait until something is so, and fail if it is not so within ten seconds."""
    until = time.monotonic() + 10
    while not known():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(module, "OFTEN", 0.02)
    monkeypatch.setattr(module, "SOON", 0.0)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_a_line_tells_how_far_it_is(often):
    with capture_logs() as logs, show_progress("tokenizing", 4e9, "B") as advance:
        advance(1e9)
        soon(lambda: logs)
    first = {key: value for key, value in logs[0].items() if key != "seconds"}
    assert first == {
        **{"event": "tokenizing", "log_level": "info"},
        **{"done": "1.0 GB", "of": "4.0 GB", "percent": 25},
    }


def test_what_is_quick_or_within_something_else_or_on_another_rank_says_nothing(monkeypatch):
    with capture_logs() as logs:
        with show_progress("quick"):
            pass
        monkeypatch.setattr(module, "OFTEN", 0.01)
        with silent(), show_progress("inner", 1) as advance:
            advance(1)
            time.sleep(0.05)
        with structlog.contextvars.bound_contextvars(rank=1), show_progress("elsewhere"):
            time.sleep(0.05)
        with show_progress("outer"), show_progress("inner"):
            soon(lambda: logs)
    assert {entry["event"] for entry in logs} == {"outer"}


def test_a_bar_on_a_terminal_goes_away_in_the_end(often, monkeypatch):
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    with show_progress("loading weights", 10, "numbers") as advance:
        advance(5)
        soon(lambda: "5 of 10 numbers" in stream.getvalue())
    assert stream.getvalue().endswith("\x1b[2K")  # the bar's line is empty again
    assert "\x1b[?25h" in stream.getvalue()  # and the cursor is back


def test_errors_pass_through_and_the_next_one_is_shown(often):
    with pytest.raises(ZeroDivisionError), show_progress("fails"):
        raise ZeroDivisionError
    with capture_logs() as logs, show_progress("next"):
        soon(lambda: logs)
    assert {entry["event"] for entry in logs} == {"next"}


def test_it_decorates_functions():
    @show_progress("twice")
    def twice(number):
        return 2 * number

    assert [twice(1), twice(2)] == [2, 4]
