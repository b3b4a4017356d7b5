/* ref/bound/bound.h - error bounds of the chunk pipeline in a base policy, from inputs and
 * reference values only (never from the subject).
 *
 * A dp_chunk here is a REFERENCE chunk, computed with base fp64; its h, v_new, dh, dv_local, dv_new
 * are filled. One set of formulas serves two models of rounding (math.md j.2, j.4). Both are first
 * order in the unit roundoffs: products of two errors are dropped.
 *
 *   sound     p = 1   worst case: absolute errors of all operations add up. A larger error is
 *                     certainly wrong.
 *   probable  p = 2   rounding errors are mean-independent, so their squares add up. A row exceeds
 *                     lambda times this bound with probability at most 2 exp(-lambda^2 / 2) (Higham
 *                     and Mary 2019; Azuma), lambda = DP_LAMBDA. Errors that reach a result on
 *                     several paths are counted as independent. Truncating formats are not
 *                     mean-independent: their part stays worst case.
 *
 * Every array D below holds p-th powers of errors. Inside a chunk bounds are entrywise. Between
 * chunks the error e of the state is
 *   p = 1   [V]        bound of the 2-norm over K of each column
 *   p = 2   [2][K][V]  squares of each entry's error, carried by the squares of M_c's entries
 *                      (math.md j.4), in two parts. The first part differs from column to column.
 *                      The second comes from the error of an M, one matrix for all columns. A sum
 *                      over v adds squares of the first part, but errors of the second.
 * The error b of the chain is one number (Frobenius norm) for p = 1, [K][K] squares for p = 2.
 * Sources: Higham, Accuracy and Stability of Numerical Algorithms, chapters 3, 8, 14; Higham and
 * Mary, SIAM J. Sci. Comput. 41 (2019).
 */
#pragma once
#include "ref/arithmetic/norms.h"
#include "ref/chunk/chunk.h"
#include "ref/vocabulary/design.h"

#include <math.h>

/* The rounding model of a base policy: relative errors, but for tiny. */
typedef struct {
    double u;  /* of the arithmetic: 2^-53 or 2^-24 */
    double us; /* of a store, beyond u: 2^-8 where FLA stores bf16, else 0 */
    /* of a product's operand that is rounded to bf16 but not stored so: 2^-8, else 0 */
    double uo;
    /* absolute error of an operation through underflow or flush to zero: 2^-126 (fp64: 2^-1022) */
    double tiny;
    /* of a pair's decay, beyond u, if rounded operands carry it (design scores=gated), else 0 */
    double pair;
    double decay; /* of an operand's decay, beyond u (design decays=F); else 0 */
    double key;   /* of kg, beyond one decay and one store (design keys=scored); else 0 */
    double input; /* of q and k before any use, beyond u (design inputs=stored); else 0 */
    /* 1: w, u come from products with the stored inverse (bf16), 0: from a triangular solve */
    int inverse;
    int p; /* 1 sound, 2 probable */
} dp_rounding;
/* |x|^p. */
static inline double dp_pw(const dp_rounding *r, double x) {
    return r->p == 2 ? x * x : x < 0 ? -x : x;
}
#define DP_LAMBDA 6.0 /* 2 exp(-18) = 3e-8 a row */
/* From a p-th power to the bound itself. */
static inline double dp_bound_final(const dp_rounding *r, double x) {
    return r->p == 2 ? DP_LAMBDA * sqrt(x) : x;
}
/* The rounding model of a base policy and its default design; p: 1 sound, 2 probable. */
dp_rounding dp_rounding_of(dp_base b, int p);
/* The rounding model of a design. With gated scores chunk_gated.h rounds both operands of a score,
 * and the adjoint of the score, to bf16. Their products with fp32 exponentials of at most 2 * 76
 * add less than 2^-6 of that. With keys=scored kg has a second decay, store and exponential. With
 * beta=inverse T B and Kgam, V are rounded, by default T and B Kgam, B V: equally often. */
