/* Effective bits and bias of a chain of M (bits.h). */
#include "bits.h"
#include "ref/arithmetic/elementary.h"
#include "ref/arithmetic/mm.h"
#include "ref/vocabulary/problem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const dp_bits_models[DP_NBITMODELS] = {"store", "operand", "accumulate"};

#define FIRST 16
#define LAST 256
#define RMS 0.42466 /* sqrt(1/(8 ln 2)) */
/* 2 * 0.7213: mean relative loss of one product with two truncated operands over u */
#define SHRINK 1.4426950408889634

/* ---- yardsticks ------------------------------------------------------------------------------ */

static void row_squares(int K, const double *P, double *r) {
    for (int i = 0; i < K; i++) {
        r[i] = 0;
        for (int j = 0; j < K; j++)
            r[i] += P[i * K + j] * P[i * K + j];
    }
}

static void column_squares(int K, const double *W, double *c) {
    memset(c, 0, sizeof(double) * (size_t)K);
    for (int i = 0; i < K; i++)
        for (int j = 0; j < K; j++)
            c[j] += W[i * K + j] * W[i * K + j];
}

/* Row sums of Q = sum over k of (partial sum up to k)^2, terms taken in order with FMA: math.md
 * j.4, accumulate. */
static void partial_squares(int K, const double *M, const double *P, double *q) {
    DP_OWN double *s = dp_doubles(K);
    for (int i = 0; i < K; i++) {
        memset(s, 0, sizeof(double) * (size_t)K);
        q[i] = 0;
        for (int k = 0; k < K; k++)
            for (int j = 0; j < K; j++) {
                s[j] += M[i * K + k] * P[k * K + j];
                q[i] += s[j] * s[j];
            }
    }
}

static double dot(int K, const double *a, const double *b) {
    double s = 0;
    for (int i = 0; i < K; i++)
        s += a[i] * b[i];
    return s;
}

/* Row sums that the three models need of every product: rP of P_j, q of its accumulation, m of
 * (M_j^2)(P_(j-1)^2); all [n][K]. */
typedef struct {
    double *rP, *q, *m;
} row_sums;

/* With c(W) the column sums of W^2, entries of V_n (math.md j.4) add up to
 *   store       c(W_j) . rP_j,
 *   operands    c(W_j) . m_j + c(W_j M_j) . rP_(j-1),
 *   accumulate  c(W_j) . q_j,   j = 2..n, W_n = I, W_(j-1) = W_j M_j. */
static void yardsticks(int n, int K, const double *M, const row_sums *s, double A[DP_NBITMODELS]) {
    const int64_t KK = (int64_t)K * K;
    DP_OWN double *W = dp_doubles(KK), *X = dp_doubles(KK), *c = dp_doubles(2 * K);
    double *d = c + K, V[DP_NBITMODELS] = {0};
    for (int i = 0; i < K; i++)
        W[i * K + i] = 1;
    for (int j = n - 1; j >= 1; j--) {
        dp_mm(DP_FP64, 0, 0, K, K, K, W, M + j * KK, X);
        column_squares(K, W, c);
        column_squares(K, X, d);
        V[DP_BITS_STORE] += dot(K, c, s->rP + j * K);
        V[DP_BITS_OPERAND] += dot(K, c, s->m + j * K) + dot(K, d, s->rP + (j - 1) * K);
        V[DP_BITS_ACCUMULATE] += dot(K, c, s->q + j * K);
        dp_swap(&W, &X);
    }
    for (int m = 0; m < DP_NBITMODELS; m++)
        A[m] = sqrt(V[m]);
}

void dp_bits_scale_init(dp_bits_scale *s, int n, int K, const double *M) {
    const int64_t KK = (int64_t)K * K;
    const int top = n < LAST ? n : LAST;
    *s = (dp_bits_scale){.K = K};
    if (n < FIRST) return;
    DP_OWN double *P = dp_copy(M, KK), *Q = dp_doubles(KK), *buf = dp_doubles(3 * (int64_t)top * K);
    const row_sums r = {buf, buf + (int64_t)top * K, buf + 2 * (int64_t)top * K};
    row_squares(K, P, r.rP);
    for (int j = 1; j < top; j++) {
        const double *Mj = M + j * KK;
        partial_squares(K, Mj, P, r.q + j * K);
        for (int i = 0; i < K; i++)
            for (int k = 0; k < K; k++)
                r.m[j * K + i] += Mj[i * K + k] * Mj[i * K + k] * r.rP[(j - 1) * K + k];
        dp_mm(DP_FP64, 0, 0, K, K, K, Mj, P, Q);
        dp_swap(&P, &Q);
        row_squares(K, P, r.rP + j * K);
        if (j + 1 < FIRST << s->npoint) continue;
        s->chunks[s->npoint] = j + 1;
        s->P[s->npoint] = dp_copy(P, KK);
        yardsticks(j + 1, K, M, &r, s->A[s->npoint++]);
    }
}

void dp_bits_scale_free(dp_bits_scale *s) {
    for (int i = 0; i < s->npoint; i++)
        free(s->P[i]);
    s->npoint = 0;
}

/* ---- readings -------------------------------------------------------------------------------- */

static int significant_bits(double x) {
    uint64_t b;
    if (x == 0 || !isfinite(x)) return 0;
    x = frexp(x, &(int){0});
    memcpy(&b, &x, sizeof b);
    b = (b & 0xfffffffffffffu) | 1ull << 52;
    return 53 - __builtin_ctzll(b);
}

