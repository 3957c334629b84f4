"""The router against loops that read like the paper, its load and bias, and the balance losses."""

import attrs
import pytest
import torch
from nanotrain_deepseek import balance_losses
from nanotrain_deepseek.config import DeepSeekConfig
from nanotrain_deepseek.model import DeepSeek
from nanotrain_deepseek.router import Router
from nanotrain_deepseek.samples import V2, V3

from nanotrain_core.batch import Batch
from nanotrain_core.models.activation_checkpointing import recompute_blocks
from nanotrain_core.moe.routing import counting_routers
from nanotrain_core.pipeline.actions import Part
from nanotrain_core.precision.dtypes import cast

LOSSES = {"seq_balance": 1.0}
V3_CONFIG = DeepSeekConfig(**V3 | LOSSES)
V2_LOSSES = {"expert_balance": 1.0, "device_balance": 1.0, "comm_balance": 1.0}
V2_CONFIG = DeepSeekConfig(**{k: v for k, v in V2.items() if k != "yarn"} | V2_LOSSES)


def router_of(config, *, seed=0, dtype=torch.float64):
    """Return a router with random weights and, where it has one, a random bias."""
    generator = torch.Generator().manual_seed(seed)
    router = Router(config)
    for name, parameter in router.named_parameters():
        parameter.data = torch.empty(parameter.shape, dtype=dtype).normal_(0.0, 0.3, generator=generator)
        if name == "bias":
            parameter.data = parameter.data.float()
    return router


def tokens_of(config, *, sequences=4, length=9):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sequences, length, config.width, dtype=torch.float64, generator=generator)


def scores_of_token(router, x):
    logits = [sum(float(w) * float(v) for w, v in zip(row, x, strict=True)) for row in router.weight.detach()]
    exps = torch.tensor(logits, dtype=torch.float64)
    return (exps.sigmoid() if router.config.score == "sigmoid" else exps.exp() / exps.exp().sum()).tolist()


def route_one(router, scores):
    """Return {expert: weight} of one token, by sorting lists."""
    c = router.config
    bias = [0.0] * c.experts if router.bias is None else router.bias.tolist()
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    size = c.experts // c.groups
    members = [range(g * size, (g + 1) * size) for g in range(c.groups)]
    best = 1 if router.bias is None else 2
    of_group = [sum(sorted((biased[e] for e in group), reverse=True)[:best]) for group in members]
    open_groups = sorted(range(c.groups), key=lambda g: -of_group[g])[: c.group_limit]
    allowed = [e for g in open_groups for e in members[g]]
    chosen = sorted(allowed, key=lambda e: -biased[e])[: c.top_k]
    total = sum(scores[e] for e in chosen) if c.normalize_weights else 1.0
    return {e: scores[e] / total * c.route_scale for e in chosen}


@pytest.mark.parametrize("config", [V3_CONFIG, V2_CONFIG], ids=["v3", "v2"])
def test_routes_as_a_loop_over_tokens(config):
    router, x = router_of(config), tokens_of(config)
    routing = router(x)
    for sequence, token in torch.cartesian_prod(torch.arange(4), torch.arange(9)).tolist():
        expected = route_one(router, scores_of_token(router, x[sequence, token]))
        experts = routing.experts[sequence, token].tolist()
        weights = dict(zip(experts, routing.weights[sequence, token].tolist(), strict=True))
        assert weights == pytest.approx(expected, abs=1e-12)


def test_the_bias_chooses_and_does_not_weigh():
    config = attrs.evolve(V3_CONFIG, groups=1, group_limit=0, top_k=2, normalize_weights=False)
    router, x = router_of(config), tokens_of(config)
    router.bias.data = torch.tensor([0.0, 9.0, 0.0, 0.0, 0.0, 0.0, 9.0, 0.0])
    routing = router(x)
    assert routing.experts.sort(-1).values.unique(dim=1).flatten(0, 1).unique(dim=0).tolist() == [[1, 6]]
    scores = (x @ router.weight.T).sigmoid()
    assert torch.allclose(
        routing.weights, scores.gather(-1, routing.experts) * config.route_scale, atol=1e-12
    )


