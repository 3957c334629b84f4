"""``--option KEY=VALUE``: settings of the target, validated before they are written into a script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

import attrs

from nanotrain_core.api import NanotrainError, did_you_mean

#: One word without characters that a shell, Slurm or YAML would interpret.
WORD = r"[\w.,:@%+=/\[\]-]+"
COUNT = r"[1-9]\d*"
#: 1 to 65535.
PORT_NUMBER = r"[1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5]"
#: Kubernetes' quantities of memory.
QUANTITY = r"[1-9]\d*(\.\d+)?([KMGT]i?)?"
NAME = r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?"
PATH = r"[\w.,:@%+=/ -]+"
#: Words of a command; a path with a space is quoted.
COMMAND = r"[\w.,:@%+=/ '\"-]+"


@attrs.define(frozen=True)
class Option:
    """One key that a target knows."""

    meaning: str
    pattern: str = WORD
    example: str = ""
    default: str | None = None
    """None: it may be left out, unless it is ``required``."""
    required: bool = False


def read_options(target: str, pairs: Sequence[str], known: Mapping[str, Option]) -> dict[str, str]:
    """Return the options of a target: those given, and defaults.

    Raises:
        NanotrainError: one is not known, given twice, missing, or of another form.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign:
            raise NanotrainError(f"--option {pair}: expected KEY=VALUE; keys of {target}: {', '.join(known)}")
        if key not in known:
            near = did_you_mean(key, list(known))
            raise NanotrainError(
                f"--option {pair}: {target} has no option '{key}'{near}; it has {', '.join(known)}"
            )
        if key in found:
            raise NanotrainError(f"--option {pair}: given twice: {key} is {found[key]!r} already")
        option = known[key]
        if not re.fullmatch(option.pattern, value):
            example = f", for example {key}={option.example}" if option.example else ""
            raise NanotrainError(f"--option {pair}: expected {option.meaning}{example}")
        found[key] = value
    for key, option in known.items():
        if option.required and key not in found:
            example = f", for example --option {key}={option.example}" if option.example else ""
            raise NanotrainError(f"{target} needs --option {key}: {option.meaning}{example}")
        if option.default is not None:
            found.setdefault(key, option.default)
    return found


def read_hosts(text: str, nodes: int) -> list[str]:
    """Return the hosts of ``--option hosts=a,b``.

    Raises:
        NanotrainError: there are not as many as nodes, or two are the same.
    """
    hosts = text.split(",")
    problem = ""
    if "" in hosts:
        problem = "expected names with one comma between them, as in node1,node2"
    elif twice := next((host for host in hosts if hosts.count(host) > 1), ""):
        problem = f"{twice} is named twice; name each node once"
    elif len(hosts) != nodes:
        problem = f"{nodes} nodes need as many host names, got {len(hosts)}"
    if problem:
        raise NanotrainError(f"--option hosts={text}: {problem}")
    return hosts


def command_words(text: str) -> list[str]:
    """Return the words of ``--option command=...``, as a shell reads them.

    Raises:
        NanotrainError: a quotation mark is missing.
    """
    try:
        return shlex.split(text)
    except ValueError as problem:
        raise NanotrainError(f"--option command={text}: {str(problem).lower()}") from None


def read_environment(pairs: Sequence[str]) -> dict[str, str]:
    """Return the variables of ``--env NAME=VALUE``.

    Raises:
        NanotrainError: one is of another form.
    """
    found = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise NanotrainError(f"--env {pair}: expected NAME=VALUE, for example NCCL_DEBUG=WARN")
        found[name] = value
    return found
