/* What is left out under sanitizers (sanitized.h): the table. */
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
    {"judge", "recorded_output_of_fla_has_the_error_measured_elsewhere",
     NUMERICS "judges_ten_tensors_of_three_ranks runs the same code"},
    {"truth", "radius_covers_each_source_of_error",
     NUMERICS "radius_covers_the_difference_between_precisions runs the same code"},
};

const char *gt_left_out(const char *suite, const char *name) {
    if (!GT_SANITIZED || getenv("DP_SANITIZE_ALL")) return NULL;
    for (size_t i = 0; i < sizeof LEFT_OUT / sizeof *LEFT_OUT; i++)
        if (!strcmp(suite, LEFT_OUT[i].suite) &&
            (!LEFT_OUT[i].name || !strcmp(name, LEFT_OUT[i].name)))
            return LEFT_OUT[i].why;
    return NULL;
}
