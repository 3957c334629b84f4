"""What NVML tells is averaged between logged steps, in a thread; without it there is a word, or silence."""

import sys
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch
from nanotrain_performance import DeviceConfig
from nanotrain_performance.device import Device
from nanotrain_performance.nvml import Sampler
from structlog.testing import capture_logs

GPU = torch.device("cuda", 0)


READINGS = {"utilization": 0.75, "memory": 3072.0, "power": 100.0, "temperature": 61.0}


class NotTold(Exception):
    pass


def fake_nvml(power=(100_000, 300_000), **changes):
    """Return a module as pynvml, of a GPU whose power differs from look to look, without a clock."""
    module = ModuleType("pynvml")
    powers = iter(power * 100)

    def clock(handle, kind):
        raise NotTold

    found = {
        "NVMLError": NotTold,
        "NVML_TEMPERATURE_GPU": 0,
        "NVML_CLOCK_SM": 1,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByUUID": {"GPU-ab-1": "handle"}.__getitem__,
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=75),
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=3 * 2**30),
        "nvmlDeviceGetPowerUsage": lambda handle: next(powers),
        "nvmlDeviceGetTemperature": lambda handle, sensor: 61,
        "nvmlDeviceGetClockInfo": clock,
        **changes,
    }
    vars(module).update(found)
    return module


def test_readings_are_means_since_the_last_and_a_gpu_need_not_tell_all():
    sampler = Sampler(fake_nvml(), "ab-1", 60.0)
    sampler.look()
    sampler.look()
    assert sampler.take() == READINGS | {"power": 200.0}
    assert sampler.take() == {}


def run_on(device, rank=0):
    told = []
    metrics = SimpleNamespace(per_rank=lambda name, value: told.append((name, value)))
    return SimpleNamespace(device=device, rank=rank, metrics=metrics), told


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="ab-1"))
    return monkeypatch


def test_what_a_thread_reads_is_published_in_logged_steps(gpu):
    gpu.setitem(sys.modules, "pynvml", fake_nvml())
    monitor, (run, told) = Device(DeviceConfig(every_seconds=0.1)), run_on(GPU)
    monitor.on_start(run)
    until = time.monotonic() + 10
    while not told and time.monotonic() < until:
        time.sleep(0.01)
        monitor.on_step(None)
    assert ("device/utilization/{over}", 0.75) in told
    monitor.on_end(None)
    assert monitor.sampler is None


def test_a_logged_step_without_a_new_reading_has_the_last_one(gpu):
    """So all ranks publish in the same steps, from the first on, whenever their threads look."""
    gpu.setitem(sys.modules, "pynvml", fake_nvml())
    monitor, (run, told) = Device(DeviceConfig(every_seconds=60.0)), run_on(GPU)
    monitor.on_start(run)
    monitor.on_step(None)
    monitor.on_step(None)
    monitor.on_end(None)
    once = [(f"device/{name}/{{over}}", value) for name, value in READINGS.items()]
    assert told == [*once, *once]


def test_what_is_no_error_of_nvmls_is_said_once_and_ends_it(gpu):
    looks = iter([75])
    use = lambda handle: SimpleNamespace(gpu=next(looks))  # noqa: E731 - then StopIteration
    gpu.setitem(sys.modules, "pynvml", fake_nvml(nvmlDeviceGetUtilizationRates=use))
    monitor, (run, told) = Device(DeviceConfig(every_seconds=0.01)), run_on(GPU, rank=1)
    with capture_logs() as logs:
        monitor.on_start(run)
        monitor.sampler.join(10)
        monitor.on_step(None)
        monitor.on_end(None)
    assert [entry["error"] for entry in logs] == ["StopIteration: "]
    assert told == []


def broken(*_):
    raise NotTold("driver/library version mismatch")


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (None, "pip install 'nanotrain-performance[nvml]'"),
        (fake_nvml(nvmlInit=broken), "cannot read NVML: driver/library version mismatch"),
    ],
    ids=["not-installed", "broken"],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_without_nvml_rank_0_says_what_to_do_and_the_run_goes_on(gpu, module, text, rank):
    gpu.setitem(sys.modules, "pynvml", module)
    monitor, (run, told) = Device(DeviceConfig()), run_on(GPU, rank)
    with capture_logs() as logs:
        monitor.on_start(run)
        monitor.on_step(None)
    assert [text in entry["event"] for entry in logs] == ([True] if rank == 0 else [])
    assert told == []


def test_on_a_cpu_it_is_silent():
    monitor, (run, told) = Device(DeviceConfig()), run_on(torch.device("cpu"))
    with capture_logs() as logs:
        monitor.on_start(run)
        monitor.on_step(None)
    assert (logs, told) == ([], [])