dp_rounding dp_rounding_of_design(const dp_design *d, int p);
int64_t dp_state_error_size(const dp_rounding *r, int K, int V); /* entries of e */
int64_t dp_chain_error_size(const dp_rounding *r, int K);        /* entries of b */
/* Bound of the Frobenius norm of a tensor's error, from its array D [n]. For p = 2 it is DP_LAMBDA
 * times the root of the sum. For p = 1 D holds columns' norms, or one number. */
double dp_error_fro(const dp_rounding *r, const double *D, int64_t n);
/* The norm of the error of a state, or of a product of the chain. With p = 2 it is the larger of
 * two norms: from the entries, and from the covariance. */
double dp_state_error_norm(const dp_rounding *r, int K, int V, const double *e);
double dp_chain_error_norm(const dp_rounding *r, int K, const double *b);
/* Error of a sum of n products relative to the sum of absolute values: gamma_n(u), or u sqrt(n/3 +
 * 1) (the worst sum of squares of n growing partial sums is n/3 of the last one's square). */
double dp_sum_error(const dp_rounding *r, int n);

/* Errors of the activated inputs of one chunk. */
typedef struct {
    double q, k, v, beta; /* relative, another error in every entry; v: of write o v, too */
    double erasing;       /* of erase o k beyond k and qk_row; 0 where the keys erase */
    double qk_row;        /* relative, one error for a whole row of q or k (its 1/norm) */
    /* NULL, or what each entry of q [c][K], k [n][K], v [n][V] has on top of q, k, v */
    const double *rq, *rk, *rv;
    const double *g; /* [c][K] absolute error of the log decay, entrywise; stride sg */
    int64_t sg;
    int Kg;
    const double *held; /* [K] number of the head's chunks that have this chunk's decay; NULL: 1.
                         * Their errors of it are equal, and add up in proportion to the number */
} dp_input_error;

typedef struct {
    dp_rounding r;
    const dp_chunk *ch;
    double *Dcum; /* [c][K] D of gcum; D of gcum_s - gcum_i is Dcum_s - Dcum_i */
    /* [c][K] relative errors (not powers) of exp(gcum) and of exp(gcum_last - gcum) */
    double *Dexp, *Dend;
    double *DeC; /* [K] D of eC */
    /* [K] error of eC for carried states (p = 2). Chunks with one decay share one error, and (sum
     * of n equal errors)^2 = n times the sum of their squares */
    double *DeC_held;
    double *DL, *DA, *DT;        /* [n][n]; DT NULL without the inverse */
    double *DAqk;                /* [c][n] */
    double *Dw, *Du, *Dkg, *Dqg; /* [n][K], [n][V], [n][K], [c][K] */
    double *DM;                  /* [K][K] error of the factor M_c as formed */
    double *DF;                  /* [K][K] part of DM that does not come from kg and w */
    double *M;                   /* [K][K] M_c itself */
    double mu;                   /* upper bound of |M_c|_2 */
    double *eq, *ek, *ev;        /* [c][K], [n][K], [n][V] relative errors of the entries */
    double *ee;                  /* [n][K] relative errors of the erasing keys */
    double eb, er;               /* copies of the input errors; er = qk_row */
} dp_chunk_bound;

/* Fills *b with the errors of the stages before the state; `in` has the errors of the inputs. */
void dp_bound_intra(dp_chunk_bound *b, const dp_chunk *ch, dp_rounding r, const dp_input_error *in);
/* Fills *b with the errors that solve (DT) and wy (Dw, Du, Dkg, Dqg, DeC) add by themselves when
 * gcum, L and Akk are exact. All else is 0 or not set. */
void dp_bound_own(dp_chunk_bound *b, const dp_chunk *ch, dp_rounding r);
/* Makes every intermediate of the chunk exact; DM then holds the error of forming M_c alone. */
void dp_bound_exact(dp_chunk_bound *b);
void dp_bound_free(dp_chunk_bound *b);

/* Carries the state's error over a chunk.
 *   S    reference state before the chunk, not modified
 *   e    error of S on entry, of the state after the chunk on return
 *   DX   [n][V] gets the error of v_new that does not come through e; NULL: not wanted */
