"""The components of every installation, registered through the same hooks as any plugin's.

This module contains only descriptions: every command imports it, and it never imports torch.
"""

from nanotrain_core import hookimpl
from nanotrain_core.builtin import configs, stragglers, transformer_config
from nanotrain_core.component import Component, always_captured
from nanotrain_core.hookspecs import Register
from nanotrain_core.optim.moment_groups import check_moments


@hookimpl
def nanotrain_register_topology(register: Register) -> None:
    """Register ``grid``."""
    register(
        Component(
            name="grid",
            config=configs.GridConfig,
            factory="nanotrain_core.layout.grid:Grid",
            summary="pp x dp x cp x tp, and an expert view of the same ranks; dp is the remaining factor",
        )
    )


@hookimpl
def nanotrain_register_kernels(register: Register) -> None:
    """Register ``auto`` and ``torch``."""
    register(
        Component(
            name="auto",
            config=configs.AutoKernelsConfig,
            factory="nanotrain_core.models.kernels:AutoKernels",
            summary="kernels of an installed plugin for the run's device, else torch",
        )
    )
    register(
        Component(
            name="torch",
            config=configs.TorchKernelsConfig,
            factory="nanotrain_core.models.kernels:TorchKernels",
            summary="plain PyTorch, the reference for every function",
            cuda_graphs=always_captured,
        )
    )


@hookimpl
def nanotrain_register_model(register: Register) -> None:
    """Register ``transformer``."""
    register(
        Component(
            name="transformer",
            config=transformer_config.TransformerConfig,
            factory="nanotrain_core.models.transformer:Transformer",
            summary="decoder of GPT-2, Llama, Mistral or Qwen shape",
            provides={"document_masks"},
            cuda_graphs=always_captured,
            check=transformer_config.check_transformer,
            hf="nanotrain_core.hf.transformer_names:names",
        )
    )


@hookimpl
def nanotrain_register_parallel(register: Register) -> None:
    """Register ``recompute``."""
    register(
        Component(
            name="recompute",
            config=configs.RecomputeConfig,
            factory="nanotrain_core.models.activation_checkpointing:Recompute",
            summary="activation checkpointing: full, or selective, which recomputes no matrix product",
            cuda_graphs=configs.recompute_captured,
        )
    )


@hookimpl
def nanotrain_register_optimizer(register: Register) -> None:
    """Register ``adamw`` and ``sgd``."""
    register(
        Component(
            name="adamw",
            config=configs.AdamWConfig,
            factory="nanotrain_core.optim.adamw:AdamW",
            summary="AdamW, fused, decay on matrices only",
            cuda_graphs=always_captured,
            check=check_moments,
        )
    )
    register(
        Component(
            name="sgd",
            config=configs.SGDConfig,
            factory="nanotrain_core.optim.sgd:SGD",
            summary="plain gradient descent with optional momentum",
            cuda_graphs=always_captured,
        )
    )


@hookimpl
def nanotrain_register_precision(register: Register) -> None:
    """Register ``fp64``, ``fp32``, ``bf16`` and ``fp16``."""
    for name, summary in {
        "fp64": "double precision throughout, for checking one layout against another",
        "fp32": "single precision throughout",
        "bf16": "bfloat16 weights and activations, float32 gradients and master weights",
    }.items():
        register(
            Component(
                name=name,
                config=configs.PrecisionConfig,
                factory=f"nanotrain_core.precision.uniform:{name}",
                summary=summary,
                cuda_graphs=always_captured,
            )
        )
    register(
        Component(
            name="fp16",
            config=configs.FP16Config,
            factory="nanotrain_core.precision.uniform:fp16",
            summary="like bf16, with float16 and a dynamic loss scale",
            cuda_graphs=always_captured,
        )
    )


@hookimpl
def nanotrain_register_schedule(register: Register) -> None:
    """Register ``accumulate``."""
    register(
        Component(
            name="accumulate",
            config=configs.AccumulateConfig,
            factory="nanotrain_core.pipeline.accumulate:Accumulate",
            summary="one stage: each microbatch forward, then backward",
        )
    )


@hookimpl
def nanotrain_register_checkpoint(register: Register) -> None:
    """Register ``simple``."""
    register(
        Component(
            name="simple",
            config=configs.SimpleCheckpointConfig,
            factory="nanotrain_core.checkpoint.simple:SimpleCheckpoint",
            summary="the whole run in one safetensors file",
            provides={"gathers_checkpoint"},
            weights="nanotrain_core.checkpoint.simple:open_simple_weights",
            listing="nanotrain_core.checkpoint.simple_listing:list_checkpoints",
        )
    )


@hookimpl
def nanotrain_register_monitor(register: Register) -> None:
    """Register ``console``, ``jsonl``, ``sample``, ``guard``, ``stragglers``, ``replicas``, ``bit_flips``."""
    register(
        Component(
            name="console",
            config=configs.ConsoleConfig,
            factory="nanotrain_core.monitors.console:Console",
            summary="a panel on a terminal, key=value lines elsewhere, or a table",
            provides={"prints_metrics"},
            reads_metrics=lambda config: [("metrics", pattern) for pattern in config.metrics],
        )
    )
    register(
        Component(
            name="jsonl",
            config=configs.JsonlConfig,
            factory="nanotrain_core.monitors.jsonl:Jsonl",
            summary="metrics.jsonl in the run folder",
            provides={"records_metrics"},
        )
    )
    register(
        Component(
            name="sample",
            config=configs.SampleConfig,
            factory="nanotrain_core.monitors.sample:Sample",
            summary="text generated by the model, during and after the run",
        )
    )
    register(
        Component(
            name="guard",
            config=configs.GuardConfig,
            factory="nanotrain_core.monitors.guard:Guard",
            summary="detects loss spikes and NaN, and rolls back to a checkpoint from before them",
        )
    )
    register(
        Component(
            name="stragglers",
            config=configs.StragglersConfig,
            factory="nanotrain_core.monitors.stragglers:Stragglers",
            summary="names a rank whose work makes the others wait, and a slow link",
            metrics=stragglers.METRICS,
        )
    )
    register(
        Component(
            name="replicas",
            config=configs.ReplicasConfig,
            factory="nanotrain_core.monitors.replicas:Replicas",
            summary="compares replicated weights bit for bit; reports the memory of every rank",
        )
    )
    register(
        Component(
            name="bit_flips",
            config=configs.BitFlipsConfig,
            factory="nanotrain_core.monitors.bit_flips:BitFlips",
            summary="weights, master weights and optimizer state: no bit changes between two updates",
        )
    )


@hookimpl
def nanotrain_register_data(register: Register) -> None:
    """Register ``text`` and ``synthetic``."""
    register(
        Component(
            name="text",
            config=configs.TextConfig,
            factory="nanotrain_core.data.text:Text",
            summary="files and folders of text; by default the Python standard library's source",
            provides={"changes_length"},
            requires_for=configs.masks_documents,
            survey="nanotrain_core.data.text_survey:survey",
        )
    )
    register(
        Component(
            name="synthetic",
            config=configs.SyntheticConfig,
            factory="nanotrain_core.data.synthetic:Synthetic",
            summary="a seeded Markov chain of known entropy",
            provides={"changes_length"},
            survey="nanotrain_core.builtin.configs:survey_synthetic",
        )
    )
