"""The built-in transformer against a second, straightforward implementation in plain einsum."""

import math

import pytest
import torch
import torch.nn.functional as F
from drawn import draw

from nanotrain_core.batch import IGNORE, Batch
from nanotrain_core.builtin.transformer_config import TransformerConfig
from nanotrain_core.contracts import Initializer
from nanotrain_core.layout.roles import Role, tagged
from nanotrain_core.models.norms import RMSNorm
from nanotrain_core.models.ops import TORCH_OPS
from nanotrain_core.models.rope import rope_frequencies, rope_rotation
from nanotrain_core.models.transformer import Transformer
from nanotrain_core.pipeline.actions import Part

GPT2 = {
    "positions": "learned",
    "norm": "layernorm",
    "activation": "gelu",
    "bias": True,
    "tied": True,
    "max_length": 16,
}
SHAPES = {
    "gpt2": GPT2,
    "llama": {"ffn": 40},
    "gqa": {"kv_heads": 2, "ffn": 40},
    "mqa": {"kv_heads": 1, "head_size": 6, "tied": True},
}


def config(**changes):
    return TransformerConfig(**{"layers": 3, "width": 32, "heads": 4, "vocab": 23} | changes)


def build(config, first=0, last=None):
    last = config.layers if last is None else last
    part = Transformer(config).build(
        Part(first=first, last=last, has_embedding=first == 0, has_head=last == config.layers)
    )
    part = part.double().to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            parameter.copy_(draw(name, parameter.shape) + (1.0 if name.endswith("norm.weight") else 0.0))
    return part


