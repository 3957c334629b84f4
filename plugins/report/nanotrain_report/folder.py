"""What a run folder holds, read once: metrics with their declarations, recipes, log, samples, who owns it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from nanotrain_core.api import (
    CORE_METRICS,
    PATIENCE,
    RUN_FILES,
    CheckpointInfo,
    History,
    Metric,
    NanotrainError,
    did_you_mean_run,
    is_run,
    is_running,
    list_all_checkpoints,
    load_plugins,
    read_metrics,
)
from nanotrain_report.families import Family, Line, families
from nanotrain_report.health import Judging

#: What a run calls its resolved recipes: with a number from 2 where a resume changed it.
RECIPE = re.compile(r"recipe(?:-([1-9]\d*))?\.toml")
#: Sections of a recipe that are lists of tables.
LISTS = ("parallel", "monitor", "phase")
#: What is read of a recipe's tables and of the log's entries, where only values of this kind are.
KINDS: Mapping[str, type] = {
    **{"use": str, "steps": int, "ranks": int, "patience": int},
    **{"event": str, "level": str, "rank": int, "step": int, "cpus": int, "local_ranks": int},
}


@attrs.define(eq=False, slots=False)
class RunFolder:
    """A run, ended or not."""

    path: Path
    history: History
    log: list[dict[str, Any]]
    """Entries of ``run.log.jsonl``."""
    live: bool
    """Whether its process is there, as far as this host can tell."""

    @cached_property
    def name(self) -> str:
        """What the run is called: its recipe's name, or its folder's."""
        return str(self.history.start.get("name") or self.recipe.get("run", {}).get("name") or self.path.name)

    @cached_property
    def declared(self) -> tuple[Metric, ...]:
        """Declarations: those in the folder, and those of what is installed here for runs that left none."""
        registry = load_plugins()
        monitors = [registry.get("monitor", use) for use in registry.names("monitor")]
        installed = [metric for monitor in monitors for metric in monitor.metrics]
        return (*self.history.declared.values(), *CORE_METRICS, *installed)

    @cached_property
    def families(self) -> list[Family]:
        """All curves, those of one declaration together."""
        return families(self.history.curves, self.declared)

    @cached_property
    def judging(self) -> Judging:
        """How its metrics are judged: with the patience of its monitor ``health``."""
        health = (each for each in self.monitors if each.get("use") == "health")
        return Judging(self.history.curves, int(next(health, {}).get("patience", PATIENCE)))

    @cached_property
    def recipe_file(self) -> Path | None:
        """The newest resolved recipe: a resumed run that changed it has left several. Others are a user's."""
        names = ((RECIPE.fullmatch(path.name), path) for path in self.path.glob("recipe*.toml"))
        found = [(int(name[1] or 1), path) for name, path in names if name and path.is_file()]
        return max(found)[1] if found else None

    @cached_property
    def recipe(self) -> Mapping[str, Any]:
        """The sections of the newest resolved recipe that are tables; empty if there is none to be read."""
        try:
            read = tomllib.loads(self.recipe_file.read_text(encoding="utf-8")) if self.recipe_file else {}
        except (OSError, ValueError, RecursionError):
            return {}
        lists = {name: read[name] for name in LISTS if isinstance(read.get(name), list)}
        tables = {name: of_kind(each) for name, each in read.items() if isinstance(each, dict)}
        return tables | {
            name: [of_kind(each) for each in found if isinstance(each, dict)] for name, found in lists.items()
        }

    @cached_property
    def begins(self) -> list[dict[str, Any]]:
        """The log's entry of each time ranks began: command, host and so on."""
        return [entry for entry in self.log if entry.get("event") == "run begins"]

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """Rows of ``samples.jsonl``: ``step``, ``prompt`` and ``text``."""
        found = rows(self.path / "samples.jsonl")
        return [row for row in found if isinstance(row.get("step"), int) and isinstance(row.get("text"), str)]

    @property
    def steps(self) -> int:
        """How many steps it is to take, 0 if that is not known."""
        return int(self.history.start.get("steps") or self.recipe.get("run", {}).get("steps") or 0)

    @cached_property
    def saved(self) -> list[tuple[str, CheckpointInfo]]:
        """The checkpoints that are there, each with its component, by their steps."""
        return list_all_checkpoints(self.path, load_plugins())

    @property
    def unmeasured(self) -> bool:
        """Whether it has no metrics for want of the monitor ``jsonl``."""
        measured = any(each.get("use") == "jsonl" for each in self.monitors)
        return bool(self.recipe) and not self.history.attempt and not measured

    @cached_property
    def monitors(self) -> list[Mapping[str, Any]]:
        """Its recipe's ``[[monitor]]`` tables."""
        found = self.recipe.get("monitor", [])
        return found if isinstance(found, list) else [found]

    @property
    def step(self) -> int:
        """The newest step of its metrics, or else of its log and its checkpoints."""
        if self.history.attempt:
            return self.history.step
        logged = [entry["step"] for entry in self.log if isinstance(entry.get("step"), int)]
        return max([*logged, *(each.step for _, each in self.saved)], default=0)

    @property
    def unread(self) -> int:
        """How many lines of its metrics cannot be read. While it runs, the last one may be incomplete."""
        return max(0, self.history.torn - self.live)

    @property
    def logged_end(self) -> str:
        """How it ended, as the log says; empty if it has begun again since."""
        events = ("run begins", "run ends", "run failed")
        last: dict[str, Any] = next(
            (entry for entry in reversed(self.log) if entry.get("event") in events), {}
        )
        return {"run ends": str(last.get("reason", "")), "run failed": "failed"}.get(
            last.get("event", ""), ""
        )

    @property
    def state(self) -> str:
        """``running``, ``killed``, or how it ended: ``done``, ``stopped``, ``preempted``, ``failed``."""
        if self.history.end:
            return str(self.history.end["reason"])
        if self.live:
            return "running"
        if self.history.attempt:
            return "killed"
        return self.logged_end or ("killed" if self.begins else "not begun")

    @cached_property
    def lines(self) -> dict[str, Line]:
        """All curves by their whole names."""
        return {line.name: line for family in self.families for line in (*family.lines, *family.others)}

    def line(self, name: str) -> Line | None:
        """Return the curve of a metric, None if there is none."""
        return self.lines.get(name)


@attrs.define(frozen=True, eq=False)
class Shown:
    """A run among those of a report."""

    run: RunFolder
    label: str
    color: str = ""


def open_run(path: Path) -> RunFolder:
    """Read a run folder.

    Raises:
        NanotrainError: it is none; a run near by is suggested.
    """
    if not path.is_dir():
        what = "is a file, not a run's folder" if path.exists() else "there is no such folder"
        raise NanotrainError(f"{path}: {what}{did_you_mean_run(path)}")
    if not is_run(path):
        inside = [
            str(each.parent)
            for name in RUN_FILES
            for each in sorted([*path.glob(f"*/{name}"), *path.glob(f"*/*/{name}")])
        ]
        hint = f"; it holds runs: {', '.join(dict.fromkeys(inside))}" if inside else ""
        raise NanotrainError(f"{path} is no run folder: it has none of {', '.join(RUN_FILES)}{hint}")
    log = [of_kind(entry) for entry in rows(path / "run.log.jsonl") if isinstance(entry.get("event"), str)]
    return RunFolder(path, read_metrics(path), log, is_running(path))


def of_kind(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table without values of another kind than :data:`KINDS` has: somebody may have edited it."""
    return {name: value for name, value in table.items() if isinstance(value, KINDS.get(name, object))}


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines; lines that are none, as a torn last one, are left out."""
    found = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                found.append(row)
    return found
