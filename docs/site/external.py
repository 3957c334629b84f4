"""``python docs/site/external.py``: ask whether pages elsewhere that the docs link to are there.

It needs the network, so neither tests nor CI run it. Exit code 1 if a page is gone. Links within the
documentation are checked by ``mkdocs build --strict``.
"""

from __future__ import annotations

import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urldefrag, urlsplit

ROOT = Path(__file__).parents[2]

LINK = re.compile(r"https?://[^\s)>\"'`\]]+")
#: Names that are no public page: this machine's, and those that RFC 2606 keeps for examples.
NOT_ASKED = re.compile(r"(localhost|127\.0\.0\.1|(.*\.)?example(\.(com|org|net))?)$")
SECONDS = 20.0


def links(pages: Iterable[Path]) -> dict[str, Path]:
    """Return the addresses that pages link to, without fragments, each with the first page that does."""
    found: dict[str, Path] = {}
    for page in pages:
        for link in LINK.findall(page.read_text("utf-8")):
            address, _ = urldefrag(link.rstrip(".,;:"))
            if not NOT_ASKED.match(urlsplit(address).hostname or ""):
                found.setdefault(address, page)
    return found


def problem(address: str) -> str:
    """Return why an address has no page; empty if it has. One that forbids programs (403, 429) has."""
    request = urllib.request.Request(address, headers={"User-Agent": "Mozilla/5.0 (link check)"})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        return "" if error.code in (403, 429) else f"{error.code} {error.reason}"
    except (OSError, ValueError) as error:
        return str(error)


def documentation() -> list[Path]:
    """Return the Markdown files of the documentation and of plugins."""
    return sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "plugins").glob("*/*.md")])


def main() -> int:
    """Print each link that has no page."""
    asked = links(documentation())
    gone = {address: why for address in asked if (why := problem(address))}
    for address, why in gone.items():
        print(f"{asked[address].relative_to(ROOT)}: {address}: {why}", file=sys.stderr)
    print(f"{len(asked)} links to other sites, {len(gone)} without a page")
    return 1 if gone else 0


if __name__ == "__main__":
    sys.exit(main())
