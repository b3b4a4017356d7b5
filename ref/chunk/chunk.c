/* The chunkwise block-triangular solver, forward and backward (chunk.h). */
#include "chunk.h"
#include "chunk_factored.h"
#include "chunk_gated.h"
#include "chunk_pair.h"
#include "gate.h"
#include "ref/arithmetic/elementary.h"
#include "ref/arithmetic/mm.h"
#include "ref/vocabulary/design.h"

#include <stdlib.h>
#include <string.h>

double dp_round_arith(dp_base b, double x) { return b == DP_BASE_FP64 ? x : (double)(float)x; }
double dp_round_store(dp_base b, double x) {
    return b == DP_BASE_BF16 ? (double)dp_bf16((float)x) : dp_round_arith(b, x);
}

/* ---- intra ----------------------------------------------------------------------------------- */

/* The system matrix A = I + B L, unit lower. For keys that read one after another all entries below
 * its diagonal may be nonzero, else those below the diagonal blocks. */
static void system_matrix(const dp_chunk *ch, double *A) {
    const int n = ch->n;
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++)
            A[(int64_t)i * n + j] =
                i == j ? 1.0 : dp_round_arith(ch->base, ch->beta[i] * ch->L[(int64_t)i * n + j]);
}

static float *narrow(const double *x, int64_t n) {
    float *y = dp_alloc((size_t)n, sizeof *y);
    for (int64_t i = 0; i < n; i++)
        y[i] = (float)x[i];
    return y;
}

static const dp_linear *linear_of(const dp_chunk *ch) {
    return ch->linear ? ch->linear : &dp_linear_own;
}

/* C [m][n] = op(A) op(B) in the base's formats */
static void mul(const dp_chunk *ch, int ta, int tb, int m, int n, int k, const double *A,
                const double *B, double *C) {
    dp_mm_by(linear_of(ch), ch->design.factors, (dp_shape){ta, tb, m, n, k}, A, B, C);
}

/* X <- A^(-1) X or A^(-T) X in fp64 or fp32 */
static void solve(const dp_chunk *ch, const double *A, int trans, int nrhs, double *X) {
    const int n = ch->n;
    if (ch->base == DP_BASE_FP64) {
        linear_of(ch)->solve_f64(n, nrhs, trans, A, X);
        return;
    }
    DP_OWN float *a = narrow(A, (int64_t)n * n), *x = narrow(X, (int64_t)n * nrhs);
    linear_of(ch)->solve_f32(n, nrhs, trans, a, x);
    for (int64_t i = 0; i < (int64_t)n * nrhs; i++)
        X[i] = x[i];
}

/* T = A^(-1), lower; in fp32 for base fp32 and bf16. */
static double *inverse(const dp_chunk *ch, dp_base base) {
    const int n = ch->n;
    DP_OWN double *A = dp_alloc((size_t)n * n, sizeof *A);
    double *T = dp_alloc((size_t)n * n, sizeof *T);
    system_matrix(ch, A);
    if (base == DP_BASE_FP64)
        linear_of(ch)->invert_f64(n, A, T);
    else {
        DP_OWN float *a = narrow(A, (int64_t)n * n), *t = dp_alloc((size_t)n * n, sizeof *t);
        linear_of(ch)->invert_f32(n, a, t);
        for (int64_t i = 0; i < (int64_t)n * n; i++)
            T[i] = t[i];
    }
    return T;
}

/* The block [rows][columns] of X [n][n] at (row, column), to be freed. */
static double *block_of(const double *X, int n, int row, int column, int rows, int columns) {
    double *y = dp_alloc((size_t)rows * columns, sizeof *y);
    for (int i = 0; i < rows; i++)
        memcpy(y + (int64_t)i * columns, X + (int64_t)(row + i) * n + column,
               sizeof *y * (size_t)columns);
    return y;
}

/* The block of T below two inverted neighbours of `size` rows, -B C A; C is of the system. */
static void merge(const dp_chunk *ch, const double *system, int at, int size, double *T) {
    const int n = ch->n, mid = at + size, rest = n - mid < size ? n - mid : size;
    DP_OWN double *B = block_of(T, n, mid, mid, rest, rest),
                  *A = block_of(T, n, at, at, size, size);
    DP_OWN double *C = block_of(system, n, mid, at, rest, size);
    DP_OWN double *left = dp_doubles(2 * (int64_t)rest * size);
    double *low = left + (int64_t)rest * size;
    mul(ch, 0, 0, rest, size, rest, B, C, left);
    mul(ch, 0, 0, rest, size, size, left, A, low);
    for (int i = 0; i < rest; i++)
        for (int j = 0; j < size; j++)
            T[(int64_t)(mid + i) * n + at + j] = -low[i * size + j];
}

