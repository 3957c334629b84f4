"""Sliding-window attention: numbers against one mask over all scores, on every layout, and from a cache.

With transformers' Mistral, Qwen2 and Qwen3 it is compared in test_convert_window.py.
"""

import warnings
from dataclasses import replace

import pytest
import torch
from as_one_process import assert_trains_as_one_process
from test_cache import in_passes, tokens_of, whole
from test_transformer import batch, build, config

from nanotrain_core.batch import Batch
from nanotrain_core.contracts import Monitor
from nanotrain_core.errors import PluginError, RecipeError
from nanotrain_core.models.cache import Cache
from nanotrain_core.models.gpu_ops import window_attention
from nanotrain_core.models.ops import TORCH_OPS, attention, wrap_ops
from nanotrain_core.models.transformer import Transformer
from nanotrain_core.models.window import SMALLEST_BLOCK, tokens_seen
from nanotrain_core.pipeline.actions import Part
from nanotrain_core.testing import Case
from nanotrain_core.testing.compare import assert_same
from nanotrain_core.testing.compare import whole as whole_weights
from nanotrain_core.testing.probe import make_engine, train

LONG = 2 * SMALLEST_BLOCK + 11
ALTERNATE = ("sliding_attention", "full_attention")


def reference(q, k, v, scale, begins, window):
    """One mask over the scores of all queries, which are the last ones."""
    keys, queries = k.shape[1], q.shape[1]
    at_T = torch.arange(keys)
    distance = at_T[keys - queries :, None] - at_T
    seen = ((distance >= 0) & (distance < window)).expand(len(q), -1, -1)
    if begins is not None:
        seen = seen & (at_T >= begins[:, keys - queries :, None])
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bshk,bthk->bhst", q, k) * scale
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bhst,bthk->bshk", weights, v)


