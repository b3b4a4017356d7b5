/* harness/search/bisect_work.h - the parts of bisect: one stage after the other on true inputs, row
 * by row. */
#ifndef DP_BISECT_WORK_H
#define DP_BISECT_WORK_H
#include "bisect.h"
#include "harness/bound/error_bound.h"
#include "harness/verdict/expected.h"

/* Errors of one tensor by cell: a chunk and head, a rank and head, a head. */
typedef struct {
    char name[16];
    int stage;
    int64_t n;
    double *e2, *err2, *want2, *rows;
    dp_bisect_entry *worst;
} dp_bisect_tally; /* e2 [draws][n] */
typedef struct {
    int draw, ndraw, n;
    dp_bisect_tally t[64];
} dp_bisect_tallies; /* draw: the one that is running, -1: the subject */

typedef struct {
    const dp_problem *p;
    dp_base base;
    dp_rounding r;    /* p = 2 */
    dp_sim s, t, ref; /* the subject; the same stages in fp64 on the subject's inputs; the whole
                         pipeline in fp64 */
    dp_chunk_bound *intra, *own; /* [ngroup][HV] */
    dp_bisect *out;
    dp_stage stage;
    int run;
    dp_bisect_tallies *tal; /* NULL: rows are held against their bounds */
    struct {
        int64_t n, cap, at;
        uint64_t *hash;
    } first[DP_NSTAGES]; /* the rows of the first run, in the order of judgement */
} dp_bisect_work;

typedef struct {
    dp_chunk *s, *t, *ref;
    dp_chunk_bound *intra, *own;
    dp_place at;
    int g, hv;
} dp_bisect_chunk;

#define FOR_CHUNKS_IN(C, BACK)                                                              \
    for (int g_ = 0, n_ = w->ref.ngroup; g_ < n_; g_++)                                     \
        for (int hv_ = 0; hv_ < w->p->HV; hv_++)                                            \
            for (dp_bisect_chunk C = dp_bisect_chunk_of(w, (BACK) ? n_ - 1 - g_ : g_, hv_), \
                                 *once_ = &C;                                               \
                 once_; once_ = NULL)
#define FOR_CHUNKS(C) FOR_CHUNKS_IN(C, 0)

/* how a value is kept: in the base's arithmetic, or as it is stored */
enum { DP_BISECT_ARITH, DP_BISECT_STORE };

/* bisect.c */
/* Holds a row of n numbers against its bound: D, squares of its entries' errors (NULL: 0), and
 * more, of the row as a whole. */
void dp_bisect_judge(dp_bisect_work *w, const char *tensor, dp_place at, int row, int n,
                     const double *got, const double *want, const double *D, double more);
/* Judges rows of n numbers; tokens_R: rows a token from at.token on, 0: rows of a matrix. */
void dp_bisect_judge_rows(dp_bisect_work *w, const char *tensor, dp_place at, int tokens_R,
                          int rows, int n, const double *got, const double *want, const double *D);
/* Where a chunk and value head lie. */
dp_place dp_bisect_chunk_place(const dp_bisect_work *w, int g, int hv);
/* Where a whole rank's state or M lies, of local sub-sequence sub. */
dp_place dp_bisect_rank_place(const dp_bisect_work *w, int r, int hv, int sub);
/* Gives subject and twin n true values, as the base keeps them. */
void dp_bisect_give(dp_bisect_work *w, double *s, double *t, const double *ref, int64_t n, int how);
/* Gives them the true values of every rank and head that has some. */
void dp_bisect_give_list(dp_bisect_work *w, double **s, double **t, double *const *ref, int64_t n);
/* A chunk of subject, twin and reference, with its bounds. */
dp_bisect_chunk dp_bisect_chunk_of(dp_bisect_work *w, int g, int hv);

/* bisect_stages.c: each judges the stage of its name */
void dp_bisect_stage_gate(dp_bisect_work *w);
void dp_bisect_stage_intra(dp_bisect_work *w);
void dp_bisect_stage_solve(dp_bisect_work *w);
void dp_bisect_stage_wy(dp_bisect_work *w);
void dp_bisect_stage_gate_bwd(dp_bisect_work *w);

/* Judges stage pre_fwd or pre_bwd. */
void dp_bisect_stage_pre(dp_bisect_work *w, int backward);
/* Judges stage merge_fwd or merge_bwd. */
void dp_bisect_stage_merge(dp_bisect_work *w, int backward);
/* Judges stage state_fwd, its recomputation in the backward, or state_bwd. */
void dp_bisect_stage_state(dp_bisect_work *w, int backward, int recompute);
void dp_bisect_stage_output(dp_bisect_work *w);
void dp_bisect_stage_dAv(dp_bisect_work *w);

/* The rows [T][heads][per][n] of a tensor. */
typedef struct {
    const char *name;
    int heads, per, n;
} dp_bisect_rows;
/* Judges stages wy_bwd and intra_bwd. */
void dp_bisect_stage_grads(dp_bisect_work *w);

#endif
