"""Times of collectives and of phases, against numbers computed by hand."""

from collections import Counter

import attrs
import pytest
import torch
import torch.nn.functional as F
from nanotrain_plan.comms import CollectiveTime, Links
from nanotrain_plan.dry.collectives import Collective
from nanotrain_plan.dry.kernels import attention
from nanotrain_plan.dry.phase import Phase
from nanotrain_plan.dry.recorder import Recorder, pinned
from nanotrain_plan.dry.values import Values
from nanotrain_plan.hardware import find_hardware
from nanotrain_plan.timing import phase_time

from nanotrain_core.api import Layout, View

H100 = find_hardware("h100")
#: 80% of 50 GB/s of a NIC, of 450 GB/s of NVLink.
NIC, NVLINK = 40e9, 360e9


def layout(**degrees):
    names = tuple(degrees)
    view = View(names, tuple(degrees.values()))
    return Layout({"dense": view}, data_dims=tuple({*names} & {"dp", "cp"}), sequence_dims=())


def without_latency(op, ranks, size, hardware=H100):
    links = Links(hardware, layout(dp=64))
    return links.seconds(Collective(op, ranks, size)) - links.seconds(Collective(op, ranks, 0))


@pytest.mark.parametrize(
    ("op", "ranks", "seconds"),
    [
        ("all_reduce", range(8), 2 * 7 / 8 / NVLINK),
        ("all_reduce", range(32), 2 * 31 / 32 / (8 * NIC)),  # 8 rings, each through its own NIC
        ("reduce_scatter", range(64), 63 / 64 / (8 * NIC)),
        ("all_gather", range(0, 64, 4), 15 / 16 / (2 * NIC)),  # tp of 4: two ranks of a group in a node
        ("all_reduce", range(0, 64, 8), 2 * 7 / 8 / NIC),  # tp of 8: one
        ("all_to_all", range(64), 56 / 64 / NIC),  # of each rank by itself
        ("send", (0, 8), 1 / NIC),
        ("gather", range(16), 1 / NIC),  # the root's NIC receives all of it
    ],
)
def test_bandwidth_between_nodes_is_that_of_the_nics_of_a_group(op, ranks, seconds):
    assert without_latency(op, tuple(ranks), 10**9) == pytest.approx(1e9 * seconds, rel=1e-9)


def test_rings_are_no_faster_than_nvlink_and_gloo_has_one():
    h800 = attrs.evolve(H100, links=attrs.evolve(H100.links, intra_gb_s=200.0))
    sizes = "all_gather", tuple(range(16)), 10**9
    assert without_latency(*sizes, h800) == pytest.approx(15 / 16 / 160, rel=1e-9)  # 8 NICs have 320 GB/s
    cpu = find_hardware("cpu")
    assert without_latency(*sizes, cpu) == pytest.approx(15 / 16 / 0.8, rel=1e-9)


def test_no_more_is_hidden_than_there_is_to_compute():
    """An elementwise operator of 6.7 MB takes 1 us: 3350 GB/s x 0.8 x 2.5."""
    phase = Phase("B0.0", 0, 0, moved=6_700_000)
    compute = 6.7e6 / 6.7e12
    for hidden, exposed in ((0.5 * compute, 0.0), (compute, 0.0), (3 * compute, 2 * compute)):
        found = phase_time(phase, H100, CollectiveTime(exposed=1e-4, hidden=hidden))
        assert found.communication == pytest.approx(1e-4 + exposed)


def test_messages_of_a_pipeline_need_not_be_hidden_by_one_action():
    links = Links(H100, layout(pp=2, dp=8))
    send, gather = Collective("send", (0, 8), 10**9), Collective("all_gather", tuple(range(8)), 10**9)
    assert links.exposed(send) == links.hidden(send) == 0.0
    assert links.hidden(gather) == pytest.approx(0.9 * links.seconds(gather))
    phase = Phase("B0.0", 0, 0, collectives=[send, gather])
    found = links.time(phase)
    assert (found.exposed, found.hidden) == (links.exposed(gather), links.hidden(gather))
    assert found.message == pytest.approx(15e-6 + 1 / 40)  # 12 us and a quarter, 1 GB at 40 GB/s