/* T = A^(-1): blocks of 16 rows are inverted in fp32, then neighbours merged, each time twice as
 * many rows. The merging products round their operands as factors. */
static double *merged_inverse(const dp_chunk *ch) {
    enum { BLOCK = 16 };
    const int n = ch->n;
    DP_OWN double *system = dp_alloc((size_t)n * n, sizeof *system);
    double *T = dp_doubles((int64_t)n * n);
    system_matrix(ch, system);
    for (int at = 0; at < n; at += BLOCK) {
        const int rows = n - at < BLOCK ? n - at : BLOCK;
        DP_OWN double *own = block_of(system, n, at, at, rows, rows);
        DP_OWN float *a = narrow(own, (int64_t)rows * rows);
        float t[BLOCK * BLOCK];
        linear_of(ch)->invert_f32(rows, a, t);
        for (int i = 0; i < rows * rows; i++)
            T[(int64_t)(at + i / rows) * n + at + i % rows] = t[i];
    }
    for (int size = BLOCK; size < n; size *= 2)
        for (int at = 0; at + size < n; at += 2 * size)
            merge(ch, system, at, size, T);
    return T;
}

void dp_chunk_inverse(dp_chunk *ch) {
    if (!ch->Akk) ch->Akk = inverse(ch, linear_of(ch) == &dp_linear_own ? DP_BASE_FP64 : ch->base);
}

/* gcum; then kgam, kg, qg, eC. A single step below the floor multiplies by exactly 0 in this
 * arithmetic. Kernels add it as it is, and differences behind it lose what its size rounds off.
 * Below the reset that is more than 2^-9, a rounding of bf16. Such a step, -inf too, is raised to
 * the floor: that changes no product, and keeps gcum finite and its differences accurate. */
double dp_gate_floor(dp_base b) { return b == DP_BASE_FP64 ? -746.0 : -104.0; }
static double gate_reset(dp_base b) { return b == DP_BASE_FP64 ? -0x1p44 : -0x1p15; }

static void cumsum(dp_chunk *ch, const dp_chunk_in *in) {
    const int c = ch->c, K = ch->K;
    const dp_base b = ch->base;
    for (int x = 0; x < K; x++) {
        double s = 0;
        for (int t = 0; t < c; t++) {
            double g = in->g[t * in->sg + (in->Kg == 1 ? 0 : x)];
            if (g < gate_reset(b)) g = dp_gate_floor(b);
            if (ch->design.fast_decays) g = dp_round_arith(b, g * DP_LOG2_E);
            s = dp_round_arith(b, s + g);
            ch->gcum[t * K + x] = ch->design.fast_decays ? dp_round_arith(b, s * DP_LN_2) : s;
        }
    }
}

/* e = exp(g); may be g itself. */
static void exp_row(const dp_chunk *ch, const double *g, double *e) {
    if (!ch->design.fast_decays || ch->base == DP_BASE_FP64) {
        dp_exp_row(ch->K, g, e);
        return;
    }
    for (int x = 0; x < ch->K; x++)
        e[x] = dp_exp(g[x]) * dp_fast_decay_error(g[x]);
}

/* e = exp(gcum_t), end = exp(gcum_last - gcum_t) */
static void decays_at(const dp_chunk *ch, int t, double *e, double *end) {
    const int K = ch->K;
    const double *g = ch->gcum + (int64_t)t * K, *last = ch->gcum + (int64_t)(ch->c - 1) * K;
    for (int x = 0; x < K; x++)
        end[x] = dp_round_arith(ch->base, last[x] - g[x]);
    exp_row(ch, g, e);
    exp_row(ch, end, end);
    for (int x = 0; x < K; x++)
        e[x] = dp_store(ch->design.decays, dp_round_arith(ch->base, e[x]));
    for (int x = 0; x < K; x++)
        end[x] = dp_store(ch->design.decays, dp_round_arith(ch->base, end[x]));
}

/* kg of row i (token t): k by its decay to the end. With keys=scored: the operand of the scores by
 * the rest of that decay. */
