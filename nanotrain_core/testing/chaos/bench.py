"""Runs ``nanotrain run`` as a user would, injects a fault, and reads its cost from the run's ledger."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from nanotrain_core.batch import Shard
from nanotrain_core.checkpoint.listing import listed
from nanotrain_core.errors import LaunchError, NanotrainError
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.recipe import load_recipe
from nanotrain_core.recipe.tree import Recipe
from nanotrain_core.registry.registry import Registry, load_plugins
from nanotrain_core.testing.chaos import inject
from nanotrain_core.testing.chaos.inject import VARIABLE, Order, read_ledger
from nanotrain_core.testing.chaos.marks import row_marks

#: Seconds after which a run that should have ended is killed, and its row has failed: this many, and more for
#: each step.
LIMIT, LIMIT_PER_STEP = 180.0, 1.0


@attrs.define(frozen=True)
class Ended:
    """One launch of a run, from its command to its exit code."""

    code: int
    err: str
    told_at: float
    """When it first said something of the fault on stderr; 0 if it never did."""
    began: float


@attrs.define(frozen=True, kw_only=True)
class Settings:
    """The common settings of all runs of a table."""

    recipe: str
    overrides: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    ranks: int = 2
    steps: int = 24
    every: int = 6
    """Steps between checkpoints."""
    hang_timeout: float = 12.0

    @property
    def limit(self) -> float:
        """Seconds after which a run is killed."""
        return LIMIT + LIMIT_PER_STEP * self.steps


class Bench:
    """Starts runs of one recipe in separate folders."""

    def __init__(self, settings: Settings, root: Path) -> None:
        self.settings, self.root = settings, root

    def arguments(
        self,
        *,
        ranks: int | None = None,
        guard: bool = False,
        monitors: Sequence[str] = (),
        more: Sequence[str] = (),
    ) -> list[str]:
        """Return the words after ``nanotrain run``; ``monitors``: further ones, as tables of TOML."""
        at = self.settings
        words = [at.recipe, "--nproc", str(ranks or at.ranks), "--plugin", inject.__file__]
        words += [word for plugin in at.plugins for word in ("--plugin", plugin)]
        changes = [*self._changes(guard=guard, monitors=monitors), *more]
        return words + [word for change in changes for word in ("--set", change)]

    def recipe(self) -> Recipe:
        """Return the resolved recipe of these runs."""
        at = self.settings
        return load_recipe(
            at.recipe, overrides=self._changes(guard=False), plugins=self._plugins(), ranks=at.ranks
        )

    @cached_property
    def _saving(self) -> list[str]:
        """Return the recipe's checkpoint component, set to save often enough and to keep everything.

        Raises:
            NanotrainError: its table has no key ``every``.
        """
        at = self.settings
        chosen = load_recipe(
            at.recipe, overrides=at.overrides, plugins=self._plugins(), ranks=at.ranks
        ).checkpoint
        keys = attrs.fields_dict(type(chosen.config))
        if "every" not in keys:
            raise NanotrainError(
                f"nanotrain chaos says how often to save in checkpoint.every, and '{chosen.use}' has no such "
                f"key; valid: {', '.join(keys)}"
            )
        keep = [f"checkpoint.keep={max(99, at.steps)}"] if "keep" in keys else []
        return [f"checkpoint.every={at.every}", *keep]

    def _changes(self, *, guard: bool, monitors: Sequence[str] = ()) -> list[str]:
        """Return the changes of these runs to the recipe."""
        at = self.settings
        guards = ['{use="guard", window=16, warmup=4, patience=2}'] if guard else []
        monitors = ['{use="jsonl"}', '{use="replicas", every=1}', *guards, *monitors]
        monitors += ['{use="stragglers", every=1, patience=2, least=1.0}', '{use="chaos"}']
        return [
            *at.overrides,
            f"monitor=[{', '.join(monitors)}]",
            f"run.steps={at.steps}",
            "run.strict_monitors=false",
            f"run.hang_timeout={at.hang_timeout}",
            *self._saving,
            f"evaluation.every={at.every}",
            "evaluation.sequences=16",
        ]

    def _plugins(self) -> Any:
        from nanotrain_core.registry.discovery import PluginArguments

        return PluginArguments(local=(inject.__file__, *self.settings.plugins))

    @cached_property
    def registry(self) -> Registry:
        """The plugins, as the runs have them."""
        return load_plugins(local=self._plugins().local)

    def order_of_data(self, steps: int) -> list[set[str]]:
        """Return the sequences of this many batches, by their marks, in the order a run reads them."""
        recipe = self.recipe()
        data = self.registry.build(recipe.data)
        data.open(length=recipe.batch.length, seed=recipe.run.seed)
        batches = (data.train_batch(recipe.batch.sequences, Shard()) for _ in range(steps))
        return [set(row_marks(batch.tokens)) for batch in batches]

    @cached_property
    def baseline(self) -> Trial:
        """The reference run, without a fault."""
        trial = Trial(self, "baseline")
        ended = trial.launch()
        if ended.code != 0:
            raise LaunchError(f"the undisturbed run ended with exit code {ended.code}:\n{ended.err}")
        return trial


class Trial:
    """One run with a fault, possibly restarted, in a separate folder."""

    def __init__(self, bench: Bench, name: str, *, ranks: int | None = None, guard: bool = False) -> None:
        self.bench, self.ranks, self.guard = bench, ranks, guard
        self.home = bench.root / name
        self.folder, self.ledger = self.home / "run", self.home / "ledger"
        self.ledger.mkdir(parents=True)
        self.monitors: Sequence[str] = ()
        """Further monitors of its runs, as tables of TOML."""
        self.environment: Mapping[str, str] = {}
        self.launches = 0
        self.announced_bad: set[int] = set()
        """Steps whose checkpoints were announced and then taken away or harmed on purpose."""
        self.ends: list[Ended] = []

    def launch(
        self,
        *,
        order: Mapping[str, Any] | None = None,
        words: Sequence[str] = (),
        more: Sequence[str] = (),
        ranks: int | None = None,
        on_fault: Callable[[int], None] | None = None,
    ) -> Ended:
        """Start it, wait for its end, and return the result.

        Args:
            order: the fault; see :class:`~nanotrain_core.testing.chaos.inject.Order`.
            words: further words of the command line.
            more: further ``--set``.
            ranks: in place of the usual number.
            on_fault: called with the launcher's process number when the fault has struck.
        """
        process = self.start(order=order, words=words, more=more, ranks=ranks)
        return self.finish(process, on_fault)

    def start(
        self,
        *,
        order: Mapping[str, Any] | None = None,
        words: Sequence[str] = (),
        more: Sequence[str] = (),
        ranks: int | None = None,
        before: Sequence[str] = (),
    ) -> subprocess.Popen[str]:
        """Start it without waiting. ``before`` is a command prefix, such as for another host."""
        told = Order(ledger=str(self.ledger), launch=self.launches, **(order or {}))
        self.launches += 1
        arguments = self.bench.arguments(
            ranks=ranks or self.ranks, guard=self.guard, monitors=self.monitors, more=more
        )
        return subprocess.Popen(
            [
                *before,
                sys.executable,
                "-m",
                "nanotrain_core.cli",
                "run",
                *arguments,
                "--folder",
                str(self.folder),
                *words,
            ],
            cwd=self.home,
            env={**os.environ, **self.environment, VARIABLE: told.text(), "NO_COLOR": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(
        self,
        process: subprocess.Popen[str],
        on_fault: Callable[[int], None] | None = None,
        *,
        strikes: int = 1,
        limit: float | None = None,
    ) -> Ended:
        """Wait for its end, at most ``limit`` seconds; ``on_fault`` is called at fault number ``strikes``."""
        began, limit = time.time(), limit or self.bench.settings.limit
        lines: list[tuple[float, str]] = []

        def read() -> None:
            assert process.stderr is not None
            lines.extend((time.time(), line) for line in process.stderr)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        struck = False
        while process.poll() is None and time.time() < began + limit:
            if on_fault is not None and not struck and self.struck(began) >= strikes:
                struck = True
                on_fault(process.pid)
            time.sleep(0.05)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            lines.append((time.time(), f"nanotrain chaos: no end after {limit:g} seconds: killed\n"))
        code = process.wait()
        reader.join(timeout=5)
        told = [at for at, line in lines if line.startswith("nanotrain:")]
        self.ends.append(Ended(code, "".join(line for _, line in lines), told[0] if told else 0.0, began))
        return self.ends[-1]

    # --- what the ledger says -----------------------------------------------------------------

    def rows(self, *events: str) -> list[Mapping[str, Any]]:
        """Return the ledger's rows of these events, in the order of time."""
        return [row for row in read_ledger(self.ledger) if row["event"] in events]

    def faults(self) -> list[Mapping[str, Any]]:
        """Return when and where the fault was injected."""
        return self.rows("fault")

    def struck(self, since: float = 0.0) -> int:
        """Return in how many attempts faults have struck since then."""
        return len({(row["launch"], row["attempt"]) for row in self.faults() if row["time"] >= since})

    def trained(self) -> list[Mapping[str, Any]]:
        """Return the batches that were trained on: of those read for a step, the last; others are skipped."""
        last: dict[tuple[int, int, int], Mapping[str, Any]] = {}
        found = []
        for row in self.rows("batch", "step"):
            life = (row["launch"], row["attempt"], row["rank"])
            if row["event"] == "batch":
                last[life] = row
            elif life in last:
                found.append(last.pop(life))
        return found

    def committed(self) -> dict[int, frozenset[str]]:
        """Return the sequences of each effective step: of the last launch and attempt that took it."""
        latest: dict[int, tuple[int, int]] = {}
        seen: dict[tuple[int, tuple[int, int]], set[str]] = {}
        for row in self.trained():
            life = (row["launch"], row["attempt"])
            latest[row["step"]] = max(latest.get(row["step"], life), life)
            seen.setdefault((row["step"], life), set()).update(row["rows"])
        return {step: frozenset(seen[step, life]) for step, life in sorted(latest.items())}

    def losses(self) -> dict[int, set[str]]:
        """Return every loss that rank 0 reported for a step, bit for bit; replays agree with the first."""
        found: dict[int, set[str]] = {}
        for row in self.rows("step"):
            if row["rank"] == 0:
                found.setdefault(row["step"], set()).add(row["loss"])
        return found

    def weights(self) -> dict[int, str]:
        """Return the hash of each rank's weights at the end of the completed run."""
        return {row["rank"]: row["weights"] for row in self.rows("end") if row["reason"] == "done"}

    def steps_lost(self) -> int:
        """Return how many steps were taken twice."""
        lost, reached, life = 0, 0, None
        for row in self.rows("start", "step"):
            if row["rank"] != 0:
                continue
            if row["event"] == "start" and life not in (None, (row["launch"], row["attempt"])):
                lost += max(0, reached - row["first_step"])
            life = (row["launch"], row["attempt"])
            reached = row["step"] if row["event"] == "step" else max(reached, row["first_step"])
        return lost

    def on_its_way(self) -> int:
        """Return how many steps before the fault an incomplete save was begun, or 0."""
        faults = self.faults()
        if not faults:
            return 0
        before = [row for row in self.rows("step", "checkpoint") if row["time"] <= faults[0]["time"]]
        reached = max((row["step"] for row in before if row["event"] == "step"), default=0)
        complete = max((row["step"] for row in before if row["event"] == "checkpoint"), default=0)
        begun = reached // self.bench.settings.every * self.bench.settings.every
        return reached - begun if begun > complete else 0

    def seconds(self) -> tuple[float | None, float | None]:
        """Return how long after the fault it was reported, and after how long the run continued.

        A run that somebody must start again is measured from there.
        """
        faults = self.faults()
        if not faults:
            return None, None
        struck, resumed = faults[0]["time"], self.recovered_at()
        told = [end.told_at for end in self.ends if end.told_at > struck]
        since = max([struck, *(end.began for end in self.ends[1:] if end.began < resumed)])
        return told[0] - struck if told else None, resumed - since if resumed else None

    def recovered_at(self) -> float:
        """Return when a later launch or attempt than the fault's did its first step; 0 if none did."""
        faults = self.faults()
        if not faults:
            return 0.0
        life = (faults[0]["launch"], faults[0]["attempt"])
        later = [row["time"] for row in self.rows("step") if (row["launch"], row["attempt"]) > life]
        return later[0] if later else 0.0

    def checkpoint(self) -> Any:
        """Open the run's checkpoints in this process."""
        opened = self.bench.registry.build(self.bench.recipe().checkpoint)
        opened.open(self.folder / "checkpoints", Mesh(Layout({"dense": View(("dp",), (1,))})))
        return opened

    def false_successes(self) -> list[str]:
        """Return checkpoints that were announced as saved and are damaged or missing."""
        checkpoint = self.checkpoint()
        kept, problems = set(checkpoint.steps()), []
        for step in sorted({row["step"] for row in self.rows("checkpoint")} - self.announced_bad):
            if step not in kept:
                problems.append(f"the checkpoint of step {step} is gone")
            problems += checkpoint.verify(step) if step in kept else []
        return problems

    def saved_files(self) -> list[Path]:
        """Return the files of the newest checkpoint in the listing, or else of those announced."""
        found = listed(self.folder, self.bench.recipe().checkpoint.use, self.bench.registry)
        announced = max(self.rows("checkpoint"), key=lambda row: row["step"])["path"]
        newest = found[-1].path if found else Path(announced)
        return [newest] if newest.is_file() else sorted(p for p in newest.rglob("*") if p.is_file())
