"""The router against loops that read like the papers, the auxiliary loss against transformers' own."""

import attrs
import pytest
import torch
from nanotrain_moe_transformer.config import MoETransformerConfig
from nanotrain_moe_transformer.model import MoETransformer, Router
from nanotrain_moe_transformer.samples import MIXTRAL, QWEN3
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from nanotrain_core.batch import Batch
from nanotrain_core.models.activation_checkpointing import recompute_blocks
from nanotrain_core.moe.routing import counting_routers
from nanotrain_core.pipeline.actions import Part
from nanotrain_core.precision.dtypes import cast

CONFIG = MoETransformerConfig(**QWEN3 | {"mlp_only_layers": (0,)})


def router_of(config, *, dtype=torch.float64):
    router = Router(config)
    weight = torch.empty(router.weight.shape, dtype=dtype)
    router.weight.data = weight.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(0))
    return router


def tokens_of(config, *, sequences=4, length=9):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sequences, length, config.width, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("normalize", [True, False])
def test_routes_as_a_loop_over_tokens(normalize):
    config = attrs.evolve(CONFIG, normalize_weights=normalize)
    router, x = router_of(config), tokens_of(config)
    routing = router(x)
    for b, s in torch.cartesian_prod(torch.arange(4), torch.arange(9)).tolist():
        exps = [(row @ x[b, s]).exp().item() for row in router.weight]
        chosen = sorted(range(config.experts), key=lambda e: -exps[e])[: config.top_k]
        total = sum(exps[e] for e in chosen) if normalize else sum(exps)
        found = dict(zip(routing.experts[b, s].tolist(), routing.weights[b, s].tolist(), strict=True))
        assert found == pytest.approx({e: exps[e] / total for e in chosen}, abs=1e-12)


def test_mixtral_weights_are_the_softmax_of_the_chosen_logits():
    """Jiang et al., section 2.1: Softmax(TopK(x W))."""
    config = MoETransformerConfig(**MIXTRAL)
    router, x = router_of(config), tokens_of(config)
    routing, best = router(x), (x @ router.weight.T).topk(2, dim=-1)
    assert torch.equal(routing.experts, best.indices)
    assert torch.allclose(routing.weights, best.values.softmax(-1), atol=1e-12)


def test_scores_are_float32_in_a_bfloat16_model():
    router = cast(router_of(CONFIG, dtype=torch.float32), torch.bfloat16)
    x = tokens_of(CONFIG).bfloat16()
    routing = router(x)
    scores = (x.float() @ router.weight.float().T).softmax(-1).gather(-1, routing.experts)
    assert routing.weights.dtype == torch.float32
    assert torch.allclose(routing.weights, scores / scores.sum(-1, keepdim=True), rtol=1e-5)


def test_the_auxiliary_loss_of_a_sequence_is_that_of_transformers_over_top_k():
    """Theirs counts choices per token, K at even load; here, as in Switch, even load gives 1."""
    router, x = router_of(CONFIG), tokens_of(CONFIG)
    each = [load_balancing_loss_func((s @ router.weight.T,), CONFIG.experts, CONFIG.top_k) for s in x]
    assert router(x).losses["aux"].item() == pytest.approx(sum(each).item() / CONFIG.top_k, rel=1e-6)


def test_the_gradient_of_the_auxiliary_loss_is_that_of_transformers():
    router, x = router_of(CONFIG), tokens_of(CONFIG, sequences=1)
    ours = torch.autograd.grad(router(x).losses["aux"], router.weight)[0]
    wanted = load_balancing_loss_func((x[0] @ router.weight.T,), CONFIG.experts, CONFIG.top_k)
    (theirs,) = torch.autograd.grad(wanted / CONFIG.top_k, router.weight)
    assert ours.abs().max() > 1e-3
    assert torch.allclose(ours, theirs, atol=1e-7)


def test_even_load_gives_a_loss_of_one_for_each_sequence():
    config = attrs.evolve(CONFIG, experts=4, top_k=1, width=4)
    router = router_of(config)
    router.weight.data = torch.eye(4, dtype=torch.float64)
    x = 3.0 * torch.eye(4, dtype=torch.float64).expand(5, 4, 4)
    assert router(x).losses["aux"].item() == pytest.approx(5.0, abs=1e-10)


def test_without_a_weight_and_in_evaluation_there_is_no_auxiliary_loss():
    assert not router_of(attrs.evolve(CONFIG, aux_loss_coeff=0.0))(tokens_of(CONFIG)).losses
    assert not router_of(CONFIG).eval()(tokens_of(CONFIG)).losses


def test_the_loss_weighs_the_sum_over_layers_and_counts_sequences_and_layers():
    model = MoETransformer(CONFIG)  # 2 layers with experts
    assert model.loss_weights == {"lm": 1.0, "aux": 0.02}
    tokens = torch.zeros(4, 9, dtype=torch.int64)
    assert model.loss_counts(Batch(tokens, tokens))["aux"].item() == 8
    assert MoETransformer(attrs.evolve(CONFIG, mlp_only_layers=(0, 1, 2))).loss_weights == {"lm": 1.0}


def test_torchtitan_1593_a_layer_run_again_in_backward_counts_neither_tokens_nor_losses_twice():
    found = []
    for recompute in (False, True):
        part = MoETransformer(CONFIG).build(Part.whole(3)).to_empty(device="cpu").double()
        for seed, parameter in enumerate(part.parameters()):
            torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(seed))
        if recompute:
            recompute_blocks(part)
        tokens = torch.randint(CONFIG.vocab, (4, 10), generator=torch.Generator().manual_seed(1))
        losses = part(tokens[:, :-1], Batch(tokens[:, :-1], tokens[:, 1:])).losses
        sum(losses.values()).backward()
        loads = [router.take_load() for router in counting_routers([part]).values()]
        found.append((losses, loads, [p.grad for p in part.parameters()]))
    (losses, loads, gradients), (again, same_loads, same_gradients) = found
    assert [load.sum().item() for load in loads] == [4 * 9 * CONFIG.top_k] * 2
    torch.testing.assert_close(losses, again, rtol=0, atol=0)
    torch.testing.assert_close(loads, same_loads)
    torch.testing.assert_close(gradients, same_gradients, rtol=0, atol=1e-12)