static void decayed_key(dp_chunk *ch, int t, int i, const double *end) {
    const int K = ch->K;
    const dp_base b = ch->base;
    double *kg = ch->kg + (int64_t)i * K;
    const double *k = ch->k + (int64_t)i * K;
    for (int x = 0; x < K; x++) {
        double left = end[x], operand = k[x];
        if (dp_is_factored(ch)) {
            operand = dp_round_arith(b, dp_round_arith(b, dp_exp(-ch->gcum[t * K + x])) * k[x]);
            left = ch->eC[x];
        }
        if (ch->design.scored) operand = dp_gated_key(ch, t, x, k[x], &left);
        kg[x] = dp_round_arith(b, left * operand);
        if (!ch->design.late) kg[x] = dp_store(ch->kept, kg[x]);
    }
}

static void decay(dp_chunk *ch) {
    const int c = ch->c, R = ch->R, K = ch->K;
    const dp_base b = ch->base;
    const double *erasing = dp_chunk_erasing(ch);
    DP_OWN double *exps = dp_doubles(2 * (int64_t)K);
    double *ends = exps + K;
    exp_row(ch, ch->gcum + (int64_t)(c - 1) * K, ch->eC);
    for (int x = 0; x < K; x++)
        ch->eC[x] = dp_round_arith(b, ch->eC[x]);
    for (int t = 0; t < c; t++) {
        decays_at(ch, t, exps, ends);
        for (int x = 0; x < K; x++) {
            const double e = exps[x];
            ch->qg[t * K + x] = dp_store(ch->kept, dp_round_arith(b, e * ch->q[t * K + x]));
            for (int j = 0; j < R; j++) {
                const int64_t i = (int64_t)(t * R + j) * K + x;
                ch->kgam[i] = dp_round_arith(b, e * erasing[i]);
            }
        }
        for (int j = 0; j < R; j++)
            decayed_key(ch, t, t * R + j, ends);
    }
}

/* w = A^(-1) B Kgam, u = A^(-1) B V: one triangular solve, or products with the stored inverse. B
 * multiplies rows (bf16, as FLA does) or the inverse. */
static void wy(dp_chunk *ch) {
    const int n = ch->n, K = ch->K, V = ch->V;
    if (ch->AkkB) {
        mul(ch, 0, 0, n, K, n, ch->AkkB, ch->kgam, ch->w);
        mul(ch, 0, 0, n, V, n, ch->AkkB, ch->v, ch->u);
        dp_store_all(ch->kept, ch->w, (int64_t)n * K);
        dp_store_all(ch->kept, ch->u, (int64_t)n * V);
        return;
    }
    for (int i = 0; i < n; i++) {
        for (int x = 0; x < K; x++)
            ch->w[(int64_t)i * K + x] =
                dp_round_arith(ch->base, ch->beta[i] * ch->kgam[(int64_t)i * K + x]);
        for (int x = 0; x < V; x++)
            ch->u[(int64_t)i * V + x] =
                dp_round_arith(ch->base, ch->beta[i] * ch->v[(int64_t)i * V + x]);
    }
    if (ch->by_inverse) {
        DP_OWN double *rw = dp_copy(ch->w, (int64_t)n * K), *ru = dp_copy(ch->u, (int64_t)n * V);
        mul(ch, 0, 0, n, K, n, ch->Akk, rw, ch->w);
        mul(ch, 0, 0, n, V, n, ch->Akk, ru, ch->u);
        dp_store_all(ch->kept, ch->w, (int64_t)n * K);
        dp_store_all(ch->kept, ch->u, (int64_t)n * V);
        return;
    }
    DP_OWN double *A = dp_doubles((int64_t)n * n);
    system_matrix(ch, A);
    solve(ch, A, 0, K, ch->w);
    solve(ch, A, 0, V, ch->u);
}

void dp_chunk_set_design(dp_chunk *ch, const dp_design *design) {
    ch->base = design->base;
    ch->design = *design;
    ch->kept = dp_design_kept(design);
}

int64_t dp_chunk_numbers(const dp_chunk *ch, dp_chunk_array array) {
#define NUMBERS(FIELD, COUNT) COUNT,
    const int64_t n = ch->n, K = ch->K, cK = ch->c * K, cn = ch->c * n, nK = n * K, nV = n * ch->V,
                  nn = n * n, KV = K * ch->V;
    const int64_t numbers[] = {DP_CHUNK_ARRAYS(NUMBERS)};
    return numbers[array];
}

