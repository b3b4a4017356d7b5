/* harness/verdict/drawn_run.h - one nearby problem, run in one design on any number of ranks.
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
#ifndef DP_DRAWN_RUN_H
#define DP_DRAWN_RUN_H
#include "harness/simulated/calls.h"
#include "harness/simulated/stage_tensor.h"
#include "ref/chunk/conv.h"
#include "ref/vocabulary/design.h"
#include "ref/vocabulary/problem.h"

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

/* Convolutions of a draw: x, w and bias moved, no dy; each to be freed with dp_conv_free. NULL:
 * none. */
void dp_nearby_front(const dp_front *front, const dp_mover *m, dp_conv y[3]);

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
void dp_drawn_split(dp_drawn_run *x, int N);
/* All results; chain: the format of the M chain, which a recurrent design has not. */
void dp_drawn_all(dp_drawn_run *x, dp_format chain);
/* Frees all of it. */
void dp_drawn_close(dp_drawn_run *x);

/* All results of the last dp_drawn_all; borrowed. */
dp_result *dp_drawn_results(dp_drawn_run *x);
const double *dp_drawn_dg(const dp_drawn_run *x); /* [T][HV][Kg] of the log decay */

/* The value of rank and head z = rank * HV + head; NULL: it has none. */
const double *dp_drawn_rank_value(const dp_drawn_run *x, int tensor, int64_t z);
#endif
