"""Runs with and without ``cuda_graphs``, and what differs."""

from dataclasses import replace
from unittest import mock

import torch
import torch.nn.functional as F
from compiled import MODELS
from recorded_graph import recorded_graphs

from nanotrain_core.contracts import kernels
from nanotrain_core.models.ops import TORCH_OPS
from nanotrain_core.testing import probe
from nanotrain_core.testing.case import Case

STEPS = 4
#: Three microbatches of two sequences in each step.
EVEN = {"sequences": 6, "microbatch": 2, "length": 8}


def case(model="llama", degrees=None, vocab=33, ranks=None, **overrides):
    run = {"steps": STEPS, **overrides.pop("run", {})}
    tables = {
        "kernels": {"use": "torch"},
        "model": {"init_std": 0.3, "vocab": vocab, "layers": 2, **MODELS[model]},
        "data": {"vocab": vocab},
        "batch": EVEN,
        "evaluation": {"every": 2, "sequences": 5},
        "run": run,
    }
    ranks = {} if ranks is None else {"world_size": ranks}
    return Case("topology", use="grid", topology=degrees or {}, overrides=tables | overrides, **ranks)


def experts_on_the_device(rows_ND, counts_E, gate_EFD, up_EFD, down_EDF):
    """The torch kernels' experts, without telling the host how many rows each has."""
    owner_N = torch.searchsorted(counts_E.cumsum(0), torch.arange(len(rows_ND)), right=True)
    gate, up, down = (weight[owner_N] for weight in (gate_EFD, up_EFD, down_EDF))
    hidden = F.silu(torch.einsum("nd,nfd->nf", rows_ND, gate)) * torch.einsum("nd,nfd->nf", rows_ND, up)
    return torch.einsum("nf,ndf->nd", hidden, down)


on_the_device = mock.patch.object(
    kernels, "plain_ops", return_value=replace(TORCH_OPS, experts=experts_on_the_device)
)


def values(trace):
    """Return everything that a run computed, by name."""
    found = {f"loss {report.step}": report.loss for report in trace.reports}
    found |= {f"norm {report.step}": report.grad_norm for report in trace.reports}
    found |= {f"evaluation {number}": loss for number, loss in enumerate(trace.evaluations)}
    for what in ("gradients", "weights", "state"):
        found |= {f"{what} {block.name} {block.of}": block.tensor.tolist() for block in getattr(trace, what)}
    return found


def differences(plain, **options):
    """Return the names of what differs from an eager run's, and how many microbatches were replayed."""
    expected = values(probe.train(plain, {}, **options))
    with recorded_graphs() as made:
        found = values(
            probe.train(plain, {"run": {**plain.overrides["run"], "cuda_graphs": True}}, **options)
        )
    assert found.keys() == expected.keys()
    return [name for name in expected if found[name] != expected[name]], sum(each.replays for each in made)
