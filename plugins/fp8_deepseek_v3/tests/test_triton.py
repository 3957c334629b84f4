"""Triton's kernels where no GPU is: in Triton's interpreter, and compiled for Hopper.

Triton is no requirement of this workspace, as it is large: the README says which to install.
`.ci/run` runs them.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from nanotrain_fp8_deepseek_v3.backends import choose
from nanotrain_fp8_deepseek_v3.formats import E5M2
from nanotrain_fp8_deepseek_v3.gemm import FP8Recipe

from nanotrain_core.errors import NanotrainError
from nanotrain_core.testing.triton_kernels import (
    instructions,
    interpreting,
    launches,
    loops,
    resources,
    run_in_interpreter,
)

needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed")
needs_compiler = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1",
    reason="TRITON_INTERPRET=1 makes functions that no compiler takes",
)
FOLDER = Path(__file__).with_name("interpreted")


def test_the_interpreter_sees_no_gpu():
    """Its tests compare kernels with the emulation on a CPU."""
    words = [
        sys.executable,
        "-c",
        "import torch; print(torch.cuda.is_available(), torch.cuda.device_count())",
    ]
    found = subprocess.run(words, env=interpreting(), capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "0"]


@needs_triton
@pytest.mark.parametrize(
    "name",
    [
        "test_division.py",
        pytest.param("test_compiled.py", marks=pytest.mark.full),
        pytest.param("test_rounding.py", marks=pytest.mark.full),
        pytest.param("test_layers.py", marks=pytest.mark.full),
        pytest.param("test_swiglu_kernels.py", marks=pytest.mark.full),
    ],
)
def test_in_the_interpreter(name):
    run_in_interpreter(FOLDER / name)


# --- compiled for compute capability 9.0 ------------------------------------------------------

#: Of DeepSeek-V3: tokens, width, inner width of an expert, experts of a rank.
M, K, N, E = 4096, 7168, 2048, 32


def empty(*shape, dtype=torch.bfloat16):
    """Return a tensor without memory: shapes, strides and dtypes are all that a compiler needs."""
    return torch.empty(shape, dtype=dtype, device="meta")


def products(M, K, N, E):
    """Make every product of one weight's operands, and of stacked weights, at these sizes."""
    from nanotrain_fp8_deepseek_v3.fused import TritonFP8

    x, w, d_y = empty(M, K), empty(E, N, K), empty(M, N)
    experts = TritonFP8(FP8Recipe()).grouped(empty(E, dtype=torch.int64))
    _, kept = experts.forward(x, w)
    experts.dgrad(d_y, w)
    experts.wgrad(d_y, kept)
    TritonFP8(FP8Recipe(input_power_of_two=True)).wgrad(d_y, TritonFP8(FP8Recipe()).save_for_wgrad(x))
    rounded = TritonFP8(FP8Recipe(quantize_swiglu=True))
    _, *saved = rounded.swiglu(d_y, d_y)
    rounded.recompute_swiglu(*saved, d_y.dtype)
    rounded.swiglu_backward(*saved, d_y)


def flushing(launch):
    """Return the instructions that may flush."""
    return {"ex2.approx.ftz.f32"} if "swiglu" in launch.name else set()


@needs_triton
@needs_compiler
@pytest.mark.parametrize("sizes", [(M, K, N, E), (1000, 200, 328, 5)], ids=["DeepSeek-V3", "ragged"])
def test_every_kernel_compiles_for_hopper(sizes, tmp_path):
    with launches() as found:
        products(*sizes)
    names = {launch.name for launch in found}
    assert names == {
        "round_rows",
        "round_columns",
        "round_blocks",
        "round_swiglu",
        "round_recomputed_swiglu",
        "rows_times_blocks",
        "columns_times_columns",
    }
    wide = not sizes[1] % 128
    for launch in found:
        assert len(launch.grid) == 1
        assert 0 < launch.grid[0] < 2**31
        binary = launch.compiled()
        ptx = binary.asm["ptx"]
        assert ".target sm_90" in ptx
        # Numbers below 2^-126 stay, except in the exponential to which one is added.
        assert set(re.findall(r"\S+\.ftz\S*", ptx)) <= flushing(launch)
        if "times" in launch.name:
            assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in ptx
            (loop,) = loops(binary, tmp_path)
            assert loop["QGMMA"] >= 4
            assert loop["LDL"] == loop["STL"] == 0 or not wide
            assert re.search(r"cp\.async\.cg\.shared\.global[^;]*, 0x10,", ptx)  # 16 bytes at once
        else:
            assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
            assert "st.global.v4.b32" in ptx
            assert "ld.global.v4.b32" in ptx or not wide
        # What a thread holds fits into registers; outside of its loop a product may leave four numbers.
        assert resources(binary, tmp_path).stack <= (16 if "times" in launch.name else 0) or not wide


#: Instructions for each number of the README's table, rounded up.
COSTS = {
    "1 x 128": 20,
    "128 x 1": 23,
    "128 x 1 of codes": 22,
    "128 x 128": 21,
    "SwiGLU": 61,
    "SwiGLU again": 38,
    "SwiGLU backward": 60,
}


@needs_triton
@needs_compiler
def test_kernels_that_round_have_no_more_instructions_for_a_number_than_the_readme_says(tmp_path):
    from nanotrain_fp8_deepseek_v3.fused import TritonFP8
    from nanotrain_fp8_deepseek_v3.triton_kernels.quantize_blocks import quantize_blocks
    from nanotrain_fp8_deepseek_v3.triton_kernels.quantize_rows import quantize_rows
    from nanotrain_fp8_deepseek_v3.triton_kernels.quantize_transposed import (
        quantize_transposed,
        requantize_transposed,
    )

    x = empty(16384, 7168)
    with launches() as found:
        codes, scales = quantize_rows(x)
        quantize_transposed(x)
        requantize_transposed(codes, scales)
        quantize_blocks(x)
        backend = TritonFP8(FP8Recipe(quantize_swiglu=True))
        _, *saved = backend.swiglu(x, x)
        backend.recompute_swiglu(*saved, x.dtype)
        backend.swiglu_backward(*saved, x)
    for launch, (kind, most) in zip(found, COSTS.items(), strict=True):
        threads = 32 * launch.options["num_warps"] * launch.grid[0]
        each = instructions(launch.compiled(), tmp_path).total() * threads / x.numel()
        assert each <= most, kind


# --- refusals ---------------------------------------------------------------------------------


def test_one_scale_for_a_whole_tensor_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(NanotrainError, match="'triton' cannot run: its kernels round tiles of 128"):
        choose("triton", torch.device("cuda"), FP8Recipe(tile=0, gradients=E5M2))


def test_a_cpu_is_refused():
    with pytest.raises(NanotrainError, match="'triton' cannot run: it needs a CUDA device, this is cpu"):
        choose("triton", torch.device("cpu"), FP8Recipe())
