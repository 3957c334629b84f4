"""FP8 in compiled graphs: numbers bit by bit those of an eager run, and everything quantized as often.

``backend="eager"`` runs the traced graph with the kernels of an eager run; ``aot_eager``, which merges equal
calls as inductor does, also writes norms and attention in bfloat16 otherwise than torch computes them, and
is compared where there are none. Gradients of weights leave its graphs in float32, and are never rounded.
"""

from collections import Counter

import attrs
import pytest
import torch
from fp8_models import DEEPSEEK, LLAMA
from nanotrain_fp8_deepseek_v3 import backends, graphed, scaled
from nanotrain_fp8_deepseek_v3.gemm import EmulatedFP8, Float32GEMM, FP8Recipe
from nanotrain_fp8_deepseek_v3.graphed import GraphedEmulation, GraphedFloat32, GraphedMX, GraphedNVFP4
from nanotrain_fp8_deepseek_v3.mx import EmulatedMX, MXRecipe
from nanotrain_fp8_deepseek_v3.nvfp4.gemm import EmulatedNVFP4, NVFP4Recipe
from nanotrain_fp8_deepseek_v3.operand_cache import OperandCache
from nanotrain_fp8_deepseek_v3.scaled import Scaled
from scaled_products import product
from torch import nn

from nanotrain_core.compile.blocks import compile_blocks
from nanotrain_core.compile.eager import kept_eager
from nanotrain_core.layout.roles import Role, tag
from nanotrain_core.models.ops import TORCH_OPS
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.gemm import use_gemm
from nanotrain_core.precision.quantized_swiglu import quantize_swiglu
from nanotrain_core.precision.wgrad_carrier import wgrad_carrier
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import train

MICROBATCHES = 2


@pytest.fixture
def seen(monkeypatch):
    """Return how often what is quantized, in graphs and outside of them."""
    found = Counter()

    def count(owner, name, what):
        plain = getattr(owner, name)

        def counted(self, *args):
            found[what] += 1
            return plain(self, *args)

        monkeypatch.setattr(owner, name, counted)

    count(EmulatedFP8, "round_input", "inputs")
    count(Float32GEMM, "kept_by_group", "inputs of wgrad")
    count(EmulatedFP8, "of_weight", "weights")
    count(EmulatedMX, "round_input", "inputs")
    count(EmulatedMX, "of_weight", "weights")
    count(EmulatedNVFP4, "round_input", "inputs")
    count(EmulatedNVFP4, "of_weight", "weights")
    count(Scaled, "_of_weight", "weights")
    torch._dynamo.reset()
    return found


@pytest.fixture
def on_cpu(monkeypatch):
    """Have the ``torch`` backend run, its products made as tensor cores make them."""
    anywhere = attrs.evolve(backends.BACKENDS["torch"], refusal=lambda device, recipe: "")
    monkeypatch.setitem(backends.BACKENDS, "torch", anywhere)
    monkeypatch.setattr(scaled.F, "scaled_mm", product)


def train_split(model, degrees, wrappers, backend):
    """Train a rank's part."""
    run = {"compile": True, "compile_backend": backend} if backend else {}
    overrides = {
        "model": model,
        "kernels": {"use": "torch"},
        "parallel": wrappers,
        "data": {"vocab": 64},
        "precision": {"use": "fp8_deepseek_v3", "backend": "emulated"},
        "run": {"steps": 2, **run},
        "batch": {"sequences": 4, "microbatch": 2, "length": 32},
    }
    return train(Case("topology", use="grid", topology=degrees, overrides=overrides), {})


def trained(model, use, config, backend, wrappers=(), monitors=(), steps=2, microbatches=MICROBATCHES):
    """Train; ``backend`` None: eager."""
    run = {"compile": True, "compile_backend": backend} if backend else {}
    overrides = {
        "model": model,
        "kernels": {"use": "torch"},
        "parallel": list(wrappers),
        "monitor": list(monitors),
        "run": {"steps": steps, **run},
        "batch": {"sequences": 2 * microbatches, "microbatch": 2, "length": 32},
    }
    return train(Case("precision", use=use, config=config, overrides=overrides), {})


