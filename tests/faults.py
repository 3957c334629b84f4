"""Broken twins, and for each the checks of the harness that are meant for its fault."""

from pathlib import Path

from nanotrain_core.testing import Case

TWINS, MODELS, PRECISIONS, CHECKPOINTS, KERNELS, ADAMW, HISTORIES, CACHES = (
    (str(Path(__file__).with_name(f"broken_{kind}.py")),)
    for kind in ("twins", "models", "precisions", "checkpoints", "kernels", "adamw", "histories", "caches")
)


SYNTHETIC = {"vocab": 64, "sequences": 64, "validation_sequences": 10}


MODEL = {"layers": 2, "width": 32, "heads": 4, "vocab": 64, "init_std": 0.2}


MORE_LAYERS = "inner_shared_and_biased_layers"


WRONG_GRADIENTS = {
    "gradients_equal[fp64]",
    "gradients_equal[fp32]",
    "weights_equal[sgd]",
    "weights_equal[adamw]",
    "a_precision_may_replace_modules",
    MORE_LAYERS,
    "accumulation_changes_nothing",
    "unused_parameter_does_not_hang[nowhere]",
    "unused_parameter_does_not_hang[on_one_rank]",
    "monitors_see_gradients",
}


STRIDES = {f"strides_change_nothing[{dtype}]" for dtype in ("float64", "bfloat16")}


#: What finds a function with other values or gradients, where the tiny models call it and where not.
WRONG_FUNCTION = {
    "functions_equal_pytorch[float64]",
    "functions_equal_pytorch[bfloat16]",
    "gradients_may_not_be_wanted",
    *STRIDES,
}


DENSE, ROUTED = (
    {f"runs_equal_pytorch[{run}]" for run in runs}
    for runs in (
        ("transformer", "odd", "recomputed", "weight_passes"),
        ("routed", "recomputed_experts", "weight_passes_of_experts"),
    )
)


OF_BFLOAT16, *OF_INT8 = (
    f"low_precision_adamw_equals_pytorch[{form}]" for form in ("bfloat16", "int8", "carried")
)


#: What trains with a monitor whose every exception counts.
STRICT_RUNS = {
    "changes_nothing",
    "works_without_a_folder",
    "state_is_restored",
    "publishes_what_it_declares",
    "publishing_waits_for_nothing",
}


SUMMED, RANGED = ({"parallel": [{"use": use}]} for use in ("summed", "ranged"))


#: Further checks that a fault fails too: the second tier alone runs them.
ALSO = {
    "drops_one_sum": {
        "any_number_of_microbatches",
        "twenty_steps_are_those_of_one_process",
        "a_parameter_may_be_used_later[from_the_second_step]",
        "a_parameter_may_be_used_later[in_the_first_step]",
        "mixed_dtypes",
    },
    "mean_loss": {f"logits_are_those_of_the_loss[{run}]" for run in ("training", "evaluation")},
    "ignores_the_shard": {f"shards_make_up_later_epochs[{count}]" for count in (2, 3)},
    "takes_any_position": {"fingerprint_tells[seed]", "fingerprint_tells[length]"},
}