void dp_bound_state(const dp_chunk_bound *b, const double *S, double *e, double *DX);
/* Fills row [c] with squares of bounds of |o_s error|_2, from e before the chunk and DX. For p = 2
 * only, since the worst case of a row is far above it. */
void dp_bound_output(const dp_chunk_bound *b, const double *e, const double *DX, double *row);
/* The backward counterpart of dp_bound_state. The reference gradient after the chunk is dS, its
 * error e on entry. On return e is the error before the chunk. */
void dp_bound_state_bwd(const dp_chunk_bound *b, const double *dout, const double *dS, double *e,
                        double *DdX);
/* A pair (M, H) by rows (dp_chunk_pair), over its chunks from the last to the first. The factors'
 * errors are those of a chain and of a pass without roundings; on top of them
 *   X = P kg'   DX = (uo |P|, sum_error(K)) |kg|' + (u + us) |X|
 *   P           F = 2u eC |P| + sum_error(n) |X||w| + u |P|
 * A row of M has errors of its own: e <- e M_c + DX w + F. Chunks before add P times what they add
 * to the state S of a pass from zero. So DX and F reach all columns of H, with that pass's v_new:
 *   H           DX v_new + F S + sum_error(n) |X||u| + u |H|
 *   e, C   p = 1: |.|_2 of the rows [K]. p = 2: squares [K][K]; covariance of columns [K][K]
 *   eH     shared by the columns of H, but for H's own sums; as of a state */
typedef struct {
    double *P, *H, *e, *C, *eH; /* P, H: references, as dp_chunk_pair has them */
} dp_pair_error;
dp_pair_error dp_pair_error_new(const dp_rounding *r, int K, int V);
void dp_pair_error_free(dp_pair_error *x);
/* S [K][V]: of the pass from zero, before the chunk. */
void dp_bound_pair_rows(const dp_chunk_bound *b, const double *S, dp_pair_error *x);
/* Adds the error of M (trans: of M') to b of a chain, that of H to e of a state. */
void dp_bound_add_pair(const dp_rounding *r, int K, int trans, const dp_pair_error *x, double *b);

/* Squares of errors of the gradients of the activated inputs, for p = 2 only.
 *   dq [c], dk [n], dv [n]           bounds of rows (2-norm)
 *   dg [c][K], dbeta [n]             bounds of entries
 *   ndq, ndk, ndv, vdg, vdbeta       reference values: 2-norms of rows, dg and dbeta themselves
 *   edq [c][K], edk [n][K], edv [n][V]   NULL, or bounds of the entries of dq, dk, dv
 *   ederasing [n][K], vderasing [n][K]   NULL, or bounds and reference values of the gradients of
 *                                        erasing keys (dk is then of the writes alone)
 *   vdv [n][V]                       NULL, or reference values of dv */
typedef struct {
    double *dq, *dk, *dv, *dg, *dbeta, *ndq, *ndk, *ndv, *vdg, *vdbeta, *edq, *edk, *edv;
    double *ederasing, *vderasing, *vdv;
} dp_grad_bound;
/* Its arrays for c tokens with n rows lie in *all, to be freed. `each` adds edq, edk, edv;
 * `erasing` adds edv, vdv and those of erasing keys. */
dp_grad_bound dp_grad_bound_new(int c, int n, int K, int V, int each, int erasing, double **all);
/* eS, edS are errors of h and dh; DX, DdX are the errors of v_new and dv_new that do not come
 * through them. */
void dp_bound_grads(const dp_chunk_bound *b, const double *dout, const double *eS,
                    const double *edS, const double *DX, const double *DdX, dp_grad_bound *g);

/* C [K][K] <- M C M' (trans: M' C M) + A' diag(s) A + diag(d). C is the covariance of the rows of
 * an error, summed over columns. Sums of squared errors: s [n] of errors that come through A
 * [n][K], d [K] of the rows' own. */
void dp_bound_covariance(int K, int trans, const double *M, int n, const double *A, const double *s,
                         const double *d, double *C);

/* A factor diag(eC) - A' B and the sources of its error: A = kg and B = w. In the chain of dM they
 * are exchanged, and DF is transposed. Points into b. */
