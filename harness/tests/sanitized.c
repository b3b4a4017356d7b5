/* The table of tests that are left out under sanitizers (sanitized.h). */
#include "sanitized.h"

#include <stdlib.h>
#include <string.h>

#define NUMERICS "numerics of whole cases, minutes under sanitizers: "

/* Each row leaves out what repeats code that a test beside it runs with a smaller problem. */
static const struct {
    const char *suite, *name, *why; /* name NULL: all of the suite */
} LEFT_OUT[] = {
    {"faults", "each_one_turns_its_tensor_red_and_is_green_without",
     NUMERICS "every fault runs in bisect and in exact"},
    {"levels", "no_alarm_on_errors_of_the_draws_own_law",
     "a rate over 230,000 draws: each_level_sees_its_fault runs the same code"},
    {"machine", "the_digest_is_the_same_under_every_blas_kernel",
     "seven cases eight times, and the compiler's own arithmetic is what it is about"},
    {"machine", "the_digest_is_the_same_whatever_the_cpu_seems_to_have",
     "seven cases four times, and the compiler's own vectors are what it is about"},
    {"resume", "a_killed_command_goes_on",
     NUMERICS "finished_cases_are_not_run_again reads and writes the same files"},
    {"resume", "other_options_and_other_inputs_are_run",
     NUMERICS "finished_cases_are_not_run_again reads and writes the same files"},
    {"judge", "recorded_output_of_fla_has_the_error_measured_elsewhere",
     NUMERICS "judges_ten_tensors_of_three_ranks runs the same code"},
    {"ranks", "base_fp32_and_bf16_are_as_wrong_as_their_formats",
     NUMERICS "fp64_agrees_with_the_step_recurrence and every run of a case run the same code"},
    {"bisect", "a_fault_within_every_bound_is_found_by_draws",
     NUMERICS "no_stage_is_blamed_without_a_fault makes draws too"},
    {"bisect", "one_fault_one_wrong_stage", NUMERICS "every_fault_is_found runs the same code"},
    {"elementary", "within_an_ulp_of_mpfr_everywhere",
     "millions of values of functions that every test calls"},
    {"invariants", "each_is_red_under_a_fault_that_breaks_it",
     NUMERICS "all_hold_for_the_simulated_ranks runs the same checks"},
    {"shrink", "what_is_left_fails_for_the_same_reason_and_is_twenty_times_smaller",
     NUMERICS "the_program_writes_a_case_that_it_can_run runs the same search"},
    {"levels", "a_short_window_of_correlated_errors_is_no_alarm_for_its_rank",
     "a rate over many draws: each_level_sees_its_fault runs the same code"},
    {"bits", "each_format_is_recovered_within_three_tenths_at_every_length",
     NUMERICS "a_chain_that_claims_more_than_it_has runs the same code"},
    {"bits", "no_reading_where_none_is_sound",
     NUMERICS "a_chain_that_claims_more_than_it_has runs the same code"},
    {"chain", "table_of_error_growth_is_reproduced",
     NUMERICS "products_in_double_double and the chains of bits run the same code"},
    {"truth", "radius_covers_each_source_of_error",
     NUMERICS "radius_covers_the_difference_between_precisions runs the same code"},
    {"differ", "a_truth_that_takes_minutes_is_asked_for_by_name_alone",
     NUMERICS "the_first_stage_beyond_both_bounds with --no-truth runs the same code"},
    {"drop", "channel_sums_fail_where_keys_move_the_state",
     NUMERICS "claim_decides_what_may_be_dropped runs the same code"},
    {"adversary", "what_no_case_shows_fails_all_of_them_together",
     NUMERICS "pooled.* and a_right_design_passes run the same code"},
    {"attacks_report", "changed_records_are_refused_or_become_a_page",
     "Python alone, of which nothing is compiled"},
};

const char *gt_left_out(const char *suite, const char *name) {
    if (!GT_SANITIZED || getenv("DP_SANITIZE_ALL")) return NULL;
    for (size_t i = 0; i < sizeof LEFT_OUT / sizeof *LEFT_OUT; i++)
        if (!strcmp(suite, LEFT_OUT[i].suite) &&
            (!LEFT_OUT[i].name || !strcmp(name, LEFT_OUT[i].name)))
            return LEFT_OUT[i].why;
    return NULL;
}