@pytest.mark.parametrize("window", [1, 5, SMALLEST_BLOCK, SMALLEST_BLOCK + 1, LONG - 1, LONG, LONG + 1])
@pytest.mark.parametrize("queries", [LONG, SMALLEST_BLOCK + 2, 3, 1])
@pytest.mark.parametrize("documents", [False, True])
def test_values_and_gradients_are_those_of_one_mask(window, queries, documents):
    torch.manual_seed(0)
    sizes = ((queries, 4, 8), (LONG, 2, 8), (LONG, 2, 6))
    leaves = [torch.randn(2, *size, dtype=torch.float64, requires_grad=True) for size in sizes]
    begins = None
    if documents:
        at_T = torch.arange(LONG)
        begins = torch.where(torch.rand(2, LONG) < 0.05, at_T, 0).cummax(1).values
    found, expected = (each(*leaves, 0.3, begins, window) for each in (attention, reference))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    mine, theirs = (torch.autograd.grad(y.sin().sum(), leaves) for y in (found, expected))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def kept_for_backward(length, window, documents):
    q, k, v = (torch.zeros(1, length, 2, 4, requires_grad=True) for _ in range(3))
    begins = torch.zeros(1, length, dtype=torch.long) if documents else None
    storages = {}

    def keep(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        attention(q, k, v, None, begins, window)
    return sum(storages.values())


@pytest.mark.parametrize("documents", [False, True])
def test_memory_grows_with_the_sequence_and_not_with_its_square(documents):
    short, long, longer = (kept_for_backward(n * SMALLEST_BLOCK, 16, documents) for n in (4, 8, 16))
    assert longer - long == 2 * (long - short)


def masked(part, window_of):
    """Have each layer's attention be the reference, told by the layer's number."""
    for number, layer in part.layers.items():
        window = window_of(int(number)) or 10**6
        ops = replace(
            layer.attn.ops,
            attention=lambda q, k, v, scale=None, begins=None, given=None, window=window: reference(
                q, k, v, q.shape[-1] ** -0.5, begins, window
            ),
        )
        layer.attn.ops = ops
    return part


@pytest.mark.parametrize(
    ("types", "windows"),
    [
        ((), [4, 4, 4]),
        (("sliding_attention",), [4, 4, 4]),
        (("full_attention",), [None, None, None]),
        (ALTERNATE, [4, None, 4]),
        (("full_attention", "full_attention", "sliding_attention"), [None, None, 4]),
    ],
)
def test_a_model_is_the_one_with_masks_in_these_layers(types, windows):
    dims = config(kv_heads=2, window=4, layer_types=types)
    assert [dims.window_of(layer) for layer in range(3)] == windows
    part, again, data = build(dims.resolved()), build(dims.resolved()), batch(dims)
    loss, expected = (each(data.tokens, data).losses["lm"] for each in (part, masked(again, dims.window_of)))
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-11)
    found, wanted = (
        torch.autograd.grad(own, list(each.parameters())) for own, each in ((loss, part), (expected, again))
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    plain = build(config(kv_heads=2).resolved())(data.tokens, data).losses["lm"]
    assert (abs(loss - plain) > 1e-4) == any(windows)


@pytest.mark.parametrize("lengths", [(1,) * 13, (7, 1, 1, 3, 1), (13,)], ids=str)
@pytest.mark.parametrize("types", [(), ALTERNATE])
def test_from_a_cache_logits_are_those_of_the_whole_text(lengths, types):
    part, tokens = whole(kv_heads=2, window=3, layer_types=types), tokens_of(13)
    with torch.no_grad():
        expected = part(tokens, Batch(tokens)).value
    found = in_passes(part, tokens, lengths, Cache(13))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_cache_keeps_no_more_than_two_windows():
    part, tokens = whole(kv_heads=2, window=3, layer_types=ALTERNATE), tokens_of(40)
    cache = Cache(40)
    with torch.no_grad():
        expected = part(tokens, Batch(tokens)).value
    found = in_passes(part, tokens, (2,) + (1,) * 38, cache)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    rooms = [cache.layer(number).kept[0].shape[1] for number in "012"]
    assert [room <= 6 for room in rooms] == [True, False, True]
    assert rooms[1] == 40


def test_flops_are_those_of_the_tokens_that_one_sees():
    """A band of the score matrix, of which the diagonal counts as a half, as in the whole triangle."""
    length, window = 12, 5
    pairs = sum(min(token + 1, window) - 0.5 for token in range(length))
    pairs += 0.5 * (length - window)  # of what leaves the window, a half is seen
    assert tokens_seen(length, window) == pytest.approx(pairs / length)
    full, some, all_ = (
        Transformer(config(**changes)).flops(length)
        for changes in ({}, {"window": window, "layer_types": ALTERNATE}, {"window": window})
    )
    assert all_.layers[0] == some.layers[0] == some.layers[2] < some.layers[1] == full.layers[1]
    saved = 3 * 2 * (length / 2 - tokens_seen(length, window)) * 2 * 32  # scores and values, 4 heads of 8
    assert full.layers[0] - all_.layers[0] == pytest.approx(saved)
    assert Transformer(config(window=length)).flops(length) == full
    assert Transformer(config(window=3)).flops(0) == Transformer(config()).flops(0)


SLIDING = {"window": 3, "layer_types": list(ALTERNATE)}
TP, DDP = {"use": "tp", "sequence_parallel": True}, {"use": "ddp"}
RING = {"use": "cp", "communication": "ring"}
GATHER = {"use": "cp", "communication": "all_gather"}
DOCUMENTS = {"use": "text", "paths": [__file__], "mask_documents": True}
LAYOUTS = {
    "tp2-pp2": ({"tp": 2, "pp": 2}, [TP], {"schedule": {"use": "1f1b"}}),
    "cp2": ({"cp": 2}, [{"use": "cp"}], {}),
    "gather-cp3": ({"cp": 3}, [GATHER], {"batch": {"length": 13}}),
    "dp2-fsdp": ({"dp": 2}, [{"use": "fsdp2"}], {}),
    "gather-cp2-tp2-recompute": ({"cp": 2, "tp": 2}, [TP, GATHER, {"use": "recompute"}], {}),
    "cp2-pp2-documents": (
        {"cp": 2, "pp": 2},
        [{"use": "cp"}, {"use": "recompute", "granularity": "selective"}],
        {"schedule": {"use": "1f1b"}, "data": DOCUMENTS, "model": {"vocab": 256}},
    ),
    "ring-cp2-whole-sequence": (
        {"cp": 2},
        [{"use": "cp", "communication": "ring"}],
        {"model": {"window": 16}},
    ),
    "gather-cp2-documents": ({"cp": 2}, [GATHER], {"data": DOCUMENTS, "model": {"vocab": 256}}),
}
FIRST = ("gather-cp2-documents",)


@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS]
)
def test_every_layout_trains_as_one_process(name):
    topology, wrappers, around = LAYOUTS[name]
    sync = [] if any(each["use"] == "fsdp2" for each in wrappers) else [DDP]
    model = {"layers": 4, "kv_heads": 2, **SLIDING} | around.pop("model", {})
    overrides = {"parallel": [*wrappers, *sync], **around}
    assert_trains_as_one_process(
        Case("model", use="transformer", config=model, topology=topology, overrides=overrides, name=name)
    )