void dp_chunk_begin(dp_chunk *ch, dp_base base, int c, int R, int K, int V, double scale,
                    const dp_chunk_in *in) {
    *ch = (dp_chunk){.base = base,
                     .c = c,
                     .R = R,
                     .K = K,
                     .V = V,
                     .n = c * R,
                     .in_turn = in->in_turn,
                     .scale = scale,
                     .by_inverse = base == DP_BASE_BF16};
    const dp_design design = dp_design_of(base);
    dp_chunk_set_design(ch, &design);
    for (int i = 0; i <= DP_OF_CHUNK_v_new; i++)
        if (i != DP_OF_CHUNK_erasing || in->erasing)
            ch->array[i] = dp_doubles(dp_chunk_numbers(ch, (dp_chunk_array)i));
    const double *from[] = {in->q, in->k, in->erasing, in->v, in->beta};
    const int64_t stride[] = {in->sq, in->sk, in->se, in->sv, in->sb};
    for (int i = 0; i <= DP_OF_CHUNK_beta; i++) {
        const int64_t width = dp_chunk_numbers(ch, (dp_chunk_array)i) / c;
        for (int t = 0; t < c && from[i]; t++)
            memcpy(ch->array[i] + t * width, from[i] + t * stride[i],
                   sizeof(double) * (size_t)width);
    }
}

void dp_chunk_intra(dp_chunk *ch, const dp_chunk_in *in) {
    cumsum(ch, in);
    if (dp_is_factored(ch))
        dp_factored_forward(ch);
    else if (ch->design.gated)
        dp_gated_forward(ch);
    else
        dp_pair_fwd(ch);
    dp_store_all(ch->kept, ch->Aqk, (int64_t)ch->c * ch->n);
}

void dp_chunk_keep_inverse(dp_chunk *ch) {
    const int64_t n = ch->n;
    free(ch->AkkB);
    ch->AkkB = ch->design.fold_beta ? dp_doubles(n * n) : NULL;
    for (int64_t i = 0; ch->AkkB && i < n * n; i++)
        ch->AkkB[i] = dp_round_arith(ch->base, ch->Akk[i] * ch->beta[i % n]);
    if (ch->AkkB) dp_store_all(ch->kept, ch->AkkB, n * n);
    dp_store_all(ch->kept, ch->Akk, n * n);
}

void dp_chunk_solve(dp_chunk *ch) {
    if (!ch->by_inverse) return;
    free(ch->Akk);
    ch->Akk = ch->design.product == DP_INVERSE_MERGED ? merged_inverse(ch) : inverse(ch, ch->base);
    dp_chunk_keep_inverse(ch);
}

void dp_chunk_wy(dp_chunk *ch) {
    decay(ch);
    wy(ch);
}

void dp_chunk_free(dp_chunk *ch) {
    for (int i = 0; i < DP_NCHUNK_ARRAYS; i++) {
        free(ch->array[i]);
        ch->array[i] = NULL;
    }
    dp_pair_forget(ch);
}

/* ---- forward --------------------------------------------------------------------------------- */

/* d = k' X, X rounded with the decay to the chunk's end, which all channels share. */
static void write_late(const dp_chunk *ch, double *X, double *d) {
    DP_OWN double *e = dp_doubles(2 * (int64_t)ch->K);
    double *end = e + ch->K;
    for (int t = 0; t < ch->c; t++) {
        decays_at(ch, t, e, end);
        for (int64_t i = (int64_t)t * ch->R * ch->V; i < (int64_t)(t + 1) * ch->R * ch->V; i++)
            X[i] = dp_store(ch->kept, dp_round_arith(ch->base, end[0] * X[i]));
    }
    mul(ch, 1, 0, ch->K, ch->V, ch->n, ch->k, X, d);
}

void dp_chunk_state(const dp_chunk *ch, double *S, double *X) {
    const int n = ch->n, K = ch->K, V = ch->V;
    const dp_base b = ch->base;
    DP_OWN double *x = dp_doubles((int64_t)n * V), *d = dp_doubles((int64_t)K * V);
    mul(ch, 0, 0, n, V, K, ch->w, S, x); /* reads the UNdecayed state */
    for (int64_t i = 0; i < (int64_t)n * V; i++)
        x[i] = dp_store(ch->kept, dp_round_arith(b, ch->u[i] - x[i]));
    DP_OWN double *minus = dp_is_factored(ch) ? dp_factored_minus(ch) : NULL;
    if (X) memcpy(X, x, sizeof(double) * n * V);
    if (ch->design.late)
        write_late(ch, x, d);
    else
        mul(ch, 1, 0, K, V, n, minus ? minus : ch->kg, x, d);
    for (int i = 0; i < K; i++)
        for (int j = 0; j < V; j++) {
            double *s = S + (int64_t)i * V + j;
            const double write = d[(int64_t)i * V + j];
            *s = minus ? dp_round_arith(b, ch->eC[i] * dp_round_arith(b, *s + write))
                       : dp_round_arith(b, dp_round_arith(b, ch->eC[i] * *s) + write);
        }
}

