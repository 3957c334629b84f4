"""``run.compile``: what is compiled and what is not, how many graphs there are, and what is refused."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest import mock

import attrs
import pytest
import torch
from recipe_files import write
from structlog.testing import capture_logs
from torch import nn
from torch._dynamo.utils import counters

from nanotrain_core import compose as composing
from nanotrain_core.cli import main
from nanotrain_core.compile import function
from nanotrain_core.compile.blocks import compile_blocks
from nanotrain_core.compile.function import CompiledFunction
from nanotrain_core.component import StaysEager
from nanotrain_core.errors import NanotrainError, PluginError, RecipeError
from nanotrain_core.layout.roles import Role, overridden_by, override_forward, tag
from nanotrain_core.pipeline.weight_gradients import DeferredGradients
from nanotrain_core.recipe.validate import check_combination
from nanotrain_core.testing import probe, run_ranks
from nanotrain_core.testing.case import Case

COMPILED = {"compile": True, "compile_backend": "aot_eager"}
LLAMA = {"use": "transformer", "layers": 3, "width": 16, "heads": 4, "kv_heads": 2, "ffn": 24}
EXPERTS = {
    **{"use": "deepseek", "layers": 2, "width": 16, "heads": 4, "dense_layers": 1, "kv_rank": 8, "q_rank": 8},
    **{"nope_size": 4, "rope_size": 4, "value_size": 4, "ffn": 32, "experts": 4, "top_k": 2},
    **{"shared_experts": 1, "expert_ffn": 8, "groups": 2, "group_limit": 1},
}


def case(model=LLAMA, degrees=None, **overrides):
    run = {"steps": 3, **overrides.pop("run", {})}
    model = {"init_std": 0.3, "vocab": 33, **model}
    tables = {"kernels": {"use": "torch"}, "model": model, "data": {"vocab": 33}, "run": run}
    batch = {"sequences": 5, "microbatch": 2, "length": 8}
    tables |= {"batch": batch, **overrides}
    return Case("topology", use="grid", topology=degrees or {}, overrides=tables)


def losses(trace):
    return [*(report.loss for report in trace.reports), *trace.evaluations]


def train_counting(plain, changes, **options):
    """Return losses of a run and the graphs that it made."""
    torch._dynamo.reset()
    counters.clear()
    trace = probe.train(plain, changes, **options)
    return losses(trace), counters["stats"]["unique_graphs"]


# --- shapes -----------------------------------------------------------------------------------------


class Sampling(probe.Reports):
    """Also asks for the logits of one sequence, as the monitor ``sample`` does."""

    def on_start(self, run):
        self.run = run

    def on_step(self, report):
        super().on_step(report)
        self.evaluations.append(self.run.logits(torch.arange(8)[None]).double().mean().item())


@pytest.mark.full
@mock.patch.object(probe, "Reports", Sampling)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-12), ("bf16", 0.02)])
def test_sizes_that_change_need_few_graphs(precision, tolerance, tmp_path):
    """Microbatches of 2 and 1 in training, 4 and 1 in validation, one sequence of a sample.

    In bfloat16 gradients are float32 when the microbatch of 1 is traced, in each layer. Logits are of both
    signs, so that their mean is held to an absolute tolerance as well.
    """
    sizes = {"precision": {"use": precision}, "evaluation": {"every": 1, "sequences": 5}}
    plain = case(**sizes)
    expected = losses(probe.train(plain, {}))
    changes = {"run": {**plain.overrides["run"], **COMPILED}}
    found, graphs = train_counting(plain, changes, folder=tmp_path, save_at=2)
    assert found == pytest.approx(expected, rel=tolerance, abs=0.1 * tolerance)
    # Training: 2 sequences and 1. Without gradients: 2 and 1. All three layers share them. The loss of
    # a chunk is one with its gradient, of any number of tokens, and one without.
    assert graphs == 4 + 2
    again, graphs = train_counting(plain, changes, folder=tmp_path, resume="2")
    assert again[0] == pytest.approx(expected[2], rel=tolerance)
    assert graphs <= 4 + 2


@pytest.mark.full
def test_selective_checkpointing_is_part_of_a_graph():
    wrapper = {"use": "recompute", "granularity": "selective", "every": 2}
    plain = case(batch=EVEN, parallel=[wrapper])
    expected = losses(probe.train(plain, {}))
    found, graphs = train_counting(plain, {"run": {**plain.overrides["run"], **COMPILED}})
    assert found == pytest.approx(expected, rel=1e-12)
    assert graphs == 2 + 1  # layers with it, and those without; the loss


@pytest.mark.full
def test_two_ranks_layers_share_a_graph():
    """Hooks of tensor parallelism are in the graph of each layer, and alike."""
    split = case(degrees={"tp": 2}, parallel=[{"use": "tp", "sequence_parallel": True}], batch=EVEN)
    changes = {"run": {**split.overrides["run"], **COMPILED}}
    for found, graphs in run_ranks(train_counting, 2, split, changes, timeout=300):
        assert found == pytest.approx(losses(probe.train(split.alone(), {})), rel=1e-12)
        assert graphs == 1 + 2  # the loss before and after ranks have talked


@pytest.mark.parametrize("given", ["module", "long tensor", "list", "number"])
def test_layers_whose_forward_is_given_different_things_do_not_share_a_graph(given):
    """What looks alike is not the same: each layer had computed with the first one's."""

    def forward(layer, x, extra=None):
        extra = extra[0] if isinstance(extra, list) else extra
        if isinstance(extra, nn.Module):
            return layer.linear(x) + extra(x)
        return layer.linear(x) * (extra[1500] if isinstance(extra, torch.Tensor) else extra)

    def extra(number):
        tensor = torch.ones(2000).index_fill(0, torch.tensor(1500), 1.0 + number)
        made = {"module": nn.Linear(3, 3), "long tensor": tensor, "list": [nn.Linear(3, 3)]}
        return made.get(given, 1.0 + number)

    layers = [override_forward(Layer(), partial(forward, extra=extra(number))) for number in range(2)]
    part, x = nn.ModuleList(layers), torch.randn(2, 3)
    expected = [layer(x) for layer in layers]
    compile_blocks([part], "aot_eager")
    for layer, wanted in zip(layers, expected, strict=True):
        assert torch.equal(layer(x), wanted)


