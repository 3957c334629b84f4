"""The components every installation has, announced through the same hooks as any plugin's.

Only descriptions live here: this module is imported by every command and never imports torch.
"""

from nanotrain_core import hookimpl
from nanotrain_core.builtin import configs
from nanotrain_core.component import Component
from nanotrain_core.hookspecs import Register

_HERE = "nanotrain_core.builtin"


@hookimpl
def nanotrain_register_topology(register: Register) -> None:
    """Announce ``grid``."""
    register(
        Component(
            name="grid",
            config=configs.GridConfig,
            factory=f"{_HERE}.grid:Grid",
            summary="pp x dp x cp x tp, with experts folded over the same ranks; dp is what remains",
        )
    )


@hookimpl
def nanotrain_register_model(register: Register) -> None:
    """Announce ``transformer``."""
    register(
        Component(
            name="transformer",
            config=configs.TransformerConfig,
            factory=f"{_HERE}.transformer:Transformer",
            summary="decoder of GPT-2 or Llama shape",
            check=configs.check_transformer,
            foreign=f"{_HERE}.transformer_names:names",
        )
    )


@hookimpl
def nanotrain_register_parallel(register: Register) -> None:
    """Announce ``recompute``."""
    register(
        Component(
            name="recompute",
            config=configs.RecomputeConfig,
            factory=f"{_HERE}.recompute:Recompute",
            summary="layers run again in backward: memory of one at a time, for a third more computing",
        )
    )


@hookimpl
def nanotrain_register_optimizer(register: Register) -> None:
    """Announce ``adamw`` and ``sgd``."""
    register(
        Component(
            name="adamw",
            config=configs.AdamWConfig,
            factory=f"{_HERE}.optimizers:AdamW",
            summary="AdamW, fused, decay on matrices only",
        )
    )
    register(
        Component(
            name="sgd",
            config=configs.SGDConfig,
            factory=f"{_HERE}.optimizers:SGD",
            summary="plain gradient descent with optional momentum",
        )
    )


@hookimpl
def nanotrain_register_precision(register: Register) -> None:
    """Announce ``fp64``, ``fp32``, ``bf16`` and ``fp16``."""
    for name, summary in {
        "fp64": "double precision throughout, for checking one layout against another",
        "fp32": "single precision throughout",
        "bf16": "bfloat16 weights and activations, float32 gradients and master weights",
    }.items():
        register(
            Component(
                name=name,
                config=configs.PrecisionConfig,
                factory=f"{_HERE}.precisions:{name}",
                summary=summary,
            )
        )
    register(
        Component(
            name="fp16",
            config=configs.FP16Config,
            factory=f"{_HERE}.precisions:fp16",
            summary="as bf16 with float16 and a dynamic loss scale",
        )
    )


@hookimpl
def nanotrain_register_schedule(register: Register) -> None:
    """Announce ``accumulate``."""
    register(
        Component(
            name="accumulate",
            config=configs.AccumulateConfig,
            factory=f"{_HERE}.accumulate:Accumulate",
            summary="one stage: each microbatch forward, then backward",
        )
    )


@hookimpl
def nanotrain_register_checkpoint(register: Register) -> None:
    """Announce ``simple``."""
    register(
        Component(
            name="simple",
            config=configs.SimpleCheckpointConfig,
            factory=f"{_HERE}.simple_checkpoint:SimpleCheckpoint",
            summary="the whole run in one safetensors file",
            weights=f"{_HERE}.simple_checkpoint:open_weights",
            catalogue=f"{_HERE}.simple_catalogue:catalogue",
        )
    )


@hookimpl
def nanotrain_register_monitor(register: Register) -> None:
    """Announce ``console``, ``jsonl``, ``sample``, ``guard``, ``stragglers`` and ``replicas``."""
    register(
        Component(
            name="console",
            config=configs.ConsoleConfig,
            factory=f"{_HERE}.console:Console",
            summary="a live line on a terminal, key=value lines elsewhere, or a table",
        )
    )
    register(
        Component(
            name="jsonl",
            config=configs.JsonlConfig,
            factory=f"{_HERE}.jsonl:Jsonl",
            summary="metrics.jsonl in the run folder",
        )
    )
    register(
        Component(
            name="sample",
            config=configs.SampleConfig,
            factory=f"{_HERE}.sample:Sample",
            summary="text the model writes, during and after the run",
            check=configs.check_sample,
        )
    )
    register(
        Component(
            name="guard",
            config=configs.GuardConfig,
            factory=f"{_HERE}.guard:Guard",
            summary="notices loss spikes and NaN, and goes back to a checkpoint from before them",
        )
    )
    register(
        Component(
            name="stragglers",
            config=configs.StragglersConfig,
            factory=f"{_HERE}.stragglers:Stragglers",
            summary="names a rank whose data or monitors make the others wait",
        )
    )
    register(
        Component(
            name="replicas",
            config=configs.ReplicasConfig,
            factory=f"{_HERE}.replicas:Replicas",
            summary="every bit of the weights that ranks hold alike, and memory of every rank",
        )
    )


@hookimpl
def nanotrain_register_data(register: Register) -> None:
    """Announce ``text`` and ``synthetic``."""
    register(
        Component(
            name="text",
            config=configs.TextConfig,
            factory=f"{_HERE}.text:Text",
            summary="files and folders of text; with none named, the Python standard library's source",
        )
    )
    register(
        Component(
            name="synthetic",
            config=configs.SyntheticConfig,
            factory=f"{_HERE}.synthetic:Synthetic",
            summary="a seeded Markov chain whose entropy is known",
        )
    )