void dp_chunk_pair(const dp_chunk *ch, double *P, double *H) {
    const int n = ch->n, K = ch->K, V = ch->V;
    const dp_base b = ch->base;
    DP_OWN double *X = dp_doubles((int64_t)K * n), *Xu = dp_doubles((int64_t)K * V),
                  *Xw = dp_doubles((int64_t)K * K);
    mul(ch, 0, 1, K, n, K, P, ch->kg, X);
    for (int64_t i = 0; i < (int64_t)K * n; i++)
        X[i] = dp_store(ch->kept, dp_round_arith(b, X[i]));
    mul(ch, 0, 0, K, V, n, X, ch->u, Xu);
    mul(ch, 0, 0, K, K, n, X, ch->w, Xw);
    for (int64_t i = 0; i < (int64_t)K * V; i++)
        H[i] = dp_round_arith(b, H[i] + Xu[i]);
    for (int64_t i = 0; i < (int64_t)K * K; i++)
        P[i] = dp_round_arith(b, dp_round_arith(b, P[i] * ch->eC[i % K]) - Xw[i]);
}

void dp_chunk_output(const dp_chunk *ch, double *o) {
    const int c = ch->c, K = ch->K, V = ch->V;
    const dp_base b = ch->base;
    DP_OWN double *p = dp_doubles((int64_t)c * V);
    mul(ch, 0, 0, c, V, K, ch->qg, ch->h, o);
    mul(ch, 0, 0, c, V, ch->n, ch->Aqk, ch->v_new, p);
    for (int64_t i = 0; i < (int64_t)c * V; i++)
        o[i] = dp_store(
            ch->design.out[DP_RESULT_O],
            dp_round_arith(b, dp_round_arith(b, dp_round_arith(b, ch->scale) * o[i]) + p[i]));
}

void dp_chunk_M(const dp_chunk *ch, double *M) {
    const int K = ch->K;
    mul(ch, 1, 0, K, K, ch->n, ch->kg, ch->w, M);
    for (int i = 0; i < K; i++)
        for (int j = 0; j < K; j++) {
            double *m = M + (int64_t)i * K + j;
            *m = dp_round_arith(ch->base, (i == j ? ch->eC[i] : 0.0) - *m);
        }
}

/* ---- backward -------------------------------------------------------------------------------- */

void dp_chunk_dAv(dp_chunk *ch, const double *dout) {
    const int64_t nV = (int64_t)ch->n * ch->V;
    if (!ch->dv_local) ch->dv_local = dp_doubles(nV);
    mul(ch, 1, 0, ch->n, ch->V, ch->c, ch->Aqk, dout, ch->dv_local);
    dp_store_all(ch->kept, ch->dv_local, nV);
}

/* q' (decay from the chunk's start o do), do rounded with it. */
static void read_late(const dp_chunk *ch, const double *dout, double *a) {
    const int K = ch->K, V = ch->V;
    DP_OWN double *e = dp_doubles(2 * (int64_t)K), *y = dp_doubles((int64_t)ch->c * V);
    for (int t = 0; t < ch->c; t++) {
        decays_at(ch, t, e, e + K);
        for (int64_t i = (int64_t)t * V; i < (int64_t)(t + 1) * V; i++)
            y[i] = dp_store(ch->kept, dp_round_arith(ch->base, e[0] * dout[i]));
    }
    mul(ch, 1, 0, K, V, ch->c, ch->q, y, a);
}

void dp_chunk_state_bwd(const dp_chunk *ch, const double *dout, double *dS, double *dv_new) {
    const int n = ch->n, K = ch->K, V = ch->V;
    const dp_base b = ch->base;
    DP_OWN double *x = dp_doubles((int64_t)n * V), *a = dp_doubles((int64_t)2 * K * V);
    double *d = a + (int64_t)K * V;
    mul(ch, 0, 0, n, V, K, ch->kg, dS, x); /* reads the UNdecayed dS_c */
    for (int64_t i = 0; i < (int64_t)n * V; i++)
        x[i] = dp_store(ch->kept, dp_round_arith(b, ch->dv_local[i] + x[i]));
    if (ch->design.late_do)
        read_late(ch, dout, a);
    else
        mul(ch, 1, 0, K, V, ch->c, ch->qg, dout, a);
    mul(ch, 1, 0, K, V, n, ch->w, x, d);
    for (int i = 0; i < K; i++)
        for (int j = 0; j < V; j++) {
            const int64_t z = (int64_t)i * V + j;
            const double s =
                dp_round_arith(b, dp_round_arith(b, ch->eC[i] * dS[z]) +
                                      dp_round_arith(b, dp_round_arith(b, ch->scale) * a[z]));
            dS[z] = dp_round_arith(b, s - d[z]);
        }
    if (dv_new) memcpy(dv_new, x, sizeof(double) * n * V);
}

