"""Python, torch, drivers, backends and plugins: whether they are there and fit together."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from nanotrain_core.api import Registry
from nanotrain_doctor.findings import Finding, bad, good, note, warning


def examine_plugins(registry: Registry) -> list[Finding]:
    """Report plugins that do not load, and names that two of them claim."""
    found = [
        bad(
            "plugin",
            f"{plugin} does not load: {plugin.error}",
            "mend or uninstall it, or --no-plugin its name",
        )
        for plugin in registry.broken
    ]
    found += [bad("plugin", clash, "uninstall one, or --no-plugin its name") for clash in registry.clashes()]
    count = len(registry.plugins) - len(registry.broken)
    return [*found, good("plugins", f"{count} load", versions=registry.versions())]


def python() -> Finding:
    """Report the interpreter."""
    build = "" if sys.maxsize > 2**32 else ", of 32 bits"
    text = f"{platform.python_version()}{build} on {platform.system()} {platform.release()}"
    values = {"executable": sys.executable, "platform": platform.platform(), "machine": platform.machine()}
    if build:
        return bad("Python", text, "a Python of 64 bits", **values)
    return good("Python", text, **values)


def torch_version(found: str | None = None, wanted: Iterable[str] | None = None) -> Finding:
    """Judge whether the installed torch is one that the core works with, without importing it.

    Args:
        found: its version; None asks.
        wanted: what the core requires; None asks.
    """
    try:
        installed = version("torch") if found is None else found
    except PackageNotFoundError:
        return bad("torch", "not installed", "pip install torch")
    required = requires("nanotrain-core") or [] if wanted is None else wanted
    ranges = [Requirement(text).specifier for text in required if Requirement(text).name == "torch"]
    for each in ranges:
        if not each.contains(installed.partition("+")[0], prereleases=True):
            return bad("torch", f"{installed}; nanotrain-core needs {each}", f"pip install 'torch{each}'")
    return good("torch", installed, version=installed)


def examine_torch(
    load: Callable[[str], Any] = import_module, root: Path = Path("/"), environment: Any = None
) -> list[Finding]:
    """Import torch and report its devices and backends; ``root`` is where ``/proc`` and ``/dev`` are."""
    try:
        torch = load("torch")
    except Exception as problem:
        return [bad("torch", f"does not import: {type(problem).__name__}: {problem}", "install torch again")]
    return [devices(torch, root, os.environ if environment is None else environment), backends(torch)]


def devices(torch: Any, root: Path, environment: Any) -> Finding:
    """Judge whether torch sees the GPUs that this host has a driver for."""
    driver = _driver(root)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(number) for number in range(count)]
    values = {"driver": driver, "cuda": torch.version.cuda, "devices": names}
    if driver is None and not count:
        return note("GPUs", "none: runs are on the CPU, over gloo", **values)
    if not count:
        if torch.version.cuda is None:
            remedy = f"a torch with CUDA: this one, {torch.__version__}, has none"
        elif environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
            remedy = "unset CUDA_VISIBLE_DEVICES"
        else:
            remedy = f"a driver for CUDA {torch.version.cuda}; nvidia-smi says more; in Docker --gpus all"
        return bad("GPUs", f"driver {driver} is here, and torch sees no GPU", remedy, **values)
    text = f"{count} x {names[0]}, CUDA {torch.version.cuda}, driver {driver or 'unknown'}"
    if len(set(names)) > 1:
        text = f"{', '.join(names)}: not all alike"
        return warning(
            "GPUs", text, "CUDA_VISIBLE_DEVICES that leaves those alike: the slowest sets the pace", **values
        )
    return good("GPUs", text, **values)


def backends(torch: Any) -> Finding:
    """Judge whether ranks have something to exchange tensors through."""
    distributed = torch.distributed
    if not distributed.is_available():
        return bad("backends", "torch has no torch.distributed", "a torch that is built with it")
    found = {"gloo": distributed.is_gloo_available(), "nccl": distributed.is_nccl_available()}
    values: dict[str, Any] = dict(found)
    names = [name for name, there in found.items() if there]
    if found["nccl"] and torch.cuda.is_available():
        values["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        names[names.index("nccl")] = f"NCCL {values['nccl']}"
    if torch.cuda.is_available() and not found["nccl"]:
        return bad(
            "backends", "there are GPUs, and torch has no NCCL", "a torch that is built with it", **values
        )
    if not found["gloo"]:
        return bad("backends", "torch has no gloo", "a torch that is built with it", **values)
    return good("backends", ", ".join(names), **values)


def _driver(root: Path) -> str | None:
    """Return the version of NVIDIA's driver; ``"unknown"`` if only its devices are there."""
    try:
        words = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8").split()
        return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")
    except OSError:
        return "unknown" if (root / "dev/nvidiactl").exists() else None
