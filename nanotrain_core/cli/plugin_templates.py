"""The files of a new plugin, made from the template of its kind in ``templates/``.

A template has two halves: the code that every command imports (hook and config), and the code that the
factory loads. A single file has the second half in the function ``build``, a package in a separate module.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from importlib.resources import files
from string import Template
from textwrap import indent
from typing import Any

import attrs

import nanotrain_core
from nanotrain_core.component import KINDS

SUMMED = {"parallel": [{"use": "summed"}]}
SPLIT = re.compile(r"^# --- behind the factory(, torch-free)?\n", re.MULTILINE)


@attrs.define(frozen=True)
class Proof:
    """The test settings of a new plugin's component, as a ``Case`` and as command-line words."""

    config: Mapping[str, Any] = attrs.field(factory=dict)
    topology: Mapping[str, int] = attrs.field(factory=dict)
    overrides: Mapping[str, Any] = attrs.field(factory=dict)
    world_size: int | None = None

    def case(self, kind: str, name: str) -> str:
        """Return it as Python code, an argument of ``conformance``."""
        given = {key: value for key, value in attrs.asdict(self, recurse=False).items() if value}
        options = [f"{key}={json.dumps(value)}" for key, value in given.items()]
        words = [f'"{kind}"', f'use="{name}"', *options]
        line = f"    Case({', '.join(words)}),\n"
        return line if len(line) < 100 else "    Case(\n        " + ",\n        ".join(words) + ",\n    ),\n"

    def words(self) -> list[str]:
        """Return it as options of ``nanotrain conformance``."""
        options = {"--set": self.config, "--degree": self.topology, "--with": self.overrides}
        found = [word for option, keys in options.items() for word in _lines(option, keys)]
        return [*found, "--nproc", str(self.world_size)] if self.world_size else found


def _lines(option: str, keys: Mapping[str, Any]) -> list[str]:
    return [word for key, value in keys.items() for word in (option, f"{key}={toml(value)}")]


def toml(value: Any) -> str:
    """Return a value as one line of TOML.

    >>> toml([{"use": "summed", "ranks": 2}])
    '[{use="summed",ranks=2}]'
    """
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}={toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(toml, value)) + "]"
    return json.dumps(value)


@attrs.define(frozen=True)
class Offer:
    """What a new plugin can offer: a kind of component, or something registered as one."""

    kind: str
    """Kind of the component; empty: it is a command."""
    proofs: tuple[Proof, ...] = ()
    run: tuple[str, ...] = ()
    """Words after ``nanotrain run laptop`` that use it; ``NAME`` stands for its name."""


def _alone(kind: str, *run: str) -> Offer:
    return Offer(kind, (Proof(),), run or ("--set", f"{kind}.use=NAME"))


#: What ``--kind`` may be.
OFFERS = {
    **{kind: _alone(kind) for kind in KINDS},
    "topology": Offer(
        "topology",
        (Proof(config={"tp": 2}, world_size=4),),
        ("--set", 'topology={use="NAME"}', "--nproc", "2"),
    ),
    "model": _alone("model", "--set", 'model={use="NAME"}'),
    "parallel": Offer(
        "parallel",
        (Proof(topology={"tp": 2}), Proof(topology={"dp": 2, "tp": 2}, overrides=SUMMED)),
        ("--set", 'parallel=[{use="NAME"}]', "--set", "topology.tp=2", "--nproc", "2"),
    ),
    "gradient_sync": Offer(
        "parallel",
        (Proof(topology={"dp": 2}),),
        ("--set", 'parallel=[{use="NAME"}]', "--nproc", "2"),
    ),
    "optimizer": Offer(
        "optimizer",
        (Proof(), Proof(topology={"dp": 2}, overrides=SUMMED)),
        ("--set", 'optimizer={use="NAME",lr=1e-3}'),
    ),
    "schedule": Offer(
        "schedule",
        (Proof(topology={"pp": 2}),),
        ("--set", "schedule.use=NAME", "--set", "topology.pp=2", "--nproc", "2"),
    ),
    "checkpoint": Offer(
        "checkpoint",
        (Proof(topology={"dp": 2}, overrides=SUMMED),),
        ("--set", 'checkpoint={use="NAME",every=100}'),
    ),
    "monitor": _alone("monitor", "--set", 'monitor=[{use="NAME"},{use="console",metrics=["NAME/*"]}]'),
    "data": _alone("data", "--set", 'data={use="NAME"}', "--set", "evaluation.every=0"),
    "command": Offer(""),
}


