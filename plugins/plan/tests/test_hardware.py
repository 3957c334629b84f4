"""Hardware files: those that are shipped, and what is said of wrong ones."""

import json
import os
from pathlib import Path

import attrs
import pytest
from nanotrain_plan.hardware import HardwareError, find_hardware, read_hardware, shipped

from nanotrain_core.api import peak_flops
from nanotrain_core.cli import main


@pytest.mark.parametrize("name", shipped())
def test_shipped_files_are_whole_and_name_their_sources(name):
    hardware = find_hardware(name)
    assert 0 < hardware.usable < hardware.memory_gb * 1e9
    assert hardware.rate("bfloat16") < hardware.peak("bfloat16")
    head = shipped()[name].read_text().split("\n\n")[0]
    assert ("Peaks" in head and "Achieved" in head) or name == "cpu"


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("h100", 79.11),
        ("h800", 79.11),
        ("a100", 79.1),
        ("a100_40gb", 39.5),
        ("h200", 139.8),
        ("b200", 178.35),
        ("gb200", 184.31),
        ("b300", 267.69),
        ("gb300", 276.50),
        ("h100_hbm2e", 95),
        ("l40s", 44.4),
        ("rtx_4090", 23.56),
    ],
)
def test_memory_is_that_which_a_run_sees(name, gib):
    """torch says how much a device has in GiB; on paper an H100 has 80 GB."""
    assert find_hardware(name).memory_gb == pytest.approx(gib * 2**30 / 1e9, rel=1e-3)


def test_an_h20_3e_is_an_h20_with_the_memory_of_an_h200():
    """Of one name and compute capability, and half as much again of what a model has to fit in."""
    more, other, memory = (find_hardware(name) for name in ("h20_3e", "h20", "h200"))
    alike = {"name": other.name, "memory_gb": other.memory_gb, "memory": other.memory}
    assert attrs.evolve(more, **alike) == other
    assert (more.memory_gb, more.memory) == (memory.memory_gb, memory.memory)
    assert peak_flops(more.name) == peak_flops(other.name)


@pytest.mark.parametrize("name", sorted({*shipped()} - {"cpu", "h100_hbm2e"}))
def test_the_peak_is_the_one_by_which_a_run_reports_its_mfu(name):
    """Without `h100_hbm2e`, of which the file has a mean, as its source knows no more than two bounds."""
    hardware = find_hardware(name)
    assert hardware.peak("bfloat16") == pytest.approx(peak_flops(hardware.name), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "kind", "key", "most"),
    [
        ("b200", "bfloat16", "gemm", 1745.0),
        ("b200", "mxfp8", "gemm_float8", 3432.5),
        ("gb200", "bfloat16", "gemm", 1822.0),
        ("gb200", "mxfp8", "gemm_float8", 3615.6),
        ("gb200", "nvfp4", "gemm_nvfp4", 6787.0),
        ("b300", "bfloat16", "gemm", 1769.0),
        ("b300", "mxfp8", "gemm_float8", 3353.3),
    ],
)
def test_a_step_reaches_as_much_of_the_best_measured_gemm_as_on_h100(name, kind, key, most):
    """The best are stas00/ml-engineering's, of H100 794.5 and 1402.6 TFLOP/s; in NVFP4 it is NVIDIA's."""
    h100, hardware = find_hardware("h100"), find_hardware(name)
    wide = kind == "bfloat16"
    of_h100 = h100.rate(kind if wide else "float8") / (794.5e12 if wide else 1402.6e12)
    expected = of_h100 * most * 1e12 / hardware.peak(kind)
    assert getattr(hardware.achieved, key) == pytest.approx(expected, abs=0.005)
    assert hardware.rate(kind) == hardware.peak(kind) * getattr(hardware.achieved, key)


def test_nvfp4_reaches_what_fp8_does_where_a_file_does_not_say(tmp_path):
    path = tmp_path / "mine.toml"
    text = shipped()["gb300"].read_text()
    path.write_text(text.replace("gemm_nvfp4 = 0.53\n", ""))
    assert read_hardware(path).rate("nvfp4") == pytest.approx(15000e12 * 0.56)
    path.write_text(text.replace("gemm_nvfp4 = 0.53", "gemm_nvfp4 = 53"))
    with pytest.raises(HardwareError, match=r"achieved\.gemm_nvfp4: expected a fraction from 0 to 1, got 53"):
        read_hardware(path)


