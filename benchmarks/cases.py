"""What is compared with what, and what counts as passed. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs

from nanotrain_core.recipe import load_recipe
from nanotrain_core.recipe.tree import Recipe
from nanotrain_core.registry.discovery import PluginArguments

RECIPE = Path(__file__).with_name("llama.toml")
DEEPSEEK = Path(__file__).with_name("deepseek.toml")
DEEPSEEK_ZERO = Path(__file__).with_name("deepseek_zero.toml")
ZERO = Path(__file__).with_name("llama_zero.toml")
LARGE = Path(__file__).with_name("llama_118m.toml")
EXAMPLES = Path(__file__).parents[1] / "docs/examples/plugins"
NO_CLONES: Mapping[str, Path | None] = {}


@attrs.define(frozen=True, kw_only=True)
class Case:
    """One race of the engine against a peer, on the same model and the same batches, or its speed alone."""

    name: str
    peer: str = ""
    """What the other side is, for the table; empty: nobody."""
    build: str = "benchmarks.peers:peer"
    """``module:function`` that builds one rank of it."""
    clone: str = ""
    """Framework whose clone that function is given first; empty: it needs none."""
    file: Path = RECIPE
    ranks: int = 1
    threads: int = 1
    """Of each rank."""
    precision: str = "fp32"
    """What ``[precision]`` uses, or all of that table in TOML."""
    tp: int = 1
    pp: int = 1
    ep: int = 1
    schedule: str = "accumulate"
    kernels: str = "auto"
    """On our side: ``auto`` takes nanotrain-cpu's."""
    stage: int = 0
    """Of ZeRO, where the file's optimizer has stages."""
    microbatch: int = 4
    """Sequences."""
    accumulate: int = 2
    """Microbatches of each data-parallel rank in a step."""
    dropin: str = ""
    """Plugin of docs/examples/plugins on our side, torch's part in our engine: the schedule if that has its
    name, else in place of all wrappers."""
    bar: float = 1.0
    """Lowest median of tokens/s over the peer's tokens/s that passes."""
    lean: bool = False
    """Whether a rank may take no more memory than the peer's."""

    def overrides(self) -> list[str]:
        """Return what the case sets in its file, as ``--set`` takes it."""
        data_ranks = self.ranks // (self.tp * self.pp)
        whole = self.precision.startswith("{")
        changes = {
            "precision": self.precision if whole else f'{{ use = "{self.precision}" }}',
            "topology.tp": self.tp,
            "topology.pp": self.pp,
            "topology.ep": self.ep,
            "schedule.use": f'"{self.schedule}"',
            "batch.microbatch": self.microbatch,
            "batch.sequences": self.microbatch * self.accumulate * data_ranks,
        }
        if self.kernels != "auto":
            changes["kernels.use"] = f'"{self.kernels}"'
        if self.stage:
            changes["optimizer.stage"] = self.stage
        if self.dropin and self.dropin != self.schedule:
            changes["parallel"] = f'[{{ use = "{self.dropin}" }}]'
        return [f"{key}={value}" for key, value in changes.items()]

    def recipe(self) -> Recipe:
        """Return the recipe of both sides."""
        plugins = PluginArguments(local=self.local)
        return load_recipe(self.file, overrides=self.overrides(), plugins=plugins, ranks=self.ranks)

    @property
    def local(self) -> tuple[str, ...]:
        """Files to load as plugins."""
        example = EXAMPLES / f"{self.dropin}.py"
        return (str(example),) if example.exists() else ()

    def peer_builder(self, clones: Mapping[str, Path | None] = NO_CLONES) -> Any:
        """Import what builds the other side, and give it its clone."""
        module, _, name = self.build.partition(":")
        build = getattr(import_module(module), name)
        return partial(build, clones[self.clone]) if self.clone else build


PLAIN = "PyTorch loop"
TENSOR = {"peer": "torch DTensor, sequence parallel", "build": "benchmarks.peers_parallel:tensor"}
PIPELINE = {"microbatch": 1, "accumulate": 8}

#: How torch's side cuts the model: as many layers on each stage, or our stages.
SPLITS = {"": ("", "pipeline"), "-our-stages": (", our stages", "pipeline_balanced")}

CASES = (
    Case(name="fp32-1-thread", peer=PLAIN),
    Case(name="fp32-2-threads", peer=PLAIN, threads=2),
    Case(name="bf16-1-thread", peer=f"{PLAIN}, autocast", precision="bf16"),
    Case(name="bf16-2-threads", peer=f"{PLAIN}, autocast", precision="bf16", threads=2),
    Case(name="fp32-1-thread-torch-kernels", peer=PLAIN, kernels="torch", bar=0.95),
    Case(
        name="bf16-1-thread-torch-kernels",
        peer=f"{PLAIN}, autocast",
        precision="bf16",
        kernels="torch",
        bar=0.95,
    ),
    Case(name="ddp-2-ranks", peer="torch DDP", ranks=2, bar=1.1),
    Case(name="ddp-4-ranks", peer="torch DDP", ranks=4, bar=1.1),
    Case(name="tp-2-ranks", ranks=2, tp=2, bar=1.1, **TENSOR),
    Case(name="tp-4-ranks", ranks=4, tp=4, bar=1.1, **TENSOR),
    *(
        Case(
            name=f"{name}-{pp}-ranks{suffix}",
            peer=f"torch pipelining, {words}{more}",
            build=f"benchmarks.peers_parallel:{build}",
            schedule=schedule,
            ranks=pp,
            pp=pp,
            bar=1.1,
            **PIPELINE,
        )
        for pp in (2, 4)
        for name, schedule, words in (
            ("1f1b", "1f1b", "1F1B"),
            *([("interleaved", "interleaved_1f1b", "interleaved 1F1B")] if pp == 2 else []),
        )
        for suffix, (more, build) in SPLITS.items()
    ),
)

