"""What ranks measure, and how it is judged: planted wrong sums, slow devices and clocks are found."""

import threading

import pytest
import torch
import torch.distributed as dist
from nanotrain_doctor.clock import ask_offsets, tell_time
from nanotrain_doctor.hosts import of_all_hosts
from nanotrain_doctor.judge import judge_ranks, slow_ranks
from nanotrain_doctor.measure import matrix_product, wrong_sums
from nanotrain_doctor.peaks import Peaks, peaks_of, shipped

from nanotrain_core.api import NanotrainError
from nanotrain_core.testing import run_ranks

CPU = torch.device("cpu")
H200 = Peaks(source="H200", gemm=700e12, memory=3.8e12, intra=360e9, inter=40e9)


def gpu(rank, **changed):
    sums = {"wrong": 0, "bytes": 2**28, "seconds": 0.0012, "latency": 2e-5}
    found = {"rank": rank, "host": "a", "device": "NVIDIA H200", "number": rank, "gemm_bfloat16": 720e12}
    found |= {"copy": 4e12, "repeats": True, "free": 139 * 2**30, "total": 140 * 2**30, "all_reduce": sums}
    return found | changed


def statuses(ranks, peaks=H200):
    return {each.check: each.status for each in judge_ranks(ranks, peaks)}


def count_wrong(fault):
    world, rank = dist.get_world_size(), dist.get_rank()

    def all_reduce(tensor):
        if fault == "one rank is left out" and rank == 1:
            dist.all_reduce(torch.zeros_like(tensor))
            return
        dist.all_reduce(tensor)
        if fault == "mean":
            tensor /= world
        if fault == "one element" and rank == 1:
            tensor[7] += 1

    return wrong_sums(all_reduce, CPU, rank, world, count=1000)


def test_wrong_all_reduces_are_counted():
    assert run_ranks(count_wrong, 2, "none") == [0, 0]
    assert run_ranks(count_wrong, 2, "one element") == [0, 1]
    mean, left_out = run_ranks(count_wrong, 2, "mean"), run_ranks(count_wrong, 2, "one rank is left out")
    assert min(mean) > 990  # but where the sum is 0
    assert min(left_out) > 990


def test_a_product_with_other_bits_the_second_time_is_found():
    calls = iter(range(10**9))

    def unsound(a, b):
        out = a @ b
        out[0, 0] += next(calls) == 1
        return out

    assert matrix_product(CPU, torch.float32, 64)[1]
    assert not matrix_product(CPU, torch.float32, 64, unsound)[1]
    assert statuses([gpu(0, repeats=False)])["GEMM"] == "bad"


def test_the_rate_of_a_product_is_its_flops_over_its_seconds(monkeypatch):
    monkeypatch.setattr("nanotrain_doctor.measure._seconds", lambda act, device: 0.5)
    assert matrix_product(CPU, torch.float32, 16)[0] == 2 * 16**3 / 0.5


def test_a_sound_machine_is_good_and_a_cpu_gets_no_verdict():
    ranks = [gpu(rank) for rank in range(4)]
    assert statuses(ranks) == {"GEMM": "good", "memory bandwidth": "good", "all-reduce": "good"}
    cpu = [gpu(rank, device="cpu", gemm_float32=1e9) for rank in range(2)]
    assert set(statuses(cpu, peaks_of("cpu")).values()) == {"note"}


@pytest.mark.parametrize(
    ("check", "changed", "status"),
    [
        ("GEMM", {"gemm_bfloat16": 500e12}, "warning"),
        ("GEMM", {"gemm_bfloat16": 200e12}, "bad"),
        ("memory bandwidth", {"copy": 1e12}, "bad"),
        ("GPU memory", {"free": 100 * 2**30}, "warning"),
        ("all-reduce", {"all_reduce": gpu(0)["all_reduce"] | {"seconds": 0.0016}}, "warning"),
        ("all-reduce", {"all_reduce": gpu(0)["all_reduce"] | {"wrong": 3}}, "bad"),
        ("slow rank", {"gemm_bfloat16": 600e12}, "warning"),
    ],
)
def test_what_one_gpu_of_four_does_wrong(check, changed, status):
    assert statuses([gpu(0), gpu(1), gpu(2, **changed), gpu(3)])[check] == status