def test_a_message_that_is_not_hidden_counts_once():
    """Its sender waits for the part that is not hidden, and who receives it for the whole."""
    half = attrs.evolve(H100, overlap=attrs.evolve(H100.overlap, pp=0.5))
    links = Links(half, layout(pp=2, dp=8))
    send, recv = Collective("send", (0, 8), 10**9), Collective("recv", (0, 8), 10**9)
    sent = links.time(Phase("F0.0", 0, 0, collectives=[send]))
    assert sent.exposed == sent.message == pytest.approx((15e-6 + 1 / 40) / 2)
    received = links.time(Phase("F1.0", 0, 0, collectives=[recv]))
    assert received.exposed == received.message == 0.0


@pytest.mark.parametrize(("dtype", "peak"), [(torch.bfloat16, 989.4e12), (torch.float32, 66.9e12)])
def test_attention_is_timed_at_the_peak_of_its_inputs_dtype(dtype, peak):
    B, S, H, K = 1, 128, 2, 64
    recorder = Recorder("meta", Values())
    q = torch.empty(B, S, H, K, dtype=dtype, device="meta")
    with torch.no_grad(), recorder:
        attention(q, q, q)
    products = 2 * 2 * B * H * S * S * K  # q k and scores v
    assert recorder.phase.attention_flops == products
    found = phase_time(recorder.phase, H100, CollectiveTime())
    assert found.attention == pytest.approx(products / 2 / (peak * 0.55), rel=1e-9)
    assert found.gemm == 0


