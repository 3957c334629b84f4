"""Every built-in component passes the harness that plugins are asked to pass."""

from pathlib import Path

import pytest

from nanotrain_core.testing import Case, conformance

#: Prose: source files have lines of imports in common, which may be in training and in validation sequences.
SOURCES = [
    str(Path(__file__).parents[1] / "docs" / f"{name}.md")
    for name in ("reliability", "monitoring", "recipes")
]
TEXT = {"data": {"use": "text", "paths": SOURCES}, "model": {"vocab": 256}, "batch": {"length": 64}}
LEARNED = {"positions": "learned", "max_length": 16, "norm": "layernorm", "activation": "gelu", "bias": True}

test_conformance = conformance(
    Case("topology", use="grid", config={"tp": 2}, world_size=4),
    Case("topology", use="grid", config={"pp": 2, "tp": 2, "ep": 4}, world_size=8),
    Case("kernels", use="torch"),
    Case("model", use="transformer", config={"kv_heads": 2, "layers": 3}),
    Case("model", use="routed"),
    Case("schedule", use="accumulate"),
    Case("optimizer", use="adamw", config={"weight_decay": 0.1}),
    Case("precision", use="bf16"),
    Case("checkpoint", use="simple", topology={"dp": 2}, overrides={"parallel": [{"use": "summed"}]}),
    Case("monitor", use="stragglers", config={"every": 1}),
    Case("data", use="text", overrides=TEXT),
    marks=dict.fromkeys(
        (
            "killed_rank_leaves_the_last[first]",
            "killed_rank_leaves_the_last[last]",
            "damage_is_noticed[empty]",
            # sharded_v2 keeps these in the first tier
            "a_missing_tensor_is_refused[moment]",
            "a_missing_tensor_is_refused[vector]",
            "an_older_step_sets_later_ones_aside",
            "another_branch_is_left_behind",
            "damage_is_noticed[truncated]",
            "due_on_all_ranks_alike",
            "falls_back_over_a_damaged_one[bit_flipped]",
            "goes_on_on_another_layout[fewer]",
            "goes_on_on_another_layout[more]",
            "later_steps_are_left_behind",
            "packed_weights_come_back",
            "resumed_run_is_the_same_run",
            "resumed_twice_is_the_same_run",
            "steps_are_numbers",
            "what_does_not_fit_is_refused[moment_in_another_dtype]",
            "what_does_not_fit_is_refused[moment_that_is_none_here]",
            "what_does_not_fit_is_refused[weight_in_another_dtype]",
            "what_does_not_fit_is_refused[weight_that_is_none_here]",
            "falls_back_over_a_damaged_one[empty]",
            "falls_back_over_a_damaged_one[truncated]",
        ),
        pytest.mark.full,
    ),
)

test_the_second_of_a_kind = conformance(
    Case("model", use="transformer", config={**LEARNED, "tied": True}),
    Case("optimizer", use="sgd", config={"momentum": 0.9}),
    Case("precision", use="fp64"),
    Case("precision", use="fp32"),
    Case("precision", use="fp16"),
    Case("data", use="synthetic"),
    slow=pytest.mark.full,
)
test_monitors = conformance(
    Case("monitor", use="console"),
    Case("monitor", use="jsonl"),
    Case("monitor", use="replicas"),
    Case("monitor", use="bit_flips"),
    Case("monitor", use="guard"),
    Case("monitor", use="sample", config={"tokens": 4, "every": 1}, overrides=TEXT),
    # The first tier has them of `stragglers`, above.
    slow=pytest.mark.full,
)

test_exhaustively = pytest.mark.full(
    conformance(
        Case("checkpoint", use="simple"),
        Case("kernels", use="auto"),
        Case("optimizer", use="adamw", config={"moment_dtype": "bfloat16"}, name="adamw-bfloat16"),
        Case("optimizer", use="adamw", config={"moment_dtype": "int8"}, name="adamw-int8"),
    )
)
