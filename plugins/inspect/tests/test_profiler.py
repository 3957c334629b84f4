"""Profiles: which steps, which ranks, the passes in them by name, and one file of all ranks on one clock."""

import gzip
import json
from collections import Counter

import pytest
import torch
from nanotrain_inspect.memory_snapshot import MemorySnapshot
from nanotrain_inspect.merge import APART, merge_traces
from structlog.testing import capture_logs

from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_engine

SUMMED = {"parallel": [{"use": "summed"}]}


def fit(folder, world=1, *, run=None, **config):
    """Train, in a run folder."""
    case = Case("parallel", use="summed", topology={"dp": world})
    monitor = [{"use": "profiler", **config}]
    engine = make_engine(case, {"run": {"steps": 6, **(run or {})}, "monitor": monitor}, folder=folder)
    with capture_logs() as logs:
        engine.fit()
    return [entry["event"] for entry in logs if entry["log_level"] != "debug"]


def read(path):
    return json.loads(gzip.decompress(path.read_bytes()))


def names(trace):
    return Counter(event.get("name", "") for event in trace["traceEvents"] if event.get("ph") == "X")


# The first steps and a range inside of the run are also what a resumed run and two ranks are asked for below.
INSIDE = [pytest.param(steps, 2, marks=pytest.mark.full) for steps in ("3:4", "1:2")]


@pytest.mark.parametrize(
    ("steps", "count"), [*INSIDE, ("5:9", 2), pytest.param("6", 1, marks=pytest.mark.full)]
)
def test_the_steps_asked_for_are_in_the_trace_and_no_others(tmp_path, steps, count):
    fit(tmp_path, steps=steps)
    (folder,) = (tmp_path / "profile").iterdir()
    assert (
        folder.name == {"3:4": "steps-3-4", "1:2": "steps-1-2", "5:9": "steps-5-6", "6": "steps-6-6"}[steps]
    )
    found = names(read(folder / "rank0.json.gz"))
    passes = {name: times for name, times in found.items() if " of stage " in name}
    microbatches = len(passes) // 2
    assert microbatches > 1
    assert passes == {
        f"{word} of stage 0, microbatch {n}": count
        for word in ("forward", "backward")
        for n in range(microbatches)
    }
    assert "aten::mm" in (folder / "rank0.txt").read_text()


def fit_two(folder, **config):
    return fit(folder, 2, steps="2:3", **config)


