/* harness/verdict/expected.h - draws: what error a correct kernel of a design makes on a problem,
 * by trying it. A Monte-Carlo model of rounding beside the derived bounds, from the inputs only.
 *
 * A draw runs the design on a nearby problem (dp_drawn_run). It subtracts the fp64 reference of the
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
#pragma once
#include "draws.h"
#include "harness/simulated/calls.h"
#include "harness/simulated/ranks.h"
#include "ref/chunk/conv.h"
#include "ref/files/cache.h"
#include "ref/vocabulary/design.h"
#include "ref/vocabulary/problem.h"

/* One nearby problem, run in one design on any number of ranks.
 *
 * Nearby problems are the same problem with other roundings. Every number of the inputs moves at
 * random by about one unit of bf16 and is rounded to its format again. So all roundings of a kernel
 * change while the problem stays the same. In every second draw equal numbers of an input (equal
 * but for their sign) move alike. Their roundings are equal in the problem, so their errors add up:
 * gates of one value, or repeated keys. In the others every number moves by itself: equal numbers
 * may cancel to the last bit in one order of summation only. Zeros, infinities and NaN stay; beta
 * of a contraction stays at most 2.
 *
 * fp32 holds the sums of log gates, or angles, of a short format exactly, but for ties. Few draws
 * meet these. `summed` of a wider format takes them off that lattice: every sum is rounded then.
 *
 * A design is the pipeline of simulated ranks, or the token recurrence. A training step includes
 * its convolutions. A session runs each call by itself, with the state stored as the session says.
 * Moving on to another number of ranks keeps what does not depend on it.
 */

typedef struct {
    uint64_t draw;    /* 0, 1, ..: each other numbers */
    dp_format dtype;  /* of the inputs */
    dp_format summed; /* of g and angles: dtype, or a wider one */
} dp_mover;

/* The convolutions before q, k and v in a training step, without dy; NULL: none. */
typedef struct {
    const dp_conv *conv[3];
} dp_front;

/* To be freed. */
dp_problem dp_nearby_problem(const dp_problem *p, const dp_mover *m);

/* M, H, dM and dH of ranks. */
typedef struct {
    int n;
    double **of[DP_RANK_TENSORS]; /* [n] by rank * HV + head, an entry NULL where the rank forms
                                     none; NULL: no rank does */
    double **begins[2];           /* M of ranks in which a sequence begins; dM of those in which
                                     one ends; NULL as above */
} dp_drawn_pairs;

typedef struct {
    dp_design design;
    int N, backward;
    const dp_session *session; /* NULL: all tokens at once */
    dp_problem p;              /* behind the convolutions */
    dp_conv conv[3];
    dp_conv_result front[3];
    dp_sim sim;           /* chunk designs */
    dp_result out;        /* recurrent designs, sessions */
    double *S, *dS, *dg;  /* of a recurrent design: at rank boundaries; of the log decay */
    dp_drawn_pairs pairs; /* of a recurrent design */
} dp_drawn_run;

/* p and conv are borrowed. q, k, v of p are not read where a convolution precedes them. In the
 * calls of a session (NULL: none) one rank makes results alone, forward. */
void dp_drawn_open(dp_drawn_run *x, const dp_design *design, const dp_problem *p,
                   const dp_conv conv[3], const dp_session *session, int N, int backward);
/* All results; chain: the format of the M chain, which a recurrent design has not. */
void dp_drawn_all(dp_drawn_run *x, dp_format chain);
/* Frees all of it. */
void dp_drawn_close(dp_drawn_run *x);

/* All results of the last dp_drawn_all; borrowed. */
dp_result *dp_drawn_results(dp_drawn_run *x);

/* The value of rank and head z = rank * HV + head; NULL: it has none. */
const double *dp_drawn_rank_value(const dp_drawn_run *x, int tensor, int64_t z);

/* ---- draws of claims ------------------------------------------------------------------------- */

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
