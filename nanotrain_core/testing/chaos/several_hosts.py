"""Rows in which a run has two hosts, of which one is lost, or which lose their connection.

The hosts are namespaces of this machine; see :mod:`nanotrain_core.testing.virtual_hosts`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from typing import Any

from nanotrain_core.errors import Exit
from nanotrain_core.testing.chaos.bench import Bench, Ended, Trial
from nanotrain_core.testing.chaos.memory import MONITOR, RESTORED, MemoryRow
from nanotrain_core.testing.chaos.row import RESUME, Row, expect, some_rank, some_step
from nanotrain_core.testing.virtual_hosts import Network, not_here

#: Seconds that a rank sleeps while something happens to a host.
PAUSE = 1.0
#: Seconds that a rank sleeps while another host starts.
STARTS = 20.0
ENDPOINT = "host0:29400"


class Launches:
    """The launchers of a run, one on each host."""

    def __init__(self, trial: Trial, network: Network, more: Sequence[str], words: Sequence[str]) -> None:
        self.trial, self.network, self.more = trial, network, more
        self.words = ("--nnodes", "2", "--rdzv-endpoint", ENDPOINT, "--max-restarts", "2", *RESUME, *words)
        self.pool = ThreadPoolExecutor(4)
        self.begun: list[Future[Ended]] = []
        self.on: dict[int, Future[Ended]] = {}
        """The newest of each host that is to come to its end."""

    def start(
        self, host: int, order: dict[str, Any] | None = None, on_fault: Callable[[int], None] | None = None
    ) -> None:
        """Start the ranks of a host."""
        process = self.trial.start(
            order=order,
            words=self.words,
            more=self.more,
            ranks=self.trial.bench.settings.ranks // 2,
            before=self.network.hosts[host].words(self.trial.home),
        )
        self.on[host] = self.pool.submit(self.trial.finish, process, on_fault)
        self.begun.append(self.on[host])

    def start_both(self, order: dict[str, Any], on_fault: Callable[[int], None] | None = None) -> None:
        """Start the run: both hosts' ranks, which the ledger counts as one launch."""
        self.start(0, order, on_fault)
        self.trial.launches = 0
        self.start(1, order)

    def replace(self, host: int) -> None:
        """Start the ranks of a replacement for a lost host."""
        self.network.replace(host)
        self.start(host)


class HostsRow(Row):
    """Two hosts with half of the ranks each."""

    least_ranks = 2
    delay, loss = 0.0, 0.0
    #: A lost host is to be told from a hang, which takes a minute.
    more: Sequence[str] = ("run.hang_timeout=120",)
    words: Sequence[str] = ()
    texts: Sequence[str] = ()
    """One of these must be said on some host."""
    monitors: Sequence[str] = ()
    """Beside the recipe's."""

    @classmethod
    def not_here(cls, bench: Bench) -> str:
        return "an odd number of ranks" if bench.settings.ranks % 2 else not_here()

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        trial.monitors = [*self.monitors]
        with Network(2, delay=self.delay, loss=self.loss, seed=random.randrange(1000)) as network:
            launches = Launches(trial, network, self.more, self.words)
            order = {
                "act": "sleep",
                "step": some_step(trial, random),
                "rank": some_rank(trial, random),
                "amount": PAUSE,
            }

            def strike(process: int) -> None:
                self.strike(launches, random)

            self.begin(launches, order, strike)
            for launch in launches.begun:  # which grows meanwhile
                launch.result()
            for launch in launches.on.values():
                yield from expect(launch.result(), Exit.DONE)
        said = "".join(ended.err for ended in trial.ends)
        if self.texts and not any(text in said for text in self.texts):
            yield f"stderr says none of {self.texts}: {said[-600:]}"

    def begin(self, launches: Launches, order: dict[str, Any], on_fault: Callable[[int], None]) -> None:
        """Start the run."""
        launches.start_both(order, on_fault)

    def strike(self, launches: Launches, random: Random) -> None:
        """Inject the fault, while a rank sleeps."""


