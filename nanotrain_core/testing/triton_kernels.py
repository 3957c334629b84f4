"""Tests of Triton kernels without a GPU: compiled for one, and run in Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import attrs


@attrs.define(frozen=True, eq=False)
class Launch:
    """A launch that was recorded but not run."""

    kernel: Any
    args: tuple[Any, ...]
    options: Mapping[str, Any]
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        """Return the kernel's name."""
        return str(self.kernel.__name__)

    def compiled(self, capability: int = 90) -> Any:
        """Return the compiler's output for a GPU of this compute capability, times 10."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.runtime.jit import mangle_type

        kernel = self.kernel
        given = dict(zip(kernel.arg_names, self.args, strict=False)) | dict(self.options)
        words = ("num_warps", "num_stages", "maxnreg", "num_ctas")
        launch = {name: given.pop(name) for name in words if name in given}
        constant = {
            p.name
            for p in kernel.params
            if p.is_constexpr or given[p.name] is None or _is_int(given[p.name], 1)
        }
        signature = {n: "constexpr" if n in constant else mangle_type(given[n]) for n in kernel.arg_names}
        aligned = [
            n for n in kernel.arg_names if n not in constant and (not _is_int(given[n]) or given[n] % 16 == 0)
        ]
        place = {name: (number,) for number, name in enumerate(kernel.arg_names)}
        source = ASTSource(
            kernel,
            signature,
            constexprs={place[n]: given[n] for n in constant},
            attrs={place[n]: [["tt.divisibility", 16]] for n in aligned},
        )
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch)


def _is_int(value: object, number: int | None = None) -> bool:
    return type(value) is int and number in (None, value)


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Record launches within the block, with tensors on ``meta``, without running them."""
    from triton.runtime.jit import JITFunction

    found: list[Launch] = []

    def run(kernel: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        found.append(Launch(kernel, args, options, tuple(grid)))

    with mock.patch.object(JITFunction, "run", run):
        yield found


@attrs.define(frozen=True)
class Resources:
    """The resources of a compiled kernel according to ``cuobjdump``."""

    registers: int
    """Of each thread, of at most 255."""
    stack: int
    """Bytes of each thread that do not fit into registers."""
    shared: int
    """Bytes of shared memory of a program."""


def resources(binary: Any, folder: Path) -> Resources:
    """Return the resources of a compiled kernel; ``folder`` is for a file of it."""
    from triton import knobs

    (folder / "kernel.cubin").write_bytes(binary.asm["cubin"])
    words = [knobs.nvidia.cuobjdump.path, "-res-usage", str(folder / "kernel.cubin")]
    report = subprocess.run(words, capture_output=True, text=True, check=True)
    text = report.stdout + report.stderr
    return Resources(
        registers=max(map(int, re.findall(r"REG:(\d+)", text))),
        stack=sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", text))),
        shared=int(binary.metadata.shared),
    )


def instructions(binary: Any, folder: Path) -> Counter[str]:
    """Return how often each instruction occurs in a compiled kernel, except padding."""
    found = Counter(name for _, name, _ in _lines(binary, folder) if name)
    del found["NOP"]
    return found


def loops(binary: Any, folder: Path) -> list[Counter[str]]:
    """Return how often each instruction occurs in each loop of a compiled kernel, innermost first."""
    labels: dict[str, int] = {}
    seen: list[str] = []
    found = []
    for label, instruction, target in _lines(binary, folder):
        if label:
            labels[label] = len(seen)
        if instruction:
            seen.append(instruction)
        if target in labels:
            found.append(Counter(seen[labels[target] :]))
    return [loop for loop in found if loop.total() > 1]  # a kernel ends in a jump to itself


def _lines(binary: Any, folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield label, instruction, and target label of each line of a kernel; empty where there is none."""
    from triton import knobs

    (folder / "kernel.cubin").write_bytes(binary.asm["cubin"])
    words = [knobs.nvidia.nvdisasm.path, "-c", str(folder / "kernel.cubin")]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    patterns = (
        r"\s*(\.L_x_\d+):",
        r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)",
        r".*BRA[^`]*`\((\.L_x_\d+)\)",
    )
    for line in text.splitlines():
        label, instruction, target = (
            found[1] if (found := re.match(each, line)) else "" for each in patterns
        )
        yield label, instruction, target


def interpreting() -> dict[str, str]:
    """Return an environment for Triton's interpreter: one core, and no GPU, even where there is one."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    return {**os.environ, **hidden, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def run_in_interpreter(path: Path, *options: str) -> None:
    """Run the tests at ``path`` in a separate process: Triton reads its variable once, when imported.

    Raises:
        AssertionError: one failed, or was skipped.
    """
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path), *options]
    found = subprocess.run(words, env=interpreting(), capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
    assert "skipped" not in found.stdout, found.stdout[-4000:]
