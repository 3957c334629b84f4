"""Which models are raced, and against whom."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from benchmarks.gpu.contenders import Contender
from benchmarks.gpu.race import Race, run
from benchmarks.gpu.settings import Settings

FOLDER = Path(__file__).parent
DENSE, GPT2, EXPERTS = (FOLDER / f"{name}.toml" for name in ("dense", "gpt2", "experts"))

BF16 = ('precision.use="bf16"',)
FP8 = ('precision.use="fp8_deepseek_v3"', 'precision.backend="triton"')
EMULATED = ('precision.use="fp8_deepseek_v3"', "run.compile=false")
#: 1.5B parameters in layers wide enough for FP8 to pay.
WIDE = (
    "model.layers=6",
    "model.width=4096",
    "model.heads=32",
    "model.ffn=11264",
    "batch.sequences=4",
    "batch.microbatch=2",
)
#: Sixteen layers with next to nothing to compute: what a step takes is the host's.
NO_WIDTH = (
    *("model.width=128", "model.heads=2", "model.ffn=128", "model.vocab=256", "data.vocab=256"),
    *("batch.length=128", "batch.sequences=4", "batch.microbatch=2"),
)
#: For a CPU.
TINY = (
    *('run.device="cpu"', "run.compile=true", 'run.compile_backend="aot_eager"', 'kernels.use="torch"'),
    *("model.layers=2", "model.width=128", "model.heads=2", "model.vocab=128", "data.vocab=128"),
    *("batch.length=16", "batch.sequences=2", "batch.microbatch=1"),
)
TINY_FFN = (*TINY, "model.ffn=128")
TINY_GPT2 = (*TINY, "model.max_length=16")
TINY_EXPERTS = (
    *(*TINY_FFN, "model.experts=4", "model.top_k=2", "model.expert_ffn=128", "model.q_rank=128"),
    *("model.kv_rank=128", "model.nope_size=64", "model.rope_size=64", "model.value_size=64"),
)


def llama(settings: Settings) -> Race:
    """Llama 0.96B: against plain PyTorch in three ways, and in FP8."""
    plain = partial(Contender, who="plain", recipe=DENSE, overrides=(*BF16, *_if(settings, TINY_FFN)))
    return Race(
        model="Llama 0.96B",
        ours=_ours("ours, bf16", DENSE, (*BF16, *_if(settings, TINY_FFN))),
        others=(
            plain(name="PyTorch, compiled whole", compiled="whole", bar="llama", memory_bar="memory"),
            plain(name="PyTorch, compiled by layer", compiled="layers"),
            plain(name="PyTorch, eager"),
            _ours("ours, FP8", DENSE, (*_if(settings, TINY_FFN), *_fp8(settings))),
            plain(name="torchao, rowwise FP8, compiled by layer", compiled="layers", torchao="rowwise"),
        ),
        resident=17.5,
        active=21.0,
    )


def wide(settings: Settings) -> Race:
    """Llama 1.5B, wide: where FP8 pays."""
    sizes = _if(settings, TINY_FFN, WIDE)
    plain = partial(Contender, who="plain", recipe=DENSE, overrides=(*BF16, *sizes), compiled="layers")
    return Race(
        model="Llama 1.5B wide",
        ours=_ours("ours, bf16", DENSE, (*BF16, *sizes)),
        others=(
            plain(name="PyTorch, compiled by layer", bar="wide"),
            _ours("ours, FP8", DENSE, (*sizes, *_fp8(settings)), bar="fp8-wide"),
            plain(name="torchao, rowwise FP8, compiled by layer", torchao="rowwise"),
            plain(name="torchao, tensorwise FP8, compiled by layer", torchao="tensorwise"),
        ),
        resident=27.5,
        active=16.0,
    )


def gpt2(settings: Settings) -> Race:
    """GPT-2 124M: against nanoGPT, also with CUDA graphs."""
    sizes = (*BF16, *_if(settings, TINY_GPT2))
    peer = partial(Contender, recipe=GPT2, overrides=sizes)
    nano, compiled = partial(peer, who="nanogpt", clone=settings.nanogpt), "nanoGPT, compiled"
    return Race(
        model="GPT-2 124M",
        ours=_ours("ours, bf16", GPT2, sizes),
        others=(
            nano(name=compiled, compiled="whole", bar="gpt2"),
            _ours(
                "ours, CUDA graphs",
                GPT2,
                (*sizes, "run.cuda_graphs=true"),
                bar="gpt2-graphs",
                versus=compiled,
                on_gpu_only=True,
            ),
            peer(name="PyTorch, vocabulary as it is, compiled whole", who="plain", compiled="whole"),
            nano(name="nanoGPT, eager"),
        ),
        resident=3.0,
        active=16.0,
    )


def deepseek(settings: Settings) -> Race:
    """DeepSeek 2.3B slice: its share of the device's peak, and FP8."""
    sizes = _if(settings, TINY_EXPERTS)
    return Race(
        model="DeepSeek 2.3B slice",
        ours=_ours("ours, bf16", EXPERTS, (*BF16, *sizes), mfu_bar="deepseek"),
        others=(_ours("ours, FP8", EXPERTS, (*sizes, *_fp8(settings))),),
        resident=43.0,
        active=16.0,
    )


def host(settings: Settings) -> Race:
    """A model of no width: what the host does in a step."""
    sizes = (*BF16, *_if(settings, TINY_FFN, NO_WIDTH))
    plain = partial(Contender, who="plain", recipe=DENSE, overrides=sizes)
    return Race(
        model="16 layers of no width",
        ours=_ours("ours", DENSE, sizes),
        others=(
            plain(name="PyTorch, compiled by layer", compiled="layers"),
            plain(name="PyTorch, eager"),
            _ours("ours, eager", DENSE, (*sizes, "run.compile=false")),
            _ours("ours, CUDA graphs", DENSE, (*sizes, "run.cuda_graphs=true"), on_gpu_only=True),
        ),
        resident=1.0,
        active=1.0,
    )


def run_bars(race: Callable[[Settings], Race], settings: Settings) -> None:
    """Race ours against the sides that have a bar."""
    found = race(settings)
    run(attrs.evolve(found, others=[each for each in found.others if each.bars]), settings)


def run_others(race: Callable[[Settings], Race], settings: Settings) -> None:
    """Race ours against the sides that have none."""
    found = race(settings)
    ours = attrs.evolve(found.ours, mfu_bar="", profiled=False)
    run(attrs.evolve(found, ours=ours, others=[each for each in found.others if not each.bars]), settings)


run_llama, run_gpt2, run_wide, run_deepseek = (
    partial(run_bars, race) for race in (llama, gpt2, wide, deepseek)
)
run_llama_others, run_gpt2_others, run_wide_others, run_deepseek_others = (
    partial(run_others, race) for race in (llama, gpt2, wide, deepseek)
)


def run_host(settings: Settings) -> None:
    run(host(settings), settings)


def _ours(name: str, recipe: Path, overrides: tuple[str, ...], **more: Any) -> Contender:
    return Contender(name=name, recipe=recipe, overrides=overrides, profiled=True, **more)


def _fp8(settings: Settings) -> tuple[str, ...]:
    """Return FP8 as the device has it; a CPU emulates it."""
    return EMULATED if settings.smoke else FP8


def _if(settings: Settings, tiny: tuple[str, ...], real: tuple[str, ...] = ()) -> tuple[str, ...]:
    return tiny if settings.smoke else real
