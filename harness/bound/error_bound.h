/* harness/bound/error_bound.h - the error that a base policy and a chain format may make on a
 * problem split over N ranks. The bounds of ref/bound/bound.h are carried through the whole
 * pipeline (math.md j.2, j.3, j.4, j.6). From inputs and fp64 reference values, never from the
 * subject. First order. A row is one token's vector or one state, as dp_result_shape counts rows;
 * bounds are absolute 2-norms. With p = 1, sound: worst case, for M, H, S_in and the states. Rows
 * of o and of token gradients are left out: their worst case is far above the tensor itself. With p
 * = 2, probable: DP_LAMBDA standard deviations, for everything.
 */
#pragma once
#include "harness/simulated/ranks.h"
#include "ref/bound/bound.h"
#include "ref/files/cache.h"

/* Errors of the activations (math.md c), derived above the code. They are relative for q, k, beta;
 * .g is not set. */
dp_input_error dp_error_bound_inputs(const dp_problem *p, dp_base base, const dp_rounding *r);
/* The gate of one token, head and channel and its derivatives by raw gate (dx) and A_log (dA). Dg
 * is the absolute error of the value, Ddx the RELATIVE error of the derivatives. */
typedef struct {
    double g, dx, dA, Dg, Ddx;
} dp_gate_error;
dp_gate_error dp_error_bound_gate(const dp_problem *p, int64_t t, int hv, int c, double u);

/* Bounds of the absolute error of each entry of q, k and v, where the subject computes them (op
 * step). NULL: it gets them. In an activated row they count as relative errors of the entries and,
 * through its 1/norm, of the whole. */
typedef struct {
    double *of[DP_NQKV];
} dp_raw_error;

/* The part that no chain format changes: reference run and chunk bounds of (problem, base, N). */
typedef struct {
    dp_sim *ref; /* borrowed: base fp64, chain fp64, run (with backward if wanted), same N */
    dp_base base;
    dp_sending sending; /* that of the design; may be changed between runs */
    int pair_rows;      /* of the design */
    dp_rounding r;
    dp_input_error in;      /* of the activated inputs; those of a chunk are set there */
    dp_chunk_bound *b;      /* [ngroup][HV] */
    double **eH, **edH;     /* [N*HV] -> state error (ref/bound/bound.h); NULL where absent */
    double *Dg;             /* [T][HV][Kg] error of the log decay */
    double *Dphi;           /* [T][HV][P] of the sum of angles; NULL: no rotation */
    dp_raw_error raw_error; /* borrowed */
    int entries;            /* did it get any, zeros or not? */
    double **eS, **edS, *row[DP_NRESULTS]; /* errors entering the ranks and row bounds of the last
                                     run: often the same for the next format */
} dp_error_bound_base;
/* Fills *w from the reference, which must outlive it; p: 1 sound, 2 probable; raw NULL: none. */
void dp_error_bound_base_init(dp_error_bound_base *w, dp_sim *ref, const dp_design *design, int p,
                              int backward, const dp_raw_error *raw);
void dp_error_bound_base_free(dp_error_bound_base *w);

typedef struct {
    double *row[DP_NRESULTS]; /* per dp_result_fields: [rows], NULL when absent or not bounded */
    double *rank[DP_RANK_TENSORS]; /* [N*HV] Frobenius bounds; 0 where absent */
    double traj[DP_MAX_TRAJ];      /* M of ref->traj_rank (HV = 1) */
    /* Squares of the probable errors of dq, dk, dv without DP_LAMBDA: of every entry, and in
     * addition of a row as a whole. NULL unless the base got errors of q, k or v (op step) */
    double *entry[DP_NQKV], *rest[DP_NQKV];
} dp_error_bound;
/* Allocates and fills *out; *w keeps what the next format may share. */
void dp_error_bound_run(dp_error_bound_base *w, dp_format chain, int backward, dp_error_bound *out);
void dp_error_bound_free(dp_error_bound *b);
/* Allocates *out for p split over N ranks (entries: entry and rest too). */
void dp_error_bound_alloc(const dp_problem *p, int N, int backward, int entries,
                          dp_error_bound *out);
/* The same, filled from the cache; 0: it has none, and *out is nothing. */
int dp_error_bound_load(const char *cache, dp_key key, const dp_problem *p, int N, int backward,
                        int entries, dp_error_bound *out);
void dp_error_bound_save(const char *cache, dp_key key, const dp_problem *p, int N,
                         dp_error_bound *b);
/* Exchanges with b what the backward makes. */
void dp_error_bound_swap_backward(dp_error_bound *a, dp_error_bound *b);
/* Bounds of one rank become those of N ranks, of which each computes as one does: nothing is
 * exchanged. */
void dp_error_bound_spread(const dp_problem *p, int N, dp_error_bound *one);

/* Bounds [rows] of the 2-norm of each row's error in a stage tensor that is not DP_PER_RANK, all
 * stages before it included, to be freed. From a bound that has been run. */
double *dp_stage_bound(const dp_error_bound_base *w, int stage);
/* The worst case of the fp64 reference itself, which stages have for a truth. w is zeros before the
 * first call. */
double *dp_error_bound_of_reference(dp_error_bound_base *w, dp_sim *ref, int backward, int stage);

/* The sound and the probable one, of which a bound is the smaller, entry by entry. */
typedef struct {
    dp_error_bound_base sound, probable;
} dp_error_bounds;
void dp_error_bounds_init(dp_error_bounds *w, dp_sim *ref, const dp_design *design, int backward,
                          const dp_raw_error *raw); /* NULL: none */
void dp_error_bounds_run(dp_error_bounds *w, dp_format chain, int backward, dp_error_bound *out);
double *dp_error_bounds_stage(dp_error_bounds *w, dp_format chain, int backward, int stage);
void dp_error_bounds_free(dp_error_bounds *w);
/* All three, for one format. */
void dp_error_bounds_once(dp_sim *ref, const dp_design *design, dp_format chain, int backward,
                          const dp_raw_error *raw, dp_error_bound *out);
