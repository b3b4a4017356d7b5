/* harness/run/standard.h - the data that judge every result of a case: its truth, the truth's
 * radius, the expected errors of its number formats (driver.c). The second struct
 * holds them for N ranks, with the fp64 reference for bounds.
 *
 * Both structs must stay at their address between open and close. They borrow case and options.
 * The caller closes them whether or not open returned DP_OK.
 */
#pragma once
#include "harness/bound/error_bound.h"
#include "harness/record/run.h"
#include "harness/verdict/expected.h"
#include "step.h"

typedef struct {
    const dp_case *c;
    const dp_run_options *o;
    int boundaries; /* 1: it keeps states where ranks meet */
    dp_truth truth;
    dp_truth_note note;
    double radius; /* largest of a tensor, relative to its norm */
    dp_front front;
    dp_expectations expect; /* of any number of ranks */
    void *other; /* the truth of an operation without a recurrence (subjects.h); else NULL */
} dp_standard;

/* boundaries: keep states where ranks meet, which what ranks exchange is judged by. */
dp_status dp_standard_open(dp_standard *s, const dp_case *c, const dp_run_options *o,
                           int boundaries, dp_err *e);
/* Frees what dp_standard_open made. */
void dp_standard_close(dp_standard *s);
typedef struct {
    dp_standard *std;
    const dp_case *c;      /* std's */
    const dp_truth *truth; /* std's */
    int N;
    dp_truth_rank *at; /* [N*HV]; NULL: the truth keeps no states where ranks meet */
    double **traj;     /* [DP_MAX_TRAJ] true M over 2^i chunks of the recorded rank; NULL: none */
    dp_windows windows;
    dp_condition cond;
    dp_sim ref;                   /* dp_sharding_reference, once it is asked for */
    dp_error_bound_base fp64;     /* its own worst case, once a stage asks for it */
    unsigned char *first_of_call; /* [T] of a session: 1 where a call begins; NULL: no session */
    const dp_step_run *step; /* op step: what the subject's convolutions made of the inputs; NULL:
                                it gets the problem as it is */
} dp_sharding;

/* ref: simulated ranks in base fp64, as dp_sim_new makes them. */
void dp_condition_of(const dp_sim *ref, dp_condition *c);
/* DP_EINPUT: N ranks cannot share this problem. Without a recurrence it has N alone. */
dp_status dp_sharding_open(dp_sharding *sp, dp_standard *std, int N, dp_err *e);
/* Frees what dp_sharding_open made. */
void dp_sharding_close(dp_sharding *sp);
/* The fp64 run of the chunk pipeline; in a session chunks begin anew where its calls do. The first
 * bound that is not cached makes it. */
dp_sim *dp_sharding_reference(dp_sharding *sp);
/* sp->traj: M over the first 2^i chunks of the rank that dp_sim records, from the truth's segments.
 * They are products in fp64 of truths: exact to 1e-15. NULL where the truth keeps no such state.
 * One head, one sequence. */
void dp_sharding_prefixes(dp_sharding *sp);
/* Makes the draws of a run in n designs, of DP_COMMON_DESIGNS at most, side by side. There are none
 * where nothing rounds (keys = exact). stages: 1 where intermediates are judged, too. */
void dp_sharding_expect(dp_sharding *sp, const dp_run *r, int stages, int n,
                        const dp_design *design);
/* The draws of a run in its design; draw: made where they are not known. NULL: none. */
const dp_expected *dp_sharding_expected(dp_sharding *sp, const dp_run *r, int stages, int draw);
