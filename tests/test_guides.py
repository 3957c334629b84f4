"""Every number of docs/guides is what its script computes, and every picture is drawn from the same."""

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[1] / "docs/guides"
PAGES = sorted(GUIDES.glob("*.md"))
#: Those that train or plan take 5 to 20 seconds each.
DEAR = {"zero_in_bytes", "what_a_checkpoint_holds", "reading_plan_explain_report"}
NUMBER = re.compile(r"(?<![\w.\]])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?=%|[^\w.]|\.?$|\.\s)")
#: Losses of other processors differ a little; all else is arithmetic on numbers that are drawn alike.
TOLERANCE = {True: 0.15, False: 0.02}


def blocks(text):
    """Return the lines of a page's blocks of output."""
    found = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line.rstrip() for block in found for line in block.splitlines() if line.strip()]


def values(text):
    return [float(found.replace(",", "")) for found in NUMBER.findall(text)]


def prose(text):
    """Return a page without code, links' targets and what it cites."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", text)
    return re.sub(r"arXiv[\s\d.,and]+|section [\d.]+", " ", text)


def script(page):
    """Return a guide's module."""
    if str(GUIDES) not in sys.path:
        sys.path.insert(0, str(GUIDES))
    return import_module(page.stem)


def parametrized(dear):
    return [
        pytest.param(page, id=page.stem, marks=[pytest.mark.full] if page.stem in dear else [])
        for page in PAGES
    ]


def test_every_guide_has_a_script_a_picture_and_a_place_in_the_site():
    site = (GUIDES.parent / "site/mkdocs.yml").read_text(encoding="utf-8")
    learn = (GUIDES.parent / "learn.md").read_text(encoding="utf-8")
    assert len(PAGES) == 9
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert f"python docs/guides/{page.stem}.py\n" in text
        assert f"](images/{page.stem}.svg)" in text
        assert f": guides/{page.name}\n" in site
        assert f"](guides/{page.name})" in learn


@pytest.mark.parametrize("page", parametrized(DEAR))
def test_a_guide_shows_what_its_script_prints(page, capsys):
    """Words exactly, numbers nearly; and what its sentences say beside are numbers that were printed."""
    script(page).main()
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    shown = blocks(page.read_text(encoding="utf-8"))
    assert [NUMBER.sub("#", line) for line in printed] == [NUMBER.sub("#", line) for line in shown]
    for line, wanted in zip(printed, shown, strict=True):
        assert values(line) == pytest.approx(values(wanted), rel=TOLERANCE[line.startswith("losses")]), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_numbers_of_sentences_are_those_of_the_script(page):
    """Each that is no small count is printed, or stands in the script as a value that it computes with."""
    text = page.read_text(encoding="utf-8")
    source = page.with_suffix(".py").read_text(encoding="utf-8")
    known = {*values("\n".join(blocks(text))), *values(source), *map(float, range(17))}
    told = values(prose(text))
    assert [number for number in told if number not in known] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_picture_of_a_guide_is_drawn_from_its_numbers(page):
    """Write it anew with ``python docs/guides/NAME.py --draw``."""
    (found,) = script(page).pictures().items()
    name, drawn = found
    kept = (GUIDES / f"images/{name}.svg").read_text(encoding="utf-8")
    number = re.compile(r"-?\d+\.?\d*")
    assert number.sub("#", drawn) == number.sub("#", kept)
    ours, theirs = ([float(each) for each in number.findall(text)] for text in (drawn, kept))
    assert ours == pytest.approx(theirs, abs=1.0)