#: What torch offers for each stage, and DDP, on a small Llama and one whose state is large beside its batch.
SHARDED = tuple(
    Case(
        name=f"zero{stage}-{size}{suffix}-{ranks}-ranks",
        peer=peer,
        build=f"benchmarks.{build}",
        file=file,
        ranks=ranks,
        stage=stage,
        bar=bar,
        lean=True,
        **shape,
    )
    for ranks in (2, 4)
    for size, file, shape, bars in (
        ("small", ZERO, {}, (1.1, 1.1)),
        ("118m", LARGE, {"microbatch": 1}, (1.0, 1.5)),
    )
    for stage, suffix, peer, build, bar in (
        (1, "-ddp", "torch DDP", "peers:peer", 1.0),
        (1, "", "torch DDP, ZeroRedundancyOptimizer", "peers_sharded:zero_redundancy", bars[0]),
        (2, "", "torch FSDP2", "peers_sharded:fsdp", bars[1]),
        (2, "-reshard", "torch FSDP2, reshard", "peers_sharded:fsdp_reshard", bars[1]),
    )
)

#: Our engine around torch's own parts, against the same parts in a plain loop: what the engine costs.
DROPINS = (
    *(
        Case(name=f"dropin-{name}-{ranks}-ranks", peer=peer, build=f"benchmarks.{build}", ranks=ranks, **more)
        for ranks in (2, 4)
        for name, peer, build, more in (
            ("ddp", "torch DDP", "peers:peer", {"dropin": "torch_ddp"}),
            (
                "fsdp2",
                "torch FSDP2, reshard",
                "peers_sharded:fsdp_reshard",
                {"dropin": "fsdp2", "microbatch": 8, "accumulate": 1},
            ),
        )
    ),
    Case(
        name="dropin-interleaved-2-ranks",
        peer="torch pipelining, interleaved 1F1B",
        build="benchmarks.peers_parallel:pipeline",
        ranks=2,
        pp=2,
        schedule="torch_pipelining",
        dropin="torch_pipelining",
        **PIPELINE,
    ),
)

#: 1024 tokens a step of a small DeepSeek, whatever the layout.
SMALL_DEEPSEEK: dict[str, Any] = {"file": DEEPSEEK, "microbatch": 2}

#: Layouts of two dimensions, over 4 ranks.
PP2_EP2: dict[str, Any] = {"ranks": 4, "pp": 2, "ep": 2, "schedule": "1f1b"}
TP2_PP2: dict[str, Any] = {"ranks": 4, "tp": 2, "pp": 2, "schedule": "1f1b"}
DP2_TP2: dict[str, Any] = {"ranks": 4, "tp": 2}

ALONE = (
    Case(name="deepseek-1-rank", accumulate=4, **SMALL_DEEPSEEK),
    Case(name="deepseek-pp2-ep2", accumulate=2, **PP2_EP2, **SMALL_DEEPSEEK),
    Case(name="deepseek-tp2-pp2", accumulate=4, **TP2_PP2, **SMALL_DEEPSEEK),
    Case(name="deepseek-tp2-pp2-ep2", accumulate=4, **TP2_PP2, ep=2, **SMALL_DEEPSEEK),
    Case(name="llama-tp2-pp2", **TP2_PP2, **PIPELINE),
    Case(name="llama-dp2-tp2", **DP2_TP2),
)

NANO_TRAIN: dict[str, Any] = {
    "clone": "nano-train",
    "build": "benchmarks.peer_nano_train:peer",
    "bar": 1.5,
    **SMALL_DEEPSEEK,
}
NANO_TRAIN_ZERO: dict[str, Any] = {
    **NANO_TRAIN,
    **PP2_EP2,
    "file": DEEPSEEK_ZERO,
    "stage": 2,
    "accumulate": 2,
}
PICOTRON: dict[str, Any] = {"clone": "picotron", "build": "benchmarks.peer_picotron:peer", "bar": 1.2}

#: Frameworks that are raced from a clone.
ORIGINALS = (
    Case(name="nano-train-1-rank", peer="nano-train", **{**NANO_TRAIN, "microbatch": 8, "accumulate": 1}),
    Case(name="nano-train-pp2-ep2", peer="nano-train, ZeRO-2", **NANO_TRAIN_ZERO),
    Case(
        name="nano-train-pp2-ep2-lanes",
        peer="nano-train, ZeRO-2, a batch for each lane",
        **{**NANO_TRAIN_ZERO, "build": "benchmarks.peer_nano_train:every_lane"},
    ),
    Case(name="nano-train-tp2-pp2", peer="nano-train", accumulate=4, **TP2_PP2, **NANO_TRAIN),
    Case(name="picotron-tp2", peer="picotron", ranks=2, tp=2, **PICOTRON),
    Case(name="picotron-pp2", peer="picotron", ranks=2, pp=2, schedule="1f1b", **PIPELINE, **PICOTRON),
    Case(name="picotron-tp2-pp2", peer="picotron", **TP2_PP2, **PIPELINE, **PICOTRON),
    Case(name="picotron-dp2-tp2", peer="picotron", **DP2_TP2, **PICOTRON),
)
