/* harness/search/differ.h - two subjects on the same inputs, without a truth: where their results
 * and stages differ, and whether by more than both bounds allow.
 *
 * Each row (a token's vector, a state, a head's sum) of a tensor that both make is compared. The
 * 2-norm of its difference must be within the sum of two bounds. Each bound is that of the base,
 * chain and design of one subject (harness/bound/error_bound.h). Beyond it one of them breaks its
 * own bound, or both; which one, a truth alone can say.
 *   same       the same numbers (-0 = 0, NaN = NaN)
 *   within     others, no row by more than the sum of both bounds
 *   beyond     a row is
 *   unbounded  others, and a bound is missing: of a design without one, where it would take too
 *              long, of a stage in chunks of other than 64 tokens
 * A stage is compared if both show it; columns of Akk and Aqk up to the diagonal. Tensors that a
 * rank does not have (stages.h) are skipped. The first tensor beyond, in the order of the
 * pipeline, is where to look.
 */
#pragma once
#include "invariants.h"

typedef enum {
    DP_DIFFER_SAME,
    DP_DIFFER_WITHIN,
    DP_DIFFER_UNBOUNDED,
    DP_DIFFER_BEYOND,
    DP_DIFFER_NKINDS /* the later the worse */
} dp_differ_kind;
extern const char *const dp_differ_names[DP_DIFFER_NKINDS];

typedef struct {
    const char *name;
    int stage;                  /* dp_stage_tensor; -1: a result */
    int only;                   /* 1, 2: the first, the second alone makes it, and nothing else */
    int64_t entries, different; /* entries that were looked at, and those that are not the same */
    dp_differ_kind kind;
    double most, a, b;          /* the largest difference of an entry, and its values */
    dp_place at;                /* of its row; -1 where there is no rank, token, .. */
    int64_t index;              /* in the row */
    double relative;            /* difference of the whole tensor by its 2-norm, for that of b */
    double share, off, allowed; /* the row with the largest share of both bounds; NAN: unbounded */
    dp_place worst;
} dp_differ_tensor;

#define DP_DIFFER_MOST (DP_NRESULTS + DP_NSTAGE_TENSORS)
typedef struct {
    int n;
    dp_differ_tensor t[DP_DIFFER_MOST]; /* in the order of the pipeline */
    int first;                          /* the first that is beyond; -1: none */
    dp_differ_kind kind;                /* the worst; of stages without a bound where no result is
                                           compared */
    int64_t compared;                   /* entries of all */
    char unbounded[2][160];             /* why a subject has no bounds; "": it has */
    double seconds[3];                  /* of the two, and of their bounds */
} dp_differ;

/* Both on N ranks. *who: whose failure *e tells, 0 or 1. DP_EINPUT: it refuses the problem;
 * DP_EDEVICE: it did not come to its end. */
dp_status dp_differ_run(const dp_problem *p, const dp_check_subject s[2], int N, int backward,
                        dp_differ *out, int *who, dp_err *e);
