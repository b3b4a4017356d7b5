/* harness/search/invariants_work.h - the parts of the invariants: problems made from others, runs
 * of them, and what must be the same. */
#pragma once
#include "harness/bound/error_bound.h"
#include "harness/record/run.h"
#include "invariants.h"

typedef struct {
    dp_result r;
    double **M, **dM;
    int n, segments;
    double *stage[DP_NSTAGE_TENSORS]; /* of a subject that shows them, whole; NULL: not made */
} dp_check_outcome;                   /* segments: parts that a sequence was cut in, at most */

/* Bounds of the problem itself, and of the one that a check compares with: made when needed. */
typedef struct {
    dp_error_bound of[2];
    const dp_check *made[2]; /* by which check; the problem itself: by any */
} dp_check_bounds;

typedef struct {
    const dp_problem *p; /* what is compared with, on N ranks */
    const dp_problem *whole;
    const dp_check_subject *s;
    int N, backward;
    dp_check *c;
    const dp_check_outcome *base; /* the problem itself on N ranks */
    dp_check_bounds *bounds;
    dp_err *e;
} dp_check_work;

typedef int dp_check_keep(const void *ctx, int field, int64_t token, int head,
                          int seq); /* token: -1 for states and parameters */

/* why parts of a sequence that kernels cut by length are not compared */
#define DP_CHECK_CUT \
    "the kernels cut the sequence in segments, and its part elsewhere: not the same bits"

/* invariants.c */
/* A copy with inputs of its own. */
dp_problem dp_check_copy(const dp_problem *p, int backward);
/* The input i of p, to be changed: no other problem shares it from now on (memory.h). */
double *dp_check_own(dp_problem *p, int i);
/* Tokens [a, b), which belong to one sequence, as a problem of its own; s0, dstate: NULL, or
 * [HV][K][V]. */
dp_problem dp_check_slice(const dp_problem *p, int64_t a, int64_t b, const double *s0,
                          const double *dstate, int backward);
/* p with arrays in memory of this process, to be freed. */
dp_problem dp_check_at_hand(const dp_problem *p);
/* Frees results and factors of a run. */
void dp_check_outcome_free(dp_check_outcome *o);
/* Runs the subject on a problem. */
dp_status dp_check_run_problem(const dp_check_subject *s, const dp_problem *p, int N, int backward,
                               dp_check_outcome *o, dp_err *e);

/* A comparison of one result of two runs: got = want * factor in every row that keep accepts (NULL:
 * all). The problem of got is p; its first token and sequence in want's problem w->p are t0 and
 * seq0. */
typedef struct {
    const dp_problem *p;
    const dp_result *got, *want;
    int64_t t0;
    int seq0;
    double factor, small; /* entries may differ by small */
    dp_check_keep *keep;
    const void *ctx;
} dp_check_pair;
/* Counts what was compared, and notes the first row that differs. */
void dp_check_same_field(dp_check_work *w, int field, const dp_check_pair *x);
/* The same for all results. */
void dp_check_same(dp_check_work *w, const dp_check_pair *x);
/* The subject; a library is called with the problem itself before, in the same process. */
dp_check_subject dp_check_called_before(const dp_check_work *w);
/* Runs p, which is freed, and compares all results with the problem itself. factor NULL: 1; a
 * result with factor 0 is left out. */
dp_status dp_check_changed(dp_check_work *w, const dp_check_subject *s, dp_problem *p,
                           const double factor[DP_NRESULTS], double small, dp_check_keep *keep,
                           const void *ctx);
/* "rank 0, head 1, token 5": where a row of a result of w->p stands. */
void dp_check_row_text(const dp_check_work *w, int f, int64_t row, char *text, size_t size);
/* Adds to a failure what was changed. */
void dp_check_say(dp_check_work *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Notes why a check does not apply. DP_OK. */
dp_status dp_check_skip(dp_check_work *w, const char *why);
/* Did either run cut a sequence in segments, so that parts of it may differ in bits? */
int dp_check_cut(const dp_check_outcome *a, const dp_check_outcome *b);
/* dp_check_bounds_there of w. */
int dp_check_bounded(const dp_check_work *w, char *why, size_t size);
/* The design that the subject is bounded by, which the problem decides where it has kernels for
 * some recurrences that others are not computed by. */
dp_design dp_check_design(const dp_check_subject *s, const dp_problem *p);
/* Does the library claim to leave out states that have decayed? No bound has them. */
int dp_check_drops(const dp_check_subject *s);
/* Bounds of the subject's results on p over N ranks. Also of each stage [DP_NSTAGE_TENSORS] of
 * tokens or chunks that `of` holds one of (NULL: none). Its design has bounds. */
void dp_check_bounds_make(const dp_check_subject *s, const dp_problem *p, int N, int backward,
                          double *const *of, dp_error_bound *b, double **stage);
/* Are there bounds of the subject on p? Not for designs without one, nor where they would take too
 * long; why says so. */
int dp_check_bounds_there(const dp_check_subject *s, const dp_problem *p, char *why, size_t size);
/* Bounds of w->p on w->N ranks; to be freed by dp_check_bounds_free, all together. */
const dp_error_bound *dp_check_bounds_of(dp_check_work *w);

/* invariants_parts.c */
/* Sequences packed together give the bits that each gives alone. */
dp_status dp_check_packed(dp_check_work *w);
/* Heads in another order, or one of them alone, give what they gave. */
dp_status dp_check_head_order(dp_check_work *w);
/* Sequences packed in another order give the same bits. */
dp_status dp_check_sequence_order(dp_check_work *w);
/* A sequence cut at a chunk and continued from its state gives the same bits. */
dp_status dp_check_prefix(dp_check_work *w);
/* Inputs [n] times c give results times factor. */
dp_status dp_check_factor(dp_check_work *w, const int *input, int n, double c,
                          const double factor[DP_NRESULTS], double small);
/* One rank and N ranks give the same bits on exact inputs. */
dp_status dp_check_exact_cp(dp_check_work *w);
dp_status dp_check_ranks(dp_check_work *w, int transpose);
/* One rank and N ranks differ by no more than both bounds. */
dp_status dp_check_ranks_bound(dp_check_work *w);
/* The first tokens differ from their fp64 reference by no more than twice their bounds. */
dp_status dp_check_reference(dp_check_work *w);
/* Chunks of other lengths differ by no more than both bounds. */
dp_status dp_check_chunk_size(dp_check_work *w);