def assert_same(ours, theirs):
    assert [r.loss for r in ours.reports] == [r.loss for r in theirs.reports]
    for name in ("gradients", "weights"):
        pairs = list(zip(getattr(ours, name), getattr(theirs, name), strict=True))
        assert pairs
        assert all(torch.equal(a.tensor, b.tensor) for a, b in pairs)


RECOMPUTE = [{"use": "recompute"}]
MIXED = {"backend": "emulated", "fp32": ["*.attn.o", "*.experts"]}
full = pytest.mark.full


@pytest.mark.parametrize(
    ("model", "use", "backend", "roles"),
    [
        (DEEPSEEK, "fp8_deepseek_v3", "auto", set()),
        (DEEPSEEK, "fp8_deepseek_v3", "triton", set()),
        (DEEPSEEK, "fp8_deepseek_v3", "torch", {Role.EXPERTS}),
        (DEEPSEEK, "fp8_hybrid", "auto", {Role.EXPERTS}),
        (DEEPSEEK, "fp8_hybrid", "emulated", set()),
        (LLAMA, "fp8_hybrid", "auto", set()),
        (DEEPSEEK, "mxfp8", "auto", {Role.EXPERTS}),
        (DEEPSEEK, "nvfp4", "auto", {Role.EXPERTS}),
        (DEEPSEEK, "nvfp4", "emulated", set()),
        (LLAMA, "fp8_deepseek_v3", "te", {Role.BLOCK}),
    ],
)
def test_what_stays_eager_is_said(model, use, backend, roles):
    case = Case("precision", use=use, config={"backend": backend}, overrides={"model": model})
    registry, recipe = case.registry(), case.recipe()
    layout = registry.build(recipe.topology).layout(recipe.run.ranks)
    assert {kept.role for kept in kept_eager(recipe, registry, layout) if "precision" in kept.who} == roles


@pytest.mark.parametrize(
    ("model", "use", "config", "wrappers"),
    [
        (LLAMA, "fp8_deepseek_v3", {"backend": "emulated"}, []),
        pytest.param(DEEPSEEK, "fp8_deepseek_v3", {"backend": "emulated"}, [], marks=full),
        pytest.param(LLAMA, "fp8_hybrid", {"backend": "torch"}, RECOMPUTE, marks=full),
        pytest.param(DEEPSEEK, "fp8_deepseek_v3", {"backend": "torch"}, [], marks=full),
        pytest.param(DEEPSEEK, "fp8_hybrid", {"backend": "emulated"}, [], marks=full),
        pytest.param(DEEPSEEK, "fp8_deepseek_v3", {"backend": "emulated"}, RECOMPUTE, marks=full),
        pytest.param(DEEPSEEK, "fp8_deepseek_v3", MIXED, [], marks=full),
        pytest.param(DEEPSEEK, "mxfp8", {"backend": "emulated"}, [], marks=full),
        pytest.param(DEEPSEEK, "mxfp8", MIXED, RECOMPUTE, marks=full),
        pytest.param(DEEPSEEK, "nvfp4", {"backend": "emulated"}, [], marks=full),
        pytest.param(DEEPSEEK, "nvfp4", MIXED, RECOMPUTE, marks=full),
        pytest.param(DEEPSEEK, "mxfp8", {"backend": "torch"}, [], marks=full),
        pytest.param(LLAMA, "mxfp8", {"backend": "torch"}, RECOMPUTE, marks=full),
    ],
)
def test_a_compiled_run_has_the_eager_ones_bits(model, use, config, wrappers, on_cpu, seen):
    eager = trained(model, use, config, None, wrappers)
    in_eager = seen["weights"]
    assert_same(trained(model, use, config, "eager", wrappers), eager)
    assert seen["weights"] == 2 * in_eager > 0


@pytest.mark.full
@pytest.mark.parametrize("wrappers", [[], RECOMPUTE], ids=["kept", "recomputed"])
def test_a_graph_quantizes_as_often_as_eager_layers_do(wrappers, seen):
    """Weights once a step, an input once for all layers that read it, along its rows and its columns.

    Of a recomputation a compiler leaves out what nobody reads.
    """
    trained(DEEPSEEK, "fp8_deepseek_v3", {"backend": "emulated"}, None, wrappers)
    eager = dict(seen)
    seen.clear()
    trained(DEEPSEEK, "fp8_deepseek_v3", {"backend": "emulated"}, "aot_eager", wrappers)
    if wrappers:
        assert 0 < seen.pop("inputs") <= eager.pop("inputs")
    assert seen == eager


