"""Runs of a tiny model on one rank, with its checkpoints in a store."""

from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import attrs
from nanotrain_object_store.uploads import Uploads

from nanotrain_core.contracts import Monitor
from nanotrain_core.engine import RuntimeEngine

RECIPE = """
[run]
name = "{name}"
steps = {steps}
ranks = 1
[batch]
sequences = 2
microbatch = 2
length = 8
[model]
use = "transformer"
layers = 1
width = 16
heads = 2
vocab = 256
[precision]
use = "fp32"
[optimizer]
use = "adamw"
lr = 0.01
[data]
use = "synthetic"
vocab = 256
[checkpoint]
use = "{format}"
every = {every}
keep = {keep_here}
[[monitor]]
use = "object_store"
url = "{url}"
lease = 1.0
{more}
"""


class Watch(Monitor):
    """Keeps the losses, and does something after certain steps."""

    def __init__(self, after=None):
        self.after, self.losses, self.metrics, self.ends = after or {}, {}, {}, []

    def on_step(self, report):
        self.losses[report.step] = report.loss
        if report.step in self.after:
            return self.after[report.step]()
        return None

    def on_metrics(self, report):
        for name, value in report.values.items():
            self.metrics.setdefault(name, []).append((report.step, value))

    def on_end(self, report):
        self.ends.append(report.reason)


@attrs.define
class Ran:
    """What a run left."""

    folder: Path
    watch: Watch
    engine: RuntimeEngine

    @property
    def losses(self):
        return self.watch.losses

    def weights(self):
        return {p.placement.name: p.parameter.detach().clone() for p in self.engine.run.placed}


def fit(
    folder,
    url,
    *,
    steps=6,
    every=2,
    resume=None,
    name="small",
    use="simple",
    more="",
    after=None,
    keep_here=99,
):
    """Train in this process."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = folder.with_suffix(".toml")
    text = RECIPE.format(
        name=name, steps=steps, every=every, url=url, more=more, format=use, keep_here=keep_here
    )
    recipe.write_text(text)
    watch = Watch(after)
    engine = RuntimeEngine.from_recipe(recipe, folder=folder, resume=resume, callbacks=[watch])
    engine.fit()
    return Ran(folder, watch, engine)


class Looking:
    """Stands for the uploads of the run that goes on now."""

    def __getattr__(self, name):
        return getattr(self.found, name)


@contextmanager
def looking_at_uploads():
    """Yield the uploads of the next run, once it has begun."""
    looking, begin = Looking(), Uploads.__init__

    def began(uploads, *arguments):
        looking.found = uploads
        begin(uploads, *arguments)

    with mock.patch.object(Uploads, "__init__", began):
        yield looking


def end(uploads):
    """Wait for what is on its way, as a training step that takes longer would."""
    while uploads.under_way:
        uploads.advance()


def steps_in(server, prefix):
    """Return the steps that are complete in a prefix, and those that are not."""
    entries, complete = {}, set()
    for key in server.names():
        if key.startswith(f"{prefix}/step-"):
            entry, _, rest = key.removeprefix(f"{prefix}/").partition("/")
            entries[entry] = int(entry.split("-")[1])
            complete |= {entry} if rest == "COMPLETE.json" else set()
    return sorted(entries[e] for e in complete), sorted(entries[e] for e in entries.keys() - complete)
