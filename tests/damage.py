"""Random damage to JSON and to bytes, the same for the same seed: what a forger or a bad disk might leave."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

#: Where a value is replaced.
EXTREMES = (
    None,
    True,
    -1,
    0,
    2**31,
    10_000,
    10_000_000,
    2**63,
    10**30,
    1e308,
    float("inf"),
    float("nan"),
    0.5,
    "",
    "../../escaped",
    "/etc/escaped",
    "a\0b",
    "x" * 5000,
    [],
    {},
    [[0, 2**62]],
    [[5, 1]],
    [-1, -1],
    {"": 1},
    [[[]]],
)


def places(table: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every value of JSON, tables and lists themselves included."""
    entries = (
        table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, list) else ()
    )
    for key, value in entries:
        yield (*way, key)
        if len(way) < 12:  # deeper there is only what was nested before
            yield from places(value, (*way, key))


def hurt(table: Any, random: Random) -> str:
    """Change one place of a table, and return in words what was done."""
    # By depth first: else the many entries of one long list would take all damage.
    ways = list(places(table))
    depth = random.choice(sorted({len(way) for way in ways}))
    way = random.choice([way for way in ways if len(way) == depth])
    holder = table
    for key in way[:-1]:
        holder = holder[key]
    last, act = way[-1], random.choice(("replace", "replace", "replace", "remove", "copy", "nest"))
    if act == "remove":
        del holder[last]
    elif act == "copy":
        value = json.loads(
            json.dumps(random.choice(list(holder.values() if isinstance(holder, dict) else holder)))
        )
        holder[last] = value
    elif act == "nest":
        holder[last] = json.loads("[" * 400 + "]" * 400)
    else:
        value = random.choice(EXTREMES)
        near = isinstance(holder[last], int) and not isinstance(holder[last], bool) and random.random() < 0.5
        holder[last] = holder[last] + random.choice((-1, 1)) if near else value
    return f"{act} {'.'.join(map(str, way))}: {str(holder[last] if act != 'remove' else '')[:60]}"


def writable(value: Any, depth: int = 0) -> Any:
    """Return what can be written as TOML: it has no null, and its writer calls itself for each level."""
    if depth > 40:
        return []
    if isinstance(value, dict):
        return {key: writable(each, depth + 1) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [writable(each, depth + 1) for each in value if each is not None]
    return value


def twice(text: str, random: Random) -> str:
    """Return JSON in which one key of the outermost table is there twice."""
    table = json.loads(text)
    key = random.choice(list(table))
    return f"{{{json.dumps(key)}: {json.dumps(random.choice((0, [], {})))}, {text.strip()[1:]}"


def hurt_bytes(data: bytes, random: Random) -> bytes:
    """Flip a bit, cut the end off, or repeat a piece."""
    act, at = random.randrange(3), random.randrange(max(1, len(data)))
    if act == 0 and data:
        return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
    return data[:at] if act == 1 else data[:at] + data[max(0, at - 64) :]
