"""``docs/site/external.py`` finds links to other sites, and those that lead nowhere."""

import runpy
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

EXTERNAL = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "site" / "external.py"))


class Site(BaseHTTPRequestHandler):
    """Has one page, and one that programs may not read."""

    def do_GET(self):
        self.send_response({"/here": 200, "/people-only": 403}.get(self.path, 404))
        self.end_headers()

    def log_message(self, *words):
        """Keep quiet."""


@pytest.fixture
def site():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_page_that_is_gone_is_told_with_its_status(site):
    found = [EXTERNAL["problem"](f"{site}/{name}") for name in ("here", "people-only", "gone")]
    assert found == ["", "", "404 Not Found"]


def test_a_site_that_does_not_answer_is_a_problem():
    assert EXTERNAL["problem"]("http://127.0.0.1:1/") != ""


def test_links_are_found_once_without_fragments_and_examples(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "[a](https://arxiv.org/abs/1909.08053) (https://arxiv.org/abs/1909.08053#top).\n"
        "Open http://127.0.0.1:8000/, `https://hooks.example.org/T0`, <https://ui.perfetto.dev>.\n"
    )
    assert EXTERNAL["links"]([page]) == {
        "https://arxiv.org/abs/1909.08053": page,
        "https://ui.perfetto.dev": page,
    }


def test_the_documentation_links_to_other_sites():
    addresses = EXTERNAL["links"](EXTERNAL["documentation"]())
    assert "https://github.com/karpathy/nanoGPT" in addresses
