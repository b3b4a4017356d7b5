/* ref/bound.h - error bounds of the chunk pipeline in a base policy, from inputs and reference values only (never from the subject).
 *
 * A dp_chunk here is a REFERENCE chunk: computed with base fp64, its h, v_new, dh, dvl, dX filled. The bounds are first order in the unit
 * roundoffs (products of two errors are dropped), worst case, entrywise inside a chunk and column-wise in the 2-norm between chunks:
 * e[v] bounds the 2-norm over K of column v of the state's error. Derivations stand above the code in bound.c; they follow
 * math.md j.2, j.3, j.6 and Higham, Accuracy and Stability of Numerical Algorithms, chapters 3, 8, 14.
 */
#ifndef DP_BOUND_H
#define DP_BOUND_H
#include "chunk.h"
#ifdef __cplusplus
extern "C" {
#endif

/* The rounding model of a base policy. */
typedef struct {
    double u;      /* arithmetic: 2^-53 or 2^-24 */
    double us;     /* a store, beyond u: 2^-8 where FLA stores bf16, else 0 */
    double uo;     /* rounding of a product's operand that was not stored in that format: 2^-8, else 0 */
    double tiny;   /* absolute error of an operation through underflow or flush to zero: 2^-126 (fp64: 2^-1022) */
    int inverse;   /* 1: w, u come from products with the stored inverse (bf16), 0: from a triangular solve */
} dp_rounding;
dp_rounding dp_rounding_of(dp_base b);

/* Errors of the activated inputs of one chunk. */
typedef struct {
    double q, k, v, beta;        /* relative, rowwise */
    const double *g;             /* [c][K] absolute error of the log decay, entrywise; stride sg */
    int64_t sg;
    int Kg;
} dp_input_error;

typedef struct {
    dp_rounding r;
    const dp_chunk *ch;
    double *Dexp;                /* [c][K] relative error of exp(gcum) */
    double *Dend;                /* [c][K] relative error of exp(gcum_last - gcum) */
    double *DeC;                 /* [K] absolute */
    double *DL, *DA, *DT;        /* [n][n] absolute; DT NULL without the inverse */
    double *DAqk;                /* [c][n] */
    double *Dw, *Du, *Dkg, *Dqg; /* [n][K], [n][V], [n][K], [c][K] */
    double *DM;                  /* [K][K] error of the factor M_c as formed */
    double *M;                   /* [K][K] M_c itself */
    double mu;                   /* upper bound of |M_c|_2 */
    double eq, ek, ev, eb;       /* copies of the input errors */
    double *Dg;                  /* [c][K] */
} dp_chunk_bound;

void dp_bound_intra(dp_chunk_bound *b, const dp_chunk *ch, dp_rounding r, const dp_input_error *in);
void dp_bound_free(dp_chunk_bound *b);

/* e <- bound after the chunk, for a state with reference value S before it (NOT modified; X its reference v_new, NULL: computed).
 * DX (may be NULL): [n][V] local error of v_new, what does not come through e. */
void dp_bound_state(const dp_chunk_bound *b, const double *S, double *e, double *DX);
/* row [c]: bound of |o_s error|_2, from e before the chunk and DX. */
void dp_bound_output(const dp_chunk_bound *b, const double *e, const double *DX, double *row);
/* The backward twins: dS is the reference gradient after the chunk, e its error bound on entry, that before the chunk on return. */
void dp_bound_state_bwd(const dp_chunk_bound *b, const double *dout, const double *dS, double *e, double *DdX);
/* Row bounds (2-norm) of the gradients of the activated inputs: dq [c], dk [n], dv [n]; entrywise dg [c][K], dbeta [n].
 * eS, edS: error of h and dh; DX, DdX: local errors. */
/* The n* fields return reference values beside the bounds: 2-norms of the rows of dq, dk, dv, and dg [c][K], dbeta [n] themselves. */
typedef struct { double *dq, *dk, *dv, *dg, *dbeta, *ndq, *ndk, *ndv, *vdg, *vdbeta; } dp_grad_bound;
void dp_bound_grads(const dp_chunk_bound *b, const double *dout, const double *eS, const double *edS, const double *DX, const double *DdX, dp_grad_bound *g);

/* One step of the M chain, running and normwise (math.md j.3), b bounding |P_hat - P|_F:
 *   b_j = mu_j b_(j-1) + | eta |M_j||P| + |DM_j||P| |_F + (eta |||M_j|||_2 + |DM_j|_F) b_(j-1) + 3 K^2 tiny
 * P is the REFERENCE product before the step; the second line pays for using it in place of the computed one. */
double dp_bound_chain_step(dp_format f, int K, const double *M, const double *DM, double mu, const double *P, double b);
/* One merge step S <- M S + H with computed M, H (math.md j.6), column-wise: e error before, bM >= |dM|_F, eH [V]. */
void dp_bound_merge_step(int K, int V, double eta, double u, const double *M, double mu, double bM, const double *S, const double *H, const double *eH, double *e);

/* Upper bound of the spectral norm: largest eigenvalue of A'A by LAPACK plus its backward error. */
double dp_norm2_up(int m, int n, const double *A);
double dp_norm_fro(int64_t n, const double *A);
/* sqrt(|A|_1 |A|_inf) >= | |A| |_2 */
double dp_norm_abs2_up(int m, int n, const double *A);

#ifdef __cplusplus
}
#endif
#endif
