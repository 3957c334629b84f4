"""The report in a browser: every figure is drawn, without a request and without a complaint."""

import re
import shutil
import subprocess

import pytest
from made_up import full_run
from nanotrain_report.folder import open_run
from nanotrain_report.html import page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")

#: Notes what the page fetched, and what its policy kept it from.
WITNESS = """<script>
addEventListener("securitypolicyviolation", (event) => { document.body.dataset.refused = event.blockedURI });
const names = () => performance.getEntriesByType("resource").map((entry) => entry.name);
setInterval(() => { document.body.dataset.fetched = names() }, 50);
</script>"""


def test_every_figure_is_drawn_and_nothing_is_fetched(tmp_path):
    text = page([open_run(full_run(tmp_path / "run", 60))])
    file = tmp_path / "report.html"
    file.write_text(text.replace("<body>", "<body>" + WITNESS, 1))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    options += ["--window-size=1280,2000", "--virtual-time-budget=20000", "--enable-logging=stderr"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri()]
    done = subprocess.run([CHROMIUM, *options], check=True, capture_output=True, text=True, timeout=120)
    assert 'data-drawn="all"' in done.stdout
    drawn = len(re.findall(r'class="plot"[^>]*><div[^>]*class="bk-', done.stdout))
    assert drawn == text.count('class="plot"') - folded(text)
    assert 'data-fetched=""' in done.stdout
    assert "data-refused" not in done.stdout
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line and "[bokeh" not in line]
    assert complaints == []


def folded(text):
    """Return how many figures lie in what is folded away: they are drawn when it is opened."""
    parts = re.findall(r'<details class="group">.*?</details>', text, flags=re.DOTALL)
    return sum(part.count('class="plot"') for part in parts)