def test_scores_are_float32_in_a_bfloat16_model_and_so_is_the_bias():
    router = cast(router_of(V3_CONFIG, dtype=torch.float32), torch.bfloat16)
    assert (router.weight.dtype, router.bias.dtype) == (torch.bfloat16, torch.float32)
    x = tokens_of(V3_CONFIG).bfloat16()
    routing = router(x)
    scores = (x.float() @ router.weight.float().T).sigmoid().gather(-1, routing.experts)
    expected = scores / scores.sum(-1, keepdim=True) * V3_CONFIG.route_scale
    assert routing.weights.dtype == torch.float32
    assert torch.allclose(routing.weights, expected, rtol=1e-5)


# --- load and bias ----------------------------------------------------------------------------


def test_load_counts_training_tokens_once_and_is_forgotten_when_taken():
    router, x = router_of(V3_CONFIG), tokens_of(V3_CONFIG)
    expected = torch.zeros(8, dtype=torch.int64)
    for part in (x, x[:2]):
        routing = router(part)
        router.add_load(routing.load)
        for expert in routing.experts.flatten().tolist():
            expected[expert] += 1
    assert router.eval()(x).load is None
    load = router.take_load()
    assert load.dtype == torch.int64
    assert load.tolist() == expected.tolist()
    assert router.take_load().tolist() == [0] * 8


def test_megatron_7081_bias_moves_by_the_sign_of_an_exact_difference():
    config = attrs.evolve(V3_CONFIG, experts=4, groups=1, group_limit=0, bias_update_rate=0.25)
    router = router_of(config)
    before = router.bias.clone()
    huge = 10**15  # a mean in float32 would call all of these equal
    router.balance(torch.tensor([huge + 1, huge - 1, huge, huge]))
    assert (router.bias - before).tolist() == [-0.25, 0.25, 0.0, 0.0]
    assert not router.bias.requires_grad


def test_a_rate_of_zero_and_a_softmax_router_keep_their_bias():
    still = router_of(attrs.evolve(V3_CONFIG, bias_update_rate=0.0))
    before = still.bias.clone()
    still.balance(torch.arange(8))
    assert torch.equal(still.bias, before)
    softmax = router_of(V2_CONFIG)
    softmax.balance(torch.arange(8))
    assert [name for name, _ in softmax.named_parameters()] == ["weight"]


def test_torchtitan_1593_a_layer_run_again_in_backward_counts_neither_tokens_nor_losses_twice():
    config = DeepSeekConfig(**V3 | {"layers": 2, "dense_layers": 1, "mtp": 1, "seq_balance": 0.1})
    found = []
    for recompute in (False, True):
        part = DeepSeek(config).build(Part.whole(2)).to_empty(device="cpu").double()
        for seed, parameter in enumerate(part.parameters()):
            torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(seed))
        if recompute:
            recompute_blocks(part)
        tokens = torch.randint(config.vocab, (4, 10), generator=torch.Generator().manual_seed(1))
        losses = part(tokens[:, :-1], Batch(tokens[:, :-1], tokens[:, 1:])).losses
        sum(losses.values()).backward()
        loads = [router.take_load() for router in counting_routers([part]).values()]
        found.append((losses, loads, [p.grad for p in part.parameters() if p.requires_grad]))
    (losses, loads, gradients), (again, same_loads, same_gradients) = found
    assert [load.sum().item() for load in loads] == [4 * 9 * config.top_k] * 2
    torch.testing.assert_close(losses, again, rtol=0, atol=0)
    torch.testing.assert_close(loads, same_loads)
    torch.testing.assert_close(gradients, same_gradients, rtol=0, atol=1e-12)


# --- balance losses ---------------------------------------------------------------------------


