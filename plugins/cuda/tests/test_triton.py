"""Triton's kernels where no GPU is: in Triton's interpreter, and compiled for Hopper.

Triton is no requirement of this workspace, as it is large: the README says which to install.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from nanotrain_core.testing.triton_kernels import launches, resources, run_in_interpreter

FOLDER = Path(__file__).parent
needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed")
needs_compiler = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1",
    reason="TRITON_INTERPRET=1 makes functions that no compiler takes",
)


@needs_triton
@pytest.mark.parametrize(
    "name", ["test_adamw.py", "test_permutation.py", "test_top_k.py", "test_without_rows.py"]
)
def test_in_the_interpreter(name):
    run_in_interpreter(FOLDER / name, "-m", "not gpu")


@pytest.mark.full
@needs_triton
def test_the_harness_passes_in_the_interpreter():
    """Functions of the table, of all shapes and dtypes; runs of models are the same functions once more."""
    run_in_interpreter(FOLDER / "test_conformance.py", "-k", "not runs_are and not two_runs")


@needs_triton
@needs_compiler
@pytest.mark.parametrize(("width", "chosen"), [(7168, 8), (2048, 6), (200, 2)])
def test_every_kernel_compiles_for_hopper(width, chosen, tmp_path):
    from nanotrain_cuda import triton_permutation as kernels

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    x, rows, back = empty(4096, width), empty(4096 * chosen, width), empty(4096 * chosen, dtype=torch.int64)
    weights = empty(4096, chosen, dtype=torch.float32)
    with launches() as found:
        kernels.spread(x, back, chosen)
        kernels.add_up(rows, back, chosen, None)
        kernels.add_up(rows, back, chosen, weights)
        kernels.weigh_backward(x, rows, back, weights)
    assert [launch.name for launch in found] == ["spread_rows", "add_up_rows", "add_up_rows", "spread_rows"]
    for launch in found:
        assert launch.grid == (4096,)
        binary = launch.compiled()
        ptx = binary.asm["ptx"]
        assert ".target sm_90" in ptx
        assert "atom.global" not in ptx  # the same bits each time
        assert "red.global" not in ptx
        taken = resources(binary, tmp_path)
        assert taken.stack == 0
        if width % 16 == 0:
            assert "ld.global.v4.b32" in ptx
            assert "st.global.v4.b32" in ptx
            # Two programs or more of 512 threads fit the 65,536 registers of a multiprocessor.
            assert taken.registers * 32 * launch.options["num_warps"] <= 65536 // 2


@needs_triton
@needs_compiler
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("sizes", [(256, 8, 8, 4), (160, 6, 8, 3), (30, 5, 1, 1)], ids=str)
def test_a_choice_compiles_for_hopper_within_a_warps_registers(sizes, biased, tmp_path):
    from nanotrain_cuda.triton_top_k import choose

    E, *rest = sizes
    bias = torch.empty(E, device="meta") if biased else None
    with launches() as found:
        choose(torch.empty(4096, E, device="meta"), bias, *rest)
    (launch,) = found
    assert launch.grid == (4096,)
    taken = resources(launch.compiled(), tmp_path)
    assert taken.stack == 0
    assert taken.registers <= 128  # sixteen warps of a multiprocessor's 65,536 registers, or more


@needs_triton
@needs_compiler
def test_zeros_compile_for_hopper_into_wide_stores_and_no_loads_of_gradients(tmp_path):
    from nanotrain_cuda.triton_without_rows import zero_without_rows

    stacked = torch.empty(64, 1408, 2048, dtype=torch.bfloat16, device="meta")
    with launches() as found:
        zero_without_rows(stacked, torch.empty(64, dtype=torch.int64, device="meta"))
    (launch,) = found
    assert launch.grid == (64, 32)
    binary = launch.compiled()
    assert "st.global.v4.b32" in binary.asm["ptx"]
    assert binary.asm["ptx"].count("ld.global") == 1  # of the count
    assert resources(binary, tmp_path).stack == 0


@needs_triton
@needs_compiler
@pytest.mark.parametrize("form", ["int8", "bfloat16", "carried"])
def test_low_precision_adamw_compiles_for_hopper_into_wide_accesses(form, tmp_path):
    from nanotrain_cuda.triton_adamw import update_weight

    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    weight = torch.nn.Parameter(empty(1024, 4096))
    weight.grad = empty(1024, 4096)
    state = {}
    for name, code in (("exp_avg", torch.int8), ("exp_avg_sq", torch.uint8)):
        if form == "int8" or (form == "carried" and name == "exp_avg_sq"):
            state[f"{name}_code"] = empty(1024, 4096, dtype=code)
            state[f"{name}_scale"] = empty(1024, 128, dtype=torch.bfloat16)
        else:
            state[name] = empty(1024, 4096, dtype=torch.bfloat16)
    with launches() as found:
        update_weight(weight.detach(), weight.grad, state, empty(2), empty(), 0.9, 0.95, 0.01, 1e-8)
    (launch,) = found
    binary = launch.compiled()
    ptx = binary.asm["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    assert ".f64" not in ptx
    taken = resources(binary, tmp_path)
    assert taken.stack == 0
    assert taken.registers <= 80  # of 24 warps of a multiprocessor, or more
