"""The race against an earlier checkout: which side is slower, and what is told of what cannot be raced."""

import sys

import pytest

from benchmarks.__main__ import main
from benchmarks.earlier import ROOT, Ratio, cells, measure


def test_a_side_that_takes_longer_now_misses_the_bar():
    slower = Ratio("x", 90.0, 100.0, (0.9, 0.91, 0.89), (1.0, 1.0, 1.0))
    as_fast = Ratio("x", 98.0, 100.0, (0.98, 0.97, 0.99), (0.5, 0.5, 0.5))
    assert (slower.passed, as_fast.passed) == (False, True)


def test_a_folder_that_is_no_checkout_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["earlier", "--checkout", str(tmp_path), "--python", sys.executable])
    assert end.value.code == 2
    assert f"{tmp_path} is no checkout: it has no folder nanotrain_core" in capsys.readouterr().err


def test_a_case_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit) as end:
        main(["earlier", "fp32-1-tread", "--checkout", str(ROOT), "--python", sys.executable])
    assert end.value.code == 2
    assert "no case named fp32-1-tread; there are fp32-1-thread, " in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("name", ["fp32-1-thread", "ddp-2-ranks"])
def test_this_checkout_is_about_as_fast_as_itself(name):
    found = measure(cells()[name], ROOT, sys.executable, rounds=2, steps=1)
    assert len(found.ratios) == len(found.clock_ratios) == 2
    assert 0.2 < found.now / found.earlier < 5