@pytest.mark.parametrize(
    ("kind", "operands", "scales", "block", "recipe", "reached"),
    [
        ("float8", torch.float8_e4m3fn, torch.float32, 0, "TensorWise", 4500e12 * 0.58),
        ("mxfp8", torch.float8_e4m3fn, torch.float8_e8m0fnu, 32, "BlockWise1x32", 4500e12 * 0.58),
        ("nvfp4", torch.float4_e2m1fn_x2, torch.float8_e4m3fn, 16, "BlockWise1x16", 13500e12 * 0.53),
    ],
)
def test_scaled_products_are_counted_by_the_dtype_of_their_scales(
    kind, operands, scales, block, recipe, reached
):
    """An element of ``float4_e2m1fn_x2`` is two numbers; all take the units of their format on a B300."""
    M, N, K, recorder = 128, 256, 512, Recorder("meta", Values())
    wide = K // 2 if operands is torch.float4_e2m1fn_x2 else K
    a, b = (torch.empty(rows, wide, dtype=operands, device="meta") for rows in (M, N))
    of_a, of_b = (
        torch.empty((rows, K // block) if block else 1, dtype=scales, device="meta") for rows in (M, N)
    )
    form = getattr(F.ScalingType, recipe)
    order = F.SwizzleType.SWIZZLE_32_4_4 if block else F.SwizzleType.NO_SWIZZLE
    with recorder:
        F.scaled_mm(
            a, b.T, of_a, form, of_b, form, swizzle_a=order, swizzle_b=order, output_dtype=torch.bfloat16
        )
    assert recorder.phase.gemm_flops == {kind: 2 * M * N * K}
    assert recorder.phase.moved == 0
    found = phase_time(recorder.phase, find_hardware("b300"), CollectiveTime())
    assert found.gemm == pytest.approx(2 * M * N * K / reached, rel=1e-9)


def test_an_update_of_fused_adamw_writes_all_that_it_changes():
    """It reads weight, gradient and two moments, and writes all but the gradient: 28 bytes."""
    n, recorder = 1000, Recorder("meta", Values())
    weight, gradient, first, second = (torch.empty(n, device="meta") for _ in range(4))
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
    with recorder:
        torch._fused_adamw_(
            [weight], [gradient], [first], [second], [], [], amsgrad=False, maximize=False, **options
        )
    assert recorder.phase.moved == 28 * n


def test_what_only_writes_does_not_read_before():
    recorder = Recorder("meta", Values())
    master, weight = torch.empty(1000, device="meta"), torch.empty(1000, dtype=torch.bfloat16, device="meta")
    with recorder:
        weight.copy_(master)
        torch._foreach_mul_([master, master.clone()], 0.5)
    assert recorder.phase.moved == 1000 * (6 + 8 + 16)


def test_gradients_are_added_to_earlier_ones_by_no_compiled_operator():
    """A cast reads 2 bytes and writes 4; the addition reads 8 and writes 4."""
    recorder, total = Recorder("meta", Values()), torch.empty(1000, device="meta")
    with recorder:
        recorder.take(total)
        recorder.enter("B0.1")
        gradient = torch.ones(1000, dtype=torch.bfloat16, device="meta")
        total.add_(gradient.float())
        (gradient + 1).add_(1)
        found = recorder.phase
    assert found.eager == 18 * 1000
    seconds = [
        phase_time(attrs.evolve(found, eager=eager), H100, CollectiveTime()).memory
        for eager in (found.eager, 0)
    ]
    assert seconds[0] - seconds[1] == pytest.approx(18e3 / (3350e9 * 0.8) * (1 - 1 / 2.5))


def test_pinned_memory_is_allocated_in_powers_of_two():
    assert [pinned(size) for size in (0, 1, 3, 2**20, 2**20 + 1)] == [0, 1, 4, 2**20, 2**21]


def test_attention_of_a_sequence_in_two_calls_takes_the_flops_of_one():
    """The second call's queries see all keys of the first one's tokens."""
    q, k, v = (torch.empty(2, 8, heads, 16, device="meta", dtype=torch.bfloat16) for heads in (4, 2, 2))

    def flops(begin, end):
        with Recorder("meta", Values()) as recorder:
            attention(q[:, begin:end], k[:, :end], v[:, :end])
        return recorder.phase.attention_flops

    assert flops(0, 4) + flops(4, 8) == flops(0, 8) > 0


def test_attention_to_keys_in_two_blocks_takes_the_flops_of_one():
    """The second block's queries see all keys of the first, without a mask, as in ring attention."""
    q, k, v = (torch.empty(2, heads, 8, 16, device="meta", dtype=torch.bfloat16) for heads in (4, 2, 2))
    one, other = slice(4), slice(4, 8)

    def flops(queries, keys, causal):
        with Recorder("meta", Values()) as recorder:
            torch.ops.aten._scaled_dot_product_flash_attention(
                q[:, :, queries], k[:, :, keys], v[:, :, keys], 0.0, causal
            )
        return recorder.phase.attention_flops

    parts = (one, one, True), (other, one, False), (other, other, True)
    assert sum(flops(*each) for each in parts) == flops(slice(8), slice(8), True) > 0


def test_messages_of_a_ring_are_hidden_by_attention_alone():
    links = Links(H100, Layout({"dense": View(("cp",), (8,))}, sequence_dims=("cp",)))
    send, recv = Collective("send", (0, 1), 10**9), Collective("recv", (0, 7), 10**9)
    travels, rate = links.seconds(send), H100.attention_rate("bfloat16")
    for attends, left in ((0.25, 0.75), (2, 0)):
        flops = Counter({"attention bfloat16": 2 * rate * travels * attends, "bfloat16": 10**20})
        found = links.time(Phase("F0.0", 0, 0, collectives=[recv, send], gemm_flops=flops))
        assert found == CollectiveTime(exposed=pytest.approx(left * travels))


def test_attention_in_a_window_takes_the_flops_of_what_it_sees():
    """Of 8 tokens and a window of 3: a band of 24 scores, less half of the 3 x 3 before its beginning."""
    q, k, v = (
        torch.empty(2, 8, heads, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2, 2)
    )

    def flops(begin, end, backward=False):
        with Recorder("meta", Values()) as recorder:
            y = attention(q[:, begin:end], k[:, :end], v[:, :end], None, None, 3)
            if backward:
                y.sum().backward()
        return recorder.phase.attention_flops / 2

    forward = 2 * 2 * 4 * (24 - 4.5) * (16 + 16)
    assert flops(0, 8) == forward
    assert flops(0, 4) + flops(4, 8) == forward
    assert flops(0, 8, backward=True) == forward * (1 + 5 / 2)
