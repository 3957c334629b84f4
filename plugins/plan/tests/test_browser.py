"""Pages in a browser: every picture is drawn, without a request and without a complaint."""

import re
import shutil
import subprocess

import pytest

from nanotrain_core.cli import main

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]


RECIPE = """
[run]
name = "tiny"
steps = 10
ranks = 2
[batch]
sequences = 8
microbatch = 2
length = 16
[model]
use = "transformer"
layers = 3
width = 32
heads = 4
vocab = 64
[data]
use = "synthetic"
vocab = 64
"""


def test_pictures_are_drawn_and_nothing_is_fetched(tmp_path):
    recipe, page = tmp_path / "tiny.toml", tmp_path / "page.html"
    recipe.write_text(RECIPE)
    assert main(["explain", str(recipe), "--html", str(page)]) == 0
    # Sizes of the pictures and what was fetched, as the browser has them; the page itself runs no scripts.
    text = page.read_text().replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'")
    witness = """<script>addEventListener("load", () => {
    const pictures = [...document.querySelectorAll("svg")];
    document.body.dataset.drawn = pictures.map((e) => e.getBoundingClientRect().height > 10);
    document.body.dataset.fetched = performance.getEntriesByType("resource").length;
    document.body.dataset.wide = document.documentElement.scrollWidth > innerWidth; })</script>"""
    page.write_text(text.replace("<body>", f"<body>{witness}"))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    options += ["--window-size=800,2000", "--virtual-time-budget=5000", "--enable-logging=stderr"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run([CHROMIUM, *options], check=True, capture_output=True, text=True, timeout=240)
    drawn = re.search('data-drawn="([^"]*)"', done.stdout)
    assert drawn is not None
    assert drawn[1].split(",") == ["true"] * text.count("<svg")
    assert 'data-fetched="0"' in done.stdout
    assert 'data-wide="false"' in done.stdout
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