typedef struct {
    int n, trans;
    const double *A, *B, *DA, *DB, *DF;
} dp_factor_error;
dp_factor_error dp_factor_error_of(const dp_chunk_bound *b, int trans);

/* One step of the M chain, running (math.md j.3, j.4); b is updated in place.
 *   sound     b <- mu b + | eta |M||P| + |DM||P| |_F + (eta |||M|||_2 + |DM|_F) b + 3 K^2 tiny
 *             P is the REFERENCE product before the step; the last terms pay for using it in place
 *             of the computed one.
 *   probable  b <- M^2 b + 2 u_op^2 M^2 P^2 + s_K^2 (|M||P|)^2 + u_store^2 (M P)^2 + DM P^2
 *             (squares entrywise, DM holds squares)
 *             and C <- M C M' + A' diag(sum of DB |P_k|^2) A + diag(the rest), the covariance of
 *             the rows of the error, summed over columns: exact where the roundings of A, B and the
 *             product do not know of each other, which b is only while M mixes few of its entries
 * b: one number (p = 1); b [K][K] and C [K][K] (p = 2). x: the sources of DM, for p = 2 only. For
 * probable bounds only, bias [1]: running worst case of truncated operands,
 *   bias <- mu bias + 2 u_op | |M||P| |_F, else untouched. */
void dp_bound_chain_step(const dp_rounding *r, dp_format f, int K, const double *M,
                         const double *DM, const dp_factor_error *x, double mu, const double *P,
                         double *b, double *bias);
/* A computed M with its reference value: mu = |M|_2 at least, b its error, bias as below. */
typedef struct {
    const double *M;
    double mu;
    const double *b;
    double bias;
} dp_computed_product;
/* P <- M P of two computed products (the scan over ranks, math.md g.3). P is the reference, b and
 * bias are its error before; on return all are of M P.
 *   sound     b' = (|M|_2 + |dM|) b + |P|_2 |dM| + 3 K^2 tiny
 *             + eta ( | |M||P| |_F + | |M| |_2 b + | |P| |_2 |dM| + |dM| b )
 *   probable  b' = M^2 b + bM P^2 + what rounding the product costs (as in a step of the chain);
 *             C' = M C M' + |P|_2^2 C_M + diag(the rounding), since dM P has rows dM_i P;
 *             bias' = |M|_2 bias + |P|_2 bias_M + 2 u_op | |M||P| |_F, the last where truncated */
void dp_bound_compose(const dp_rounding *r, dp_format f, int K, const dp_computed_product *M,
                      const double *P, double *b, double *bias);
/* Error of a payload (ref/vocabulary/exchange.h); u is the unit roundoff of its numbers. The
 * computed number that is rounded is its reference with the error before.
 *   a state   sound: e + u (|S| + e) + K tiny, column by column; probable: e + (u S)^2
 *   M         the same of M; of M - I: u |M - I|, and one rounding of the arithmetic each where I
 *             is taken off and put back, of M's diagonal;
 *   low rank  |M - U W|_2 <= tolerance, which is no rounding and lies in any direction: sound b +
 *             tolerance; probable (tolerance / lambda)^2 at every entry and on the diagonal of C,
 *             whose sums over S are then at least |dM S|. The factors have |U_i|_2 <= |M_i|_2 and
 *             |W_j|_2 <= 1: rounding and multiplying them costs (2 u + sum_error(K)) |M_i|_2 */
void dp_bound_sent_state(const dp_rounding *r, dp_payload p, int K, int V, const double *S,
                         double *e);
void dp_bound_sent_M(const dp_rounding *r, dp_payload p, int K, const double *M, double *b);
/* One merge step S <- M S + H with computed M and H in fp32 or fp64 (math.md j.6). Errors: e before
 * the step, b of M, eH of H. For p = 2 bias >= |truncation's part of M's error|_F. It is spread
 * over the column once evenly and once like |M||S|, which truncation shrinks. */
void dp_bound_merge_step(const dp_rounding *r, int K, int V, const double *M, double mu,
                         const double *b, double bias, const double *S, const double *H,
                         const double *eH, double *e);
