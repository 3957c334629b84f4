"""What a command found, as a page for people and as JSON; both are written anew after every part."""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks.gpu import bars
from benchmarks.gpu.records import Record
from benchmarks.report import table, verdict
from nanotrain_core.run.files import write_text_atomically

ROOT = Path(__file__).parents[2]


@attrs.define
class Done:
    """One part, as it ended."""

    name: str
    seconds: float = 0.0
    ended: str = ""
    """What went wrong with its process, empty: nothing. With why it did not begin, see ``ran``."""
    ran: bool = True
    records: list[Record] = attrs.field(factory=list)
    log: str = ""
    """Last lines of what it printed, where it ended badly."""

    @property
    def failed(self) -> bool:
        """Whether anything of it failed, a bar that was missed included."""
        kinds = any(record["kind"] == "problem" or record.get("passed") is False for record in self.records)
        return (self.ran and bool(self.ended)) or kinds


@attrs.define
class Result:
    """Of all parts that were asked for."""

    command: Sequence[str]
    commit: str
    smoke: bool = False
    """Whether no time means anything: no bar is judged."""
    machine: dict[str, Any] = attrs.field(factory=dict)
    asked: Sequence[str] = ()
    """Names of the parts that are to run; of those that have not begun, nothing is in ``parts``."""
    parts: list[Done] = attrs.field(factory=list)

    @property
    def records(self) -> list[Record]:
        return [record for part in self.parts for record in part.records]

    @property
    def passed(self) -> bool:
        """Whether all parts ran, nothing failed, and no bar that has a figure was missed."""
        missed = any(passed is False for _, passed in self._bars())
        return not missed and all(part.ran and not part.failed for part in self.parts)

    def _bars(self) -> list[tuple[list[str], bool | None]]:
        why = dict.fromkeys(self.asked, "its turn had not come") | {p.name: p.ended for p in self.parts}
        found = bars.rows(self.records, why)
        return [([*row[:3], ""], None) for row, _ in found] if self.smoke else found

    def markdown(self) -> str:
        """Return the machine, the bars, every table, and what failed or was left out."""
        blocks = [
            "; ".join(f"{name} {value}" for name, value in self._machine()),
            f"`{shlex.join(self.command)}`, {self.commit}",
            table(bars.HEADER, [row for row, _ in self._bars()]),
        ]
        tables: dict[str, list[Record]] = {}
        for record in self.records:
            if record["kind"] == "row":
                tables.setdefault(record["table"], []).append(record)
        for name, rows in tables.items():
            header = list(dict.fromkeys(column for row in rows for column in row["cells"]))
            lines = [[str(row["cells"].get(column, "")) for column in header] for row in rows]
            if any(row["passed"] is not None for row in rows):
                header.append("")
                for line, row in zip(lines, rows, strict=True):
                    line.append("" if row["passed"] is None else verdict(row["passed"]))
            blocks += [f"{name[0].upper()}{name[1:]}.", table(header, lines)]
        blocks += self._troubles()
        return "\n\n".join(blocks)

    def _machine(self) -> list[tuple[str, Any]]:
        return [
            (name, f"{value:.0f}" if isinstance(value, float) else value)
            for name, value in self.machine.items()
        ]

    def _troubles(self) -> list[str]:
        problems, left = [], []
        for part in self.parts:
            if part.ended:
                (problems if part.ran else left).append(f"- {part.name}: {part.ended}" + _quoted(part.log))
            for record in part.records:
                if record["kind"] == "problem":
                    problems.append(f"- {record['name']}:" + _quoted(record["text"]))
                elif record["kind"] == "left out":
                    left.append(f"- {record['name']}: {record['why']}")
        return [
            *(["Failed:\n\n" + "\n".join(problems)] if problems else []),
            *(["Not run:\n\n" + "\n".join(left)] if left else []),
        ]

    def take_over(self, folder: Path, again: Sequence[str] = ()) -> None:
        """Take the parts that ended well from the result in ``folder``, but for those to be run ``again``.

        Raises:
            ValueError: it is of another machine or commit.
        """
        path = folder / "result.json"
        if not path.exists():
            return
        earlier = json.loads(path.read_text(encoding="utf-8"))
        for what, now in (("machine", self.machine), ("commit", self.commit), ("smoke", self.smoke)):
            if earlier[what] != now:
                raise ValueError(f"{path} has {what} {earlier[what]}, this is {now}: give another --folder")
        known = [Done(**part) for part in earlier["parts"]]
        self.parts = [part for part in known if part.ran and not part.ended and part.name not in again]

    def write(self, folder: Path) -> None:
        """Write ``result.json`` and ``table.md``."""
        rows = [dict(zip(bars.HEADER[:3], row, strict=False), passed=passed) for row, passed in self._bars()]
        whole = {**attrs.asdict(self), "bars": rows, "passed": self.passed}
        write_text_atomically(folder / "result.json", json.dumps(whole, indent=1) + "\n")
        write_text_atomically(folder / "table.md", self.markdown() + "\n")


def _quoted(text: str) -> str:
    return "".join(f"\n      {line}" for line in text.splitlines())


def commit(root: Path = ROOT) -> str:
    """Return git's commit, and whether files differ from it; without git a hash of the sources."""
    try:
        words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        found = hashlib.sha256()
        for path in sorted(
            [*root.glob("nanotrain_core/**/*.py"), *root.glob("plugins/*/nanotrain_*/**/*.py")]
        ):
            found.update(path.read_bytes())
        return f"sources {found.hexdigest()[:12]}"