@attrs.define(frozen=True)
class NewPlugin:
    """The files of a plugin, and how to use and to test it."""

    name: str
    kind: str
    """A key of :data:`OFFERS`."""
    package: bool

    @property
    def root(self) -> str:
        """The file or folder to pass to ``--plugin``."""
        return f"nanotrain-{self.command}" if self.package else f"{self.name}.py"

    @property
    def command(self) -> str:
        """The name as a word of a command line."""
        return self.name.replace("_", "-")

    def files(self) -> dict[str, str]:
        """Return the text of each file, by its path."""
        if not self.package:
            return {self.root: self._one_file()}
        module = f"nanotrain_{self.name}"
        return {
            f"{self.root}/{path}": text
            for path, text in {
                "pyproject.toml": self._fill("pyproject.toml", ""),
                "README.md": self._fill("README.md", ""),
                f"{module}/__init__.py": self._halves(self._factory())[0],
                f"{module}/{self.kind}.py": f'"""{self._title()}"""\n\n' + self._halves("")[1],
                # Test files of the same name would clash if pytest runs several packages together.
                f"tests/test_{self.name}.py": self._test(),
            }.items()
        }

    @property
    def proofs(self) -> tuple[Proof, ...]:
        return OFFERS[self.kind].proofs

    def run(self, *, installed: bool = False) -> str:
        """Return a command line that uses it: with ``--plugin``, unless the package is installed."""
        words = [word.replace("NAME", self.name) for word in OFFERS[self.kind].run]
        start = ["run", "laptop"] if self.proofs else [self.command, "laptop"]
        return shlex.join(["nanotrain", *start, *words, *([] if installed else ["--plugin", self.root])])

    def tests(self) -> list[str]:
        """Return commands that test it: in general, then in a typical recipe."""
        of = f"{OFFERS[self.kind].kind}:{self.name}"
        options = [[], *(proof.words() for proof in self.proofs if proof.words())] if self.proofs else []
        return [
            shlex.join(["nanotrain", "conformance", of, *words, "--plugin", self.root]) for words in options
        ]

    def _factory(self) -> str:
        module = f"nanotrain_{self.name}.{self.kind}"
        return f'"{module}:{self._class()}"' if self.proofs else f'"{module}"'

    def _class(self) -> str:
        return "".join(word.capitalize() for word in self.name.split("_"))

    def _title(self) -> str:
        return self._halves("")[0].partition("\n")[0].strip('"')

    def _fill(self, file: str, factory: str) -> str:
        """Return a template with this plugin's names."""
        text = files("nanotrain_core.cli").joinpath("templates", f"{file}.txt").read_text(encoding="utf-8")
        major, minor, *_ = nanotrain_core.__version__.split(".")
        return Template(text).substitute(
            name=self.name,
            Class=self._class(),
            command=self.command,
            factory=factory,
            kind=OFFERS[self.kind].kind or "command",
            module=self.kind,
            core=f">={major}.{minor},<{major}.{int(minor) + 1}",
            run=self.run(installed=True),
            test=f"conformance: {len(self.proofs)} case(s)" if self.proofs else "command",
        )

    def _halves(self, factory: str) -> tuple[str, str]:
        """Return the text before and after the factory, for a package."""
        face, _, body = SPLIT.split(self._fill(self.kind, factory))
        return face, body

    def _one_file(self) -> str:
        torch_free = SPLIT.split(self._fill(self.kind, ""))[1]
        if not torch_free:
            face, body = self._halves('f"{__name__}:build"')
            inside = re.sub("\n{3,}", "\n\n", f"{body.rstrip()}\n\nreturn {self._class()}(config)\n")
            return (
                f"{face}\n\ndef build(config):\n"
                '    """Called once on every rank. Only from here on may torch be imported."""\n'
                + indent(inside, "    ")
            )
        face, body = self._halves("__name__" if not self.proofs else f'f"{{__name__}}:{self._class()}"')
        return _joined(face, body)

    def _test(self) -> str:
        if not self.proofs:
            return self._fill("test_command.py", "")
        kind = OFFERS[self.kind].kind
        cases = "".join(proof.case(kind, self.name) for proof in self.proofs)
        return (
            f'"""{self.name} passes every check of its kind: `pytest`, once the package is installed."""\n\n'
            "from nanotrain_core.testing import Case, conformance\n\n"
            f"test_conformance = conformance(\n{cases})\n"
        )


def _joined(face: str, body: str) -> str:
    """Return both halves in one module, with their imports of the core merged."""
    line = re.compile(r"^from nanotrain_core\.api import (.*)\n", re.MULTILINE)
    names = {name for half in (face, body) for found in line.findall(half) for name in found.split(", ")}
    constants = sorted(name for name in names if name.isupper())
    classes = sorted(name for name in names if name[0].isupper() and not name.isupper())
    functions = sorted(name for name in names if name[0].islower())
    together = f"from nanotrain_core.api import {', '.join([*constants, *classes, *functions])}\n"
    return f"{line.sub(together, face)}\n\n{line.sub('', body).strip()}\n"
