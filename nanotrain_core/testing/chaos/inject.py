"""The ``chaos`` monitor: keeps the ledger of a run, and injects faults at the harness's request.

What to do stands in the environment, as JSON: training code knows nothing of it. The monitor is the
last of the run, so that after its ``on_step`` nothing comes but evaluation and checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from nanotrain_core import hookimpl
from nanotrain_core.component import Component

#: Where the harness writes what to do.
VARIABLE = "NANOTRAIN_CHAOS"


@attrs.define(frozen=True, kw_only=True)
class Order:
    """The harness's request: where to keep the ledger, and one fault of each attempt."""

    ledger: str
    launch: int = 0
    """How often the harness has started the run before."""
    act: str = ""
    """Empty: keep the ledger only."""
    at: str = "step"
    """``start``, ``data``, ``step``, ``evaluation``, ``save``, or the ``end`` of all that a step does."""
    step: int = 0
    rank: int = 0
    """Who is hurt; -1 for all."""
    last: int = 0
    """Last step to act at, for acts that go on; 0 is the same as ``step``."""
    amount: float = 0.0
    """Seconds, a factor, the number of the write to act at, or a place between 0 and 1."""

    harm: str = ""
    """What is done to this rank's memory snapshots first: ``gone`` or ``flipped``."""
    memory: str = ""
    """The folder that has them."""
    then: Sequence[Mapping[str, Any]] = ()
    """What is different in the attempts after the first, in turn: others are not hurt."""

    def of(self, attempt: int) -> Order:
        """Return what is wanted of an attempt."""
        changes = [{}, *self.then][attempt] if attempt <= len(self.then) else {"act": ""}
        return attrs.evolve(self, **changes)

    def text(self) -> str:
        return json.dumps(attrs.asdict(self))


@attrs.define(frozen=True, kw_only=True)
class ChaosConfig:
    """``[[monitor]] use = "chaos"``: no keys."""


@hookimpl
def nanotrain_register_monitor(register: Any) -> None:
    """Register ``chaos``."""
    register(
        Component(
            name="chaos", config=ChaosConfig, factory=f"{__name__}:build", summary="harms a run to test it"
        )
    )


