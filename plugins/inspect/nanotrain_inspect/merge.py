"""One Perfetto file from the traces of several ranks, on one clock. Torch-free."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nanotrain_core.api import write_atomically

#: Name of the file of all ranks.
MERGED = "all-ranks.json.gz"

#: Identifiers of processes of one rank are moved by this much from those of the one before.
APART = 1_000_000

#: Kinds of events whose ``id`` connects them: arrows and asynchronous spans.
CONNECTED = frozenset("stfbneNOD")


def merge_traces(traces: Mapping[int, Path], into: Path) -> None:
    """Write the Chrome traces of ranks as one: processes are named by rank, and clocks are aligned.

    Args:
        traces: rank -> what ``torch.profiler`` exported, packed by gzip.
        into: where to write, packed too.

    Times of one host are of one clock. Those of several are as far apart as their clocks are.
    """
    loaded = {rank: _events(path) for rank, path in traces.items()}
    bases = {rank: int(trace.get("baseTimeNanoseconds", 0)) for rank, trace in loaded.items()}
    first = min(bases.values())
    events = [
        event
        for place, (rank, trace) in enumerate(loaded.items())
        for event in _of_rank(rank, place, trace["traceEvents"], (bases[rank] - first) / 1e3)
    ]
    merged = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": first,
        "traceEvents": events,
    }
    packed = gzip.compress(json.dumps(merged).encode())
    write_atomically(into, lambda path: path.write_bytes(packed))


def _of_rank(rank: int, place: int, events: list[dict[str, Any]], later: float) -> Iterator[dict[str, Any]]:
    """Yield a rank's events with processes of their own, ``later`` by so many microseconds."""
    numbers: dict[Any, int] = {}
    for event in events:
        found = dict(event)
        if "pid" in found:
            pid = numbers.setdefault(found["pid"], (place + 1) * APART + len(numbers))
            if found.get("name") == "process_name":
                found["args"] = {"name": f"rank {rank}: {found['args'].get('name', '')}"}
            if found.get("name") == "process_labels":
                found["args"] = {"labels": f"rank {rank} {found['args'].get('labels', '')}"}
            if found.get("name") == "process_sort_index":
                found["args"] = {"sort_index": pid}
            found["pid"] = pid
        if "ts" in found:
            found["ts"] = float(found["ts"]) + later
        if "id" in found and found.get("ph") in CONNECTED:
            found["id"] = f"{rank}.{found['id']}"
        yield found


def _events(path: Path) -> Any:
    """Return the content of a trace. With stacks torch may write names that are not UTF-8."""
    return json.loads(gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace"), strict=False)
