"""FlexAttention of documents on a GPU: which blocks it computes, and that it is attention with a mask."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from nanotrain_core.models import gpu_ops, ops
from nanotrain_core.models.activation_checkpointing import KEPT, _policy
from nanotrain_core.models.document_attention import block_mask

WINDOWS = (None, 1, 2, 129, 300)


def documents(rows, tokens, number):
    """Return where some documents begin in each of some rows; the first row has one."""
    generator = torch.Generator().manual_seed(tokens + number)
    begins = torch.zeros(rows, tokens, dtype=torch.int64)
    for row in begins[1:]:
        for begin in torch.randint(tokens, (number,), generator=generator).sort().values.tolist():
            row[begin:] = begin
    return begins


@pytest.mark.parametrize("tokens", [100, 128, 129, 500, 1024])
def test_blocks_are_those_that_torch_finds_token_by_token(tokens):
    for number in (1, 3, 20, 400):
        for window in WINDOWS:
            begins = documents(3, tokens, number)
            low = begins if window is None else begins.maximum(torch.arange(tokens) - (window - 1))

            def sees(batch, head, query, key, low=low):
                return (key <= query) & (key >= low[batch, query])

            expected = create_block_mask(sees, 3, None, tokens, tokens, device="cpu")
            found = block_mask(begins, window)
            assert torch.equal(found.to_dense(), expected.to_dense())
            for each in (found, expected):  # those without a mask alone
                each.kv_num_blocks = torch.zeros_like(each.kv_num_blocks)
            assert torch.equal(found.to_dense(), expected.to_dense())


@pytest.mark.parametrize("window", [None, 70, 999])
def test_it_is_attention_with_a_mask(monkeypatch, window):
    """On a CPU FlexAttention has no backward pass, and computes blocks without a mask like others."""
    monkeypatch.setattr(gpu_ops, "has_document_kernel", lambda q: torch.compiler.is_compiling())
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 300, *size, dtype=torch.float64) for size in ((4, 16), (2, 16), (2, 12)))
    begins = documents(3, 300, 5)
    compiled = torch.compile(gpu_ops.attention, fullgraph=True, backend="eager")
    found = compiled(q, k, v, 0.3, begins, window)
    torch.testing.assert_close(found, ops.attention(q, k, v, 0.3, begins, window), atol=1e-12, rtol=0)


def test_selective_checkpointing_stores_its_result(monkeypatch):
    operator = torch.ops.higher_order.flex_attention
    assert _policy(None, operator) is torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
    monkeypatch.setattr("nanotrain_core.models.activation_checkpointing.KEPT", KEPT - {"flex_attention"})
    assert _policy(None, operator) is torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("sizes", [(128, 128), (192, 128), (64, 64)], ids=str)
@pytest.mark.parametrize("tokens", [1024, 1000])
def test_on_a_gpu_gradients_are_those_of_attention_with_a_mask(tokens, sizes, window):
    torch.manual_seed(0)
    heads = ((4, sizes[0]), (2, sizes[0]), (2, sizes[1]))
    exact = [torch.randn(3, tokens, *size, device="cuda", requires_grad=True) for size in heads]
    halves = [x.detach().bfloat16().requires_grad_() for x in exact]
    with torch.no_grad():
        for x, half in zip(exact, halves, strict=True):
            x.copy_(half)
    begins = documents(3, tokens, 5).cuda()
    compiled = torch.compile(gpu_ops.attention, fullgraph=True)
    found = compiled(*halves, None, begins, window)
    expected = ops.attention(*exact, None, begins, window)
    d_y = torch.randn_like(expected)
    gradients = [
        torch.autograd.grad(y, xs, d_y.to(y.dtype)) for y, xs in ((found, halves), (expected, exact))
    ]
    for a, b in zip((found, *gradients[0]), (expected, *gradients[1]), strict=True):
        assert (a.float() - b).norm() <= 0.02 * b.norm()
