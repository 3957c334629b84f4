"""How the benchmark of a GPU times what runs on one, with a stand-in for torch.cuda."""

from types import SimpleNamespace

import attrs
import pytest
import torch
from torch.autograd.profiler_util import FunctionEvent

from benchmarks.gpu import turns
from benchmarks.gpu.contenders import Trainer
from benchmarks.gpu.parts import machine
from benchmarks.gpu.profile import summarize, waited, write
from benchmarks.gpu.records import read
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.side import rest, take_turn
from benchmarks.optimizer import HOST, times, wall_time
from nanotrain_core.run.throughput import peak_flops


def test_time_in_which_the_host_waits_is_not_its_own():
    took = {"cudaLaunchKernel": 5, "cudaStreamSynchronize": 300, "cudaDeviceSynchronize": 700}
    events = [
        SimpleNamespace(name=name, time_range=SimpleNamespace(elapsed_us=lambda us=us: us))
        for name, us in took.items()
    ]
    assert waited(events) == pytest.approx(1e-3)


@pytest.fixture
def cuda(monkeypatch):
    """Stand in for torch.cuda as far as the benchmark uses it; return the calls that were made."""
    calls, clock = [], iter(range(10, 1000, 6))

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            self.time = next(clock)

        def synchronize(self):
            calls.append("synchronize")

        def elapsed_time(self, other):
            return float(other.time - self.time)

    found = SimpleNamespace(
        name="NVIDIA H200", total_memory=150e9, multi_processor_count=132, major=9, minor=0
    )
    stand = {
        "_sleep": lambda cycles: calls.append("sleep"),
        "Event": Event,
        "is_available": lambda: True,
        "get_device_properties": lambda device: found,
        "synchronize": lambda device=None: calls.append("synchronize"),
        "reset_peak_memory_stats": lambda: calls.append("reset"),
        "max_memory_allocated": lambda: 7,
        "max_memory_reserved": lambda: 8,
        "empty_cache": lambda: calls.append("empty"),
    }
    for name, value in stand.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return calls


def test_a_turn_on_a_gpu_is_timed_to_its_end_after_a_step_that_is_not(cuda):
    trainer = Trainer(lambda steps: cuda.append(f"{steps} steps"), 1, 1)
    turn = take_turn(trainer, "cuda", steps=4)
    rest("cuda")
    assert cuda == ["1 steps", "synchronize", "reset", "4 steps", "synchronize", "empty"]
    assert (turn.peak, turn.reserved) == (7, 8)


def test_calls_on_a_gpu_are_timed_by_its_clock(cuda):
    assert turns.seconds(lambda: cuda.append("call"), 3) == pytest.approx(6e-3 / 3)
    assert cuda == ["sleep", "call", "call", "call", "synchronize"]


def test_the_machine_is_told(cuda, tmp_path):
    settings = Settings(records=tmp_path / "records")
    machine(settings)
    (found,) = read(settings.records)
    assert found["value"]["device"] == "NVIDIA H200"
    assert found["value"]["memory GB"] == 150
    assert found["value"]["torch"] == torch.__version__


def test_without_a_device_the_machine_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    machine(Settings(records=tmp_path / "records"))
    (found,) = read(tmp_path / "records")
    assert found["name"] == "refusal"
    assert found["value"] == f"it needs a CUDA device, and torch {torch.__version__} finds none"


def test_sides_alternate_after_warming_up(monkeypatch):
    called = []
    monkeypatch.setattr(turns, "seconds", lambda call, calls, device: (call(), float(len(called)))[1])
    raced = turns.turns(lambda: called.append("ours"), lambda: called.append("theirs"), rounds=3)
    assert called[6:] == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert (raced.ours, raced.theirs) == ([7.0, 10.0, 11.0], [8.0, 9.0, 12.0])
    assert raced.ratios == [8 / 7, 0.9, 12 / 11]


def test_kernels_that_overlap_are_busy_once_and_gaps_are_not():
    ran = [("a", 0.0, 1000.0), ("b", 500.0, 2000.0), ("a", 3000.0, 4000.0), ("c", 3200.0, 3300.0)]
    found = summarize(ran)
    assert (found.span, found.busy) == (4.0, 0.75)
    assert found.kernels == [("a", 2.0, 2), ("b", 1.5, 1), ("c", 0.1, 1)]
    assert summarize([]).busy == 0


def test_a_profile_counts_kernels_and_copies_and_no_ranges_of_annotations(cuda, monkeypatch, tmp_path):
    """Events as torch's profiler gives them, of three steps: microseconds from its own beginning."""
    on_gpu, on_host = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [
        ("ProfilerStep*", 0, 100_000, on_gpu, True),
        ("cudaLaunchKernel", 500, 510, on_host, False),
        ("gemm", 1000, 7000, on_gpu, False),
        ("Memcpy HtoD (Pinned -> Device)", 7000, 8500, on_gpu, False),
        ("gemm", 10_000, 13_000, on_gpu, False),
        ("cudaDeviceSynchronize", 600, 1600, on_host, False),
    ]

    class Profiler:
        def __init__(self, activities):
            assert torch.profiler.ProfilerActivity.CUDA in activities

        def __enter__(self):
            return self

        def __exit__(self, *error):
            cuda.append("end of profile")

        def events(self):
            return [
                FunctionEvent(
                    id=0, name=name, thread=0, start_us=start, end_us=end, device_type=where,
                    is_user_annotation=annotation,
                )
                for name, start, end, where, annotation in events
            ]  # fmt: skip

        def export_chrome_trace(self, path):
            cuda.append(path)

    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    trainer = Trainer(lambda steps: cuda.append(f"{steps} steps"), 1, 1)
    write(trainer, "cuda", folder=tmp_path, name="GPT-2: ours, bf16")
    trace = str(tmp_path / "gpt-2-ours-bf16.json.gz")
    assert cuda == ["1 steps", "synchronize", "3 steps", "synchronize", "end of profile", trace]
    text = (tmp_path / "gpt-2-ours-bf16.txt").read_text()
    assert "first to last kernel         4.00 ms, a kernel runs in 87.5% of it, gaps are 12.5%" in text
    kernels = [line.split() for line in text.splitlines() if " x  " in line]
    assert [(line[0], line[2], line[3], line[5]) for line in kernels] == [
        ("3.000", "85.7%", "0.7", "gemm"),
        ("0.500", "14.3%", "0.3", "Memcpy"),
    ]


def test_an_optimizer_on_a_device_is_timed_to_its_end():
    ours, theirs = times("bf16", attrs.evolve(HOST, parameters=4), 2, lambda p, step: wall_time(p, step, 3))
    assert len(ours) == len(theirs) == 2
    assert min(*ours, *theirs) > 0


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H800", 989e12),
        ("NVIDIA H800 PCIe", 756e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA RTX A1000", None),  # neither an A10 nor an A100
        ("NVIDIA RTX A3000 Laptop GPU", None),
        ("Some GPU", None),
    ],
)
def test_the_peak_of_a_device_is_known_by_its_name(name, peak):
    assert peak_flops(name) == peak