def sequence_loss(scores, c):
    """V3, equations 17 to 20, of one sequence: scores is a list of lists."""
    T, loss = len(scores), 0.0
    for i in range(c.experts):
        f = sum(i in sorted(range(c.experts), key=lambda e: -s[e])[: c.top_k] for s in scores)
        p = sum(s[i] / sum(s) for s in scores) / T
        loss += f * c.experts / (c.top_k * T) * p
    return loss


def v2_losses(scores, chosen, c):
    """V2, equations 23 to 31, of one sequence: chosen is a list of sets."""
    T, D, size = len(scores), c.groups, c.experts // c.groups
    f = [c.experts / (c.top_k * T) * sum(e in s for s in chosen) for e in range(c.experts)]
    p = [sum(s[e] for s in scores) / T for e in range(c.experts)]
    expert = sum(a * b for a, b in zip(f, p, strict=True))
    device = communication = 0.0
    for d in range(D):
        own = range(d * size, (d + 1) * size)
        score = sum(p[e] for e in own)
        device += sum(f[e] for e in own) / size * score
        sent = sum(any(e in s for e in own) for s in chosen)
        communication += D / (c.group_limit * T) * sent * score
    return {"expert_balance": expert, "device_balance": device, "comm_balance": communication}


def test_v3_balance_loss_is_the_sum_of_each_sequence_s():
    router, x = router_of(V3_CONFIG), tokens_of(V3_CONFIG)
    expected = sum(sequence_loss([scores_of_token(router, t) for t in seq], V3_CONFIG) for seq in x)
    assert router(x).losses["seq_balance"].item() == pytest.approx(expected, abs=1e-10)


def test_v2_balance_losses_are_the_sums_of_each_sequence_s():
    router, x = router_of(V2_CONFIG), tokens_of(V2_CONFIG)
    routing = router(x)
    expected = dict.fromkeys(V2_LOSSES, 0.0)
    for sequence, chosen in zip(x, routing.experts.tolist(), strict=True):
        scores = [scores_of_token(router, t) for t in sequence]
        for name, value in v2_losses(scores, [set(k) for k in chosen], V2_CONFIG).items():
            expected[name] += value
    assert {n: v.item() for n, v in routing.losses.items()} == pytest.approx(expected, abs=1e-10)


def test_even_load_gives_a_loss_of_one_for_each_sequence():
    config = attrs.evolve(V2_CONFIG, experts=4, groups=4, group_limit=1, top_k=1, width=4)
    router = router_of(config)
    router.weight.data = torch.eye(4, dtype=torch.float64)
    x = 3.0 * torch.eye(4, dtype=torch.float64).expand(5, 4, 4)
    losses = {name: value.item() for name, value in router(x).losses.items()}
    assert losses == pytest.approx(dict.fromkeys(V2_LOSSES, 5.0), abs=1e-10)


def test_losses_reach_the_router_s_weight_through_the_scores_alone():
    router = router_of(V3_CONFIG)
    x = tokens_of(V3_CONFIG)
    analytic = torch.autograd.grad(router(x).losses["seq_balance"], router.weight)[0]
    step = torch.randn_like(router.weight) * 1e-6
    with torch.no_grad():
        router.weight += step
        up = router(x).losses["seq_balance"].item()
        router.weight -= 2 * step
        down = router(x).losses["seq_balance"].item()
    assert up - down == pytest.approx(2 * (analytic * step).sum().item(), rel=1e-4)


def test_evaluation_has_no_losses():
    assert not router_of(V3_CONFIG).eval()(tokens_of(V3_CONFIG)).losses


def test_megatron_1545_a_token_whose_scores_vanish_leaves_the_balance_loss_finite():
    scores_SE = torch.full((4, 8), -120.0).sigmoid().requires_grad_()
    loss = balance_losses.sequence_loss(scores_SE, scores_SE.topk(2).indices)
    loss.backward()
    assert loss.item() == 0.0
    assert scores_SE.grad.isfinite().all()
