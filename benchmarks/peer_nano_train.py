"""The other side: nano-train, the original, run from a clone of its repository.

Nothing of it is changed: its command line is parsed by its own parser, its own parts are built from that,
and its own engine's loop takes the steps, a few more in each turn. Sizes are those of the recipe.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from nanotrain_core.recipe.tree import Recipe


def peer(clone: Path, recipe: Recipe, rank: int) -> Callable[[int], object]:
    """Return what trains for so many steps more, its expert-parallel lanes sharing the recipe's batch out."""
    return training(clone, recipe, rank, recipe.batch.sequences // recipe.topology.config.ep)


def every_lane(clone: Path, recipe: Recipe, rank: int) -> Callable[[int], object]:
    """Return what trains for so many steps more, every expert-parallel lane on a whole batch.

    Lanes hold one replica's weights but draw batches of their own, and no gradient but the experts' is summed
    over them: what a user gets who gives the batch of one replica.
    """
    return training(clone, recipe, rank, recipe.batch.sequences)


def training(clone: Path, recipe: Recipe, rank: int, sequences: int) -> Callable[[int], object]:
    """Build the parts of one rank as its engine does; each expert-parallel lane steps on ``sequences``."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(recipe.run.ranks))
    sys.path.insert(0, str(clone / "examples"))
    script = import_module("train_4d")  # puts the clone on the path, for src
    sys.argv = ["train_4d.py", *flags(recipe, sequences)]
    args = script.parse_args()
    parts = script.build_train_4d_components()
    context = parts.bootstrap.build_context(args)
    model = parts.model_provider.build_model(context)
    data = parts.data_provider.build_train_data(context)
    optimizer = parts.optimizer_runtime.initialize(model, context)
    schedule = parts.schedule_selector.select(context)
    state = import_module("src.runtime.context").TrainState()
    engine = script.RuntimeEngine()
    piped = recipe.topology.config.pp > 1
    loop = engine._run_pipeline_mode if piped else engine._run_non_pipeline_mode
    model.train()

    def advance(steps: int) -> None:
        args.max_steps = end = state.global_step + steps
        loop(
            args=args,
            model=model,
            train_data=data,
            optimizer_state=optimizer,
            schedule=schedule,
            runtime_context=context,
            state=state,
            components=parts,
        )
        state.global_step = end  # its pipeline loop stops one short of it

    return advance


def flags(recipe: Recipe, sequences: int) -> list[str]:
    """Return the command line of its ``train_4d.py`` for a DeepSeek recipe."""
    model, degrees, optimizer = recipe.model.config, recipe.topology.config, recipe.optimizer.config
    values = {
        "--tensor-model-parallel-size": degrees.tp,
        "--pipeline-model-parallel-size": degrees.pp,
        "--expert-model-parallel-size": degrees.ep,
        "--num_microbatches": sequences // recipe.batch.microbatch if degrees.pp > 1 else 1,
        "--batch_size": sequences,
        "--num_samples": 64 * sequences,
        "--seq_len": recipe.batch.length,
        "--max_position_embeddings": recipe.batch.length,
        "--epochs": 1_000_000,
        "--log_every": 0,
        "--lr": optimizer.lr,
        "--weight_decay": optimizer.weight_decay,
        "--vocab_size": model.vocab,
        "--hidden_size": model.width,
        "--num_layers": model.layers,
        "--num_heads": model.heads,
        "--num_kv_heads": model.heads,
        "--intermediate_size": model.ffn,
        "--moe_intermediate_size": model.expert_ffn,
        "--q_lora_rank": model.q_rank,
        "--kv_lora_rank": model.kv_rank,
        "--qk_nope_head_dim": model.nope_size,
        "--qk_rope_head_dim": model.rope_size,
        "--v_head_dim": model.value_size,
        "--num_experts": model.experts,
        "--top_k": model.top_k,
        "--n_group": 1,
        "--topk_group": 1,
        "--n_shared_experts": model.shared_experts,
        "--first_k_dense_replace": model.dense_layers,
        "--capacity_factor": model.experts / model.top_k,  # room for every token: none is dropped
    }
    sharded = ["--use-distributed-optimizer", "--data-parallel-sharding-strategy", "optim_grads"]
    zero = sharded if recipe.optimizer.use == "zero12" else []
    return [*(str(part) for pair in values.items() for part in pair), *zero]