void dp_chunk_grad_alloc(dp_chunk_grad *g, const dp_chunk *ch) {
    for (int i = 0; i <= DP_OF_CHUNK_gcum; i++)
        g->of[i] = ch->array[i] ? dp_doubles(dp_chunk_numbers(ch, (dp_chunk_array)i)) : NULL;
}

void dp_chunk_grad_free(dp_chunk_grad *g) {
    for (int i = 0; i <= DP_OF_CHUNK_gcum; i++)
        free(g->of[i]);
    *g = (dp_chunk_grad){0};
}

static double sum_arith(dp_base b, const double *x, const double *y,
                        int n) { /* sum x o y, every operation rounded */
    double s = 0;
    for (int i = 0; i < n; i++)
        s = dp_round_arith(b, s + dp_round_arith(b, x[i] * y[i]));
    return s;
}

static double sum_stored(dp_base b, dp_format f, const double *x, const double *y,
                         int n) { /* the same of numbers that were stored in between */
    double s = 0;
    for (int i = 0; i < n; i++)
        s = dp_round_arith(b, s + dp_round_arith(b, dp_store(f, x[i]) * dp_store(f, y[i])));
    return s;
}

/* d[i] = sum of row i of A o B, [n][m]. */
static void add_rows(dp_base b, int n, int m, const double *A, const double *B, double *d) {
    for (int i = 0; i < n; i++)
        d[i] = dp_round_arith(b, d[i] + sum_arith(b, A + (int64_t)i * m, B + (int64_t)i * m, m));
}

/* dbeta as FLA sums it, from dZ = A^(-T) dv_new, dw = -dv_new S_0' and dA = dv_new V' + dw Kgam':
 *   dbeta = rowsum(dZ o V) + rowsum(A^(-T) dw o Kgam) - rowsum(A^(-T) dA B A^(-T) o L)
 * Terms that cancel in E are multiplied first. */
static void sum_dbeta(const dp_chunk *ch, const double *dZ, double *dbeta) {
    const int n = ch->n, K = ch->K, V = ch->V;
    const int64_t nK = (int64_t)n * K, nn = (int64_t)n * n;
    DP_OWN double *all = dp_doubles(2 * nK + 3 * nn);
    double *dw = all, *y = dw + nK, *dA = y + nK, *x = dA + nn, *back = x + nn;
    mul(ch, 0, 1, n, K, V, ch->dv_new, ch->h, dw);
    for (int64_t i = 0; i < nK; i++)
        dw[i] = dp_store(ch->kept, -dw[i]);
    mul(ch, 1, 0, n, K, n, ch->Akk, dw, y);
    memset(dbeta, 0, sizeof *dbeta * (size_t)n);
    add_rows(ch->base, n, V, dZ, ch->v, dbeta);
    add_rows(ch->base, n, K, y, ch->kgam, dbeta);
    mul(ch, 0, 1, n, n, V, ch->dv_new, ch->v, dA);
    memcpy(y, ch->kgam, sizeof *y * (size_t)nK);
    dp_store_all(ch->kept, y, nK);
    mul(ch, 0, 1, n, n, K, dw, y, x);
    for (int64_t i = 0; i < nn; i++)
        dA[i] = dp_store(ch->kept, dp_round_arith(ch->base, dA[i] + x[i]) * ch->beta[i % n]);
    mul(ch, 0, 1, n, n, n, dA, ch->Akk, x);
    dp_store_all(ch->kept, x, nn);
    mul(ch, 1, 0, n, n, n, ch->Akk, x, back);
    for (int64_t i = 0; i < nn; i++)
        back[i] = -back[i];
    add_rows(ch->base, n, n, back, ch->L, dbeta);
}

