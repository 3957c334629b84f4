"""What a plan takes beside the devices, for a terminal."""

from __future__ import annotations

from rich.console import RenderableType

from nanotrain_plan.data_use import DataPosition
from nanotrain_plan.number_format import count, duration, size
from nanotrain_plan.plan import Plan
from nanotrain_plan.rendering.terminal import grid


def beside(plan: Plan) -> RenderableType:
    """Return what a run takes beside its devices: of the disk, the data, and the memory of hosts."""
    c, d, h = plan.checkpoints, plan.data, plan.host
    later = (
        f", later ones {size(c.later_bytes)} in {duration(c.later_seconds)}"
        if c.later_bytes < c.bytes
        else ""
    )
    disk = f"{c.kept} on disk {size(c.disk)}"
    if c.free is not None:
        disk += f", of {size(c.free)} free here"
        if c.disk > c.free:
            disk += ": too little for a run on this machine"
    rows = [
        ("checkpoint", f"{size(c.bytes)}, written in {duration(c.seconds)}{later}; {disk}"),
        (
            "data",
            f"{count(d.tokens_per_step)} tokens in a step"
            + (f"; {_epochs(d.epochs)} epochs of {d.sequences:,} sequences" if d.epochs is not None else ""),
        ),
        ("data position", _position(d.position)),
        (
            "host memory",
            f"{size(h.total)} for {h.ranks} rank{'s' if h.ranks > 1 else ''}, of "
            f"{size(plan.hardware.host_memory_gb * 1e9)}: processes {size(h.processes)}, "
            f"checkpoint {size(h.checkpoint)}"
            + (f", later ones {size(h.later_checkpoint)}" if h.later_checkpoint < h.checkpoint else "")
            + (f", tensors {size(h.tensors)}" if h.tensors else "")
            + (f", optimizer state {size(h.offloaded)}" if h.offloaded else "")
            + (f", activations {size(h.activations)}" if h.activations else "")
            + ("" if h.fits else f": too little; {_relief(plan)}"),
        ),
    ]
    return grid(rows)


def _position(p: DataPosition) -> str:
    """Return where the run ends in its data, and what a checkpoint saves of that."""
    if p.epoch is None or p.sequence is None or p.train is None:
        told = f"the run ends after {p.taken:,} sequences; how many an epoch has is known when data is opened"
    elif p.sequence:
        told = f"the run ends in epoch {p.epoch + 1:,}, after {p.sequence:,} of its {p.train:,} sequences"
    else:
        told = f"the run ends with epoch {p.epoch:,}, of {p.train:,} sequences"
    return f"{told}. A checkpoint saves the count of sequences and the data's fingerprint"


def _epochs(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _relief(plan: Plan) -> str:
    """Return what would take less of a host's memory."""
    h = plan.host
    if h.checkpoint > max(h.offloaded, h.activations, h.processes):
        shares = "a checkpoint of which every rank writes a share, such as checkpoint.use = 'sharded_v2'"
        return f"{shares}, is not put together on one host"
    if h.activations > max(h.offloaded, h.processes):
        return "activation checkpointing in place of offload"
    return "optimizer.offload = false keeps it on the devices" if h.offloaded else "fewer ranks on a host"