@pytest.mark.full
def test_compiled_layers_train_as_eager_ones():
    """Layers with a window and without have a graph each."""
    case = Case("model", use="transformer", config={"layers": 4, **SLIDING}).alone()
    eager, compiled = (
        train(case, {"kernels": {"use": "torch"}, "run": {"compile": on, "compile_backend": "aot_eager"}})
        for on in (False, True)
    )
    found, expected = (whole_weights([each.weights], atol=0.0) for each in (compiled, eager))
    assert_same(found, expected, "weights", atol=1e-12)


class Windows(Monitor):
    """Keeps the windows that attention is called with."""

    def on_start(self, run):
        self.seen = []
        run.observe_calls(
            "attention", lambda name, *args: self.seen.append((name, args[5:])), ["layers.0", "layers.1"]
        )


@pytest.mark.full
@pytest.mark.parametrize("heads", [4, 2])
def test_a_gpus_kernel_is_traced_without_a_warning(heads):
    """torch warns once of a cached function in a graph; here nothing of the graph is run."""

    def backend(graph, inputs):
        (result,) = graph.graph.find_nodes(op="output")
        return lambda *_: [torch.zeros(each.meta["example_value"].shape) for each in result.args[0]]

    q, k, v = (torch.zeros(2, 32, n, 8, dtype=torch.bfloat16) for n in (4, heads, heads))
    compiled = torch.compile(window_attention, backend=backend, fullgraph=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lru_cache.*")
        assert compiled(q, k, v, None, 8).shape == q.shape


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_monitors_see_the_windows_of_calls(compiled):
    case = Case("model", use="transformer", config=SLIDING).alone()
    run = {"steps": 1, "compile": compiled, "compile_backend": "aot_eager"}
    monitor = Windows()
    make_engine(case, {"kernels": {"use": "torch"}, "run": run}, callbacks=[monitor]).fit()
    assert set(monitor.seen) == {("layers.0", (3,)), ("layers.1", ())}


def test_kinds_of_layers_without_a_window_are_refused():
    case = Case("model", use="transformer", config={"layer_types": ["sliding_attention"]})
    with pytest.raises(RecipeError, match=r"model.layer_types: without window no layer has sliding-window"):
        case.recipe()
    with pytest.raises(RecipeError, match=r"'sliding' \(did you mean 'sliding_attention'\?\)|one of"):
        Case("model", use="transformer", config={"window": 4, "layer_types": ["sliding"]}).recipe()


def old(q, k, v, scale=None, starts_BT=None):
    return attention(q, k, v, scale, starts_BT)


def around_old(inner, q, k, v, scale=None, starts_BT=None):
    return inner(q, k, v, scale, starts_BT)


@pytest.mark.parametrize(
    ("ops", "told"),
    [
        (replace(TORCH_OPS, attention=old), r"old\(q, .*use = 'torch' has it$"),
        (wrap_ops(TORCH_OPS, {"attention": around_old}), r"around_old\(inner, .*sliding-window attention$"),
        (
            wrap_ops(replace(TORCH_OPS, attention=old), {"attention": lambda f, *args: f(*args)}),
            r"old\(q, .*use = 'torch' has it$",
        ),
    ],
    ids=["kernel", "wrapper", "wrapped"],
)
def test_kernels_without_windows_serve_models_without(ops, told):
    """Written before there were any, they are refused for a model that has some."""
    plain, sliding = Transformer(config()), Transformer(config(window=4))
    part = plain.build(Part.whole(3), ops).to_empty(device="cpu")
    tokens = torch.zeros(1, 5, dtype=torch.long)
    part(tokens, Batch(tokens))
    with pytest.raises(PluginError, match=rf"test_window\.{told}"):
        sliding.build(Part.whole(3), ops)
    full = config(window=4, layer_types=("full_attention",))
    Transformer(full).build(Part.whole(3), ops)
