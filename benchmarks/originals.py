"""Frameworks that pip does not have: each is raced from a clone of its repository, which nothing changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import attrs

from benchmarks.cases import ORIGINALS, Case


@attrs.define(frozen=True)
class Original:
    """A framework to clone."""

    url: str
    commit: str
    """That the figures of docs/benchmarks.md were measured with."""
    script: str
    """Its training script, by which a clone is known."""

    def command(self, folder: Path) -> str:
        """Return what a shell runs to have it in ``folder``."""
        return f"git clone {self.url} {folder} && git -C {folder} checkout {self.commit}"


#: By the name of the option that takes the clone.
CLONES = {
    "nano-train": Original(
        "https://github.com/lastweek/nano-train",
        "a57228e1acbc7d156e901b66e57fad7fdee7562d",
        "examples/train_4d.py",
    ),
    "picotron": Original(
        "https://github.com/huggingface/picotron",
        "59714b1bf25541dbeb6f5a721ed15f6d0768e786",
        "train.py",
    ),
}

NAMES = ("originals", *(case.name for case in ORIGINALS))


def chosen(names: Collection[str], clones: Mapping[str, Path | None]) -> list[Case]:
    """Return the cases that are named, by ``originals`` all of them; if nothing is, those with a clone."""
    if not names:
        return [case for case in ORIGINALS if clones[case.clone]]
    return [case for case in ORIGINALS if {"originals", case.name} & {*names}]


def problems(cases: Iterable[Case], clones: Mapping[str, Path | None]) -> list[str]:
    """Return, for each clone that ``cases`` need and that is not there, how to get it."""
    found = []
    for name in dict.fromkeys(case.clone for case in cases):
        original, folder = CLONES[name], clones[name]
        if folder is None:
            how = original.command(Path(name))
            found.append(f"--{name} names no clone of {original.url}: {how}; then give --{name} {name}")
        elif not (folder / original.script).is_file():
            found.append(f"--{name} {folder} has no {original.script}: {original.command(folder)}")
    return found
