"""What leaves the device, once for all its views, and when it comes back."""

import gc
import math

import pytest
import torch
from nanotrain_activation_offload.host_memory import HostMemory
from nanotrain_activation_offload.offload import Layers
from nanotrain_activation_offload.saved import SavedByLayer, is_dense
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile

from nanotrain_core.batch import Batch
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_run

CPU = torch.device("cpu")


class Logged(HostMemory):
    """Writes down what is copied when."""

    def __init__(self):
        super().__init__(CPU)
        self.log = []

    def copy_out(self, flat_N):
        self.log.append(("out", flat_N.numel()))
        return super().copy_out(flat_N)

    def copy_back(self, copied):
        self.log.append(("back", copied.numel()))
        return super().copy_back(copied)


def saved_by(memory, least=1, weights=(), before=None):
    return SavedByLayer(memory, least, weights, before)


def test_views_of_the_same_elements_are_copied_once_and_come_back_in_their_shapes():
    memory = Logged()
    layer, x = saved_by(memory), torch.arange(24.0).view(4, 6)
    kept = [layer.pack(view) for view in (x, x.view(2, 12), x.t())]
    assert memory.log == [("out", 24)]
    for view, found in zip((x, x.view(2, 12), x.t()), map(layer.unpack, kept), strict=True):
        assert torch.equal(found, view)
        assert found.stride() == view.stride()
    assert memory.log == [("out", 24), ("back", 24)]


def test_what_changed_in_place_or_took_the_memory_of_another_is_copied_anew():
    memory = Logged()
    layer, x = saved_by(memory), torch.zeros(8)
    first = layer.pack(x)
    x.add_(1)
    second = layer.pack(x)
    address = x.data_ptr()
    del x
    for _ in range(50):  # an allocator gives the same memory again, sooner or later at once
        y = torch.full((8,), 2.0)
        if y.data_ptr() == address:
            break
        y = torch.full((8,), 2.0).clone()
    third = layer.pack(y)
    assert [layer.unpack(kept)[0].item() for kept in (first, second, third)] == [0.0, 1.0, 2.0]


def test_weights_small_tensors_integers_and_gaps_stay():
    memory, weight = Logged(), nn.Parameter(torch.ones(8, 8))
    layer = saved_by(memory, least=64 * 4, weights={weight.untyped_storage().data_ptr()})
    gaps = torch.ones(16, 8)[::2]
    for tensor in (weight, weight.detach().t(), torch.ones(63), torch.ones(64, dtype=torch.int64), gaps):
        kept = layer.pack(tensor)
        assert kept.tensor().data_ptr() == tensor.data_ptr()
    assert not memory.log
    assert layer.pack(torch.ones(64)) is not None
    assert memory.log == [("out", 64)]


@pytest.mark.parametrize(
    ("shape", "stride", "dense"),
    [((2, 3), (3, 1), True), ((2, 3), (1, 2), True), ((2, 3), (4, 1), False), ((2, 3), (0, 1), False)],
)
def test_dense_is_what_fills_its_memory(shape, stride, dense):
    assert is_dense(torch.zeros(24).as_strided(shape, stride)) is dense


@pytest.mark.parametrize("least", [1, math.inf], ids=["offloaded", "kept"])
def test_a_saved_tensor_that_is_changed_in_place_is_refused(least):
    """torch compares versions of saved tensors only where no hook packs them."""

    class Changes(nn.Module):
        def forward(self, x):
            h = x * 1
            y = h * h
            h.add_(1)
            return y + h

    layers, block = Layers(Logged()), Changes()
    layers.watch(block, 0, least)
    with pytest.raises(RuntimeError, match="was changed in place"):
        block(torch.ones(8, requires_grad=True)).sum().backward()


def test_an_operation_that_saves_its_own_output_is_freed_without_a_backward_pass():
    layers, block = Layers(Logged()), nn.Tanh()
    layers.watch(block, 0, math.inf)
    y = block(torch.ones(8, requires_grad=True))
    storage = StorageWeakRef(y.untyped_storage())
    del y
    assert storage.expired()


def test_in_backward_copies_run_one_layer_ahead():
    memory = Logged()
    layers, blocks = Layers(memory), [nn.Sequential(nn.Tanh()) for _ in range(4)]
    x = torch.ones(5, 1, requires_grad=True)
    for number, block in enumerate(blocks):
        layers.watch(block, number, 1 if number < 3 else math.inf)
        x = block(x)
        x.register_hook(lambda _, number=number: memory.log.append(("backward", number)))
    assert memory.log == 3 * [("out", 5)]
    memory.log.clear()
    x.sum().backward()
    # The last layer keeps its own; while its backward runs, what the one before it saved is on its way.
    wanted = ("backward", 3), ("back", 5), ("backward", 2), ("back", 5), ("backward", 1), ("back", 5)
    assert memory.log == [*wanted, ("backward", 0)]


def left_after_forward(config):
    """Return the bytes that a forward pass leaves for backward, and those that were copied out."""
    wrappers = [{"use": "activation_offload", **config}] if config is not None else []
    case = Case("model", use="transformer", config={"layers": 6, "ffn": 96}, overrides={"parallel": wrappers})
    run = make_run(case, {})
    (part,) = run.stages.values()
    copied = 0

    def count(self, flat_N):
        nonlocal copied
        copied += flat_N.numel() * flat_N.element_size()
        return torch.empty(0)

    tokens = torch.arange(64 * 16).remainder(64).view(64, 16)
    HostMemory.copy_out, before = count, HostMemory.copy_out
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            output = part(tokens, Batch(tokens, tokens))
    finally:
        HostMemory.copy_out = before
    left = sum(event.self_cpu_memory_usage for event in profiler.events())
    del output
    return left, copied


def test_what_was_copied_is_gone_from_the_device():
    (plain, none), (most, one), (half, other) = (
        run_ranks(left_after_forward, 1, config)[0]
        for config in (None, {"min_mb": 0.0, "keep": 0}, {"min_mb": 0.0, "keep": 3})
    )
    assert none == 0
    assert other == pytest.approx(one / 2, rel=0.01)
    assert plain - most > 0.8 * plain
    assert half == pytest.approx((plain + most) / 2, rel=0.1)


@pytest.fixture
def deterministic():
    """By default the backward pass of torch's attention on a GPU adds up in any order."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu_weights_are_the_same_bits_and_the_peak_is_lower(deterministic):
    (plain, peak), (offloaded, less) = (
        trained_on_a_gpu(wrappers) for wrappers in ([], [{"use": "activation_offload", "min_mb": 0.1}])
    )
    assert all(torch.equal(one, other) for one, other in zip(plain, offloaded, strict=True))
    assert less < 0.75 * peak


def trained_on_a_gpu(wrappers):
    """Return the weights after four steps, and the peak memory."""
    around = {
        "run": {"device": "cuda", "compile": False, "steps": 4},
        "parallel": wrappers,
        "model": {"layers": 8, "width": 512, "heads": 8, "ffn": 2048, "vocab": 512},
        "batch": {"sequences": 8, "microbatch": 8, "length": 512},
        "data": {"vocab": 512},
    }
    gc.collect()  # what an earlier run has left is not of this one's peak
    torch.cuda.reset_peak_memory_stats()
    case = Case("precision", use="bf16", overrides=around)
    engine = RuntimeEngine.from_recipe(case.recipe(), registry=case.registry(), device="cuda")
    engine.fit()
    weights = [placed.parameter.detach().cpu() for placed in engine.run.placed]
    return weights, torch.cuda.max_memory_allocated()
