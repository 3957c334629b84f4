"""``python docs/site/offline.py SITE``: say what pages of a built site would fetch from elsewhere.

Exit code 1 if there is anything. Of the theme's own scripts nothing is looked at: what they can load from
elsewhere (diagrams) they load for markup that no page here has, which is what is checked.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

#: What a browser loads by itself. A link that somebody follows, ``<a href>``, is none of it.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed|object)\b[^>]*?\b(?:src|data|srcset)=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preload|preconnect|icon|modulepreload))[^>]*?\bhref=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|class=["']?mermaid|@import\s+["']?(?:url\()?["']?https?:""",
)


def fetched(site: Path) -> list[str]:
    """Return what the pages and style sheets of a site would fetch, each with its file."""
    files = sorted([*site.rglob("*.html"), *site.rglob("*.css")])
    return [
        f"{f.relative_to(site)}: {m[0][:120]}" for f in files for m in FETCHED.finditer(f.read_text("utf-8"))
    ]


if __name__ == "__main__":
    found = fetched(Path(sys.argv[1]))
    print("\n".join(found), file=sys.stderr)
    sys.exit(1 if found else 0)
