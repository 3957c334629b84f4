"""What ranks measure, and how it is judged: planted wrong sums, slow devices and clocks are found."""

import threading

import pytest
import torch
import torch.distributed as dist
from nanotrain_doctor.clock import ask_offsets, tell_time
from nanotrain_doctor.hosts import of_all_hosts
from nanotrain_doctor.judge import judge_gemm, judge_memory, judge_ranks, slow_ranks
from nanotrain_doctor.measure import matrix_product, measure_device, wrong_sums
from nanotrain_doctor.peaks import Peaks, peaks_of, shipped
from nanotrain_doctor.processor import processor

from nanotrain_core.api import NanotrainError, peak_flops
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


def test_a_sound_machine_is_good():
    ranks = [gpu(rank) for rank in range(4)]
    assert statuses(ranks) == {"GEMM": "good", "memory bandwidth": "good", "all-reduce": "good"}


def cpu(rank, **changed):
    """Return a rank with 4 cores at 2.5 GHz with AVX2, which do 320 GFLOP/s in float32 at the most."""
    found = {"device": "cpu", "cores": 4.0, "clock": 2.5e9, "vectors": "AVX2", "threads": 4}
    return gpu(rank, **found | {"gemm_float32": 250e9, "gemm_bfloat16": 80e9, "copy": 12e9} | changed)


@pytest.mark.parametrize(
    ("changed", "status", "told"),
    [
        ({}, "good", "78% of 0.32 TFLOP/s in float32: 4 cores x 2.5 GHz x 32 FLOPs (AVX2, two FMA units)"),
        ({"gemm_float32": 100e9}, "note", "31% of 0.32"),  # of half a core each, 63%
        ({"gemm_float32": 30e9}, "warning", "9% of 0.32"),
        ({"gemm_float32": 400e9, "vectors": "AVX512"}, "good", "125% of 0.32"),  # two units of 512 bits
        ({"gemm_float32": 30e9, "cores": 0.5, "threads": 1}, "good", "75% of 0.04"),
        ({"gemm_float32": 1e9, "clock": None}, "note", "no expectation: this system does not tell"),
        ({"gemm_float32": 1e9, "vectors": "DEFAULT"}, "note", "(torch says DEFAULT)"),
    ],
)
def test_products_of_a_cpu_are_held_to_its_cores_clock_and_vectors(changed, status, told):
    found = judge_gemm([cpu(0, **changed), cpu(1, **changed)], peaks_of("cpu"))
    assert (found.status, told in found.text) == (status, True), found.text
    assert bool(found.remedy) == (status == "warning")


def test_the_rank_that_is_judged_is_the_one_that_reaches_least_of_its_own_cores():
    ranks = [cpu(0, gemm_float32=60e9), cpu(1, gemm_float32=55e9, cores=1.0)]
    assert "19% of 0.32" in judge_gemm(ranks, peaks_of("cpu")).text


def test_a_file_of_ones_own_is_what_a_cpu_is_held_to():
    mine = Peaks(source="mine", gemm=100e9, memory=10e9)
    assert judge_gemm([cpu(0)], mine).text.endswith("expected of mine: 0.1 TFLOP/s")
    assert judge_memory([cpu(0)], mine).status == "good"


@pytest.mark.parametrize("judge", [judge_gemm, judge_memory])
def test_a_slow_cpu_is_not_sent_to_the_tool_of_a_gpu(judge):
    """Where there is no driver, nvidia-smi is not installed."""
    mine = Peaks(source="mine", gemm=1e13, memory=1e12)
    assert "nvidia-smi" not in judge([cpu(0)], mine).remedy
    assert judge([cpu(0)], mine).remedy.startswith("top: other processes")
    assert judge([gpu(0, gemm_bfloat16=1e12, copy=1e10)], H200).remedy.startswith("nvidia-smi: ")


def test_copies_of_a_cpu_have_no_expectation_and_say_so():
    found = judge_memory([cpu(0), cpu(1)], peaks_of("cpu"))
    assert (found.status, "no expectation" in found.text) == ("note", True)