def build(config: ChaosConfig) -> Any:
    """Return the monitor. Only this imports torch."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from nanotrain_core.contracts import Monitor, RollbackReport
    from nanotrain_core.precision.quantized_storage import storage_of
    from nanotrain_core.testing.chaos.harm import flip_bit, harm_snapshots, miscomputed
    from nanotrain_core.testing.chaos.marks import row_marks, weight_marks
    from nanotrain_core.testing.disaster import WRITES, _limit_files, kill_at

    class Chaos(Monitor):
        every_step = True

        def __init__(self) -> None:
            self.order = Order(**json.loads(os.environ[VARIABLE]))
            self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
            self.struck = self.furthest = 0

        # --- the ledger -----------------------------------------------------------------------

        def write(self, event: str, **fields: Any) -> None:
            row = {"event": event, "launch": self.order.launch, "attempt": self.attempt, "time": time.time()}
            self.file.write(json.dumps({**row, "rank": self.run.rank, **fields}) + "\n")
            self.file.flush()

        def on_start(self, run: Any) -> None:
            self.run, self.step, self.held_out = run, run.first_step, False
            # Hosts that were started again at different times count alike from here on.
            launch, self.attempt = max(run.mesh.gather((self.order.launch, self.attempt)))
            self.order = attrs.evolve(self.order.of(self.attempt), launch=launch)
            self.file = open(Path(self.order.ledger, f"rank-{run.rank}.jsonl"), "a")  # noqa: SIM115
            self.write("start", first_step=run.first_step, ranks=run.world_size, pid=os.getpid())
            self.train_batch, self.validation_batch = run.data.train_batch, run.data.validation_batch
            run.data.train_batch, run.data.validation_batch = self.batch, self.held_out_batch
            self.trained = [placed for placed in run.placed if placed.parameter.requires_grad]
            for placed in self.trained:
                placed.parameter.register_hook(self.gradient)
            self.hook = register_optimizer_step_pre_hook(self.before_update)
            self.maybe("start")

        def batch(self, *arguments: Any) -> Any:
            self.maybe("data")
            batch = self.train_batch(*arguments)
            self.write("batch", step=self.step + 1, rows=row_marks(batch.tokens))
            return batch

        def held_out_batch(self, *arguments: Any) -> Any:
            self.maybe("evaluation")
            return self.validation_batch(*arguments)

        def on_step(self, report: Any) -> None:
            self.step, self.furthest = report.step, max(self.furthest, report.step)
            self.write("step", step=report.step, loss=float(report.loss).hex(), skipped=report.skipped)
            self.maybe("step")
            if self.order.act.startswith("write:") and self.due("step"):
                self.arm()

        def on_step_end(self, end: Any) -> None:
            self.state = end.state
            self.maybe("end")

        def on_checkpoint(self, report: Any) -> None:
            self.write("checkpoint", step=report.step, path=str(report.path.absolute()))

        def on_save_failed(self, report: Any) -> None:
            self.write("save_failed", step=report.step)

        def on_rollback(self, report: RollbackReport) -> None:
            self.step = report.restored
            self.write("rollback", **attrs.asdict(report))

        def on_end(self, report: Any) -> None:
            self.hook.remove()  # it is the process's, which may be used again
            self.write("end", step=report.step, reason=report.reason, weights=weight_marks(self.run.placed))

        # --- faults ---------------------------------------------------------------------------

        def due(self, at: str) -> bool:
            order = self.order
            now = self.step + (at == "data")
            return order.rank in (-1, self.run.rank) and order.step <= now <= max(order.last, order.step)

        def maybe(self, at: str) -> None:
            act = getattr(self, f"do_{self.order.act}", None)
            if act is not None and self.order.at == at and self.due(at) and self.struck <= self.span():
                self.struck += 1
                self.write("fault")
                act()

        def span(self) -> int:
            return max(self.order.last, self.order.step) - self.order.step

        def do_kill(self) -> None:
            if self.order.harm:
                harm_snapshots(self.order.memory, self.run.rank, self.order.harm)
            os.kill(os.getpid(), signal.SIGKILL)

        def do_stop(self) -> None:
            os.kill(os.getpid(), signal.SIGSTOP)

        def do_sleep(self) -> None:
            time.sleep(self.order.amount)

        def do_terminate(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        def do_fail(self) -> None:
            raise RuntimeError("chaos: this rank fails")

        def do_flip(self) -> None:
            """Flip one bit of the weights that other ranks hold, too."""
            layout = self.run.mesh.layout
            shared = [p.parameter for p in self.run.placed if p.placement.replica_span(layout)]
            flip_bit(map(storage_of, shared), self.order.amount)

        def do_flip_state(self) -> None:
            """Flip one bit of optimizer state or master weights."""
            flip_bit((b.tensor for b in self.state().blocks if "/" in b.name), self.order.amount)

        def do_miscompute(self) -> None:
            """Have one linear layer compute wrongly from now on in training."""
            layers = [m for part in self.run.parts for m in part.modules() if isinstance(m, torch.nn.Linear)]
            layers[int(self.order.amount * len(layers))].register_forward_hook(miscomputed)

        def do_nan_weight(self) -> None:
            """Set one number of a weight to NaN. Collective, so that all copies have it."""
            here = {p.placement.name: p.parameter for p in self.trained}
            names = sorted(set().union(*self.run.mesh.gather([*here])))
            chosen = here.get(names[int(self.order.amount * len(names))])
            if chosen is not None and chosen.numel():
                chosen.data.view(-1)[int(self.order.amount * chosen.numel())] = float("nan")

        def do_full(self) -> None:
            """Limit files to ``amount`` bytes from now on, until after the last step."""
            import resource

            if self.step < self.order.last:
                _limit_files(int(self.order.amount))
            else:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

        def do_vanish(self) -> None:
            import shutil

            shutil.rmtree(self.run.folder / "checkpoints", ignore_errors=True)

        def gradient(self, gradient: Any) -> Any:
            """Set a gradient to NaN. A backward pass that defers it passes None first."""
            return None if gradient is None or not self.strikes("nan") else gradient * float("nan")

        def before_update(self, optimizer: Any, arguments: Any, options: Any) -> None:
            """Multiply one step's learning rate; the scheduler sets the next one's."""
            if self.strikes("rate"):
                for group in optimizer.param_groups:
                    group["lr"] *= self.order.amount

        def strikes(self, act: str) -> bool:
            """Return whether to inject the fault in the current step: once, unless ``amount`` is negative."""
            if self.order.act != act or not self.due("data"):
                return False
            if self.step + 1 <= self.furthest and self.order.amount >= 0:
                return False  # the run went back and comes here again
            if not self.struck:
                self.write("fault")
            self.struck += 1
            return True

        def arm(self) -> None:
            """Act at the n-th write call from here on: this step saves a checkpoint."""
            number = int(self.order.amount)
            self.write("fault")
            if self.order.act == "write:kill":
                kill_at(number)
                return
            seen = 0

            def watch(frame: Any, event: str, function: Any) -> None:
                nonlocal seen
                if event == "c_call" and getattr(function, "__name__", "") in WRITES:
                    seen += 1
                    if seen == number:
                        sys.setprofile(None)
                        time.sleep(1.0)  # the harness sends its signal meanwhile

            sys.setprofile(watch)

    return Chaos()


def read_ledger(folder: Path) -> list[Mapping[str, Any]]:
    """Return what all ranks wrote, in order of time."""
    rows = []
    for path in sorted(folder.glob("rank-*.jsonl")):
        rows += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return sorted(rows, key=lambda row: row["time"])
