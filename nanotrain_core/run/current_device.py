"""The device of a rank, as the current one of its process."""

from __future__ import annotations

import torch


def make_current(device: torch.device | str) -> torch.device:
    """Return ``device`` with its index, after making it the current device of this process.

    Events are recorded on the current device's stream, and its random-number stream is the one that is
    saved. The index is needed because ``torch.device("cuda") != torch.device("cuda:0")``. ``cpu`` and
    ``meta`` are returned unchanged.
    """
    device = torch.device(device)
    if device.type in ("cpu", "meta"):
        return device
    if device.index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    torch.accelerator.set_device_index(device)
    return device
