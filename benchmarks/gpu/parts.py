"""What the command consists of, the most worth first."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import attrs

from benchmarks.gpu.records import Recorder
from benchmarks.gpu.settings import Settings


@attrs.define(frozen=True)
class Part:
    """Something that runs in a process of its own."""

    name: str
    about: str
    function: str
    """``module:function`` of settings."""
    least: float
    """Seconds without which it is not begun."""
    most: float
    """Seconds after which it is ended."""

    def call(self, settings: Settings) -> None:
        """Import and run it."""
        module, _, name = self.function.partition(":")
        function: Callable[[Settings], None] = getattr(import_module(module), name)
        function(settings)


MACHINE = Part("machine", "the device and the versions", "benchmarks.gpu.parts:machine", 0, 90)

PARTS = (
    Part("llama", "Llama 0.96B", "benchmarks.gpu.races:run_llama", 60, 140),
    Part("gpt2", "GPT-2 124M", "benchmarks.gpu.races:run_gpt2", 45, 130),
    Part("wide", "Llama 1.5B, wide", "benchmarks.gpu.races:run_wide", 60, 120),
    Part("deepseek", "DeepSeek 2.3B slice", "benchmarks.gpu.races:run_deepseek", 45, 100),
    Part("optimizer", "a step of AdamW", "benchmarks.gpu.optimizer_step:run", 10, 40),
    Part("fp8", "rounding kernels, layers, experts", "benchmarks.gpu.fp8_kernels:run", 20, 90),
    Part("fp8-equality", "FP8 kernels and emulation", "benchmarks.gpu.fp8_kernels:compare", 10, 60),
    Part("equality", "float64, compiled and eager", "benchmarks.gpu.equality:run", 20, 120),
    Part("permutation", "experts' rows", "benchmarks.gpu.permutation:run", 10, 60),
    Part("tests", "all tests that use a GPU", "benchmarks.gpu.gpu_tests:run", 30, 240),
    Part("llama-others", "sides without a bar", "benchmarks.gpu.races:run_llama_others", 60, 150),
    Part("gpt2-others", "sides without a bar", "benchmarks.gpu.races:run_gpt2_others", 45, 120),
    Part("wide-others", "sides without a bar", "benchmarks.gpu.races:run_wide_others", 60, 120),
    Part("deepseek-others", "sides without a bar", "benchmarks.gpu.races:run_deepseek_others", 45, 120),
    Part("host", "a model of no width", "benchmarks.gpu.races:run_host", 30, 90),
)


def machine(settings: Settings) -> None:
    """Record the device, the driver and the versions."""
    import torch

    record = Recorder(settings.records)
    found = {
        "torch": torch.__version__,
        **{name: _version(name) for name in ("triton", "torchao")},
        "Python": platform.python_version(),
        "CPU cores": str(os.cpu_count()),
    }
    if settings.smoke:
        record.data("machine", {"device": "CPU, sizes made tiny: no figure means anything", **found})
        return
    if not torch.cuda.is_available():
        record.data("refusal", f"it needs a CUDA device, and torch {torch.__version__} finds none")
        return
    device = torch.cuda.get_device_properties(0)
    record.data(
        "machine",
        {
            "device": device.name,
            "memory GB": device.total_memory / 1e9,
            "multiprocessors": device.multi_processor_count,
            "compute capability": f"{device.major}.{device.minor}",
            "driver": _driver(),
            "CUDA": torch.version.cuda,
            **found,
        },
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _driver() -> str:
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.split("\n")[0].strip()
