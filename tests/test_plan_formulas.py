"""Three recipes as papers have them, by arithmetic alone, against ``nanotrain plan``: no plan's code is used.

Dimensions are read from the recipe. Sources: matrix products, 2 FLOPs a weight and token and twice that in
backward (arXiv 2001.08361); ZeRO (1910.02054); activations (2205.05198); MLA and experts (2405.04434,
2412.19437); 1F1B (2104.04473). S: tokens of a microbatch, which has one sequence in all three; D: width.
"""

import contextlib
import io
import json
from collections import defaultdict

import pytest

from nanotrain_core.cli import main
from nanotrain_core.recipe.load import resolve_recipe

BF16, FP8, FP32 = 2, 1, 4


def planned(name, hardware, *changes):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(["plan", name, "--hardware", hardware, "--no-advice", "--json", *changes])
    return json.loads(out.getvalue())


def moved(plan):
    """Return count and bytes of a step's collectives, by mesh axis and operation."""
    found = defaultdict(lambda: (0, 0))
    for each in plan["collectives"]["of_a_step"]:
        found[each["axis"], each["op"]] = each["count"], each["bytes"]
    return found


def mla(m):
    """Return the weights of one attention (its matrices and the two norms of latents), section 2.1.1."""
    key, up = m.nope_size + m.rope_size, m.nope_size + m.value_size
    query = m.width * m.q_rank + m.q_rank * m.heads * key if m.q_rank else m.width * m.heads * key
    down = m.width * (m.kv_rank + m.rope_size)
    return query + down + m.kv_rank * m.heads * up + m.heads * m.value_size * m.width, (
        m.q_rank or 0
    ) + m.kv_rank


def deepseek(m):
    """Return elements of a layer by kind, without norms and router, and those of all norms of a layer."""
    attention, latents = mla(m)
    expert = 3 * m.width * m.expert_ffn
    return attention, 3 * m.width * m.ffn, expert, m.width * m.experts, latents + 2 * m.width


