"""The fenced blocks of the documentation, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("plugins/*/README.md")))

FENCE = re.compile(
    r"^(?:<!-- (?P<marker>[^\n]+) -->\n)?"
    r"(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)

#: What a line of a block without a language begins with if it is a command.
PROGRAMS = ("nanotrain ", "python -m ", "pip ", "git clone ")


@attrs.define(frozen=True)
class CodeBlock:
    """One fenced block."""

    page: Path
    line: int
    language: str
    """``text`` is output, or a listing: nothing to run."""
    marker: str
    """What the comment right before it says: ``file: NAME``, ``cannot run: WHY``, ``in: TABLES``."""
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def marked(self, word: str) -> str | None:
        """Return what a marker of that word says."""
        return self.marker.removeprefix(f"{word}: ") if self.marker.startswith(f"{word}: ") else None


def blocks(language: str = "") -> list[CodeBlock]:
    """Return all blocks, or those of one language."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start("text"))
            body = re.sub(f"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
            told = match["language"] or ("sh" if body.startswith(PROGRAMS) else "text")
            found.append(CodeBlock(page, line, told, match["marker"] or "", body))
    return [block for block in found if language in ("", block.language)]


def file_of(name: str) -> str:
    """Return the file that some page gives in whole, after ``<!-- file: NAME -->``."""
    (found,) = (block.text for block in blocks("python") if block.marked("file") == name)
    return found


def commands(block: CodeBlock) -> Iterator[list[str]]:
    """Yield the words of each command of a block: of a pipe or a list, of each part of it."""
    for line in block.text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, "|"]:
            if set(word) <= set("|&;"):
                if words:
                    yield words
                words = []
            else:
                words.append(word)