/* dZ = A^(-T) dv_new; dE = B dZ -> dv; E = V - Kgam S_0 - L X; dbeta = sum_v dZ o E */
void dp_chunk_wy_bwd(const dp_chunk *ch, dp_chunk_grad *g) {
    const int n = ch->n, K = ch->K, V = ch->V;
    const dp_base b = ch->base;
    const int64_t nV = (int64_t)n * V;
    DP_OWN double *E = dp_doubles(nV), *LX = dp_doubles(nV);
    DP_OWN double *dZ;
    if (ch->by_inverse) {
        dZ = dp_doubles(nV);
        mul(ch, 1, 0, n, V, n, ch->Akk, ch->dv_new, dZ);
    } else {
        DP_OWN double *A = dp_doubles((int64_t)n * n);
        system_matrix(ch, A);
        dZ = dp_copy(ch->dv_new, nV);
        solve(ch, A, 1, V, dZ);
    }
    mul(ch, 0, 0, n, V, K, ch->kgam, ch->h, E);
    mul(ch, 0, 0, n, V, n, ch->L, ch->v_new, LX);
    for (int64_t i = 0; i < nV; i++)
        E[i] = dp_round_arith(b, dp_round_arith(b, ch->v[i] - E[i]) - LX[i]);
    for (int i = 0; i < n; i++) {
        g->dbeta[i] = sum_arith(b, dZ + (int64_t)i * V, E + (int64_t)i * V, V);
        for (int x = 0; x < V; x++)
            g->dv[(int64_t)i * V + x] = dp_round_arith(b, ch->beta[i] * dZ[(int64_t)i * V + x]);
    }
    if (ch->design.summed) sum_dbeta(ch, dZ, g->dbeta);
}

/* dg, the reverse cumulative sum of dgam. */
static void gate_sums(const dp_chunk *ch, const double *dgam, double *dg) {
    const int K = ch->K;
    for (int x = 0; x < K; x++) {
        double s = 0;
        for (int t = ch->c - 1; t >= 0; t--)
            dg[t * K + x] = s = dp_round_arith(ch->base, s + dgam[t * K + x]);
    }
}

void dp_chunk_grads(const dp_chunk *ch, const double *dout, dp_chunk_grad *g) {
    dp_chunk_wy_bwd(ch, g);
    dp_chunk_intra_bwd(ch, dout, g);
}

/* Shared by the steps of the backward inside a chunk, in one buffer. */
typedef struct {
    const dp_chunk *ch;
    double *buf, *r, *wsum, *dgam, *pair; /* [c][K] */
    double *dkr, *dkw, *end;              /* [n][K]: read and write part of dk, dS_c X */
    double *dP, *dL;                      /* [c][n], [n][n] */
    double *z, *exps, *ends;              /* [K] */
} intra_work;

static intra_work intra_open(const dp_chunk *ch) {
    const int64_t cK = (int64_t)ch->c * ch->K, nK = (int64_t)ch->n * ch->K,
                  cn = (int64_t)ch->c * ch->n, nn = (int64_t)ch->n * ch->n;
    intra_work w = {.ch = ch, .buf = dp_doubles(4 * cK + 3 * nK + cn + nn + 3 * ch->K)};
    w.r = w.buf;
    w.wsum = w.r + cK;
    w.dgam = w.wsum + cK;
    w.pair = w.dgam + cK;
    w.dkr = w.pair + cK;
    w.dkw = w.dkr + nK;
    w.end = w.dkw + nK;
    w.dP = w.end + nK;
    w.dL = w.dP + cn;
    w.z = w.dL + nn;
    w.exps = w.z + ch->K;
    w.ends = w.exps + ch->K;
    return w;
}

/* dP, dL and the products with the states. */
static void intra_products(intra_work *w, const double *dout, dp_chunk_grad *g) {
    const dp_chunk *ch = w->ch;
    const int c = ch->c, n = ch->n, K = ch->K, V = ch->V;
    const dp_base b = ch->base;
    mul(ch, 0, 1, c, n, V, dout, ch->v_new, w->dP); /* dP = scale do X', used for i <= s */
    mul(ch, 0, 1, n, n, V, g->dv, ch->v_new,
        w->dL); /* -dL = dE X', used where a key reads: for i < s, and inside a token if its keys
                 * read one after another */
    for (int64_t i = 0; i < (int64_t)c * n; i++)
        w->dP[i] = dp_round_arith(b, dp_round_arith(b, ch->scale) * w->dP[i]);
    for (int64_t i = 0; i < (int64_t)n * n; i++)
        w->dL[i] = -w->dL[i];
    mul(ch, 0, 1, c, K, V, dout, ch->h, g->dq);        /* S_0 do */
    mul(ch, 0, 1, n, K, V, g->dv, ch->h, w->dkr);      /* S_0 dE */
    mul(ch, 0, 1, n, K, V, ch->v_new, ch->dh, w->end); /* dS_c X */
}