EVEN = {"sequences": 4, "microbatch": 2, "length": 8}


class Layer(nn.Module):
    def __init__(self, forward=None):
        super().__init__()
        self.linear = tag(nn.Linear(3, 3), Role.COLUMN)
        self.how = forward
        tag(self, Role.BLOCK)

    def forward(self, x):
        return self.how(self.linear(x)) if self.how else self.linear(x).relu()


def test_what_would_need_too_many_graphs_runs_eager():
    layer = Layer()
    sizes = [(2, 3), (5, 3), (2, 7, 3), (5, 2, 2, 3)]
    inputs = [torch.randn(*size) for size in sizes]
    expected = [layer(x) for x in inputs]
    torch._dynamo.reset()
    counters.clear()
    with mock.patch.object(function, "MOST_GRAPHS", 2):
        assert compile_blocks([nn.ModuleList([layer])], "aot_eager") == ["0"]
        for x, y in zip(inputs, expected, strict=True):
            torch.testing.assert_close(layer(x), y, rtol=0, atol=0)
    assert counters["stats"]["unique_graphs"] == 2


def test_gradients_of_another_dtype_are_there_after_a_layer_was_compiled():
    layer = Layer().bfloat16()
    weight = layer.linear.weight
    weight.grad_dtype = torch.float32
    weight.grad = before = torch.randn(3, 3)
    compile_blocks([nn.ModuleList([layer])], "aot_eager", log=False)
    y = layer(torch.ones(2, 3, dtype=torch.bfloat16))
    assert weight.grad is before
    y.sum().backward()
    assert weight.grad.dtype == torch.float32


def test_gradients_of_a_parameter_outside_of_the_layer_are_set_aside_too():
    part = nn.ModuleList([Layer(lambda y: y * part.factor)]).bfloat16()
    part.factor = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    part.factor.grad_dtype = torch.float32
    compile_blocks([part], "aot_eager", log=False)
    for rows in (2, 3):  # the second graph is traced beside a gradient in float32
        part[0](torch.ones(rows, 3, dtype=torch.bfloat16)).sum().backward()
    assert part.factor.grad.dtype == torch.float32


def test_a_graph_that_arguments_do_not_ask_for_is_prepared_for_too():
    layer = Layer(lambda y: y * layer.factor).bfloat16()
    layer.factor = 2.0
    compile_blocks([nn.ModuleList([layer])], "aot_eager", log=False)
    x, weight = torch.ones(2, 3, dtype=torch.bfloat16), layer.linear.weight
    before = layer(x)
    weight.grad_dtype = torch.float32
    weight.grad = wide = torch.randn(3, 3)
    layer.factor = 4.0
    torch.testing.assert_close(layer(x), 2 * before, rtol=0, atol=0)
    assert weight.grad is wide


