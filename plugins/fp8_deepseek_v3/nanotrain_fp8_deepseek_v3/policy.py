"""Selects the GEMM format of each module from the recipe's patterns, and formats the table of modules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from math import prod

import attrs
from torch import nn

from nanotrain_core.api import NanotrainError, Problem, Role, did_you_mean, lies_in, tagged
from nanotrain_core.api.torch import LINEAR_ROLES, gemm_parameters
from nanotrain_fp8_deepseek_v3 import patterns
from nanotrain_fp8_deepseek_v3.configs import ModuleFormats


@attrs.define(frozen=True)
class Row:
    """One module of the table."""

    name: str
    role: str
    format: str
    why: str = ""
    """Why the module is not in a narrow format, regardless of the patterns; empty if they decide."""
    linear: bool = False
    """Whether patterns apply to it."""


def format_of(name: str, config: ModuleFormats) -> str:
    """Return the format that the patterns of ``config`` give to a linear layer."""
    for format_ in ("fp32", "bf16", config.LOW):  # the widest whose pattern matches is used
        if matches(name, getattr(config, format_)):
            return format_
    return "bf16"


def format_and_why(name: str, module: nn.Module, config: ModuleFormats) -> tuple[str, str]:
    """Return the format that a linear layer, or experts, get, and why it differs from the patterns'."""
    format_ = format_of(name, config)
    weights = [module.get_parameter(parameter) for parameter in gemm_parameters(module)]
    N, K = min((tuple(weight.shape[-2:]) for weight in weights), key=prod)
    if format_ == config.LOW and config.min_size > N * K:
        return "bf16", f"{N:,} x {K:,} is less than min_size"
    return format_, ""


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a module's name fits any pattern."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def rows_of(part: nn.Module, config: ModuleFormats) -> Iterator[Row]:
    """Yield the format of each module of ``part`` that has parameters."""
    for name, module, tag in tagged(part):
        role = tag.role.name.lower()
        if gemm_parameters(module):
            yield Row(name, role, *format_and_why(name, module, config), linear=True)
        elif tag.role is Role.EXPERTS:
            yield Row(name, role, "bf16", "they make products of their own")
        elif tag.role in LINEAR_ROLES:
            yield Row(name, role, "bf16", "it has its own forward")
        elif tag.role is not Role.BLOCK and next(module.parameters(), None) is not None:
            yield Row(name, role, "bf16", "never narrower")


def check_patterns(rows: Iterable[Row], config: ModuleFormats) -> None:
    """Reject patterns that match no linear layer of the whole model.

    Args:
        rows: of every stage.
        config: with the patterns that the user wrote.

    Raises:
        NanotrainError: the text names the key, the pattern, and the nearest name.
    """
    for key, text in unmatched(rows, config):
        raise NanotrainError(f"precision.{key}: {text}")


def unmatched(rows: Iterable[Row], config: ModuleFormats) -> Iterator[tuple[str, str]]:
    """Yield the key, ``bf16.0``, and an error text for each pattern that the user wrote and that matches no
    linear layer of these rows."""
    names = sorted({row.name for row in rows if row.linear})
    for key, wanted in patterns(config).items():
        for number, pattern in enumerate(wanted):
            if not any(fnmatchcase(name, pattern) for name in names):
                inside = any(lies_in(name, pattern) for name in names)
                near = f"; for those inside write '{pattern}.*'" if inside else did_you_mean(pattern, names)
                text = f"'{pattern}' matches no linear layer of the model"
                yield f"{key}.{number}", f"{text}{near or f'; they are {abbreviated(names)}'}"


def unmatched_in(model: nn.Module, config: ModuleFormats) -> Iterator[Problem]:
    """Yield a problem for each of them that matches no linear layer of a whole model."""
    for key, text in unmatched(rows_of(model, config), config):
        yield Problem(f"precision.{key}", text)


def abbreviated(names: Sequence[str]) -> str:
    """Return names, merging those that differ only in numbers."""
    return ", ".join(sorted({re.sub(r"\d+", "N", name) for name in names}))


def table(rows: Iterable[Row]) -> list[str]:
    """Return lines with each module's format; modules that differ only in numbers share one."""
    lines = [(re.sub(r"\d+", "*", row.name), row.role, row.format, row.why) for row in rows]
    counted = [(line, len(list(same))) for line, same in groupby(sorted(lines))]
    width = max((len(line[0]) for line, _ in counted), default=0)
    return [
        f"  {name:<{width}}  {format_:<18} {count:>3} x {role}{f' ({why})' if why else ''}"
        for (name, role, format_, why), count in counted
    ]
