/* harness/verdict/expected.h - draws: what error a correct kernel of a design makes on a problem,
 * by trying it. A Monte-Carlo model of rounding beside the derived bounds, from the inputs only.
 *
 * A draw runs the design on a nearby problem (drawn_run.h) and subtracts the fp64 reference of that
 * same nearby problem, which runs on one rank. All roundings fall out anew, those of correlated
 * operands and of truncation included, while the problem stays what it is. The problem itself is
 * never drawn: a subject that is the simulated ranks is judged by other problems than its own. Base
 * fp64 is drawn in fp32 and scaled by 2^-29 (errors are first order in the unit roundoff).
 *
 * A session is drawn in its own calls, rollbacks and formats of the kept state included; its
 * reference takes all tokens at once.
 *
 * A training step (op step) is drawn whole: x, w and bias of the convolutions move, too. The
 * subject's q, k, v are outputs of its own convolution.
 */
#ifndef DP_EXPECTED_H
#define DP_EXPECTED_H
#include "drawn_run.h"
#include "draws.h"
#include "harness/simulated/stage_tensor.h"
#include "ref/chunk/conv.h"
#include "ref/files/cache.h"
#include "ref/vocabulary/design.h"

#define DP_SET_OFF_LATTICE 2 /* the set whose gates and angles leave the lattice of their format */

typedef struct {
    const dp_problem *p;
    const dp_front *front; /* NULL: no training step. q, k, v behind a convolution are not read */
    const dp_session *session; /* NULL: all tokens at once; else one rank, forward */
    dp_format dtype;           /* of the inputs */
    int backward;
    int set; /* 0, 1, ..: each an independent set of draws */
} dp_expected_request;

/* How a subject computes, or may. */
typedef struct {
    int N; /* ranks */
    dp_design design;
    dp_format chain; /* of the M chain; a recurrent design has none */
    int stages;      /* 1: intermediates, too; chunk designs of DP_CHUNK tokens only */
} dp_claim;

typedef struct {
    dp_draws field[DP_NRESULTS];        /* by dp_result_fields */
    dp_draws rank[DP_RANK_TENSORS];     /* [N*HV] states, by DP_RANK_S_IN .. */
    dp_draws step[DP_CONV_NRESULTS][3]; /* of a training step: of the convolutions of q, k, v */
    dp_draws stage[DP_NSTAGE_TENSORS];  /* by dp_stage_tensor, those of tokens and chunks */
} dp_expected;
#define DP_EXPECTED_TENSORS \
    (DP_NRESULTS + DP_RANK_TENSORS + 3 * DP_CONV_NRESULTS + DP_NSTAGE_TENSORS)
#define DP_EXPECTED_PARTS (6 * DP_EXPECTED_TENSORS)

/* Draws of one set: at least 6. */
int dp_expected_count(const dp_problem *p);

/* All n claims at once: what they share is computed once a draw, and draws run side by side.
 * Results of a claim do not depend on the others. out [n] is allocated. */
void dp_expected_run(const dp_expected_request *rq, int n, const dp_claim *claim, dp_expected *out);

/* Zeros, of the same shapes; and the arrays, for a cache: returns their number. */
int dp_expected_parts(dp_expected *x, dp_part *parts);
void dp_expected_free(dp_expected *x);

/* Rows of a tensor of states that not every rank and head has: the draws of rows row[0 .. n). */
dp_draws dp_draws_of_rows(const dp_draws *d, int n, const int *row);

/* ---- the draws of one problem, made once and kept -------------------------------------------- */

/* Sets of draws are numbered: set 0 judges; set 1 decides where set 0 left a verdict marginal.
 * Missing draws are read from the cache or drawn, all claims and numbers of ranks together. */

typedef struct {
    dp_claim claim;
    int set;
    dp_expected x;
} dp_expectation;

typedef struct {
    dp_expected_request
        request;       /* its set and stages are not used; what it points to is borrowed */
    const char *cache; /* a folder; NULL: none */
    int n;
    dp_expectation *known;
} dp_expectations;

/* Draws what is not known yet of n claims. */
void dp_expectations_want(dp_expectations *e, int set, int n, const dp_claim *claim);

/* NULL: not wanted before. */
const dp_expected *dp_expectations_find(const dp_expectations *e, const dp_claim *claim, int set);

void dp_expectations_free(dp_expectations *e);
#endif