def test_each_graph_is_told_of_with_its_seconds():
    layers = nn.ModuleList([Layer(), Layer()])
    with capture_logs() as lines:
        compile_blocks([layers], "aot_eager")
        for _ in range(3):
            layers[1](layers[0](torch.ones(2, 3, requires_grad=True)))
    assert [(line["event"], line["layer"], line["alike"]) for line in lines] == [
        ("compiling", "0", 2),
        ("compiled", "0", 2),
    ]
    assert lines[1]["seconds"] >= 0


def test_what_cannot_be_traced_names_the_layer_and_the_way_out():
    layers = nn.ModuleList([Layer(lambda x: x * x.sum().item())])
    compile_blocks([layers], "aot_eager", log=False)
    with mock.patch.object(torch._dynamo.config, "capture_scalar_outputs", False):
        layers[0].how = lambda x: torch._dynamo.graph_break() or x
        with pytest.raises(NanotrainError, match=r"run.compile: 0 cannot be compiled .*run.compile = false"):
            layers[0](torch.ones(2, 3))


# --- what stays eager -------------------------------------------------------------------------------


def modules_compiled(plain):
    run = probe.make_run(plain, {"run": {**plain.overrides["run"], **COMPILED}})
    named = (each for part in run.stages.values() for each in part.named_modules())
    compiled = [name for name, each in named if isinstance(overridden_by(each), CompiledFunction)]
    return compiled, [line for line in run.described if line.startswith("torch.compile")]


def test_around_experts_over_ranks_the_rest_of_their_layer_is_compiled():
    spread = case(EXPERTS, {"dp": 2, "ep": 2}, parallel=[{"use": "ep_deepseek"}, {"use": "ddp"}])
    for compiled, lines in run_ranks(modules_compiled, 2, spread):
        assert compiled == ["layers.0", "layers.1.attn", "layers.1.moe.shared"]
        assert "in pieces around EXPERTS, and the loss of a chunk" in lines[0]
        assert lines[2].startswith("torch.compile: EXPERTS eager because of parallel 'ep_deepseek': the host")


def count_deferred(plain, changes, gpu):
    """Return how many weight gradients waited for W passes, and which modules were compiled."""
    added, real, compiled = [], composing.compile_parts, []

    def on_a_gpu(parts, recipe, registry, mesh, placements, passes):
        stands = SimpleNamespace(device=torch.device("cuda"), layout=mesh.layout, rank=mesh.rank)
        lines = real(parts, recipe, registry, stands if gpu else mesh, placements, passes)
        found = (overridden_by(each) for part in parts for each in part.modules())
        compiled.extend(each for each in found if isinstance(each, CompiledFunction))
        return lines

    def add(self, weight, wgrad):
        added.append(weight)
        return adding(self, weight, wgrad)

    adding = DeferredGradients.add
    with (
        mock.patch.object(composing, "compile_parts", on_a_gpu),
        mock.patch.object(DeferredGradients, "add", add) if plain else nullcontext(),
    ):
        trace = probe.train(plain, changes)
    return len(added), len(compiled), losses(trace)


def test_w_passes_get_as_many_weight_gradients_as_in_an_eager_run():
    """With ``auto`` on a GPU the layers of such a schedule stay eager; those of another are compiled."""
    four, run = {**LLAMA, "layers": 4}, {"compile_backend": "eager"}
    split = case(four, {"pp": 2}, schedule={"use": "zb_h1"}, run=run)
    eager = run_ranks(count_deferred, 2, split, {}, gpu=False)
    auto = run_ranks(count_deferred, 2, split, {}, gpu=True)
    assert auto == eager
    # 2 layers of 7 matrices on each rank, 3 microbatches, 3 steps; the head's is not split.
    assert [count for count, _, _ in eager] == [2 * 7 * 3 * 3] * 2
    other = run_ranks(count_deferred, 2, split, {"schedule": {"use": "1f1b"}}, gpu=True)
    assert [(count, compiled) for count, compiled, _ in other] == [(0, 2), (0, 2)]


def test_on_a_cpu_auto_compiles_nothing():
    run = probe.make_run(case(), {})
    assert not any(isinstance(overridden_by(m), CompiledFunction) for m in run.stages[0].modules())
    assert not [line for line in run.described if "torch.compile" in line]


# --- refusals ---------------------------------------------------------------------------------------

RECIPE = """
[run]
steps = 1
{run}
[batch]
sequences = 4
microbatch = 1
length = 8
[model]
use = "transformer"
layers = 2
width = 16
heads = 2
vocab = 256
[kernels]
use = "torch"
{rest}
"""
ZERO_BUBBLE = '[topology]\npp = 2\n[schedule]\nuse = "zb_h1"'


