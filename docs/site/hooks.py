"""What MkDocs calls while it builds the site: it adds the pages of ``pages.py``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

import pages

SECTIONS = {"plugins": "Plugins", "recipe": "Recipe keys", "commands": "Commands"}


def on_config(config: Any) -> Any:
    """Put what is generated into the navigation."""
    texts = pages.generated()
    config.extra["texts"] = texts
    reference = []
    for folder, title in SECTIONS.items():
        mine = sorted(path for path in texts if path.startswith(f"{folder}/"))
        index = f"{folder}/index.md"
        named = [{Path(path).stem: path} for path in mine if path != index]
        reference.append({title: [index, *named]})
    config.nav = [*config.nav[:-1], {"Reference": reference}, config.nav[-1]]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add generated pages, and a page for each source file that any page links to."""
    texts: dict[str, str] = config.extra.pop("texts")
    sources: set[Path] = set()
    for file in list(files.documentation_pages()):
        text = file.content_string
        kind = Path(file.src_uri).stem
        if file.src_uri.startswith("kinds/") and kind != "command":
            text = f"{text.rstrip()}\n\n{pages.checks_of_kind(kind)}"
        files.remove(file)
        texts[file.src_uri] = text
    for uri, text in texts.items():
        led, found = pages.site_links(text, uri)
        sources |= found
        files.append(File.generated(config, uri, content=led))
    waiting, done = sorted(sources), set[Path]()
    while waiting:  # a Markdown file among them may link to more
        path = waiting.pop()
        done.add(path)
        uri = pages.in_site(path)
        assert uri is not None
        text, found = pages.site_links(pages.source_page(path), uri)
        waiting += sorted(found - done - set(waiting))
        front = "---\nsearch:\n  exclude: true\nhide: [toc]\n---\n\n"
        files.append(File.generated(config, uri, content=front + text))
    return files
