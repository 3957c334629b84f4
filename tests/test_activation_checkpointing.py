"""Activation checkpointing: gradients as before, in the memory of one layer."""

import warnings

import pytest
import torch
from compositions import MODELS, VOCAB
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from nanotrain_core.batch import Batch
from nanotrain_core.contracts import Monitor
from nanotrain_core.models.activation_checkpointing import recompute
from nanotrain_core.testing import Case, conformance, run_ranks
from nanotrain_core.testing.probe import Reports, make_engine, make_run

LAYERS = 6
LLAMA = {"use": "transformer", "vocab": VOCAB}


def case(every, granularity="full", **around):
    config = {"every": every, "granularity": granularity}
    table = {"parallel": [{"use": "recompute", **config}, {"use": "summed"}], **around}
    overrides = {**table, "model": {"layers": LAYERS, "ffn": 96}}
    name = "" if granularity == "full" else granularity
    return Case(
        "parallel", use="recompute", config=config, topology={"dp": 2}, overrides=overrides, name=name
    )


test_conformance = conformance(
    case(1),
    # The first tier has them of ddp and zero12.
    slow=pytest.mark.full,
    marks=dict.fromkeys(("monitors_see_gradients", "weights_equal[adamw]"), pytest.mark.full),
)
test_exhaustively = pytest.mark.full(
    conformance(case(1, granularity="selective"), case(2), case(2, schedule={"use": "accumulate"}))
)


def kept(config, model=LLAMA, kernels="auto"):
    """Return the bytes that a forward pass leaves for backward, FLOPs of the backward pass, and gradients."""
    wrappers = [{"use": "recompute", **config}] if config else []
    around = {"parallel": wrappers, "kernels": {"use": kernels}, "data": {"vocab": VOCAB}}
    whole = Case("model", use=model["use"], config={**model, "layers": LAYERS}, overrides=around)
    (part,) = make_run(whole, {}).stages.values()
    tokens = torch.arange(64 * 16).remainder(VOCAB).view(64, 16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        output = part(tokens, Batch(tokens, tokens))
    with FlopCounterMode(display=False) as counter:
        sum(output.losses.values()).backward()
    memory = sum(event.self_device_memory_usage + event.self_cpu_memory_usage for event in profiler.events())
    return memory, counter.get_total_flops(), [p.grad for p in part.parameters() if p.requires_grad]


def test_of_a_layer_its_input_alone_is_kept():
    configs = {}, {"every": 2}, {"every": 1}
    (plain, _, gradients), (second, _, _), (all_of_them, _, again) = (
        run_ranks(kept, 1, c)[0] for c in configs
    )
    hidden = 64 * 16 * 32 * 8  # float64
    assert plain - all_of_them > 10 * LAYERS * hidden
    assert all_of_them < 0.2 * plain
    assert second == pytest.approx((plain + all_of_them) / 2, rel=0.05)
    for one, other in zip(gradients, again, strict=True):
        assert torch.equal(one, other)


@pytest.mark.full
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("model", [LLAMA, MODELS["deepseek_v3"]], ids=["llama", "deepseek"])
def test_selective_repeats_no_matrix_product_and_keeps_less_than_everything(model, kernels):
    """Full recomputation repeats the whole forward pass of layers.

    On a CPU, products that nanotrain-cpu writes into memory of its own, as those of experts, are repeated
    too, and so is attention without a kernel.
    """
    configs = {}, {"granularity": "selective"}, {"granularity": "full"}
    found = [run_ranks(kept, 1, config, model=model, kernels=kernels)[0] for config in configs]
    (plain, flops, gradients), (selective, no_more, _), (full, more, _) = found
    assert full < selective < 0.8 * plain
    assert more > 1.3 * flops
    assert flops <= no_more < (1.02 if model is LLAMA and kernels == "torch" else 1.15) * flops
    for _, _, others in found[1:]:
        for one, other in zip(gradients, others, strict=True):
            assert torch.equal(one, other)


def test_what_selective_stores_passes_by_hooks_on_saved_tensors_without_a_warning():
    """Such as those of activation_offload. torch 2.14 warns of each operator if it is not said."""
    layer, x, seen = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 5)), torch.ones(3, 4), []
    with warnings.catch_warnings(), saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        warnings.simplefilter("error")
        y = recompute(None, layer, x, selective=True)
    assert not {t.shape for t in seen} & {(3, 6), (3, 5)}  # results of the products
    y.sum().backward()
    assert layer[0].weight.grad is not None


class Multiplies(Monitor):
    """Observes attention calls and outputs by products, of which checkpointed layers have some as well."""

    def __init__(self):
        self.products = []

    def on_start(self, run):
        run.observe_calls("attention", lambda name, q, *_: self.look(name, q), ["layers.*"])
        run.observe_outputs(self.look, ["layers.*.attn", "layers.*.ffn"])

    def look(self, name, x):
        self.products.append(torch.mm(x.flatten(0, -2).mT, x.flatten(0, -2)))


def trained(model, monitors):
    """Return losses and gradient norms."""
    run = {"steps": 1}
    changes = {"run": run, "parallel": [{"use": "recompute", "granularity": "selective"}]}
    around = {"data": {"vocab": VOCAB}, "kernels": {"use": "torch"}, "optimizer": {"use": "adamw"}}
    whole = Case("model", use=model["use"], config={**model, "layers": 2}, overrides=around)
    seen = Reports()
    engine = make_engine(whole, changes, callbacks=[seen])
    engine.events.monitors = [*engine.events.monitors, *monitors]
    engine.fit()
    return [(report.loss, report.grad_norm) for report in seen.reports]


@pytest.mark.parametrize(
    "model", [LLAMA, pytest.param(MODELS["deepseek_v3"], marks=pytest.mark.full)], ids=["llama", "deepseek"]
)
def test_products_of_an_observer_are_not_stored_among_those_of_a_layer(model):
    monitor = Multiplies()
    assert trained(model, [monitor]) == trained(model, [])
    assert monitor.products