@pytest.mark.full
def test_one_file_has_all_ranks(tmp_path):
    run_ranks(fit_two, 2, tmp_path)
    folder = tmp_path / "profile" / "steps-2-3"
    each, merged = [read(folder / f"rank{n}.json.gz") for n in (0, 1)], read(folder / "all-ranks.json.gz")
    assert names(merged) == names(each[0]) + names(each[1])
    told = {e["args"]["name"].partition(":")[0] for e in merged["traceEvents"] if e["name"] == "process_name"}
    assert told == {"rank 0", "rank 1"}

    # A collective of two ranks is at the same time on both.
    def when(rank, name):
        spans = [e for e in merged["traceEvents"] if e["name"] == name and e["ph"] == "X"]
        mine = [e for e in spans if e["pid"] // APART == rank + 1]
        return min(e["ts"] for e in mine), max(e["ts"] + e["dur"] for e in mine)

    (first, end), (other, other_end) = when(0, "gloo:all_reduce"), when(1, "gloo:all_reduce")
    assert first < other_end
    assert other < end


@pytest.mark.parametrize("config", [{"ranks": [1]}, pytest.param({"merge": 1}, marks=pytest.mark.full)])
def test_ranks_that_are_not_asked_for_are_left_out(tmp_path, config):
    run_ranks(fit_two, 2, tmp_path, **config)
    found = {path.name for path in (tmp_path / "profile" / "steps-2-3").glob("*.gz")}
    assert found == ({"rank1.json.gz"} if "ranks" in config else {"rank0.json.gz", "rank1.json.gz"})


def test_clocks_are_aligned_and_arrows_stay_with_their_rank(tmp_path):
    traces = {}
    for rank in (0, 3):
        event = {"ph": "X", "name": "work", "pid": 7, "tid": 7, "ts": 10.0, "dur": 1.0}
        arrow = {"ph": "s", "id": 5, "pid": 7, "tid": 7, "ts": 10.0, "name": "arrow", "cat": "ac2g"}
        trace = {"baseTimeNanoseconds": 1000 + 2_000_000 * rank, "traceEvents": [event, arrow]}
        traces[rank] = tmp_path / f"{rank}.json.gz"
        traces[rank].write_bytes(gzip.compress(json.dumps(trace).encode()))
    merge_traces(traces, tmp_path / "merged.json.gz")
    merged = read(tmp_path / "merged.json.gz")
    assert [event["ts"] for event in merged["traceEvents"]] == [10.0, 10.0, 6010.0, 6010.0]
    assert len({event["pid"] for event in merged["traceEvents"]}) == 2
    assert [e["id"] for e in merged["traceEvents"] if e["ph"] == "s"] == ["0.5", "3.5"]


def test_names_that_torch_reads_from_freed_memory_stop_nothing(tmp_path, monkeypatch):
    """With stacks, torch 2.13 gives some Python frames such names: runs failed at the end of a profile."""
    event = b'{"ph": "X", "name": "\x96\x01", "pid": 7, "tid": 7, "ts": 10.0, "dur": 1.0}'
    trace = b'{"baseTimeNanoseconds": 0, "traceEvents": [' + event + b"]}"
    traces = {rank: tmp_path / f"{rank}.json.gz" for rank in range(2)}
    for path in traces.values():
        path.write_bytes(gzip.compress(trace))
    merge_traces(traces, tmp_path / "merged.json.gz")
    assert [event["ts"] for event in read(tmp_path / "merged.json.gz")["traceEvents"]] == [10.0, 10.0]

    def freed(profiled):
        return b"\x96".decode()

    monkeypatch.setattr(torch.profiler.profile, "key_averages", freed)
    fit(tmp_path, steps="1:2", run={"steps": 3})
    (table,) = (tmp_path / "profile" / "steps-1-2").glob("rank0.txt")
    assert table.read_text().startswith("no table: torch cannot read the names of all events")


@pytest.mark.full
def test_a_run_that_resumes_after_them_says_so(tmp_path):
    fit(tmp_path, steps="1:2", run={"steps": 3})
    case = Case("parallel", use="summed")
    changes = {"run": {"steps": 5}, "monitor": [{"use": "profiler", "steps": "1:2"}]}
    engine = make_engine(case, changes, folder=tmp_path, resume="latest")
    with capture_logs() as logs:
        engine.fit()
    assert "the steps to profile are over" in [entry["event"] for entry in logs]
    assert len(list((tmp_path / "profile").iterdir())) == 1


def test_memory_that_runs_out_leaves_a_snapshot_until_the_run_is_over(tmp_path, monkeypatch):
    """Without a GPU: torch's three functions are taken for granted, what is called with what is not."""
    import torch

    called, asked = {}, []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **kw: asked.append(kw))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: called.update(path=path))
    monkeypatch.setattr(
        torch._C, "_cuda_attach_out_of_memory_observer", lambda f: called.update(observer=f), raising=False
    )
    snapshot = MemorySnapshot(tmp_path, 3)
    assert (asked[0]["max_entries"], asked[0]["stacks"]) == (100_000, "python")
    assert "path" not in called
    with capture_logs() as logs:
        called["observer"](0, 2_000_000, 80_000_000, 1_000_000)
    assert called.pop("path") == str(tmp_path / "memory" / "rank3.pickle")
    assert [(e["wanted_mb"], e["free_mb"]) for e in logs] == [(2.0, 1.0)]
    snapshot.stop()
    assert asked[1:] == [{"enabled": None}]
    called["observer"](0, 2_000_000, 80_000_000, 1_000_000)
    assert "path" not in called
