"""Triton's kernels as operators of a compiled graph."""

import pytest
import torch
from fp8_operands import normal
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from nanotrain_fp8_deepseek_v3.formats import E4M3
from nanotrain_fp8_deepseek_v3.fused import TritonFP8
from nanotrain_fp8_deepseek_v3.gemm import FP8Recipe
from nanotrain_fp8_deepseek_v3.operand_cache import OperandCache
from nanotrain_fp8_deepseek_v3.triton_kernels import (
    experts,
    quantize_rows,
    quantize_swiglu,
    quantize_transposed,
)
from nanotrain_fp8_deepseek_v3.triton_kernels.layout import Groups
from nanotrain_fp8_deepseek_v3.triton_kernels.quantize_blocks import quantize_blocks
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from nanotrain_core.compile.blocks import compile_blocks
from nanotrain_core.layout.roles import Role, tag, tagged
from nanotrain_core.models.activation_checkpointing import recompute_blocks
from nanotrain_core.models.feed_forward import SwiGLU
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.gemm import Prepared, use_gemm
from nanotrain_core.precision.quantized_swiglu import quantize_swiglu as quantize_layers


def products(of_one, x, w, d_y, counts):
    backend = of_one if counts is None else of_one.grouped(counts)
    (y,), kept = backend.forward(x, w)
    return y, backend.dgrad(d_y, w), backend.wgrad(d_y, kept)


@pytest.mark.parametrize("counts", [[40, 0, 23], None], ids=["experts", "one weight"])
def test_a_graph_has_the_eager_bits(counts, monkeypatch):
    """torch's own product, of one weight, has no code for a CPU: a stand-in is multiplied with."""
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_mm",
        lambda a, b, *_, output_dtype: (a.float() @ b.float()).to(output_dtype),
    )
    N, K = 72, 200
    x, d_y = normal(63, K), normal(63, N, seed=2)
    w = normal(N, K, seed=1) if counts is None else normal(len(counts), N, K, seed=1)
    counts = None if counts is None else torch.tensor(counts)
    backend = TritonFP8(FP8Recipe(input_power_of_two=True))
    expected = products(backend, x, w, d_y, counts)
    forms = backend.prepare(w)
    graph = torch.compile(
        lambda x, w, forms, *rest: products(backend, x, Prepared(w, forms), *rest),
        fullgraph=True,
        backend="aot_eager",
    )
    for ours, theirs in zip(graph(x, w, forms, d_y, counts), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_operators_return_what_a_compiler_is_told():
    check = {"test_utils": ("test_faketensor", "test_autograd_registration")}
    counts = torch.tensor([40, 0, 23])
    groups, x, d_y = Groups.of(counts, counts.device), normal(63, 200), normal(63, 72, seed=2)
    torch.library.opcheck(quantize_rows._in_graph, (x, E4M3.dtype, True), **check)
    for of_groups in ((None, None), (groups.rows, groups.tiles)):
        torch.library.opcheck(
            quantize_transposed._in_graph, (x, None, *of_groups, E4M3.dtype, False), **check
        )
    blocks, (codes, scales) = quantize_blocks(normal(3, 72, 200, seed=1)), quantize_rows.quantize_rows(x)
    given = codes, scales, blocks.codes_ENK, blocks.scales_Enk, groups.rows, groups.tiles
    torch.library.opcheck(experts._rows_in_graph, (*given, 63, 72, torch.bfloat16), **check)
    pairs = (quantize_transposed.quantize_transposed(each, groups) for each in (d_y, x))
    given = *next(pairs), *next(pairs), groups.tiles, 72, 200
    torch.library.opcheck(experts._columns_in_graph, given, **check)
    gate, up, d_h = (normal(63, 200, seed=seed) for seed in range(3))
    torch.library.opcheck(quantize_swiglu._forward_in_graph, (gate, up, True), **check)
    backend = TritonFP8(FP8Recipe(quantize_swiglu=True))
    kept = *backend.quantize(gate), *backend.quantize(up)
    for d_h_or_none in (d_h, None):
        given = *kept, d_h_or_none, torch.bfloat16, False
        torch.library.opcheck(quantize_swiglu._backward_in_graph, given, **check)


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_a_layers_graph_has_the_eager_bits_and_never_computes_the_whole_product(recomputed, monkeypatch):
    """Forward and backward; what torch would make of gate and up in the forward graph is read by nothing."""
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_mm",
        lambda a, b, *_, output_dtype: (a.float() @ b.float()).to(output_dtype),
    )
    found, forward_graphs = [], []

    def capture(graph, inputs):
        forward_graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph)

    def run(graph, inputs):
        return make_boxed_func(graph)

    for backend in (
        None,
        aot_autograd(fw_compiler=capture, bw_compiler=run, partition_fn=min_cut_rematerialization_partition),
    ):
        torch.manual_seed(0)
        layer, passes = tag(SwiGLU(200, 328).bfloat16(), Role.BLOCK), Passes()
        cache = OperandCache(passes)
        for _, module, its in tagged(layer):
            if its.role is not Role.BLOCK:
                use_gemm(module, {"weight": TritonFP8(FP8Recipe(quantize_swiglu=True), cache)}, passes)
        quantize_layers(layer)
        if recomputed:
            recompute_blocks(nn.ModuleList([layer]))
        if backend:
            compile_blocks([nn.ModuleList([layer])], backend, passes=passes, log=False)
        x = normal(33, 200).requires_grad_()
        with passes.weights_unchanged():
            y = layer(x)
            with passes.backward():
                y.backward(normal(33, 200, seed=1))
        found.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    (names,) = forward_graphs
    assert names.count("nanotrain_fp8.quantize_swiglu.default") == 1
    assert names.count("nanotrain_fp8.quantize_rows.default") == 1  # of x, for gate and up
    assert not any("silu" in name for name in names)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