class HostLost(HostsRow):
    number, name = "30", "host lost, replaced"
    texts: Sequence[str] = (
        "on host1 (process ",
        "another host has joined",
    )  # the replacement may be there sooner

    def strike(self, launches: Launches, random: Random) -> None:
        launches.network.vanish(1)
        time.sleep(random.uniform(0, 5))
        launches.replace(1)


class InMemory(HostsRow):
    """Beside memory snapshots, of which the new host has none: a step is lost, and no more."""

    lost, steps = 0, 1
    monitors: Sequence[str] = (f'{{use="{MONITOR}"}}',)

    @classmethod
    def not_here(cls, bench: Bench) -> str:
        return MemoryRow.not_here(bench) or super().not_here(bench)


class HostLostInMemory(InMemory, HostLost):
    number, name = "28", "neighbor memory: host lost, replaced"
    texts = RESTORED


class RendezvousHostLost(HostsRow):
    number, name = "31", "rendezvous host lost, replaced"
    texts: Sequence[str] = (f"{ENDPOINT}, where the hosts meet, is gone: waiting for it",)

    def strike(self, launches: Launches, random: Random) -> None:
        launches.network.vanish(0)
        time.sleep(random.uniform(0, 5))
        launches.replace(0)


class RendezvousHostLostInMemory(InMemory, RendezvousHostLost):
    number, name = "28", "neighbor memory: rendezvous host lost, replaced"
    texts = RESTORED


class Partition(HostsRow):
    """Shorter than ``run.timeout``: connections hold, and the run only waits."""

    number, name, lost = "32", "partition of some seconds", 0

    def strike(self, launches: Launches, random: Random) -> None:
        launches.network.part([0], [1])
        time.sleep(random.uniform(0.5, 6))
        launches.network.heal()


class LongPartition(HostsRow):
    """Longer than ``run.timeout``: the ranks give up and are restarted once the hosts reconnect."""

    number, name = "33", "partition longer than run.timeout"
    more = ("run.timeout=6", "run.hang_timeout=120")

    def strike(self, launches: Launches, random: Random) -> None:
        launches.network.part([0], [1])
        time.sleep(random.uniform(8, 12))
        launches.network.heal()


class SlowNetwork(HostsRow):
    number, name, lost = "34", "200 ms there and back, 1% of packets lost", 0
    delay, loss = 0.1, 0.01


class FewerHosts(HostsRow):
    """The other host never returns: the run continues with the remaining ranks."""

    number, name, same_end = "35", "host lost, on with fewer", False
    words = ("--min-nnodes", "1")

    def strike(self, launches: Launches, random: Random) -> None:
        launches.network.vanish(1)
        del launches.on[1]


class HostJoins(HostsRow):
    """A run that one host has begun is joined by another: it is saved and goes on with the ranks of both."""

    number, name, same_end, lost = "40", "a host joins", False, 0
    words = ("--min-nnodes", "1")
    texts = ("another host has joined: all ranks are restarted",)

    def begin(self, launches: Launches, order: dict[str, Any], on_fault: Callable[[int], None]) -> None:
        launches.start(0, {**order, "rank": 0, "amount": STARTS}, on_fault)

    def strike(self, launches: Launches, random: Random) -> None:
        launches.start(1)


class BadHost(HostsRow):
    """The ranks of a host are the first to die, twice: it leaves, and the run goes on without it."""

    number, name, same_end, lost = "36", "a host that fails twice is left out", False, 2
    words = ("--min-nnodes", "1")

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        last = trial.bench.settings.ranks - 1
        every, steps = trial.bench.settings.every, trial.bench.settings.steps
        with Network(2, seed=random.randrange(1000)) as network:
            launches = Launches(trial, network, self.more, self.words)
            again = {"step": random.randrange(2 * every + 1, steps - 1)}
            order = {
                "act": "kill",
                "step": random.randrange(every + 1, 2 * every),
                "rank": last,
                "then": [again],
            }
            launches.start_both(order)
            good, bad = (launches.on[host].result() for host in (0, 1))
        yield from expect(good, Exit.DONE, f"rank {last} was killed by SIGKILL")
        yield from expect(bad, Exit.FAILED, "the first to fail 2 times: it leaves the run")
