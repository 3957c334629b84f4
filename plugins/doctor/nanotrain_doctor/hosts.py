"""What ranks of several hosts tell one another: their clocks, what each host found, and how it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from nanotrain_core.api.ranks import Ranks
from nanotrain_doctor.clock import ask_offsets, judge_offsets, tell_time
from nanotrain_doctor.findings import Finding
from nanotrain_doctor.judge import judge_versions

if TYPE_CHECKING:
    from torch.distributed import Store


def exchange_offsets(store: Store, ranks: Ranks) -> dict[int, tuple[float, float]]:
    """Return on rank 0 how far clocks of other hosts are ahead, by their first rank. All ranks call it."""
    store.set(f"place/{ranks.rank}", str(ranks.local_rank))
    if ranks.rank == 0:
        others = [rank for rank in range(1, ranks.world_size) if int(store.get(f"place/{rank}")) == 0]
        return ask_offsets(store, others)
    if ranks.local_rank == 0:
        tell_time(store, ranks.rank)
    return {}


def of_all_hosts(reports: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Return what all hosts found, what is the same everywhere once, and how they differ."""
    hosts = {_label(each, reports): each for each in reports if each.get("findings")}
    lines: dict[tuple[str, ...], Finding] = {}
    where: dict[tuple[str, ...], list[str]] = {}
    for host, report in hosts.items():
        for table in report["findings"]:
            found = Finding(**table)
            key = (found.check, found.status, found.text, found.remedy)
            lines.setdefault(key, found)
            where.setdefault(key, []).append(host)
    findings = [
        attrs.evolve(found, host="" if len(where[key]) == len(hosts) else _some(where[key]))
        for key, found in lines.items()
    ]
    findings += judge_versions({host: report["versions"] for host, report in hosts.items()})
    labels = {report["rank"]: host for host, report in hosts.items()}
    offsets = {labels[int(rank)]: tuple(pair) for rank, pair in reports[0]["offsets"].items()}
    return [*findings, judge_offsets(offsets)] if offsets else findings


def tell_code(store: Store, ranks: Ranks, code: int) -> None:
    """Give every other rank its exit code, and wait until they have it: the store ends with rank 0."""
    store.set("code", str(code))
    for rank in range(1, ranks.world_size):
        store.get(f"heard/{rank}")


def hear_code(store: Store, ranks: Ranks) -> int:
    """Return the exit code that rank 0 tells."""
    code = int(store.get("code"))
    store.set(f"heard/{ranks.rank}", "")
    return code


def _label(report: Mapping[str, Any], reports: Sequence[Mapping[str, Any]]) -> str:
    """Return a host's name; with the rank where several of the name report, as under tests."""
    twins = [each for each in reports if each.get("findings") and each["host"] == report["host"]]
    return str(report["host"]) if len(twins) == 1 else f"{report['host']} (rank {report['rank']})"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
