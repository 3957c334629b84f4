"""The description of a job, independent of the target, and the formatting of its commands."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

import attrs

#: Where hosts meet, unless an option says otherwise: torch's own default.
PORT = 29400
#: Seconds that ranks and launchers get beyond ``run.grace``, to end after the last save.
MARGIN = 60


@attrs.define(frozen=True, kw_only=True)
class Job:
    """One run on several machines."""

    recipe: str
    """As the machines will find it: a path in their working directory, or the name of a shipped recipe."""
    name: str
    nodes: int
    nproc: int
    """Ranks on each node."""
    gpus: bool
    """Whether each rank has a GPU."""
    grace: float
    """``run.grace``, in seconds."""
    patience: float
    """Seconds until the remaining ranks detect that others are gone: the longest wait for a rank."""
    folder: str
    """Of the run: the same each time, so that it is resumed."""
    changes: tuple[str, ...] = ()
    """Further words of ``nanotrain run``: ``--set``, ``--plugin`` and so on."""
    max_restarts: int = 0
    min_nodes: int | None = None
    """Nodes that are enough to begin and to go on with; None: all."""
    checks_hosts: bool = False
    """Whether each node is examined before its launcher starts."""
    environment: Mapping[str, str] = attrs.field(factory=dict)
    made_by: str = ""
    """The command that wrote the script."""
    plan: str = ""
    """What ``nanotrain plan`` said, in a line."""

    def words(self) -> list[str]:
        """Return the arguments of ``nanotrain`` for a rank that another tool starts."""
        return ["run", self.recipe, *self.changes, "--folder", self.folder, "--resume", "auto"]

    def launcher_words(self) -> list[str]:
        """Return the arguments for the launcher of a node, without the rendezvous options."""
        sizes = ["--nnodes", str(self.nodes), "--nproc", str(self.nproc)]
        if self.min_nodes is not None:
            sizes += ["--min-nnodes", str(self.min_nodes)]
        return [*self.words(), *sizes, "--max-restarts", str(self.max_restarts)]

    def on_each_node(self, nanotrain: Sequence[str], *meet: str) -> list[str]:
        """Return the command of a node.

        Args:
            nanotrain: the words of the command that calls nanotrain.
            meet: the rendezvous options.
        """
        launcher = [*nanotrain, *self.launcher_words(), *meet]
        if not self.checks_hosts:
            return launcher
        return [*nanotrain, "doctor", "--quick", "--folder", self.folder, "--then", *launcher]

    @property
    def grace_until_killed(self) -> int:
        """Seconds after the signal from which on the cluster may kill remaining processes."""
        return math.ceil(self.grace) + MARGIN

    def label(self, longest: int = 40) -> str:
        """Return the name of the run as clusters take it: lower case, digits and hyphens.

        >>> Job(recipe="", name="Llama 3/8B_v2", nodes=1, nproc=1, gpus=True, grace=1, patience=1,
        ...     folder="").label()
        'llama-3-8b-v2'
        """
        plain = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:longest].strip("-")
        return plain if plain[:1].isalpha() else f"run-{plain}".strip("-")

    def header(self, *more: str) -> list[str]:
        """Return comments that say where the script comes from."""
        lines = [f"Made by: {self.made_by}", f"Planned: {self.plan}" if self.plan else "", *more]
        return [f"# {line}".replace("\n", "\\n").replace("\r", "\\r") for line in lines if line]


def command(words: Iterable[str], *raw: str, indent: str = "    ") -> str:
    """Return a shell's command with an option on each line.

    Args:
        words: quoted where that is needed.
        raw: appended as they are, as ``"$endpoint"``.
        indent: of continued lines.
    """
    lines: list[str] = []
    for word in [*(shlex.quote(each) for each in words), *raw]:
        if not lines or word.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return f" \\\n{indent}".join(lines)


def exports(environment: Mapping[str, str]) -> list[str]:
    """Return lines of a shell that set variables."""
    return [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]


def text(lines: Sequence[str]) -> str:
    """Join lines into a file."""
    return "\n".join(lines) + "\n"