@pytest.mark.full
def test_llama_8b_is_that_of_formulas():
    recipe, plan = resolve_recipe("llama_8b").recipe, planned("llama_8b", "h100")
    m, S, ranks = recipe.model.config, recipe.batch.length, recipe.run.ranks
    microbatches = recipe.batch.sequences // ranks // recipe.batch.microbatch
    D, L, V, F = m.width, m.layers, m.vocab, m.ffn
    kv = m.kv_heads * (D // m.heads)
    matrices = L * (2 * D * D + 2 * D * kv + 3 * D * F) + V * D  # the head's among them
    P = matrices + V * D + (2 * L + 1) * D
    assert plan["parameters"]["total"] == P
    flops = plan["flops_per_token"]
    assert flops["matmul"] == 6 * matrices
    assert (
        flops["attention"] == 3 * L * 2 * S * D
    )  # two products of S x D a head's worth, half of them masked
    (rank,) = plan["memory"]["ranks"]
    state = rank["between_steps"]
    assert state["weights"] == BF16 * P
    for holder, each in {"gradients": FP32, "masters": FP32, "optimizer": 2 * FP32}.items():  # ZeRO-2
        assert state[holder] == pytest.approx(each * P / ranks, rel=1e-6)
    collectives = moved(plan)
    assert collectives["dp", "reduce_scatter"][1] == pytest.approx(microbatches * FP32 * P, rel=1e-4)
    assert collectives["dp", "all_gather"][1] == pytest.approx(BF16 * P, rel=1e-4)
    assert plan["pipeline"]["bubble"] == pytest.approx(0.0, abs=1e-9)
    # Selective checkpointing: a layer's input, its products, attention's output with a log-sum-exp a row.
    kept = BF16 * S * (D + (D + 2 * kv) + D + D + (2 * F + D)) + FP32 * S * m.heads
    told = sum(a["bytes"] * a["count"] for a in plan["memory"]["activations"] if a["module"][:7] == "layers.")
    assert told == pytest.approx(L * kept, rel=0.01)
    assert plan["checkpoints"]["bytes"] == pytest.approx((BF16 + 3 * FP32) * P, rel=1e-6)


@pytest.mark.full
def test_deepseek_v2_lite_is_that_of_formulas():
    recipe, plan = resolve_recipe("deepseek_v2_lite").recipe, planned("deepseek_v2_lite", "h100")
    m, S, ep = recipe.model.config, recipe.batch.length, recipe.topology.config.ep
    microbatches = recipe.batch.sequences // recipe.run.ranks // recipe.batch.microbatch
    attention, dense, expert, router, norms = deepseek(m)
    D, L, sparse = m.width, m.layers, m.layers - m.dense_layers
    head, shared = m.vocab * D, m.shared_experts * expert
    P_experts = sparse * m.experts * expert
    P_others = 2 * head + L * (attention + norms) + m.dense_layers * dense + sparse * (shared + router) + D
    assert plan["parameters"]["total"] == P_experts + P_others
    matrices = head + L * attention + m.dense_layers * dense
    matrices += sparse * (shared + router + m.top_k * expert)
    flops = plan["flops_per_token"]
    assert flops["matmul"] == 6 * matrices
    key = m.nope_size + m.rope_size
    assert flops["attention"] == 3 * L * S * m.heads * (key + m.value_size)
    (rank,) = plan["memory"]["ranks"]
    state, mine = rank["between_steps"], P_others + P_experts // ep
    assert state["weights"] == BF16 * mine
    owned = P_others / recipe.run.ranks + P_experts / ep  # no rank has the same experts: edp is 1
    for holder, each in {"gradients": FP32, "masters": FP32, "optimizer": 2 * FP32}.items():
        assert state[holder] == pytest.approx(each * owned, rel=1e-6)
    collectives = moved(plan)
    assert collectives["dp", "reduce_scatter"][1] == pytest.approx(microbatches * FP32 * P_others, rel=1e-4)
    assert collectives["dp", "all_gather"][1] == pytest.approx(BF16 * P_others, rel=1e-4)
    # A layer dispatches and combines rows, forward, in activation checkpointing, and backward. Each time but
    # in backward it tells first how many rows come, in 8 bytes an expert.
    rows = m.top_k * S
    count, size = collectives["ep", "all_to_all"]
    assert count == microbatches * sparse * (3 * 2 + 2)
    assert size == microbatches * sparse * (6 * rows * D * BF16 + 2 * 8 * m.experts)


@pytest.fixture(scope="module")
def v3():
    """Return it under 1F1B, whose memory and bubble have formulas."""
    plan = planned("deepseek_v3_671b", "h800", "--set", "schedule.use=1f1b")
    return resolve_recipe("deepseek_v3_671b").recipe, plan


@pytest.mark.full
def test_deepseek_v3_has_the_parameters_and_flops_of_formulas(v3):
    recipe, plan = v3
    m, S = recipe.model.config, recipe.batch.length
    attention, dense, expert, router, norms = deepseek(m)
    D, L, sparse = m.width, m.layers, m.layers - m.dense_layers
    head, shared = m.vocab * D, m.shared_experts * expert
    layer = attention + norms + shared + router + m.experts  # of the router also a bias for each expert
    P_experts = sparse * m.experts * expert
    total = P_experts + sparse * layer + m.dense_layers * (attention + norms + dense) + 2 * head + D
    mtp = 2 * D * D + 3 * D + layer + m.experts * expert  # section 2.2: projection, three norms, one layer
    assert plan["parameters"]["total"] == total
    assert plan["parameters"]["mtp"] == mtp
    flops = plan["flops_per_token"]
    once = attention + shared + router + m.top_k * expert  # matrices that a token meets in a layer
    matrices = sparse * once + m.dense_layers * (attention + dense) + head
    assert flops["matmul"] == 6 * matrices
    scores = 3 * S * m.heads * (m.nope_size + m.rope_size + m.value_size)
    assert flops["attention"] == L * scores
    assert flops["mtp"] == 6 * (once + 2 * D * D + head) + scores
    assert plan["checkpoints"]["bytes"] == pytest.approx((total + mtp) * (BF16 + FP32 + 2 * BF16), rel=0.01)


@pytest.mark.full
def test_deepseek_v3_holds_and_sends_what_formulas_say(v3):
    recipe, plan = v3
    m, S, ranks = recipe.model.config, recipe.batch.length, recipe.run.ranks
    pp, ep, D = recipe.topology.config.pp, recipe.topology.config.ep, recipe.model.config.width
    dp = ranks // pp
    edp, microbatches = dp // ep, recipe.batch.sequences // dp // recipe.batch.microbatch
    attention, _, expert, router, norms = deepseek(m)
    layer = attention + norms + m.shared_experts * expert + router + m.experts
    # A rank in the middle: 4 layers, 16 experts. Weights in FP8's run are bfloat16, moments too: section 3.3.
    middle = plan["memory"]["ranks"][pp // 2]["between_steps"]
    stage = plan["pipeline"]["stages"][pp // 2]
    layers = stage["last"] - stage["first"]
    P_others, P_mine = layers * layer, layers * m.experts // ep * expert
    assert middle["weights"] == pytest.approx(BF16 * (P_others + P_mine), rel=0.01)
    owned = P_others / dp + P_mine / edp  # ZeRO-1
    assert middle["masters"] == pytest.approx(FP32 * owned, rel=0.01)
    assert middle["optimizer"] == pytest.approx(2 * BF16 * owned, rel=0.01)
    grown = plan["memory"]["ranks"][pp // 2]["at_peak"]["gradients"]
    assert grown == pytest.approx(FP32 * (P_others + P_mine) + FP32 * owned, rel=0.01)
    # Whole layers are computed again: each keeps its input, and the stage its output, which is sent.
    first = plan["memory"]["ranks"][0]
    assert first["in_flight"] == pp
    kept = sum(each["bytes"] * each["count"] for each in plan["memory"]["activations"] if each["stage"] == 0)
    inputs = plan["pipeline"]["stages"][0]["last"]
    assert kept == pytest.approx((inputs + 1) * S * D * BF16, rel=0.01)
    assert first["at_peak"]["activations"] == pytest.approx(pp * kept, rel=0.01)
    collectives = moved(plan)
    assert collectives["dp", "reduce_scatter"][1] == pytest.approx(FP32 * P_others, rel=0.01)
    assert collectives["dp", "all_gather"][1] == pytest.approx(BF16 * P_others, rel=0.01)
    assert collectives["edp", "reduce_scatter"][1] == pytest.approx(FP32 * P_mine, rel=0.01)
    assert collectives["edp", "all_gather"][1] == pytest.approx(BF16 * P_mine, rel=0.01)
    # Each way between stages, hidden states and their gradients.
    assert collectives["pp", "send"] == (2 * microbatches, 2 * microbatches * S * D * BF16)
    assert collectives["pp", "recv"] == collectives["pp", "send"]
    # Section 3.3.3: rows and their gradients go to experts in FP8, with a scale for 128 numbers, back in
    # BF16; those of forward a second time, since it is computed again.
    rows = m.top_k * S
    count, size = collectives["ep", "all_to_all"]
    assert count == microbatches * layers * 8
    dispatched = rows * D * (FP8 + FP32 / 128)
    assert size == pytest.approx(microbatches * layers * 3 * (dispatched + rows * D * BF16), rel=0.01)


@pytest.mark.full
def test_the_bubble_of_deepseek_v3_is_that_of_1f1b(v3):
    """The step is the busiest stage's microbatches, and one of each other stage before or after them.

    A message goes to each other stage and back. In between, as many microbatches as there are stages are on
    their way, and 1F1B hides no message: each microbatch waits for its share of those of one that returns.
    """
    recipe, plan = v3
    pp, pipeline = recipe.topology.config.pp, plan["pipeline"]
    microbatches = recipe.batch.sequences // (recipe.run.ranks // pp) // recipe.batch.microbatch
    busiest = sum(plan["time"]["busiest"].values()) / microbatches
    all_stages = (1 - pipeline["bubble"]) * pp * pipeline["seconds"] / microbatches  # of one microbatch
    send = next(each for each in plan["collectives"]["of_a_step"] if each["op"] == "send")
    messages = 2 * (pp - 1) * send["seconds"] / send["count"]
    expected = (microbatches - 1) * (busiest + messages / pp) + all_stages + messages
    # Stages differ: some of them finish their last microbatch a little before the formula says.
    assert pipeline["seconds"] == pytest.approx(expected, rel=0.002)
    assert pipeline["bubble"] > (pp - 1) / (microbatches + pp - 1)  # of stages that take equally long


@pytest.mark.full
def test_operands_of_deepseek_v3_wait_for_w_passes_in_fp8():
    """Under DualPipe-V the rank at the bend puts off the weight gradients of its last pp backward passes.

    It peaks in the last of them. Each layer holds x and dy of every matrix, E4M3 with a scale for 128
    numbers; matrices that read one tensor hold it once. The router is multiplied at once.
    """
    recipe, plan = resolve_recipe("deepseek_v3_671b").recipe, planned("deepseek_v3_671b", "h800")
    m, S, pp = recipe.model.config, recipe.batch.length, recipe.topology.config.pp
    key, up = m.nope_size + m.rope_size, m.nope_size + m.value_size
    attention = m.width + m.q_rank + m.kv_rank + m.rope_size  # x of both down-projections, and their dy
    attention += m.q_rank + m.heads * key + m.kv_rank + m.heads * up + m.heads * m.value_size + m.width
    expert = 2 * m.width + 3 * m.expert_ffn  # x, dy of gate and up, silu(gate) up, dy of down
    of_layer = S * (attention + (m.top_k + m.shared_experts) * expert) * (FP8 + FP32 / 128)
    bend, stage = plan["memory"]["ranks"][-1], plan["pipeline"]["stages"][pp - 1]
    layers = stage["last"] - stage["first"]
    waiting = bend["at_peak"]["activations"]
    assert waiting == pytest.approx((pp - 1) * layers * of_layer, rel=0.01)


#: A Llama of 4 layers on 8 ranks, whose tensors are small, and figures of it.
SMALL = """
[run]
steps = 1
ranks = 8
[batch]
sequences = 32
microbatch = 2
length = 512
[model]
use = "transformer"
layers = 4
width = 1024
heads = 8
kv_heads = 4
ffn = 2816
vocab = 8192
[precision]
use = "bf16"
[data]
use = "synthetic"
vocab = 128
"""
L, D, KV, V, TOKENS = 4, 1024, 512, 8192, 2 * 512
LAYER = 2 * D * D + 2 * D * KV + 3 * D * 2816 + 2 * D
P = L * LAYER + 2 * V * D + D
HIDDEN = BF16 * TOKENS * D


def layout_of(degrees, wrappers):
    return [f"--set=topology.{dim}={n}" for dim, n in degrees.items()] + [f"--set=parallel={wrappers}"]


@pytest.mark.full
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_tensor_parallelism_sends_hidden_states_four_times_a_layer_each_way(sequence_parallel, tmp_path):
    """Two operations forward and two backward for each half of a layer: section 4.2.2 of 2205.05198.

    The embedding's output and the head's input have one each way; statistics of logits are of 3 numbers.
    """
    file, tp, dp = tmp_path / "recipe.toml", 4, 2
    file.write_text(SMALL)
    wrappers = f'[{{use="tp",sequence_parallel={str(sequence_parallel).lower()}}},{{use="ddp"}}]'
    found = moved(planned(str(file), "h100", *layout_of({"tp": tp}, wrappers)))
    microbatches = 32 // dp // 2
    times = microbatches * (4 * L + 2)
    statistics = microbatches, microbatches * 3 * FP32 * TOKENS * tp
    if sequence_parallel:
        assert found["tp", "reduce_scatter"] == (times, times * HIDDEN)
        assert found["tp", "all_gather"] == (times + statistics[0], times * HIDDEN + statistics[1])
    else:
        assert found["tp", "all_reduce"] == (times, times * HIDDEN)
        assert found["tp", "all_gather"] == statistics
    norms = (2 * L + 1) * D
    divided = FP32 * ((P - norms) // tp + (0 if sequence_parallel else norms))
    assert found["dp", "all_reduce"][1] == divided  # without norms under sequence parallelism: over all ranks


@pytest.mark.full
def test_fsdp2_gathers_weights_for_each_pass_and_sums_gradients_of_each_microbatch(tmp_path):
    """ZeRO-3, 1910.02054: what torch does not reshard after forward, embedding and head, is gathered once."""
    file, microbatches = tmp_path / "recipe.toml", 2
    file.write_text(SMALL)
    found = moved(planned(str(file), "h100", *layout_of({}, '[{use="fsdp2"}]')))
    assert found["dp", "all_gather"] == (microbatches * (2 * L + 1), microbatches * BF16 * (P + L * LAYER))
    assert found["dp", "reduce_scatter"] == (microbatches * (L + 1), microbatches * FP32 * P)


@pytest.mark.full
@pytest.mark.parametrize("communication", ["all_to_all", "ring"])
def test_ranks_that_share_sequences_send_heads_or_keys_and_values(communication, tmp_path):
    """Ulysses, 2309.14509: q, k, v and the output, each way. A ring, 2310.01889: blocks of k and v, each way.

    Gradients of these blocks travel in float32, once more than the blocks, back to where they belong.
    """
    file, cp, dp = tmp_path / "recipe.toml", 4, 2
    file.write_text(SMALL)
    wrappers = f'[{{use="cp",communication="{communication}"}},{{use="ddp"}}]'
    found = moved(planned(str(file), "h100", *layout_of({"cp": cp}, wrappers)))
    times, mine = 32 // dp // 2 * L, TOKENS // cp
    if communication == "all_to_all":
        assert found["cp", "all_to_all"] == (times * 8, times * 2 * BF16 * mine * (2 * D + 2 * KV))
        return
    blocks, gradients = 2 * (cp - 1) * BF16, cp * FP32
    assert found["cp", "send"] == (times * (3 * cp - 2), times * mine * 2 * KV * (blocks + gradients))
    assert found["cp", "recv"] == found["cp", "send"]


@pytest.mark.full
def test_stages_send_what_a_tensor_parallel_rank_has_of_hidden_states(tmp_path):
    """Under sequence parallelism a rank sends its part of the sequence, and a gradient back: 2205.05198."""
    file, pp, tp = tmp_path / "recipe.toml", 4, 2
    file.write_text(SMALL)
    words = [*layout_of({"pp": pp, "tp": tp}, '[{use="tp"}]'), '--set=schedule={use="1f1b"}']
    plan = planned(str(file), "h100", *words)
    microbatches = 32 // 2
    for rank in plan["collectives"]["ranks"]:
        neighbors = 1 if rank["pp_rank"] in (0, pp - 1) else 2
        found = {each["op"]: each for each in rank["of_a_step"] if each["axis"] == "pp"}
        for op in ("send", "recv"):
            assert found[op]["count"] == microbatches * neighbors
            assert found[op]["bytes"] == microbatches * neighbors * HIDDEN // tp
