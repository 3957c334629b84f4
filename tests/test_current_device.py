"""A run computes on the current device of its process, and knows its index."""

import pytest
import torch

from nanotrain_core.run.current_device import make_current


@pytest.fixture
def gpus(monkeypatch):
    """Three GPUs, of which number 2 is the current one, as far as torch's Python code can tell."""
    chosen = [2]
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch._C, "_accelerator_getDeviceIndex", lambda: chosen[-1])
    monkeypatch.setattr(torch._C, "_accelerator_setDeviceIndex", chosen.append)
    return chosen


@pytest.mark.parametrize(("device", "index"), [("cuda", 2), ("cuda:1", 1), (torch.device("cuda", 0), 0)])
def test_it_becomes_the_current_one_and_has_an_index(gpus, device, index):
    """torch refuses to make a device without an index current: no run on "cuda" had started."""
    assert make_current(device) == torch.device("cuda", index)
    assert gpus[1:] == [index]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_there_is_one_host(gpus, device):
    assert make_current(device) == torch.device(device)
    assert gpus == [2]
