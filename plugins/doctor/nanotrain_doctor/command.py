"""``nanotrain doctor``: check this machine, or these machines, before training."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import attrs

from nanotrain_core.api import (
    NanotrainError,
    Registry,
    add_plugin_options,
    load_plugins,
    plugin_arguments,
    positive_int,
    usable_processors,
)
from nanotrain_core.api.ranks import Ranks, is_port
from nanotrain_doctor.clock import ClockWatch
from nanotrain_doctor.findings import Finding, bad
from nanotrain_doctor.host import examine_host
from nanotrain_doctor.hosts import exchange_offsets, hear_code, of_all_hosts, tell_code
from nanotrain_doctor.judge import judge_ranks
from nanotrain_doctor.network import examine_endpoint
from nanotrain_doctor.peaks import peaks_of
from nanotrain_doctor.ranks import Measured, first_line, measure_here, measure_joined, prepare
from nanotrain_doctor.show import exit_code, show, to_json

if TYPE_CHECKING:
    from torch.distributed import Store

#: Ranks for each processor that this process may use: each is a process that imports torch.
MOST_RANKS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "--ranks",
        type=positive_int,
        metavar="N",
        help="ranks of this host for measurements (its GPUs, or 2)",
    )
    parser.add_argument("--quick", action="store_true", help="measure no rates and start no ranks")
    parser.add_argument("--json", action="store_true", help="print JSON for a bug report, without secrets")
    parser.add_argument("--folder", default="runs", metavar="PATH", help="where runs write (runs)")
    parser.add_argument(
        "--hardware",
        metavar="NAME|FILE",
        help="expected rates of the device: a name of nanotrain-plan, or a TOML file",
    )
    parser.add_argument(
        "--rdzv-endpoint",
        type=_endpoint,
        metavar="HOST:PORT",
        help="rendezvous of several hosts: check it too",
    )
    add_plugin_options(parser)
    parser.add_argument(
        "--then",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="look at this host alone, and become this command, with all words after it, if nothing is bad",
    )


def run(args: argparse.Namespace) -> int:
    """Examine and print; the exit code is 1 if anything is bad.

    Raises:
        NanotrainError: there is no such hardware, nothing follows ``--then``, or there are too many ranks.
    """
    usable = usable_processors()
    if (args.ranks or 0) > MOST_RANKS * usable:
        most = f"{MOST_RANKS * usable}, {MOST_RANKS} for each processor that may be used here ({usable})"
        raise NanotrainError(f"--ranks {args.ranks}: expected at most {most}")
    if args.then is not None and not args.then:
        raise NanotrainError("--then: expected a command after it, for example nanotrain run my.toml")
    asked = plugin_arguments(args)
    peaks_of("", args.hardware)  # a mistake is an error before anything is measured
    stale: list[Finding] = []
    try:
        joined = None if args.then else Ranks.detect()
    except NanotrainError as problem:
        joined = None
        stale.append(bad("environment", str(problem), "unset what another launcher left in this shell"))
    if joined is None and not args.quick:
        prepare()
    registry = load_plugins(block=asked.blocked, local=asked.local)
    if joined is not None and joined.world_size > 1:
        return _be_one_of(joined, args, registry)
    watch = ClockWatch()
    count = args.ranks or _ranks_here(args.quick)
    hosts = 2 if args.then and "--rdzv-endpoint" in args.then else 1  # a launcher that meets others
    host = examine_host(Path(args.folder), registry, ranks=count, hosts=hosts, quick=args.quick)
    found = [*stale, *host]
    if args.rdzv_endpoint:
        found.append(examine_endpoint(args.rdzv_endpoint))
    measured: list[Measured] = []
    if not args.quick and not any(each.check == "torch" and each.status == "bad" for each in found):
        measured = measure_here(count)
        found += judge_ranks(measured, peaks_of(measured[0].get("device", ""), args.hardware))
    found.append(watch.finding())
    _print(found, args, measured)
    if args.then and not exit_code(found):
        _become(args.then)
    return exit_code(found)


def _become(words: Sequence[str]) -> NoReturn:
    """Replace this process by a command: it gets the signals that are meant for it, and its code is its own.

    Raises:
        NanotrainError: there is no such command.
    """
    sys.stdout.flush()
    try:
        os.execvp(words[0], [*words])
    except OSError as problem:
        raise NanotrainError(f"--then {words[0]}: {problem.strerror}") from None


def _be_one_of(ranks: Ranks, args: argparse.Namespace, registry: Registry) -> int:
    """Examine as a rank of torchrun's or srun's: the first of each host looks at it, rank 0 prints."""
    watch = ClockWatch()
    hosts = 2 if ranks.world_size > ranks.local_world_size else 1
    mine: list[Finding] = []
    if ranks.local_rank == 0:
        folder = Path(args.folder)
        mine = examine_host(folder, registry, ranks=ranks.local_world_size, hosts=hosts, quick=args.quick)

    def act(store: Store) -> Measured:
        offsets = exchange_offsets(store, ranks)
        if not mine:
            return {}
        told = [attrs.asdict(each) for each in [*mine, watch.finding()]]
        return {"findings": told, "versions": registry.versions(), "offsets": offsets}

    try:
        store, measured = measure_joined(ranks, act, quick=args.quick)
    except Exception as problem:
        text = f"rank {ranks.rank} does not meet the others: {first_line(problem)}"
        found = [*mine, bad("ranks", text, "look at host name, endpoint and firewall, on every host")]
        _print(found, args, [])
        return exit_code(found)
    if ranks.rank:
        return hear_code(store, ranks)
    found = of_all_hosts(measured)
    if not args.quick:
        found += judge_ranks(measured, peaks_of(measured[0].get("device", ""), args.hardware))
    _print(found, args, measured)
    tell_code(store, ranks, exit_code(found))
    return exit_code(found)


def _print(found: Sequence[Finding], args: argparse.Namespace, measured: Sequence[Measured]) -> None:
    if args.json:
        ranks = [{key: each[key] for key in each if key not in ("findings", "versions")} for each in measured]
        print(to_json(found, ranks=ranks))
    else:
        show(found)


def _ranks_here(quick: bool) -> int:
    """Return how many ranks measure: all GPUs of this host, or two that share its cores."""
    if quick:
        return 1
    try:
        import torch
    except Exception:  # of any kind: which, is a finding
        return 1
    return torch.cuda.device_count() or 2


def _endpoint(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not is_port(port):
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got '{text}'")
    return text