def batch(config, rows=2, length=12):
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(config.vocab, (rows, length + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[0, 3] = targets[1, -1] = IGNORE
    return Batch(tokens[:, :-1], targets)


def logits(part, batch):
    return part(batch.tokens, Batch(batch.tokens)).value


# --- the reference: one sequence position and one head at a time where that is plainest -----------


def reference_norm(x, w, name, config):
    if config.norm == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * w[f"{name}.weight"]
    return x + w.get(f"{name}.bias", 0.0)


def reference_linear(x, w, name):
    return torch.einsum("bsi,oi->bso", x, w[f"{name}.weight"]) + w.get(f"{name}.bias", 0.0)


def reference_rope(x, theta):
    """Turn the pair (i, i + K/2) of position s by s * theta^(-2i/K), as complex numbers."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half], x[..., half:])
    for s in range(x.shape[1]):
        for i in range(half):
            angle = s * theta ** (-2 * i / x.shape[-1])
            pairs[:, s, :, i] *= complex(math.cos(angle), math.sin(angle))
    return torch.cat((pairs.real, pairs.imag), -1)


def reference_attention(x, w, name, config):
    q, k, v = (reference_linear(x, w, f"{name}.{m}").unflatten(-1, (-1, config.head_size)) for m in "qkv")
    if config.positions == "rope":
        q, k = reference_rope(q, config.rope_theta), reference_rope(k, config.rope_theta)
    per_group = config.heads // config.kv_heads
    heads = []
    for h in range(config.heads):
        scores = torch.einsum("bqk,bsk->bqs", q[:, :, h], k[:, :, h // per_group]) / math.sqrt(
            config.head_size
        )
        future = torch.ones(scores.shape[1:]).triu(1).bool()
        weights = scores.masked_fill(future, -math.inf).exp()
        weights = weights / weights.sum(-1, keepdim=True)
        heads.append(torch.einsum("bqs,bsk->bqk", weights, v[:, :, h // per_group]))
    return reference_linear(torch.cat(heads, -1), w, f"{name}.o")


def reference_ffn(x, w, name, config):
    up = reference_linear(x, w, f"{name}.up")
    if config.activation == "gelu":
        inner = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    else:
        gate = reference_linear(x, w, f"{name}.gate")
        inner = gate / (1 + (-gate).exp()) * up
    return reference_linear(inner, w, f"{name}.down")


def reference_logits(tokens, w, config):
    x = w["embed.weight"][tokens]
    if config.positions == "learned":
        x = x + w["positions.weight"][: tokens.shape[1]]
    for i in range(config.layers):
        x = x + reference_attention(
            reference_norm(x, w, f"layers.{i}.attn_norm", config), w, f"layers.{i}.attn", config
        )
        x = x + reference_ffn(
            reference_norm(x, w, f"layers.{i}.ffn_norm", config), w, f"layers.{i}.ffn", config
        )
    head = w["embed.weight"] if config.tied else w["head.weight"]
    return torch.einsum("bsd,vd->bsv", reference_norm(x, w, "norm", config), head)


# --- numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_the_reference(shape):
    model = Transformer(config(**SHAPES[shape]))
    part, data = build(model.config), batch(model.config)
    expected = reference_logits(data.tokens, dict(part.named_parameters()), model.config)
    torch.testing.assert_close(logits(part, data), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradients_equal_the_reference(shape):
    model = Transformer(config(**SHAPES[shape]))
    part, data = build(model.config), batch(model.config)
    loss = part(data.tokens, data).losses["lm"]
    gradients = torch.autograd.grad(loss, list(part.parameters()))
    own = reference_logits(data.tokens, dict(part.named_parameters()), model.config)
    expected = F.cross_entropy(own.flatten(0, 1), data.targets.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for mine, theirs in zip(gradients, torch.autograd.grad(expected, list(part.parameters())), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
def test_parts_in_sequence_equal_the_whole(shape):
    dims = config(**SHAPES[shape])
    whole, parts, data = build(dims), [build(dims, 0, 1), build(dims, 1, 3)], batch(dims)
    whole_loss = whole(data.tokens, data).losses["lm"]
    whole_loss.backward()
    loss = parts[1](parts[0](data.tokens, data).value, data).losses["lm"]
    loss.backward()
    summed = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            summed[name] = summed.get(name, 0.0) + parameter.grad
    assert summed.keys() == {name for name, _ in whole.named_parameters()}
    torch.testing.assert_close(loss, whole_loss, rtol=1e-12, atol=0)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(summed[name], parameter.grad, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_later_token_never_changes_earlier_logits(shape):
    dims = config(**SHAPES[shape])
    part, data = build(dims), batch(dims)
    before = logits(part, data)
    changed = data.tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % dims.vocab
    after = logits(part, Batch(changed))
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(dim=-1).all()


# --- RoPE -------------------------------------------------------------------------------------


def turn_of(length, theta, like):
    return rope_rotation(length, rope_frequencies(8, theta, device=like.device), like=like)


def test_rope_makes_scores_depend_on_the_distance_alone():
    q, k = draw("q", (8,)), draw("k", (8,))
    turn = turn_of(32, 100.0, q)
    q_SK, k_SK = (TORCH_OPS.rope(x.expand(1, 32, 1, 8), *turn)[0, :, 0] for x in (q, k))
    scores = q_SK @ k_SK.T
    for distance in range(-31, 32):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-12)
    assert scores[0].std() > 0.01  # and it does depend on the distance


def test_rope_keeps_norms():
    x = draw("x", (2, 32, 3, 8))
    turned = TORCH_OPS.rope(x, *turn_of(32, 10000.0, x))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-13, atol=0)


def test_rope_of_a_bfloat16_model_turns_in_float32():
    x = draw("x", (1, 512, 1, 8)).bfloat16()
    turned = TORCH_OPS.rope(x, *turn_of(512, 10000.0, x))
    exact = TORCH_OPS.rope(x.double(), *turn_of(512, 10000.0, x.double()))
    # One rounding of the result, half a unit in the last of bfloat16's 8 bits, and nothing more.
    torch.testing.assert_close(turned.double(), exact, rtol=1.001 * 2**-8, atol=1e-7)


# --- RMSNorm ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)]
)
def test_rms_norm_and_its_gradients_equal_torch(dtype, close):
    x, weight, slope = (
        draw(name, shape).to(dtype)
        for name, shape in [("x", (2, 5, 16)), ("w", (16,)), ("slope", (2, 5, 16))]
    )
    x.requires_grad_()
    norm = RMSNorm(16, eps=1e-2).to(dtype)
    norm.weight = torch.nn.Parameter(weight)
    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    y, exact = norm(x), F.rms_norm(exact_x, (16,), exact_weight, 1e-2)
    mine = torch.autograd.grad(y, (x, norm.weight), slope)
    theirs = torch.autograd.grad(exact, (exact_x, exact_weight), slope.double())
    for a, b in zip((y, *mine), (exact, *theirs), strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=close, atol=close)


# --- shapes, names, roles, counts -------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        (GPT2 | {"layers": 12, "width": 768, "heads": 12, "vocab": 50257, "max_length": 1024}, 124_439_808),
        ({"layers": 32, "width": 4096, "heads": 32, "ffn": 11008, "vocab": 32000}, 6_738_415_616),
    ],
    ids=["GPT-2 small", "Llama 2 7B"],
)
def test_parameter_counts_are_the_published_ones(dims, expected):
    part = Transformer(config(**dims)).build(Part.whole(dims["layers"]))
    assert {p.device.type for p in part.parameters()} == {"meta"}
    assert sum(p.numel() for p in part.parameters()) == expected


def test_names_are_global_and_roles_say_what_may_be_split():
    part = build(config(kv_heads=2), 1, 3)
    assert {name for name, _ in part.named_parameters()} == {
        *(
            f"layers.{layer}.{name}.weight"
            for layer in (1, 2)
            for name in (
                *("attn_norm", "attn.q", "attn.k", "attn.v", "attn.o"),
                *("ffn_norm", "ffn.gate", "ffn.up", "ffn.down"),
            )
        ),
        "norm.weight",
        "head.weight",
    }
    roles = {name.removeprefix("layers.1."): (tag.role, tag.unit) for name, _, tag in tagged(part)}
    assert roles["layers.1"] == (Role.BLOCK, 1)
    assert roles["attn.q"] == roles["attn.k"] == roles["attn.v"] == (Role.COLUMN, 8)
    assert roles["attn.o"] == (Role.ROW, 8)
    assert roles["ffn.gate"] == roles["ffn.up"] == (Role.COLUMN, 1)
    assert roles["ffn.down"] == (Role.ROW, 1)
    assert roles["attn_norm"] == roles["ffn_norm"] == roles["norm"] == (Role.NORM, 1)
    assert roles["head"] == (Role.HEAD, 1)


def test_every_parameter_belongs_to_a_module_with_a_role():
    part = build(config(**GPT2))
    owners = [name for name, _, tag in tagged(part) if tag.role is not Role.BLOCK]
    orphans = [name for name, _ in part.named_parameters() if name.rpartition(".")[0] not in owners]
    assert orphans == []


def test_attention_follows_the_heads_that_a_wrapper_left():
    dims = Transformer(config()).config
    attention, x = build(dims).layers["0"].attn, draw("x", (2, 12, 32))
    turn = turn_of(12, 10000.0, x)
    whole = attention(x, turn)
    halves = 0.0
    for rows in (slice(0, 16), slice(16, 32)):
        half = build(dims).layers["0"].attn
        for projection in (half.q, half.k, half.v):
            projection.weight = torch.nn.Parameter(projection.weight[rows])
        half.o.weight = torch.nn.Parameter(half.o.weight[:, rows])
        halves = halves + half(x, turn)
    torch.testing.assert_close(halves, whole, rtol=0, atol=1e-12)


def test_initial_weights_are_ones_zeros_and_normals():
    initializer = build(config(**GPT2, init_std=0.05)).initializer
    residual = Initializer("normal", 0.05 / math.sqrt(2 * 3))
    assert (
        initializer("layers.2.attn_norm.weight") == initializer("norm.weight") == Initializer("constant", 1.0)
    )
    assert initializer("layers.2.attn.q.bias") == initializer("norm.bias") == Initializer("constant", 0.0)
    assert initializer("layers.0.attn.o.weight") == initializer("layers.0.ffn.down.weight") == residual
    for name in ("embed.weight", "positions.weight", "layers.0.attn.q.weight", "layers.0.ffn.up.weight"):
        assert initializer(name) == Initializer("normal", 0.05)


def test_loss_is_counted_over_targets_that_are_not_ignored():
    data = batch(config())
    assert Transformer(config()).loss_counts(data)["lm"].item() == 2 * 12 - 2


def test_flops_per_token_equal_a_count_by_hand():
    model = Transformer(config(kv_heads=2, ffn=40))
    # q 32x32, k and v 16x32, o 32x32; gate, up, down 40x32; three layers; head 23x32.
    weights = 3 * (32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 40 * 32) + 23 * 32
    # 100 keys, half of them in the past: 2 * 50 * 8 for the scores of a head, as many for its values.
    attention = 3 * 4 * (2 * 50 * 8 + 2 * 50 * 8)
    costs = model.flops(100)
    assert costs.total == 3 * (2 * weights + attention)
    assert (costs.embedding, costs.head) == (0.0, 3 * 2 * 23 * 32)
    assert len(costs.layers) == 3
    assert len(set(costs.layers)) == 1


def test_a_sequence_longer_than_the_model_is_refused():
    part = build(config(**GPT2))
    with pytest.raises(ValueError, match=r"17 tokens exceeds .* max_length = 16"):
        logits(part, Batch(torch.zeros(1, 17, dtype=torch.int64)))
