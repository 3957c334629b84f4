"""Weights after a few steps in float64: on the GPU as on the CPU, compiled as eager."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from benchmarks.gpu.races import DENSE, EXPERTS, TINY_EXPERTS, TINY_FFN
from benchmarks.gpu.records import Recorder
from benchmarks.gpu.settings import Settings
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.recipe import load_recipe

STEPS = 5
#: Largest difference of a weight, all being of the order of 1 or less.
BOUND = 1e-10

MODELS = {"Llama tiny": (DENSE, TINY_FFN), "DeepSeek tiny": (EXPERTS, TINY_EXPERTS)}


def run(settings: Settings) -> None:
    """Compare both models, three ways each."""
    record, device = Recorder(settings.records), settings.device
    backend = "aot_eager" if settings.smoke else "inductor"
    eager = ("run.compile=false",)
    compiled = ("run.compile=true", f'run.compile_backend="{backend}"')
    for name in MODELS:
        with record.attempt(f"equality, {name}"):
            expected = trained(name, eager, "cpu")
            found = trained(name, eager, device)
            report(record, name, f"on {device}, eager", "CPU", largest(found, expected))
        with record.attempt(f"equality, {name}, compiled"):
            again = trained(name, compiled, device)
            report(record, name, f"on {device}, {backend}", "eager", largest(again, found))


def trained(name: str, overrides: tuple[str, ...], device: str) -> Mapping[str, torch.Tensor]:
    """Return a model's weights after some steps in float64."""
    file, sizes = MODELS[name]
    changes = [*sizes, *overrides, f'run.device="{device}"', f"run.steps={STEPS}", 'precision.use="fp64"']
    engine = RuntimeEngine.from_recipe(load_recipe(file, overrides=changes, ranks=1), device=device)
    engine.fit()
    return {
        name: parameter.detach().cpu()
        for part in engine.run.stages.values()
        for name, parameter in part.named_parameters()
    }


def largest(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference of any element."""
    assert found.keys() == expected.keys()
    return max((found[name] - expected[name]).abs().max().item() for name in expected)


def report(record: Recorder, model: str, how: str, against: str, difference: float) -> None:
    record.row(
        "equality",
        what=f"{model}, float64, {STEPS} steps, {how}",
        against=against,
        difference=f"{difference:.1e}",
        bound=f"{BOUND:g}",
        ok=difference <= BOUND,
    )