def system(root, *, siblings=(), highest=(), now=(), quota=""):
    """Plant what a system tells of its processors, and of a control group."""
    files = {
        f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": t for n, t in enumerate(siblings)
    }
    files |= {f"sys/devices/system/cpu/cpu{n}/cpufreq/cpuinfo_max_freq": t for n, t in enumerate(highest)}
    files["proc/cpuinfo"] = "".join(f"processor\t: {n}\ncpu MHz\t\t: {mhz}\n" for n, mhz in enumerate(now))
    if quota:
        files |= {"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/cpu.max": quota}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_cores_and_clock_are_those_that_the_system_tells(tmp_path):
    two_threads = ("0,4", "1,5", "2,6", "3,7") * 2
    root = system(tmp_path / "a", siblings=two_threads, highest=["3500000"] * 7 + ["3200000"], now=["800.0"])
    assert processor(1, 8, root, range(8)) == {"cores": 4.0, "clock": 3.2e9}
    assert processor(2, 4, root, range(8)) == {"cores": 2.0, "clock": 3.2e9}
    assert processor(2, 1, root, range(8))["cores"] == 1.0
    assert processor(1, 4, root, [0, 4]) == {"cores": 1.0, "clock": 3.5e9}
    assert processor(8, 1, root, range(8))["cores"] == 0.5
    machine = system(tmp_path / "b", now=["2445.4", "2445.9"], quota="150000 100000")
    assert processor(1, 2, machine, range(2)) == {"cores": 1.5, "clock": pytest.approx(2445.9e6)}
    assert processor(1, 2, system(tmp_path / "c"), range(2)) == {"cores": 2.0, "clock": None}


def test_what_a_cpu_measures_is_what_is_judged():
    found = {"rank": 0, **measure_device(CPU)}
    assert judge_gemm([found], peaks_of("cpu")).status != "bad"
    assert judge_memory([found], peaks_of("cpu")).status != "bad"
    assert found["cores"] <= found["threads"]


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
    with pytest.raises(NanotrainError, match=r"mine.toml:\d+: achieved.gemm: missing"):
        peaks_of("cpu", str(path))
    path.write_text(text.replace("gemm = 0.5", "gemm = 'x'"))
    with pytest.raises(NanotrainError, match=r"mine.toml:\d+: achieved.gemm: expected a number, got 'x'"):
        peaks_of("cpu", str(path))
    path.write_text("name = \n")
    with pytest.raises(NanotrainError, match=r"--hardware: .*mine.toml:1: Invalid value \(column 8\)"):
        peaks_of("cpu", str(path))
    with pytest.raises(NanotrainError, match=r"--hardware: .* is a folder; expected"):
        peaks_of("cpu", str(tmp_path))
    with pytest.raises(NanotrainError, match="no hardware is named 'h2000'"):
        peaks_of("cpu", "h2000")


def test_peaks_of_a_known_gpu():
    found = peaks_of("NVIDIA H200")
    assert found.gemm == pytest.approx(0.7 * 989e12, rel=0.01)
    assert (found.memory is not None) == bool(shipped())
    assert peaks_of("NVIDIA Nobody").gemm is None


@pytest.mark.parametrize(
    ("device", "file"),
    [
        ("NVIDIA H20", "h20"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"),
    ],
)
def test_a_gpu_is_compared_with_the_file_of_its_own_name(device, file):
    assert not shipped() or peaks_of(device) == peaks_of("", file)


@pytest.mark.parametrize("device", ["NVIDIA H100 PCIe", "NVIDIA L40", "NVIDIA GH200 480GB"])
def test_a_gpu_without_a_file_is_compared_with_its_data_sheet_alone(device):
    """The file `h100` is of the SXM, whose peak is a third higher than that of the card for PCIe."""
    assert peaks_of(device) == Peaks(source="data sheet", gemm=0.7 * peak_flops(device))


@pytest.mark.parametrize("device", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D"])
def test_another_chip_with_all_words_of_a_file_is_not_expected_to_reach_it(device):
    assert peaks_of(device).gemm is None