@pytest.mark.full
def test_layers_run_eager_in_steps_that_a_monitor_counts_in(seen, capsys):
    monitors = [{"use": "fp8", "every": 2}]
    emulated = {"backend": "emulated"}
    eager = trained(LLAMA, "fp8_deepseek_v3", emulated, None, monitors=monitors)
    told = capsys.readouterr().out
    assert "step=1 fp8: most underflow" in told
    assert_same(trained(LLAMA, "fp8_deepseek_v3", emulated, "eager", monitors=monitors), eager)
    assert capsys.readouterr().out == told


@pytest.mark.full
def test_inductor_trains_the_same_but_for_bfloat16():
    """It rounds in other places between FP8 products, whose own code it calls."""
    eager = trained(DEEPSEEK, "fp8_deepseek_v3", {"backend": "emulated"}, None)
    found = trained(DEEPSEEK, "fp8_deepseek_v3", {"backend": "emulated"}, "inductor")
    losses = [[report.loss for report in trace.reports] for trace in (found, eager)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


TP = [{"use": "tp", "sequence_parallel": True}]


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "degrees", "wrappers"),
    [
        (LLAMA, {"tp": 2}, TP),
        (DEEPSEEK, {"tp": 2}, TP),
        (DEEPSEEK, {"dp": 2, "ep": 2}, [{"use": "ep_deepseek"}, {"use": "ddp"}]),
    ],
    ids=["llama-sp", "deepseek-sp", "deepseek-ep"],
)
def test_two_ranks_have_the_eager_ones_bits(model, degrees, wrappers):
    eager, compiled = (
        run_ranks(train_split, 2, model, degrees, wrappers, backend, timeout=300)
        for backend in (None, "eager")
    )
    for ours, theirs in zip(compiled, eager, strict=True):
        assert_same(ours, theirs)


# --- layers of linear layers alone, merged by a compiler --------------------------------------------


class Layer(nn.Module):
    """Three layers that read one input, and a SwiGLU of the sum."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (tag(nn.Linear(128, 128), Role.COLUMN) for _ in range(3))
        self.gate, self.up = (tag(nn.Linear(128, 256, bias=False), Role.COLUMN) for _ in range(2))
        self.down = tag(nn.Linear(256, 128, bias=False), Role.ROW)
        self.ops = TORCH_OPS
        tag(self, Role.BLOCK)

    def forward(self, x):
        x = self.q(x) + self.k(x) + self.v(x)
        return self.down(self.ops.swiglu(self.gate(x), self.up(x)))


def steps(make, backend, tokens=(24, 24)):
    """Return what a layer computes for two microbatches, and the gradients, in one step."""
    torch.manual_seed(0)
    passes, layer = Passes(), Layer().bfloat16()
    for parameter in layer.parameters():
        parameter.grad_dtype = torch.float32
    scratch = OperandCache(passes)
    for child in layer.children():
        use_gemm(child, {"weight": make(scratch)}, passes)
    quantize_swiglu(layer)
    if backend:
        compile_blocks([nn.ModuleList([layer])], backend, passes=passes, log=False)
    found, told = [], []
    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: told.append(each.shape))
    with passes.weights_unchanged():
        for many in tokens:
            x = torch.randn(many, 128).bfloat16().requires_grad_()
            y = layer(x)
            with passes.backward():
                y.backward(torch.randn(many, 128).bfloat16())
            found += [y.detach(), x.grad]
    assert len(told) == len(tokens) * len(list(layer.parameters()))
    return [*found, *(each.grad for each in layer.parameters())]


def is_bfloat16(gradient):
    assert gradient.dtype == torch.float32
    return torch.equal(gradient, gradient.bfloat16().float())


ROUNDED = FP8Recipe(input_power_of_two=True, quantize_swiglu=True)


@pytest.mark.full
@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda scratch: GraphedEmulation(ROUNDED, scratch), 3),
        (lambda scratch: GraphedEmulation(FP8Recipe(tile=0), scratch), 3),
        (lambda scratch: GraphedMX(MXRecipe(rounding="ceil"), scratch), 3),
        (lambda scratch: GraphedNVFP4(NVFP4Recipe(), scratch), 3),
        (GraphedFloat32, 0),
    ],
    ids=["tiles", "tensors", "blocks", "four bits", "float32"],
)
def test_merged_calls_have_the_eager_bits_and_are_as_many(make, inputs, seen):
    """Gradients of weights too, added up in float32; a parameter's hook is called once a microbatch."""
    eager = steps(make, None)
    counted = dict(seen)
    seen.clear()
    compiled = steps(make, "aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(compiled, eager, strict=True))
    if inputs:
        assert seen == counted
        assert seen["weights"] == 6
        again = 1 if make(None).recipe == ROUNDED else 0  # what SwiGLU makes again for down
        assert seen["inputs"] == MICROBATCHES * (inputs + again)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "wrappers"),
    [
        (LLAMA, []),
        pytest.param(LLAMA, RECOMPUTE, marks=full),
        pytest.param(DEEPSEEK, [], marks=full),
        pytest.param(DEEPSEEK, RECOMPUTE, marks=full),
    ],
)
def test_wgrads_of_a_graph_are_not_rounded_to_their_weights_dtype(model, wrappers):
    config = {"backend": "emulated"}
    found = trained(model, "fp8_deepseek_v3", config, "aot_eager", wrappers, steps=1, microbatches=1)
    of_gemms = {
        each.name: each.tensor
        for each in found.gradients
        if each.name.startswith("layers.") and each.tensor.dim() > 1 and "router" not in each.name
    }
    assert len(of_gemms) >= 14
    assert [name for name, gradient in of_gemms.items() if is_bfloat16(gradient)] == []


