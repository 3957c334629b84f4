"""Batches go to a GPU beside what it computes; MFU that people see is of a peak that they are told."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from nanotrain_core.batch import Batch
from nanotrain_core.builtin.configs import ConsoleConfig
from nanotrain_core.contracts import StepReport
from nanotrain_core.monitors.console import Console
from nanotrain_core.run.upload import Upload

CUDA = torch.device("cuda", 0)


def batch():
    return Batch(torch.arange(6).view(2, 3), torch.arange(6).view(2, 3) + 1)


def test_on_a_cpu_a_batch_is_what_it_was():
    given = batch()
    moved = Upload(torch.device("cpu"))(given)
    assert moved.tokens is given.tokens
    assert moved.targets is given.targets


@pytest.fixture
def done(monkeypatch):
    """Stand in for a GPU; return what was asked of it, in order."""
    asked = []

    @contextmanager
    def on(stream):
        asked.append(f"on {stream}")
        yield
        asked.append(f"off {stream}")

    now = SimpleNamespace(wait_stream=lambda stream: asked.append(f"now waits for {stream}"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: asked.append("make side") or "side")
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now)
    monkeypatch.setattr(Batch, "pinned", lambda self: asked.append("pin") or self)
    monkeypatch.setattr(Batch, "to", lambda self, device: asked.append(f"copy to {device}") or self)
    used = lambda self, stream: asked.append("used by now" if stream is now else "used elsewhere")  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "record_stream", used)
    return asked


def test_to_a_gpu_it_is_copied_from_pinned_memory_on_a_stream_of_its_own(done):
    """The stream that computes waits for it, and its memory is kept until that stream has used it."""
    upload = Upload(CUDA)
    upload(batch())
    turn = [
        "on side",
        "pin",
        "copy to cuda:0",
        "off side",
        "now waits for side",
        "used by now",
        "used by now",
    ]
    assert done == ["make side", *turn]
    upload(Batch(torch.zeros(1, 2, dtype=torch.int64)))
    assert done[len(turn) + 1 :] == turn[:-1]


def test_what_a_loader_has_put_on_a_device_is_not_pinned(done):
    elsewhere = Batch(torch.zeros(1, 2, dtype=torch.int64, device="meta"))
    Upload(CUDA)(elsewhere)
    assert done == ["copy to cuda:0"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_what_arrives_on_a_gpu_is_what_was_sent():
    """Many large ones after another, each read behind work that the device has not done yet."""
    upload, busy, read = Upload(CUDA), torch.randn(4096, 4096, device=CUDA), []
    for number in range(20):
        for _ in range(3):
            busy = (busy @ busy).clamp_(-1, 1)
        moved = upload(Batch(torch.full((512, 1024), number), torch.full((512, 1024), -number)))
        read.append((moved.tokens.sum(), moved.targets.sum()))
        del moved
    size = 512 * 1024
    assert [(a.item(), b.item()) for a, b in read] == [(n * size, -n * size) for n in range(20)]


# --- what people see --------------------------------------------------------------------------------------


def lines(device, capsys, flops=989e6, step_flops=0.0):
    console = Console(ConsoleConfig(style="lines"))
    names = {
        "name": "small",
        "parameters": 1,
        "tokens_per_step": 1,
        "data": None,
        "described": (),
        "folder": None,
    }
    run = SimpleNamespace(
        **names,
        rank=0,
        world_size=2,
        device=torch.device(device),
        first_step=0,
        steps=9,
        flops_per_token=flops,
    )
    console.on_start(run)
    console.on_step(
        StepReport(
            step=1,
            loss=1.0,
            losses={},
            grad_norm=1.0,
            lr=1.0,
            tokens=1,
            tokens_per_second=1e6,
            seconds=1.0,
            flops_per_token=step_flops,
        )
    )
    return capsys.readouterr().out


def test_the_console_shows_mfu_and_the_peak_that_it_is_of(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    said = lines("cuda", capsys)
    assert "MFU is of 989 TFLOP/s a rank: dense bfloat16, NVIDIA H100 80GB HBM3\n" in said
    assert said.endswith(" mfu=50.0%\n")  # 989e6 x 1e6 of two ranks' 989e12
    longer = lines("cuda", capsys, step_flops=1.5 * 989e6)
    assert longer.endswith(" mfu=75.0%\n")  # of sequences of the step's length


@pytest.mark.parametrize(
    ("device", "name", "flops"), [("cuda", "Other", 1.0), ("cpu", "H100", 1.0), ("cuda", "H100", 0.0)]
)
def test_where_nothing_is_known_of_the_peak_or_the_model_there_is_no_mfu(
    device, name, flops, monkeypatch, capsys
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    said = lines(device, capsys, flops)
    assert "mfu" not in said.lower()
    assert "tokens/s=1_000_000" in said
