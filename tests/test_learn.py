"""Each lesson of docs/examples/learn prints what docs/learn.md shows, and is short."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LESSONS = sorted((ROOT / "docs/examples/learn").glob("[01][0-9]_*.py"))
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?=%|[^\w.]|\.?$)")
#: The others take 5 to 20 seconds each.
CHEAP = {"01"}


def shown():
    """Return the block of text on the page below each lesson's link, by the lesson's number."""
    page = (ROOT / "docs/learn.md").read_text(encoding="utf-8")
    sections = re.findall(r"learn/(\d\d)_\w+\.py\)\n.*?```text\n(.*?)\n```", page, re.DOTALL)
    return {number: text.splitlines() for number, text in sections}


def parts(line):
    """Return a line without its numbers, and these."""
    return NUMBER.sub("#", line.rstrip()), [float(found.replace(",", "")) for found in NUMBER.findall(line)]


def test_every_lesson_is_on_the_page_and_short():
    assert sorted(shown()) == [file.name[:2] for file in LESSONS] == [f"{n:02}" for n in range(1, 11)]
    assert all(len(file.read_text(encoding="utf-8").splitlines()) <= 80 for file in LESSONS)


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, id=file.stem, marks=[] if file.name[:2] in CHEAP else pytest.mark.full)
        for file in LESSONS
    ],
)
def test_a_lesson_prints_what_the_page_shows(file):
    """Words exactly; numbers to 15%, since losses and loads of other processors differ a little."""
    done = subprocess.run(
        [sys.executable, file], capture_output=True, text=True, timeout=300, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    found, expected = done.stdout.splitlines(), shown()[file.name[:2]]
    assert [parts(line)[0] for line in found] == [parts(line)[0] for line in expected]
    for line, wanted in zip(found, expected, strict=True):
        assert parts(line)[1] == pytest.approx(parts(wanted)[1], rel=0.15), line
