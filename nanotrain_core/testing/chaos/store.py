"""Rows in which checkpoints are copied to an object store, which fails, or is all that remains."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from random import Random

from nanotrain_core.errors import Exit
from nanotrain_core.testing.chaos.bench import Bench, Trial
from nanotrain_core.testing.chaos.row import RESUME, Row, expect, save_step, some_step
from nanotrain_core.testing.object_server import ObjectServer

#: The monitor that copies them.
MONITOR = "object_store"
DOWN, UP = "the object store takes no uploads", "the object store takes uploads again"


class StoreRow(Row):
    """Runs with an S3 server of this process."""

    @classmethod
    def not_here(cls, bench: Bench) -> str:
        missing = [name for name in ("moto", "s3fs") if find_spec(name) is None]
        if MONITOR not in bench.registry.names("monitor"):
            missing.append(f"the monitor {MONITOR}")
        return f"{' and '.join(missing)} not installed" if missing else ""

    @contextmanager
    def serving(self, trial: Trial) -> Iterator[ObjectServer]:
        """Serve a bucket, which the trial's runs copy their checkpoints to."""
        with ObjectServer() as server:
            trial.environment = server.environment
            trial.monitors = [f'{{use="{MONITOR}", url="{server.url("run")}", lease=2.0, keep=99}}']
            yield server

    def unlike_their_markers(self, trial: Trial, server: ObjectServer) -> Iterator[str]:
        """Download everything that is listed as complete; yield what is wrong."""
        words = [sys.executable, "-m", "nanotrain_core.cli", "store", "verify", server.url("run")]
        environment = {**os.environ, **server.environment}
        ended = subprocess.run(
            words, env=environment, cwd=trial.home, capture_output=True, text=True, check=False
        )
        if ended.returncode != 0:
            yield f"in the store: {ended.stderr.strip()[-400:]}"
        last = trial.bench.settings.steps
        if str(last) not in [line.split()[0] for line in ended.stdout.splitlines()]:
            yield f"the last checkpoint, of step {last}, is not in the store: {ended.stdout}"


class StoreDown(StoreRow):
    number, name = "26", "object store down"
    lost = 0

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        pause = random.uniform(0.5, 3.0)
        with self.serving(trial) as server:

            def go_away(launcher: int) -> None:
                server.kill()
                threading.Thread(target=come_back, daemon=True).start()

            def come_back() -> None:
                # A checkpoint is complete since, the last one at least, and wants to be uploaded.
                struck = trial.faults()[0]["time"]
                until = time.monotonic() + 60
                while time.monotonic() < until:
                    if any(row["time"] > struck for row in trial.rows("checkpoint")):
                        break
                    time.sleep(0.05)
                time.sleep(pause)
                server.start()

            order = {"act": "sleep", "step": some_step(trial, random), "rank": 0, "amount": 0.3}
            ended = trial.launch(order=order, on_fault=go_away)
            yield from expect(ended, Exit.DONE)
            if (ended.err.count(DOWN), ended.err.count(UP)) != (1, 1):
                yield f"it was said {ended.err.count(DOWN)} times that it is down, {ended.err.count(UP)} up"
            yield from self.unlike_their_markers(trial, server)


class StoreAlone(StoreRow):
    """The run dies, and what it had saved on disk is lost."""

    number, name = "27", "run folder lost, resumed from the object store"
    lost = 2  # one may be on its way to the store

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        with self.serving(trial) as server:
            every = trial.bench.settings.every
            step = save_step(trial, random, after=2) + random.randrange(1, every)
            yield from expect(trial.launch(order={"act": "kill", "step": step}), Exit.FAILED)
            shutil.rmtree(trial.folder)
            trial.announced_bad.update(range(step + 1))
            ended = trial.launch(words=RESUME)
            yield from expect(ended, Exit.DONE, "fetched")
            yield from self.unlike_their_markers(trial, server)