@pytest.mark.parametrize(("name", "kind"), [("h100", "mxfp8"), ("h100", "nvfp4"), ("a100", "float8")])
def test_a_dtype_without_units_is_timed_as_bfloat16(name, kind):
    hardware = find_hardware(name)
    assert hardware.kind_of(kind) == "bfloat16"
    assert hardware.rate(kind) == hardware.rate("bfloat16")


def test_an_unknown_name_is_told_the_nearest():
    with pytest.raises(HardwareError, match=r"no hardware is named 'h10'.*h100.*expected one of .*a100"):
        find_hardware("h10")


def test_a_missing_file_is_named():
    with pytest.raises(HardwareError, match=r"there is no file mine\.toml; expected one of a100, "):
        find_hardware("mine.toml")


def test_what_is_no_hardware_file_is_told_what_is_expected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(shipped()["h100"].read_text())
    Path("recipe.toml").write_text("[run]\nsteps = 1\n")
    names = f"expected one of {', '.join(shipped())}, or the path of a TOML file"
    for wanted, told in {
        ".": f"--hardware: . is a folder; {names}",
        "mime.toml": f"--hardware: there is no file mime.toml (did you mean 'mine.toml'?); {names}",
        "h100.toml": f"--hardware: there is no file h100.toml (did you mean 'h100'?); {names}",
        "recipe.toml": f"--hardware: recipe.toml is a recipe; {names} that describes a device",
    }.items():
        with pytest.raises(HardwareError) as caught:
            find_hardware(wanted)
        assert str(caught.value) == told


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("memory_gb = 84.9", "memory_gb = -1.0", r"memory_gb: expected a number above 0, got -1\.0"),
        ("memory_gb = 84.9", 'memory_gb = "80"', r"memory_gb: expected a number, got '80'"),
        ("memory_gb = 84.9", "", r"memory_gb: missing; expected a number"),
        ("memory_gb = 84.9", "memory_gib = 80.0", r"memory_gib: no such key.*memory_gb"),
        ("gemm = 0.70", "gemm = 1.5", r"achieved\.gemm: expected a fraction from 0 to 1, got 1\.5"),
        ("gemm = 0.70", "gem = 0.70", r"achieved\.gem: no such key.*gemm"),
        ("float32 = 66.9", "float32 = 0", r"peak_tflops\.float32: expected a number above 0, got 0"),
        ("memory_gb = 84.9", "memory_gb = inf", r"memory_gb: expected a number above 0, got inf"),
        ("memory_gb = 84.9", "memory_gb = 1e305", r":8: memory_gb: expected a number of at most 1e12$"),
        (
            "memory_gb = 84.9",
            f"launch_us = 1{309 * '0'}\nmemory_gb = 84.9",
            r":8: launch_us: expected a number of at most 1e12$",
        ),
        (
            "bfloat16 = 989.4",
            f"bfloat16 = 1{309 * '0'}",
            r":15: peak_tflops\.bfloat16: expected a number of at most 1e12$",
        ),
        (
            "reserved_gb = 3.0",
            "reserved_gb = 90",
            r":9: reserved_gb: expected less than memory_gb = 84\.9, got 90",
        ),
        ("memory_gb = 84.9", "memory_gb = 84,9", r"mine\.toml:8: Expected newline .*\(column 15\)"),
        ("gemm = 0.70", "gemm = 70", r"mine\.toml:22: achieved\.gemm: expected a fraction"),
        (
            "float8 = 1978.9",
            "float88 = 1978.9",
            r"mine\.toml:17: peak_tflops\.float88: no such key \(did you mean 'float8'\?\); keys: bfloat16, ",
        ),
        (
            "[overlap] ",
            "[overlapp]",
            r"mine\.toml:37: overlapp: no such table \(did you mean 'overlap'\?\)",
        ),
        ("[achieved] ", "[achieve]", r"mine\.toml:21: achieve: no such table \(did you mean 'achieved'\?\)"),
        ("cp = 0.0", "", r"mine\.toml:37: overlap\.cp: missing; expected a number"),
    ],
)
def test_a_wrong_file_is_told_by_key(tmp_path, old, new, told):
    text = shipped()["h100"].read_text()
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(HardwareError, match=told) as caught:
        read_hardware(path)
    assert "mine.toml" in str(caught.value)


