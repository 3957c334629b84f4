"""Rotary embedding options of a ``config.json``, in older and newer formats. Torch-free.

Newer versions of transformers keep everything in ``rope_parameters``, older ones ``rope_theta`` and a table
``rope_scaling``. An old version would silently ignore the newer form and rotate by other angles: both are
written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanotrain_core.hf.mapping import HFError, expect, expect_real


def read_rope(hf: Mapping[str, Any], *kinds: str) -> tuple[float, str, dict[str, Any]]:
    """Return the base of the frequencies, their scaling, and its options.

    Args:
        hf: contents of ``config.json``.
        kinds: the values of ``rope_type`` that can be represented, in addition to ``default``.

    Raises:
        HFError: it is another one, or only a part of a head is rotated; or there are two forms that
        disagree: which one is read depends on the reader.
    """
    newer, older = (_table(hf, name) for name in ("rope_parameters", "rope_scaling"))
    for key in sorted(newer.keys() & older.keys()):
        if newer[key] != older[key]:
            both = f"{newer[key]!r} in rope_parameters and {older[key]!r} in rope_scaling"
            raise HFError(f"config.json: {key} is {both}; leave one of them out")
    options = {"rope_type": "default", **older, **newer}
    expect({**hf, **options}, "partial_rotary_factor", 1.0, None)
    kind = options["rope_type"]
    if kind not in ("default", *kinds):
        known = " or ".join(map(repr, ("default", *kinds)))
        raise HFError(f"config.json: rope_type is {kind!r}; only {known} can be represented")
    return expect_real({**hf, **options}, "rope_theta", 10000.0), kind, options


def _table(hf: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = hf.get(name) or {}
    if not isinstance(table, Mapping):
        raise HFError(f"config.json: {name} is {table!r}; expected a table")
    return {"rope_type": table.get("type", "default"), **table} if table else {}


def write_rope(
    theta: float, kind: str = "default", options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the entries of a ``config.json``, in both forms."""
    scaling = {"rope_type": kind, **(options or {})}
    found: dict[str, Any] = {"rope_theta": theta, "rope_parameters": {**scaling, "rope_theta": theta}}
    return found if kind == "default" else found | {"rope_scaling": {"type": kind, **scaling}}


def expect_number(options: Mapping[str, Any], key: str) -> float:
    """Return a required option.

    Raises:
        HFError: it is missing, or not a number.
    """
    value = options.get(key)
    if type(value) not in (int, float):
        found = "missing" if value is None else repr(value)
        raise HFError(f"config.json: {key} of its RoPE is {found}; expected a number")
    return float(value)  # type: ignore[arg-type]
