"""Hardware files: those that are shipped, and what is said of wrong ones."""

import pytest
from nanotrain_plan.hardware import HardwareError, find_hardware, read_hardware, shipped


@pytest.mark.parametrize("name", shipped())
def test_shipped_files_are_whole_and_name_their_sources(name):
    hardware = find_hardware(name)
    assert 0 < hardware.usable < hardware.memory_gb * 1e9
    assert hardware.rate("bfloat16") < hardware.peak("bfloat16")
    head = shipped()[name].read_text().split("\n\n")[0]
    assert ("Peaks" in head and "Achieved" in head) or name == "cpu"


def test_an_unknown_name_is_told_the_nearest():
    with pytest.raises(HardwareError, match=r"no hardware is named 'h10'.*h100.*expected one of .*a100"):
        find_hardware("h10")


def test_a_missing_file_is_named():
    with pytest.raises(HardwareError, match=r"there is no file .*mine\.toml"):
        find_hardware("mine.toml")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("memory_gb = 80.0", "memory_gb = -1.0", r"memory_gb: expected a number above 0, got -1\.0"),
        ("memory_gb = 80.0", 'memory_gb = "80"', r"memory_gb: expected a number, got '80'"),
        ("memory_gb = 80.0", "", r"memory_gb: missing; expected a number"),
        ("memory_gb = 80.0", "memory_gib = 80.0", r"memory_gib: no such key.*memory_gb"),
        ("gemm = 0.70", "gemm = 1.5", r"achieved\.gemm: expected a fraction from 0 to 1, got 1\.5"),
        ("gemm = 0.70", "gem = 0.70", r"achieved\.gem: no such key.*gemm"),
        ("float32 = 66.9", "float32 = 0", r"peak_tflops\.float32: expected a number above 0, got 0"),
        ("[overlap]", "[overlap]]", r"mine\.toml: "),
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