def test_a_plan_for_cpus_says_how_many_cores_it_assumes(tmp_path, capsys):
    path = tmp_path / "small.toml"
    path.write_text(
        "[run]\nsteps = 2\n[batch]\nsequences = 4\nmicrobatch = 1\nlength = 16\n"
        '[model]\nuse = "transformer"\nlayers = 1\nwidth = 32\nheads = 2\nvocab = 64\n'
        '[data]\nuse = "synthetic"\nvocab = 64\n'
    )
    assert main(["plan", str(path), "--hardware", "cpu", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["hardware"]["cores"] == 8
    said = f"each rank has 8 cores for itself, 8 in all on a host; this machine has {os.cpu_count()}"
    assert said in plan["assumptions"]


@pytest.mark.full
def test_a_plan_says_which_component_cannot_run_on_the_hardware(capsys):
    pytest.importorskip("nanotrain_fp8_deepseek_v3")
    small = ["--set", "model.layers=1"]
    tiles = "precision 'fp8_deepseek_v3': tiles of 128 need compute capability 9.0 (H100, H200), this is 10.0"
    four_bits = "NVFP4 needs compute capability 10.0 (B200), this is 9.0"
    for precision, backend, name, told in (
        ("fp8_deepseek_v3", "auto", "b200", [tiles]),
        ("fp8_deepseek_v3", "emulated", "b200", []),
        ("fp8_deepseek_v3", "auto", "h800", []),
        ("fp8_deepseek_v3", "auto", "cpu", []),
        ("fp8_hybrid", "auto", "b200", []),
        ("nvfp4", "auto", "h200", [f"precision 'nvfp4': {four_bits}"]),
        ("nvfp4", "emulated", "h200", []),
        ("nvfp4", "auto", "gb300", []),
    ):
        words = [f"--set=precision.use={precision}", f"--set=precision.backend={backend}", *small]
        assert main(["plan", "laptop", "--hardware", name, *words, "--json"]) == (2 if told else 0)
        assert json.loads(capsys.readouterr().out)["refusals"] == told
    words = ["--set=precision.use=mxfp8", *small]
    assert main(["plan", "laptop", "--hardware", "h100", *words]) == 2
    said = "cannot run here: precision 'mxfp8': blocks of 32 need compute capability 10.0 (B200), this is 9.0"
    assert said in " ".join(capsys.readouterr().out.split())
    assert main(["check", "laptop", "--hardware", "h100", *words]) == 0
    assert "warning: it cannot run on h100: precision 'mxfp8': blocks of 32" in capsys.readouterr().out


def test_a_compute_capability_is_two_numbers(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(shipped()["h100"].read_text().replace('"9.0"', '"sm_90"'))
    with pytest.raises(HardwareError, match=r'compute_capability: expected a text such as "9\.0", got'):
        find_hardware(str(path))
    assert find_hardware("b200").capability == (10, 0)
    assert find_hardware("cpu").capability is None


@pytest.mark.full
def test_a_dtype_that_the_device_has_no_units_for_is_told(capsys):
    pytest.importorskip("nanotrain_fp8_deepseek_v3")
    for precision, form, name, told in (
        ("fp8_hybrid", "FP8", "a100", True),
        ("fp8_hybrid", "FP8", "h100", False),
        ("mxfp8", "MXFP8", "h100", True),
        ("mxfp8", "MXFP8", "b200", False),
        ("nvfp4", "NVFP4", "h100", True),
        ("nvfp4", "NVFP4", "b300", False),
    ):
        words = ["--set", f"precision.use={precision}", "--set", "model.layers=1"]
        assert main(["plan", "laptop", "--hardware", name, *words, "--json"]) == (2 if told else 0)
        (gemms,) = [each for each in json.loads(capsys.readouterr().out)["assumptions"] if "GEMMs" in each]
        assert f" in {form}" in gemms
        assert (f"{form}, which the device has no units for: as bfloat16" in gemms) == told