def check(capsys, tmp_path, run, rest="", *words):
    """Return the exit code and all output of ``nanotrain check``."""
    path = write(tmp_path, RECIPE.format(run=run, rest=rest))
    return main(["check", str(path), *words]), "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("run", "rest", "said"),
    [
        (
            "ranks = 2\ncompile = true",
            ZERO_BUBBLE,
            "run.compile: every layer would stay eager (schedule 'zb_h1': its W passes make weight gradients "
            'later, and a compiled backward pass makes them at once); expected "auto" or false',
        ),
        (
            "compile = true",
            '[precision]\nuse = "fp8_deepseek_v3"\nbackend = "te"',
            "run.compile: every layer would stay eager (precision 'fp8_deepseek_v3': Transformer Engine's",
        ),
        ('compile = "yes"', "", "run.compile: expected one of 'auto', true, false"),
        (
            'compile_backend = "inducter"',
            "",
            "run.compile_backend: torch.compile has no backend 'inducter' (did you mean 'inductor'?); "
            "expected one of aot_eager,",
        ),
    ],
)
def test_is_refused_before_ranks_start(capsys, tmp_path, run, rest, said):
    code, text = check(capsys, tmp_path, run, rest)
    assert code == 2
    assert said in text


def test_kernels_that_no_graph_holds_are_refused_by_name(capsys, tmp_path):
    code, text = check(capsys, tmp_path, "compile = true", "", "--set", 'kernels.use="cpu"')
    assert code == 2
    assert "(kernels 'cpu': " in text
    assert '[kernels] use = "torch"' in text
    plain = case(kernels={"use": "auto"}, run=COMPILED)  # which kernels these are, a rank knows
    with pytest.raises(RecipeError, match="kernels 'cpu'"):
        probe.make_run(plain, {})


@pytest.mark.parametrize(
    ("run", "rest", "lines"),
    [
        (
            "",
            "",
            [
                "off on a CPU; on a GPU:",
                "each layer, and the loss of a chunk of logits with its gradient, with inductor",
                "embedding, final norm and the head's products stay eager",
            ],
        ),
        ('device = "cpu"', "", ["off on a CPU"]),
        ("compile = false", "", ["off"]),
        (
            "ranks = 2",
            ZERO_BUBBLE,
            [
                "off on a CPU; on a GPU:",
                "no layer",
                "the loss of a chunk of logits with its gradient, with inductor",
                "embedding, ",
                "BLOCK eager because of schedule ",
            ],
        ),
    ],
)
def test_check_explains_what_is_compiled(capsys, tmp_path, run, rest, lines):
    code, text = check(capsys, tmp_path, run, rest, "--explain")
    assert code == 0
    told = [line for line in text.splitlines() if line.startswith("# torch.compile: ")]
    assert len(told) == len(lines)
    assert all(line.startswith(f"# torch.compile: {said}") for line, said in zip(told, lines, strict=True))


@pytest.mark.parametrize(
    ("rule", "said"), [(lambda *_: ["EXPERTS"], "must yield"), (lambda *_: 1 / 0, "raised")]
)
def test_a_rule_that_is_wrong_names_its_component(rule, said):
    plain = case(run=COMPILED)
    registry, recipe = plain.registry(), plain.recipe()
    get = registry.get

    def wrong(kind, use):
        return attrs.evolve(get(kind, use), stays_eager=rule) if use == "fp64" else get(kind, use)

    with (
        mock.patch.object(type(registry), "get", staticmethod(wrong)),
        pytest.raises(PluginError, match=f"precision 'fp64' of .*stays_eager .*{said}"),
    ):
        check_combination(recipe, registry)


def test_what_stays_eager_is_named_by_a_role():
    with pytest.raises(TypeError):
        StaysEager("EXPERTS", "why")


# --- inductor ---------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(("model", "kinds"), [(LLAMA, 1), (EXPERTS, 2)], ids=["llama", "deepseek"])
def test_inductor_trains_the_same(model, kinds):
    """A graph for each kind of layer, of DeepSeek's with experts and without, and one of the loss."""
    plain = case(model, batch=EVEN)
    expected = probe.train(plain, {})
    torch._dynamo.reset()
    counters.clear()
    found = probe.train(plain, {"run": {**plain.overrides["run"], "compile": True}})
    assert counters["stats"]["unique_graphs"] == kinds + 1
    assert losses(found) == pytest.approx(losses(expected), rel=1e-9)
    for ours, theirs in zip(found.weights, expected.weights, strict=True):
        torch.testing.assert_close(ours.tensor, theirs.tensor, rtol=0, atol=1e-9)
