"""The loss of a chunk as compiled functions, against the eager definition: numbers, and how many graphs."""

import operator

import pytest
import torch
from drawn import draw
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters

from nanotrain_core.batch import IGNORE
from nanotrain_core.compile.loss import CompiledLoss, compile_losses
from nanotrain_core.layout.roles import Role, tag
from nanotrain_core.models.cross_entropy import Chunks, SplitVocabulary, cross_entropy, linear_cross_entropy
from nanotrain_core.models.head import Head
from nanotrain_core.models.ops import TORCH_OPS, Ops

V = 13
CHUNKS = Chunks(logits=0, tokens=4)
TARGETS = torch.tensor([3, IGNORE, 0, 12, 7, IGNORE, IGNORE, IGNORE, 1, 3, 5, 6, 2])


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()


def found(loss, tokens, dtype, multiple=1):
    """Return a loss without and with its gradients, and these."""
    hidden, weight = (draw(n, s).to(dtype) for n, s in (("h", (tokens, 6)), ("w", (V, 6))))
    options = {"chunks": CHUNKS, "multiple": multiple, "loss": loss}
    arguments = hidden.requires_grad_(), weight.requires_grad_(), TARGETS[:tokens]
    with torch.no_grad():
        silent = linear_cross_entropy(*arguments, **options)
    total = linear_cross_entropy(*arguments, **options)
    return silent, total.detach(), *torch.autograd.grad(total * 0.37, (hidden, weight))


@pytest.mark.full_cases(
    "dtype1-1e-06-1", "dtype0-1e-13-1", "dtype2-0.0078125-8", "dtype1-1e-06-8", "dtype2-0.0078125-1"
)
@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2.0**-7)]
)
def test_numbers_are_the_eager_ones_and_a_shorter_chunk_needs_no_graph_of_its_own(dtype, tolerance, multiple):
    """Chunks of 4 and 2, then of 4, 4 and 3: one graph with the gradient, one without. A lone row: 2."""
    compiled = CompiledLoss("aot_eager", "head", log=False)
    for tokens, graphs in ((6, 2), (11, 2), (13, 4), (9, 4)):
        ours, expected = (found(loss, tokens, dtype, multiple) for loss in (compiled, cross_entropy))
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.full
def test_ranks_that_share_the_vocabulary_have_one_graph_before_and_one_after_they_talk():
    """Both ranks' parts, one after the other: each is told what the other said in the eager run."""
    logits = draw("logits", (10, V))
    target, cuts, said = TARGETS[:10], ((0, 7), (7, V)), []
    for first, end in cuts:
        tell = SplitVocabulary(first, 7, lambda own: said.append(own) or own)
        cross_entropy(logits[:, first:end].clone(), target, end - first, tell, gradient=False)
    expected, gradient = cross_entropy(logits.clone(), target, V, None, gradient=True)
    compiled = CompiledLoss("aot_eager", "head", log=False)
    parts = []
    for rank, (first, end) in enumerate(cuts):

        def gather(own, rank=rank):
            torch.testing.assert_close(own, said[rank], rtol=1e-13, atol=0)
            return torch.cat(said)

        loss, part = compiled(
            logits[:, first:end], target, end - first, SplitVocabulary(first, 7, gather), gradient=True
        )
        torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, dim=1), gradient, rtol=0, atol=1e-13)


def test_nothing_wide_of_the_logits_size_leaves_the_graph():
    """What does is the loss, and the gradient as narrow as the logits with its columns of zeros."""
    outputs = []

    def backend(graph, inputs):
        (result,) = graph.graph.find_nodes(op="output")
        outputs.extend(node.meta["example_value"] for node in result.args[0])
        return aot_eager(graph, inputs)

    loss = CompiledLoss(backend, "head", log=False)
    logits = draw("logits", (10, 16)).bfloat16()
    before = logits.clone()
    _, d_logits = loss(logits, TARGETS[:10], V, None, gradient=True)
    assert [(each.dtype, each.dim()) for each in outputs] == [(torch.float32, 0), (torch.bfloat16, 2)]
    assert torch.equal(logits, before)
    assert d_logits.shape == (10, 16)
    assert not d_logits[:, V:].any()


def test_a_target_among_columns_that_are_no_logits_is_an_error():
    loss = CompiledLoss("eager", "head", log=False)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        loss(draw("logits", (10, 16)), torch.full((10,), V), V, None, gradient=False)


def test_statistics_and_gradient_are_of_one_size_with_columns_that_are_no_logits():
    """Inductor fuses them into the kernel of one reduction only then, which reads a row from memory once."""
    widths = set()

    def backend(graph, inputs):
        for node in graph.graph.nodes:
            value = node.meta.get("example_value")
            if node.target is operator.getitem:  # of the logits, from which the target's is read
                continue
            if isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[1] > 3:
                widths.add(value.shape[1])
        return aot_eager(graph, inputs)

    loss = CompiledLoss(backend, "head", log=False)
    loss(draw("logits", (10, 16)).bfloat16(), TARGETS[:10], V, None, gradient=True)
    assert widths == {16}


def test_kernels_with_a_loss_of_their_own_keep_it():
    own = Ops(linear_cross_entropy=lambda *_: torch.zeros(()))
    heads = torch.nn.ModuleList(tag(Head(V, 6, tied=False, ops=ops), Role.HEAD) for ops in (own, TORCH_OPS))
    assert compile_losses([heads], "aot_eager", log=False) == ["1"]
    assert heads[0].ops is own


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_inductor_makes_the_same(dtype):
    compiled = CompiledLoss("inductor", "head", log=False)
    tolerance = 1e-12 if dtype == torch.float64 else 2.0**-6
    for tokens in (6, 11):
        ours, expected = (found(loss, tokens, dtype, 8) for loss in (compiled, cross_entropy))
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert counters["stats"]["unique_graphs"] == 2
