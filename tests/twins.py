"""Broken twins by the class of their fault: the checks, by name, at least one of which must fail.

``python -m benchmarks twins`` gives each to ``nanotrain conformance`` with no options, and counts.
"""

from pathlib import Path

import attrs

HERE = Path(__file__).parent


@attrs.define(frozen=True)
class Fault:
    """A class of faults, and the twins that have it."""

    kind: str
    name: str
    twins: tuple[str, ...]
    checks: tuple[str, ...]
    file: str

    @property
    def path(self) -> str:
        return str(HERE / f"{self.file}.py")


def _fault(file, kind, name, twins, checks):
    return Fault(kind, name, tuple(twins.split()), tuple(checks.split()), file)


FAULTS = (
    _fault(
        "broken_late",
        "optimizer",
        "keeps a learning rate of another step",
        "keeps_its_first_rate follows_one_group is_one_step_late",
        "learning_rate_of_each_step",
    ),
    _fault(
        "broken_late",
        "optimizer",
        "a skipped step changes its state",
        "counts_skipped_steps forgets_at_askip decays_its_moments_anyway",
        "a_skipped_step_leaves_no_trace",
    ),
    _fault(
        "broken_syncs",
        "optimizer",
        "one that sums gradients itself has a fault of a gradient sync",
        "loses_the_odd_microbatch sums_sixteen_microbatches knows_the_first_step",
        "any_number_of_microbatches a_parameter_may_be_used_later",
    ),
    _fault(
        "broken_degrees",
        "topology",
        "another degree than was asked for",
        "takes_what_there_is rounds_down takes_none_of_an_odd_world",
        "degrees_are_those_of_the_recipe",
    ),
    _fault(
        "broken_kernels",
        "kernels",
        "a function has other values or gradients",
        "ignores_the_scale sees_later_blocks adds_eps_to_the_root wrong_gradient_of_gates "
        "counts_ignored_targets ignores_other_ranks drops_the_last_row forgets_their_weights "
        "computes_in_float32",
        "functions_equal_pytorch",
    ),
    _fault(
        "broken_kernels",
        "kernels",
        "functions are right, and a run with them is not",
        "turns_in_place makes_its_table_anew replaces_parameters transposes_square_weights counts_runs "
        "rounds_at_random trusts_the_version_counter reads_gradients_by_pointer "
        "keeps_one_buffer",
        "inputs_stay_as_they_are table_is_the_same_each_time parameters_stay_themselves "
        "gemms_equal_pytorch runs_are_independent two_calls_have_the_same_bits runs_equal_pytorch "
        "strides_change_nothing calls_do_not_share_memory",
    ),
    _fault(
        "broken_adamw",
        "kernels",
        "a step of AdamW with low-precision moments is another",
        "adds_decay_to_gradients steps_anyway returns_what_it_updated caches_its_rate "
        "rounds_scales_down rounds_second_moments_to_zero truncates_to_bfloat16",
        "low_precision_adamw_equals_pytorch",
    ),
    _fault(
        "broken_models",
        "model",
        "logits are not those of the loss",
        "scales_its_logits loses_less sharpens_in_evaluation",
        "logits_are_those_of_the_loss",
    ),
    _fault(
        "broken_models",
        "model",
        "the training pass sees its targets",
        "reads_its_targets looks_ahead_in_training averages_in_training sees_further_targets",
        "logits_are_those_of_the_loss a_target_costs_only_itself",
    ),
    _fault(
        "broken_models",
        "model",
        "layers rely on whole sequences between them",
        "numbers_hidden_states shifts_tokens averages_tokens",
        "sequence_parallel_is_exact",
    ),
    _fault(
        "broken_models",
        "model",
        "FLOPs are off",
        "forgets_backward_flops forgets_head_flops forgets_attention_flops",
        "flops_are_those_of_a_pass",
    ),
    _fault(
        "broken_models",
        "model",
        "positions are those of the first call",
        "stretches_to_its_first_length stops_at_its_first_length begins_anew_after_its_first_length "
        "keeps_its_first_documents",
        "forward_is_stateless",
    ),
    _fault(
        "broken_models",
        "model",
        "the unit of shared key heads is wrong",
        "halves_key_heads cuts_key_heads_anywhere halves_value_heads",
        "roles_are_true divisibility_is_true",
    ),
    _fault(
        "broken_models",
        "model",
        "a linear layer or the head computes more",
        "halves_queries caps_its_logits biases_its_logits",
        "linear_layers_and_heads_add_nothing",
    ),
    _fault(
        "broken_layouts",
        "topology",
        "two ranks are swapped",
        "swaps_coordinates swaps_groups swaps_ranks swaps_expert_ranks swaps_ranks_of_many_hosts",
        "coordinates_are_places_in_groups groups_divide_the_world",
    ),
    _fault(
        "broken_layouts",
        "parallel",
        "a bias or an inner norm is not summed, or too often",
        "forgets_biases forgets_inner_norms forgets_inner_biases forgets_layer_norm_biases "
        "adds_biases_of_four",
        "inner_shared_and_biased_layers gradients_equal",
    ),
    _fault(
        "broken_layouts",
        "parallel",
        "placements are ignored",
        "sums_over_data sums_over_the_world forgets_stages places_heads_whole",
        "gradients_equal inner_shared_and_biased_layers",
    ),
    _fault(
        "broken_layouts",
        "parallel",
        "what is partial under sequence parallelism alone is not summed",
        "sums_heads_alone sums_vectors_alone averages_tables",
        "gradients_equal",
    ),
    _fault(
        "broken_layouts",
        "parallel",
        "constants of heads are not those of a rank's own heads",
        "keeps_constants_of_all_heads takes_the_first_heads_constants splits_constants_twice",
        "inner_shared_and_biased_layers",
    ),
    _fault(
        "broken_layouts",
        "parallel",
        "parameters are taken for those of the first step",
        "keeps_its_first_list drops_what_comes_later freezes_what_is_unused keeps_what_was_used",
        "a_parameter_may_be_used_later",
    ),
    _fault(
        "broken_layouts",
        "parallel",
        "only even numbers of microbatches are handled",
        "loses_the_odd_one counts_the_odd_one_twice wants_pairs",
        "any_number_of_microbatches",
    ),
    _fault(
        "broken_layouts",
        "schedule",
        "uneven layers are refused",
        "wants_equal_stages wants_pairs_of_layers wants_two_layers_astage",
        "any_number_of_layers_is_cut",
    ),
    _fault(
        "broken_layouts",
        "schedule",
        "a microbatch past the sixteenth is lost",
        "stops_at_sixteen loses_the_seventeenth takes_sixteen_in_turn stops_at_ahundred",
        "every_pass_happens_once",
    ),
    _fault(
        "broken_layouts",
        "schedule",
        "it holds more than it says",
        "says_what_others_hold holds_all puts_off_weight_gradients",
        "holds_no_more_than_it_says",
    ),
    _fault(
        "broken_plans",
        "schedule",
        "a plan depends on what was asked before",
        "keeps_its_first_plan never_plans_for_fewer goes_on_from_its_last_plan",
        "schedule_is_stateless",
    ),
    _fault(
        "broken_plans",
        "schedule",
        "costs decide whether stages exist",
        "refuses_dear_heads refuses_what_is_uneven joins_cheap_stages",
        "stages_exist_whatever_they_cost",
    ),
    _fault(
        "broken_stores",
        "checkpoint",
        "a missing tensor is accepted",
        "accepts_what_is_missing accepts_missing_moments accepts_missing_vectors fills_in_zeros",
        "a_missing_tensor_is_refused",
    ),
    _fault(
        "broken_fits",
        "checkpoint",
        "a tensor of another dtype, or a superfluous one, is accepted",
        "rounds_on_loading rounds_moments rounds_weights drops_what_is_left drops_moments_that_are_left "
        "drops_weights_that_are_left",
        "what_does_not_fit_is_refused",
    ),
    _fault(
        "broken_fits",
        "checkpoint",
        "packed weights are saved or loaded as something else than their values",
        "fills_one_copy saves_codes saves_packed_late",
        "packed_weights_come_back",
    ),
    _fault(
        "broken_stores",
        "checkpoint",
        "steps are sorted as text",
        "lists_steps_as_text lists_four_digits lists_six_digits loads_the_last_text drops_the_first_text "
        "sets_aside_by_name sets_none_aside",
        "steps_are_numbers an_older_step_sets_later_ones_aside",
    ),
    _fault(
        "broken_stores",
        "checkpoint",
        "each rank's own clock says when to save",
        "due_by_its_clock due_by_the_day due_by_counter due_by_nanoseconds due_by_short_clock due_by_age "
        "due_by_its_pace",
        "due_on_all_ranks_alike",
    ),
    _fault(
        "broken_stores",
        "precision",
        "keep_dtype is ignored",
        "casts_everything keeps_routers_alone keeps_vectors_alone",
        "kept_dtypes_are_kept kept_dtypes_are_kept_to_the_end",
    ),
    _fault(
        "broken_stores",
        "precision",
        "the loss scale's growth is lost on resume",
        "forgets_its_growth begins_its_growth_anew rounds_its_growth forgets_its_pace",
        "loss_scale_grows_when_it_would_have loss_scale_can_be_put_back",
    ),
    _fault(
        "broken_gemms",
        "precision",
        "an input that is made anew is another one",
        "rounds_what_is_made_anew scales_what_is_made_anew cuts_what_is_made_anew",
        "an_input_that_is_made_anew_is_kept_as_before",
    ),
    _fault(
        "broken_caches",
        "precision",
        "what it keeps of weights outlives a rollback",
        "drops_them_after_steps drops_them_in_backward drops_them_when_stored",
        "going_back_is_bit_equal",
    ),
    _fault(
        "broken_histories",
        "precision",
        "what it keeps over steps follows validation too",
        "scales_by_every_pass forgets_in_validation takes_turns",
        "evaluation_changes_nothing",
    ),
    _fault(
        "broken_late",
        "data",
        "the epoch is lost",
        "loses_its_epoch begins_epochs_anew stops_at_the_first_epoch stops_at_the_second_epoch",
        "position_in_later_epochs_can_be_put_back",
    ),
    _fault(
        "broken_late",
        "data",
        "ranks differ in a later epoch",
        "shuffles_by_rank rotates_rows rotates_rows_later repeats_the_first_shard hashes_its_epoch",
        "shards_make_up_later_epochs every_process_has_the_same_epochs",
    ),
    _fault(
        "broken_late",
        "data",
        "the fingerprint tells neither seed nor length",
        "forgets_its_seed forgets_its_length forgets_what_it_is",
        "fingerprint_tells",
    ),
    _fault(
        "broken_splits",
        "data",
        "the fingerprint leaves out what is held out",
        "holds_out_the_end holds_out_the_beginning holds_out_every_nth",
        "what_was_trained_on_is_never_held_out",
    ),
    _fault(
        "broken_splits",
        "data",
        "it validates on what it trains on",
        "validates_on_the_beginning validates_on_one_of_them trains_on_what_is_left",
        "validation_is_never_trained_on",
    ),
    _fault(
        "broken_late",
        "monitor",
        "it misbehaves after the fourth step",
        "draws_late changes_gradients_late publishes_late forgets_late begins_anew_at_start",
        "changes_nothing publishes_what_it_declares state_is_restored",
    ),
)
