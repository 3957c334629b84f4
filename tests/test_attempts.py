"""Ranks of an attempt meet in a store that an earlier one left full, and learn what any host knows."""

import signal
from datetime import timedelta
from functools import partial
from threading import Thread, Timer
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore, TCPStore

from nanotrain_core.errors import Exit
from nanotrain_core.launch.agreement import agree, broadcast_from_rank_0
from nanotrain_core.launch.attempts import LaunchHistory, exchange_histories, remember
from nanotrain_core.launch.cause import PeerLostError
from nanotrain_core.launch.environment import Ranks
from nanotrain_core.launch.launch_monitors import SaveMarker
from nanotrain_core.launch.resume_point import start_from
from nanotrain_core.launch.worker import Job
from nanotrain_core.registry.registry import load_plugins


def attempt(store, *pasts):
    """Let ranks meet in threads; return what each read in its store and what rank 0 learnt."""
    found = {}

    def rank(number, mine):
        part, past = exchange_histories(store, number, len(pasts), mine, timeout=20)
        if number == 0:
            found["past"] = past
        part.set(f"mine/{number}", str(number))
        found[number] = [part.get(f"mine/{other}").decode() for other in range(len(pasts))]

    threads = [Thread(target=rank, args=each) for each in enumerate(pasts)]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_rank_0_learns_what_any_host_knows_and_each_attempt_has_a_store_of_its_own():
    store = HashStore()
    new, knows = LaunchHistory(), LaunchHistory(began=True, saved=True, folder="runs/a")
    first = attempt(store, new, new, new)
    assert first == {"past": LaunchHistory(), **{rank: ["0", "1", "2"] for rank in range(3)}}
    again = attempt(store, new, new, knows)
    assert again["past"] == knows
    assert [again[rank] for rank in range(3)] == [["0", "1", "2"]] * 3
    assert attempt(store, LaunchHistory(began=True), new, new)["past"] == LaunchHistory(began=True)


def test_a_rank_that_stays_away_is_named_though_an_earlier_attempt_of_it_called():
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    attempt(store, LaunchHistory(), LaunchHistory())
    with pytest.raises(PeerLostError, match=r"rank 1 has not come within 0\.2 seconds of rank 0") as told:
        exchange_histories(store, 0, 2, LaunchHistory(), timeout=0.2)
    assert told.value.exit_code == Exit.FAILED  # a slow host is no mistake: a restart helps


@pytest.mark.parametrize(
    ("rank", "text"),
    [(0, "rank 1 has not come within 0.2 seconds of rank 0"), (1, "rank 0 has not answered rank 1")],
)
def test_a_rank_that_never_calls_is_named(rank, text):
    """It was an error of torch's store, which names a key."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.3))
    with pytest.raises(PeerLostError, match=text):
        exchange_histories(store, rank, 2, LaunchHistory(), timeout=0.2)


def test_rank_0_names_a_rank_that_never_calls_before_the_others_give_up(monkeypatch):
    """Where it called last, they gave up first, and torchrun ended it before it could say which rank."""
    now = [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds)
    )
    monkeypatch.setattr("nanotrain_core.launch.attempts.time", clock)
    monkeypatch.setattr("nanotrain_core.launch.store_waits.time", clock)
    gave_up = {}
    for rank, called in ((2, 0.0), (0, 290.0)):
        now[0] = called
        with pytest.raises(PeerLostError):
            exchange_histories(HashStore(), rank, 3, LaunchHistory(), timeout=300.0)
        gave_up[rank] = now[0]
    assert gave_up[0] < gave_up[2]


WAITS = {
    "meet": lambda store, rank: exchange_histories(store, rank, 2, LaunchHistory(), timeout=4),
    "agree": lambda store, rank: agree(store, rank, 2, {}),
    "broadcast": lambda store, rank: broadcast_from_rank_0(
        lambda: None, "folder", Ranks(rank=rank, world_size=2), store
    ),
}


@pytest.mark.parametrize(
    ("wait", "rank"), [("meet", 0), ("meet", 1), ("agree", 0), ("agree", 1), ("broadcast", 1)]
)
def test_a_rank_that_waits_for_another_one_heeds_sigterm(wait, rank):
    """Inside torch's wait Python handled it after run.timeout."""

    class Heeded(Exception):
        pass

    def end(number, frame):
        raise Heeded

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=4))
    timer = Timer(0.1, signal.raise_signal, [signal.SIGTERM])
    before = signal.signal(signal.SIGTERM, end)
    try:
        timer.start()
        with pytest.raises(Heeded):
            WAITS[wait](store, rank)
    finally:
        timer.join()
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("rank", "text"),
    [
        (0, "rank 1 has not told its 'facts' within 0.1 seconds"),
        (1, "rank 0 has not told its 'verdict' within 0.2 seconds: it may wait for others"),
    ],
)
def test_a_rank_that_never_tells_what_it_runs_is_named(rank, text):
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(PeerLostError, match=text):
        agree(store, rank, 2, {})


@pytest.mark.parametrize("resume", ["3", "elsewhere/step-00000003.safetensors"])
def test_the_mark_of_an_earlier_launch_replaces_no_checkpoint_that_was_asked_for(tmp_path, resume):
    """Under torchrun, if the first attempt died before it had deleted the mark: step 6 came for step 3."""
    job, past, mark = (
        Job(recipe="a", resume=resume),
        LaunchHistory(began=True, agents=("host 7 b",)),
        tmp_path / "mark",
    )

    def start():
        return start_from(job, tmp_path, mark, past, "simple", load_plugins())

    SaveMarker(mark, "host 7 a").on_checkpoint(None)
    assert start() == resume
    SaveMarker(mark, "another\nhost 7 b").on_checkpoint(None)
    assert start() == "latest"


def test_a_new_run_that_is_restarted_before_it_saves_begins_anew(tmp_path):
    """With "auto", object_store had fetched an older run's checkpoints, which it refuses to a new run."""
    begins = partial(start_from, Job(recipe="a"), tmp_path, None, use="simple", registry=load_plugins())
    assert begins(LaunchHistory(began=True)) is None
    (tmp_path / "checkpoints/.tmp-of-a-killed-save").mkdir(parents=True)
    assert begins(LaunchHistory(began=True)) is None
    (tmp_path / "checkpoints/step-00000003.safetensors").touch()
    assert [begins(LaunchHistory(began=began)) for began in (True, False)] == ["auto", None]
    assert begins(LaunchHistory(began=True, saved=True)) == "latest"


def test_what_rank_0_leaves_is_known_though_no_host_counts():
    store = HashStore()
    part, past = exchange_histories(store, 0, 1, LaunchHistory(), timeout=20)
    assert past == LaunchHistory()
    remember(part, "runs/a")
    assert attempt(store, LaunchHistory(), LaunchHistory())["past"] == LaunchHistory(
        began=True, folder="runs/a"
    )