/* Their decays: parts of dq and dk from the states, and of dg at token t. */
static void intra_state_parts(intra_work *w, int t, dp_chunk_grad *g) {
    const dp_chunk *ch = w->ch;
    const int R = ch->R, K = ch->K;
    const dp_base b = ch->base;
    const double *erasing = dp_chunk_erasing(ch);
    decays_at(ch, t, w->exps, w->ends);
    for (int x = 0; x < K; x++) {
        const double e = w->exps[x], toend = w->ends[x];
        double *dq = g->dq + t * K + x, rr, ww = 0;
        *dq = dp_round_arith(b, dp_round_arith(b, dp_round_arith(b, ch->scale) * e) * *dq);
        rr = dp_round_arith(b, ch->q[t * K + x] * *dq);
        for (int j = 0; j < R; j++) {
            const int64_t i = (int64_t)(t * R + j) * K + x;
            w->dkr[i] = -dp_round_arith(b, e * w->dkr[i]);
            w->dkw[i] = w->end[i] = dp_round_arith(b, toend * w->end[i]);
            rr = dp_round_arith(b, rr + dp_round_arith(b, erasing[i] * w->dkr[i]));
            ww = dp_round_arith(b, ww + dp_round_arith(b, ch->k[i] * w->end[i]));
        }
        w->r[t * K + x] = rr;
        w->wsum[t * K + x] = ww;
    }
}

/* dk, and dgam = q o dq + k o (dk_read - dk_write); of erasing keys the reads are theirs. Gated
 * operands have made the pairs' part of dgam. */
static void intra_keys(intra_work *w, dp_chunk_grad *g) {
    const dp_chunk *ch = w->ch;
    const int R = ch->R, K = ch->K;
    const dp_base b = ch->base;
    for (int t = 0; t < ch->c; t++)
        for (int x = 0; x < K; x++) {
            double d = dp_round_arith(b, ch->q[t * K + x] * g->dq[t * K + x]);
            for (int j = 0; j < R; j++) {
                const int64_t i = (int64_t)(t * R + j) * K + x;
                if (ch->erasing) {
                    d = dp_round_arith(b, d + dp_round_arith(b, ch->erasing[i] * w->dkr[i]));
                    d = dp_round_arith(b, d - dp_round_arith(b, ch->k[i] * w->dkw[i]));
                    g->derasing[i] = w->dkr[i];
                    g->dk[i] = w->dkw[i];
                    continue;
                }
                d = dp_round_arith(
                    b, d + dp_round_arith(b, ch->k[i] * dp_round_arith(b, w->dkr[i] - w->dkw[i])));
                g->dk[i] = dp_round_arith(b, w->dkr[i] + w->dkw[i]);
            }
            const int64_t at = (int64_t)t * K + x;
            w->dgam[at] = ch->design.gated && !dp_is_factored(ch)
                              ? (float)(w->r[at] - w->wsum[at] + w->pair[at])
                              : d;
        }
}

/* Adds rowsum(dS_c o S_c) = z + sum_t wsum to dgam of the last token, without forming S_c. */
static void intra_end(intra_work *w) {
    const dp_chunk *ch = w->ch;
    const int c = ch->c, K = ch->K, V = ch->V;
    const dp_base b = ch->base;
    for (int x = 0; x < K; x++) /* eC o rowsum(S_0 o dS_c), of the states as they are stored */
        w->z[x] = dp_round_arith(b, ch->eC[x] * sum_stored(b, ch->kept, ch->h + (int64_t)x * V,
                                                           ch->dh + (int64_t)x * V, V));
    for (int x = 0; x < K; x++) {
        double s = w->z[x];
        for (int t = 0; t < c; t++)
            s = dp_round_arith(b, s + w->wsum[t * K + x]);
        w->dgam[(c - 1) * K + x] = dp_round_arith(b, w->dgam[(c - 1) * K + x] + s);
    }
}

void dp_chunk_intra_bwd(const dp_chunk *ch, const double *dout, dp_chunk_grad *g) {
    intra_work w = intra_open(ch);
    intra_products(&w, dout, g);
    for (int t = 0; t < ch->c; t++)
        intra_state_parts(&w, t, g);
    if (dp_is_factored(ch))
        dp_factored_backward(ch, &(dp_pair_adjoint){w.dL, w.dP, g->dq, w.dkr, w.dkw});
    else if (ch->design.gated)
        dp_gated_backward(ch, &(dp_gated_gradients){w.dL, w.dP, g->dq, w.dkr, w.dkw, w.pair});
    else
        dp_pair_bwd(ch, &(dp_pair_adjoint){w.dL, w.dP, g->dq, w.dkr, w.dkw});
    intra_keys(&w, g);
    intra_end(&w);
    gate_sums(ch, w.dgam, g->dg);
    free(w.buf);
}