@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "requires_grad", "enabled", "carried"),
    [
        (torch.bfloat16, torch.float32, True, True, True),
        (torch.bfloat16, torch.float32, False, True, False),
        (torch.bfloat16, torch.float32, True, False, False),
        (torch.float32, torch.float32, True, True, False),
        (torch.float64, torch.float64, True, True, False),
    ],
    ids=["wider", "frozen", "evaluation", "float32", "float64"],
)
def test_a_weight_has_a_carrier_where_its_gradient_is_wider(
    dtype, grad_dtype, requires_grad, enabled, carried
):
    weight = nn.Parameter(torch.ones(4, 3, dtype=dtype), requires_grad=requires_grad)
    weight.grad_dtype = grad_dtype
    with torch.set_grad_enabled(enabled):
        carrier = wgrad_carrier(weight)
    assert (carrier is not None) == carried
    if carrier is not None:
        carrier.backward(torch.full((4, 3), 1 / 3))
        assert weight.grad.unique().tolist() == torch.tensor([1 / 3]).tolist()
        assert carrier.untyped_storage().nbytes() == 4


COUNTS = [torch.tensor([10, 0, 30]), None]


@pytest.mark.parametrize("counts", COUNTS, ids=["experts", "one weight"])
@pytest.mark.parametrize(
    "key", ["128 e4m3 0 0", "128 e5m2 1 1", "0 e5m2 0 0", "mx floor", "nvfp4 float32 1x16 1 1"]
)
def test_operators_are_what_torch_expects_of_operators(key, counts):
    """Their schemas are not tried: torch cannot compare eight-bit floats."""
    x, d_y = torch.randn(40, 200).bfloat16(), torch.randn(40, 24).bfloat16()
    weight = torch.randn(24, 200) if counts is None else torch.randn(3, 24, 200)
    check = {"test_utils": ("test_faketensor", "test_autograd_registration")}
    values, *kept = graphed.emulated_input(x, counts, key)
    torch.library.opcheck(graphed.emulated_input, (x, counts, key), **check)
    torch.library.opcheck(graphed.emulated_kept, (kept, counts, key, len(x)), **check)
    torch.library.opcheck(graphed.emulated_forward, (values, weight, counts, key), **check)
    torch.library.opcheck(graphed.emulated_dgrad, (d_y, weight, counts, key), **check)
    of_dw = graphed.emulated_kept(kept, counts, key, len(x))
    torch.library.opcheck(graphed.emulated_wgrad, (d_y, of_dw, counts, key), **check)