FAULTS = [
    (
        Case("topology", use="rank_in_two_groups", config={"tp": 2}, world_size=4, plugins=TWINS),
        {
            "groups_divide_the_world",
            "groups_are_real",
            "coordinates_are_places_in_groups",
            "a_run_on_it_equals_one_process",
        },
    ),
    (Case("model", use="mean_loss", config=MODEL, plugins=TWINS), {"loss_is_a_sum"}),
    (
        Case("model", use="reads_ahead", config=MODEL, plugins=TWINS),
        {"weights_may_arrive_at_the_last_moment"},
    ),
    (
        Case("model", use="forgets_to_change", config=MODEL, plugins=TWINS),
        {"changes_in_a_run_are_those_of_a_model_built_so"},
    ),
    (
        Case("model", use="mixes_heads", config=MODEL, plugins=TWINS),
        {"roles_are_true", "sequence_parallel_is_exact", "linear_layers_and_heads_add_nothing"},
    ),
    (
        Case("model", use="penalizes_hidden_states", config=MODEL, plugins=TWINS),
        {"sequence_parallel_is_exact"},
    ),
    (
        Case("model", use="caps_its_logits", config=MODEL, plugins=MODELS),
        {"linear_layers_and_heads_add_nothing"},
    ),
    (
        Case("model", use="halves_queries", config=MODEL, plugins=MODELS),
        {"linear_layers_and_heads_add_nothing"},
    ),
    (Case("model", use="counts_all", config=MODEL, plugins=TWINS), {"terms_are_weighed_and_counted"}),
    (Case("model", use="forgets_its_place", config=MODEL, plugins=TWINS), {"goes_on_from_its_cache"}),
    (Case("model", use="numbers_experts", plugins=TWINS), {"experts_may_be_anywhere"}),
    (Case("model", use="hides_experts", plugins=TWINS), {"every_layer_has_a_role", "divisibility_is_true"}),
    (Case("model", use="counts_twice", plugins=TWINS), {"activation_checkpointing_is_exact"}),
    (Case("parallel", use="summed", topology={"dp": 2}), set()),
    (Case("parallel", use="drops_one_sum", topology={"dp": 2}, plugins=TWINS), WRONG_GRADIENTS),
    (
        Case("parallel", use="sums_only_what_it_has", topology={"dp": 2}, plugins=TWINS),
        {"unused_parameter_does_not_hang[on_one_rank]"},
    ),
    (Case("parallel", use="changes_nothing", topology={"tp": 2}, plugins=TWINS), {"its_dimensions_are_used"}),
    (Case("parallel", use="forgets_inner", topology={"tp": 2}, plugins=TWINS), {MORE_LAYERS}),
    (Case("schedule", use="drops_backward", plugins=TWINS), {"every_pass_happens_once", "gradients_equal"}),
    (Case("schedule", use="drops_backward_of_models", plugins=TWINS), {"gradients_equal"}),
    (
        Case("schedule", use="turns_around", plugins=TWINS),
        {"every_rank_gets_the_same", "schedule_is_stateless"},
    ),
    (Case("optimizer", use="never_clips", plugins=TWINS), {"clips_to_the_global_norm"}),
    (Case("optimizer", use="climbs", plugins=TWINS), {"first_step_descends"}),
    (Case("optimizer", use="decays_everything", plugins=TWINS), {"weight_decay_is_for_matrices"}),
    (Case("optimizer", use="decays_nothing", plugins=TWINS), {"weight_decay_is_for_matrices"}),
    (Case("optimizer", use="drops_errors", plugins=TWINS), {"lost_weights_are_carried_or_refused"}),
    (Case("optimizer", use="counts_calls", plugins=TWINS), {"masters_are_updated_in_parts"}),
    (
        Case("optimizer", use="forgets_its_count", plugins=TWINS),
        {"resume_is_bit_equal", "resumed_twice_is_the_same_run"},
    ),
    (
        Case(
            "optimizer",
            use="as_long_as_its_piece",
            topology={"dp": 2},
            overrides=RANGED,
            plugins=TWINS,
        ),
        {"layout_changes_nothing", "monitors_see_gradients", "twenty_steps_on_any_layout"},
    ),
    (
        Case("optimizer", use="sums_in_its_step", topology={"dp": 2}, plugins=TWINS),
        {
            "monitors_see_gradients",
            MORE_LAYERS,
            "unused_parameter_does_not_hang[nowhere]",
            "unused_parameter_does_not_hang[on_one_rank]",
            "any_number_of_microbatches",
        },
    ),
    (Case("kernels", use="ignores_the_scale", plugins=KERNELS), WRONG_FUNCTION),
    (Case("kernels", use="sees_later_blocks", plugins=KERNELS), WRONG_FUNCTION - STRIDES),
    (Case("kernels", use="adds_eps_to_the_root", plugins=KERNELS), WRONG_FUNCTION | DENSE | ROUTED),
    (Case("kernels", use="wrong_gradient_of_gates", plugins=KERNELS), WRONG_FUNCTION | DENSE),
    (Case("kernels", use="reads_gradients_by_pointer", plugins=KERNELS), STRIDES),
    (Case("kernels", use="counts_ignored_targets", plugins=KERNELS), WRONG_FUNCTION),
    (Case("kernels", use="ignores_other_ranks", plugins=KERNELS), WRONG_FUNCTION),
    (Case("kernels", use="drops_the_last_row", plugins=KERNELS), WRONG_FUNCTION | ROUTED),
    (Case("kernels", use="forgets_their_weights", plugins=KERNELS), WRONG_FUNCTION | ROUTED),
    (
        Case("kernels", use="turns_in_place", plugins=KERNELS),
        {"inputs_stay_as_they_are", "gradients_may_not_be_wanted"},
    ),
    (
        Case("kernels", use="computes_in_float32", plugins=KERNELS),
        (WRONG_FUNCTION | DENSE | ROUTED)
        - {"functions_equal_pytorch[bfloat16]", "strides_change_nothing[bfloat16]"},
    ),
    (Case("kernels", use="makes_its_table_anew", plugins=KERNELS), {"table_is_the_same_each_time"}),
    (
        Case("kernels", use="replaces_parameters", plugins=KERNELS),
        {f"parameters_stay_themselves[{model}]" for model in ("transformer", "routed")},
    ),
    (
        Case("kernels", use="transposes_square_weights", plugins=KERNELS),
        {
            "gemms_equal_pytorch[float64]",
            "gemms_equal_pytorch[bfloat16]",
            "runs_equal_pytorch[weight_passes]",
            "runs_equal_pytorch[weight_passes_of_experts]",
        },
    ),
    (
        Case("kernels", use="sums_all_but_the_last", plugins=KERNELS),
        {f"exchanges_are_those_of_process_groups[{ranks}]" for ranks in (2, 4)},
    ),
    (
        Case("kernels", use="trusts_the_version_counter", plugins=KERNELS),
        {f"runs_equal_pytorch[{run}]" for run in ("weight_passes", "weight_passes_of_experts")},
    ),
    (
        Case("kernels", use="keeps_one_buffer", plugins=KERNELS),
        {f"calls_do_not_share_memory[{dtype}]" for dtype in ("float64", "bfloat16")},
    ),
    (Case("kernels", use="counts_runs", plugins=KERNELS), {"runs_are_independent"}),
    (Case("kernels", use="rounds_at_random", plugins=KERNELS), {"two_calls_have_the_same_bits"}),
    (Case("kernels", use="steps", plugins=ADAMW), set()),
    (Case("kernels", use="adds_decay_to_gradients", plugins=ADAMW), {*OF_INT8, OF_BFLOAT16}),
    (Case("kernels", use="rounds_second_moments_to_zero", plugins=ADAMW), {*OF_INT8}),
    (
        Case("precision", use="forgets_to_write_through", plugins=PRECISIONS),
        {"stored_weights_reach_the_model", "loss_follows_float32"},
    ),
    (
        Case("precision", use="has_copies_updated", plugins=PRECISIONS),
        {"plain_masters_are_what_they_store", "resume_is_bit_equal", "going_back_is_bit_equal"},
    ),
    (
        Case("precision", use="forgets_its_masters", plugins=PRECISIONS),
        {"resume_is_bit_equal", "going_back_is_bit_equal"},
    ),
    (
        Case("precision", use="loses_one_gradient", plugins=PRECISIONS),
        {"every_weight_has_its_gradient", "loss_follows_float32"},
    ),
    (
        Case(
            "precision",
            use="asks_the_module_for_its_size",
            topology={"tp": 2},
            overrides={"parallel": [{"use": "sliced"}, {"use": "summed"}]},
            plugins=PRECISIONS,
        ),
        {"every_weight_has_its_gradient"},
    ),
    (
        Case("precision", use="loses_the_last_row", plugins=PRECISIONS),
        {"packed_weights_keep_what_is_written"},
    ),
    (Case("precision", use="drops_them_after_steps", plugins=CACHES), {"going_back_is_bit_equal"}),
    (
        Case("precision", use="scales_by_every_pass", plugins=HISTORIES),
        {"evaluation_changes_nothing", "going_back_is_bit_equal"},
    ),
    (
        Case("checkpoint", use="writes_in_place", plugins=CHECKPOINTS),
        {
            "interrupted_save_leaves_the_last[killed]",
            "interrupted_save_leaves_the_last[out_of_space]",
            "full_disk_on_one_rank",
        },
    ),
    (
        Case("checkpoint", use="never_falls_back", plugins=CHECKPOINTS),
        {f"falls_back_over_a_damaged_one[{damage}]" for damage in ("truncated", "bit_flipped", "empty")},
    ),
    (
        Case("checkpoint", use="tells_anyhow", topology={"dp": 2}, overrides=SUMMED, plugins=CHECKPOINTS),
        {"killed_rank_leaves_the_last[first]", "full_disk_on_one_rank"},
    ),
    (
        Case("checkpoint", use="sets_all_aside", plugins=CHECKPOINTS),
        {"damaged_ones_stay_if_no_other_is_left"},
    ),
    (
        Case("checkpoint", use="keeps_the_other_branch", plugins=CHECKPOINTS),
        {
            "later_steps_are_left_behind",
            "another_branch_is_left_behind",
            "an_older_step_sets_later_ones_aside",
        },
    ),
    (
        Case("checkpoint", use="reads_too_late", plugins=CHECKPOINTS),
        {"async_save_is_isolated"},
    ),
    (
        Case("checkpoint", use="asks_too_late", plugins=CHECKPOINTS),
        {"what_the_run_cannot_be_touches_nothing"},
    ),
    (
        Case("checkpoint", use="keeps_frozen_ones", plugins=CHECKPOINTS),
        {"frozen_blocks_come_back[another_loaded]"},
    ),
    (
        Case("checkpoint", use="names_the_first", plugins=CHECKPOINTS),
        {"frozen_blocks_come_back[older_gone]"},
    ),
    (Case("checkpoint", use="lists_bare_hashes", plugins=CHECKPOINTS), {"listing_shows_what_was_saved"}),
    (Case("monitor", use="draws_numbers", plugins=TWINS), {"changes_nothing"}),
    (Case("monitor", use="publishes_anything", plugins=TWINS), STRICT_RUNS),
    (Case("monitor", use="waits_to_publish", plugins=TWINS), {"publishing_waits_for_nothing"}),
    (
        Case("monitor", use="counts_on_one_rank", plugins=TWINS, topology={"dp": 2}),
        {"publishes_what_one_process_does"},
    ),
    (
        Case("monitor", use="measures_on_one_rank", plugins=TWINS, topology={"dp": 2}),
        {"publishes_what_one_process_does"},
    ),
    (Case("monitor", use="draws_before_saving", plugins=TWINS), {"changes_nothing"}),
    (Case("monitor", use="forgets_by_itself", plugins=TWINS), {"state_is_restored"}),
    (
        Case("monitor", use="changes_gradients", plugins=TWINS),
        {"changes_nothing", "its_failure_does_not_stop_training"},
    ),
    (
        Case("data", use="ignores_the_shard", config=SYNTHETIC, plugins=TWINS),
        {f"shards_make_up_the_global_batch[{count}]" for count in (2, 3, 4)},
    ),
    (
        Case("data", use="takes_any_position", config=SYNTHETIC, plugins=TWINS),
        {"position_is_of_this_data"},
    ),
    (
        Case("data", use="never_ends_validation", config=SYNTHETIC, plugins=TWINS),
        {
            "validation_shards_make_up_the_batch[2]",
            "validation_shards_make_up_the_batch[3]",
            "validation_shards_make_up_the_batch[4]",
            "validation_does_not_advance",
            "validation_has_one_order",
            "validation_is_never_trained_on",
            "last_validation_batch_is_padded",
            "what_was_trained_on_is_never_held_out",
        },
    ),
]