def test_links_between_hosts_are_held_to_what_these_do():
    seconds = gpu(0)["all_reduce"] | {"seconds": 0.01}  # 40 GB/s: little within a host, much between two
    ranks = [gpu(rank, all_reduce=seconds) for rank in range(4)]
    assert statuses(ranks)["all-reduce"] == "bad"
    assert statuses([each | {"host": "ab"[each["rank"] % 2]} for each in ranks])["all-reduce"] == "good"


def test_the_slow_one_is_named():
    (found,) = slow_ranks([gpu(0), gpu(1), gpu(2, gemm_bfloat16=300e12)])
    assert "rank 2, GPU 2 of a" in found.text


def test_a_rank_that_failed_is_all_there_is_to_tell():
    (found,) = judge_ranks([gpu(0), {"rank": 1, "failed": "RuntimeError: no memory"}], H200)
    assert (found.status, found.text) == ("bad", "rank 1: RuntimeError: no memory")


def test_offsets_of_clocks():
    store, offset = dist.HashStore(), {1: 3.0, 2: -0.5}
    threads = [
        threading.Thread(target=tell_time, args=(store, rank), kwargs={"wall": lambda own=own: 1000.0 + own})
        for rank, own in offset.items()
    ]
    for thread in threads:
        thread.start()
    found = ask_offsets(store, [1, 2], wall=lambda: 1000.0)
    assert {rank: ahead for rank, (ahead, _) in found.items()} == offset


def report(rank, host, version, *texts):
    findings = [{"check": "disk", "status": "good", "text": text} for text in texts]
    offsets = {"1": [2.5, 0.1]} if rank == 0 else {}
    versions = {"torch": version}
    return {"rank": rank, "host": host, "findings": findings, "versions": versions, "offsets": offsets}


def test_what_hosts_have_in_common_is_told_once_and_what_differs_with_the_host():
    found = of_all_hosts([report(0, "a", "2.13", "same"), report(1, "b", "2.12", "same", "own"), {"rank": 2}])
    told = [(each.host, each.check, each.status) for each in found]
    assert told == [
        ("", "disk", "good"),
        ("b", "disk", "good"),
        ("", "versions", "bad"),
        ("", "clocks of hosts", "warning"),
    ]
    assert "2.12 on b and 2.13 on a" in found[2].text


def test_peaks_of_a_file_of_ones_own(tmp_path):
    text = """
name = "mine"
[peak_tflops]
bfloat16 = 100
[achieved]
gemm = 0.5
memory = 0.8
[memory]
bandwidth_gb_s = 1000
[links]
intra_gb_s = 10
inter_gb_s = 1
achieved = 0.5
"""
    path = tmp_path / "mine.toml"
    path.write_text(text)
    assert peaks_of("cpu", str(path)) == Peaks(
        source="mine", gemm=50e12, memory=800e9, intra=5e9, inter=0.5e9
    )
    path.write_text(text.replace("gemm = 0.5", ""))
    with pytest.raises(NanotrainError, match=r"mine.toml: gemm: missing"):
        peaks_of("cpu", str(path))
    with pytest.raises(NanotrainError, match="no hardware is named 'h2000'"):
        peaks_of("cpu", "h2000")


def test_peaks_of_a_known_gpu():
    found = peaks_of("NVIDIA H200")
    assert found.gemm == pytest.approx(0.7 * 989e12, rel=0.01)
    assert (found.memory is not None) == bool(shipped())
    assert peaks_of("NVIDIA Nobody").gemm is None