/* Bits of truncated operands that make M shrink as fast: <M_hat, M> = |M|^2 exp(-(n-1) 1.4427
 * 2^-bits). NAN unless most of err lies along -M. */
static double truncated_bits(const dp_bits_scale *s, int i, const double *err) {
    const int KK = s->K * s->K;
    const double ep = dot(KK, err, s->P[i]), ee = dot(KK, err, err), pp = dot(KK, s->P[i], s->P[i]),
                 kept = 1 + ep / pp;
    if (!(ep < 0) || ep * ep < 0.5 * ee * pp || kept <= 0) return NAN;
    return -dp_log2(-dp_log(kept) / ((s->chunks[i] - 1) * SHRINK));
}

/* Least squares of log |err| over log n. */
static double growth(const dp_bits *b, const double *e) {
    double sx = 0, sy = 0, sxx = 0, sxy = 0;
    const int n = b->npoint;
    for (int i = 0; i < n; i++) {
        /* NOLINTNEXTLINE(*CallAndMessage): of each of npoint */
        const double x = dp_log(b->chunks[i]), y = dp_log(e[i]);
        sx += x;
        sy += y;
        sxx += x * x;
        sxy += x * y;
    }
    return n >= 3 ? (n * sxy - sx * sy) / (n * sxx - sx * sx) : NAN;
}

/* ---- decision -------------------------------------------------------------------------------- */

typedef struct {
    dp_bits_model model;
    double bits;
    int biased;
} law;
static law law_of(dp_format f) {
    const dp_format_info *i = &dp_formats[f];
    const dp_bits_model model = i->u_store > 0                 ? DP_BITS_STORE
                                : i->u_op > 0 && !i->two_parts ? DP_BITS_OPERAND
                                                               : DP_BITS_ACCUMULATE;
    return (law){model, i->bits, i->truncates};
}

/* Stored numbers as narrow as the store reading says: storage. Error explained by accumulation in
 * numbers as wide as those stored: accumulation.
 * Else the operands. (bf16 operands read 0.5 bit less as storage, and K = 32 terms about 2 bits
 * less than that as accumulation.) */
static dp_bits_model where(const dp_bits *b) {
    if (b->bits[DP_BITS_STORE] > b->width - DP_BITS_MARGIN) return DP_BITS_STORE;
    return b->bits[DP_BITS_ACCUMULATE] > b->width - 1 ? DP_BITS_ACCUMULATE : DP_BITS_OPERAND;
}

static int alike(const dp_bits *b) {
    for (int f = 0; f < DP_NFORMATS; f++) {
        const law l = law_of((dp_format)f);
        if (!dp_formats[f].two_parts && l.model == b->model && l.biased == b->biased &&
            fabs(l.bits - b->effective) <= DP_BITS_MARGIN)
            return f;
    }
    return -1;
}

static const char *words(int f) { return f < 0 ? "no known format" : dp_formats[f].words; }

static void say(dp_bits *b, dp_format claimed) {
    const int last = b->npoint - 1;
    char bias[96] = "";
    if (b->biased)
        snprintf(bias, sizeof bias,
                 ", biased: slope %.2f, readings fall from %.1f bits at %d chunks to %.1f at %d",
                 b->slope, b->at[0][b->model], b->chunks[0], b->at[last][b->model],
                 b->chunks[last]);
    snprintf(b->says, sizeof b->says, "%s%s%s %s: %.1f bits%s%s", b->wrong ? "claims " : "",
             b->wrong ? words(claimed) : "", b->wrong ? " but behaves like" : "behaves like",
             words(b->like), b->effective, isnan(b->truncated) || !b->biased ? "" : " truncated",
             bias);
}

void dp_bits_read(const dp_bits_scale *s, const double *err, const double *got, dp_format claimed,
                  dp_bits *b) {
    const int64_t KK = (int64_t)s->K * s->K;
    double e[DP_BITS_POINTS], truncated = 0;
    *b = (dp_bits){.npoint = s->npoint, .truncated = NAN, .slope = NAN, .like = -1};
    for (int i = 0; i < s->npoint; i++) {
        e[i] = sqrt(dot((int)KK, err + i * KK, err + i * KK));
        if (!(e[i] > 0) || !isfinite(e[i])) b->npoint = 0;
        b->chunks[i] = s->chunks[i];
        truncated += truncated_bits(s, i, err + i * KK) / s->npoint;
        for (int m = 0; m < DP_NBITMODELS; m++)
            b->bits[m] += (b->at[i][m] = -dp_log2(e[i] / (RMS * s->A[i][m]))) / s->npoint;
        for (int64_t x = 0; x < KK; x++) {
            const int w = significant_bits(got[i * KK + x]);
            if (w > b->width) b->width = w;
        }
    }
    if (!b->npoint) return;
    b->slope = growth(b, e);
    b->biased = b->slope > 0.75;
    b->model = where(b);
    b->truncated = truncated;
    b->effective = b->biased && !isnan(truncated) ? truncated : b->bits[b->model];
    b->like = alike(b);
    const law l = law_of(claimed);
    b->wrong = (b->biased && !l.biased) ||
               (b->biased && l.biased ? b->effective : b->bits[l.model]) < l.bits - DP_BITS_MARGIN;
    say(b, claimed);
}
