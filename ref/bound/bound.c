#include "bound.h"
#include "bound_pair.h"
#include "ref/arithmetic/product.h"
#include "ref/arithmetic/spectral.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Conventions. Dx is the p-th power of a bound of |computed x - exact x|, entrywise, first order;
 * ax = |x|, px = |x|^p. Independent errors add in
 * Dx: with p = 1 that is the triangle inequality, with p = 2 the sum of squares of mean-independent
 * errors (bound.h). Relative errors of one number that has only a few of them are added before the
 * power is taken (an overestimate for p = 2). sum_error(n) is the error of a sum of n products
 * against the sum of absolute values; it multiplies |A||B| and is then raised to p. Operand
 * roundings differ from entry to entry and multiply |A|^p|B|^p. Where an operand is stored in its
 * short format already, its rounding is part of its own Dx; operand terms with uo then count it
 * once more, which is within a factor 2. */

dp_rounding dp_rounding_of(dp_base b, int p) {
    dp_rounding r = {.u = 0x1p-53, .tiny = 0x1p-1022, .p = p};
    if (b != DP_BASE_FP64) {
        r.u = 0x1p-24;
        r.tiny = 0x1p-126;
    }
    if (b == DP_BASE_BF16) {
        r.us = r.uo = 0x1p-8;
        r.inverse = 1;
    }
    return r;
}

dp_rounding dp_rounding_of_design(const dp_design *d, int p) {
    dp_rounding r = dp_rounding_of(d->base, p);
    if (d->gated) r.pair = 2 * r.uo * (1 + 0x1p-6);
    return r;
}

int64_t dp_state_error_size(const dp_rounding *r, int K, int V) {
    return r->p == 1 ? V : 2 * (int64_t)K * V;
}
int64_t dp_chain_error_size(const dp_rounding *r, int K) { return r->p == 1 ? 1 : (int64_t)K * K; }

double dp_error_fro(const dp_rounding *r, const double *D, int64_t n) {
    double s = 0;
    for (int64_t i = 0; i < n; i++)
        s += r->p == 2 ? D[i] : D[i] * D[i];
    return (r->p == 2 ? DP_LAMBDA : 1) * sqrt(s);
}

double dp_sum_error(const dp_rounding *r, int n) {
    return r->p == 1 ? dp_gamma(n, r->u) : sqrt(n / 3.0 + 1) * r->u;
}

double dp_norm_fro(int64_t n, const double *A) {
    double scale = 0, s = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(A[i])) return fabs(A[i]);
        scale = fmax(scale, fabs(A[i]));
    }
    if (scale == 0) return 0;
    for (int64_t i = 0; i < n; i++)
        s += (A[i] / scale) * (A[i] / scale);
    return scale * sqrt(s);
}

double dp_norm_abs2_up(int m, int n, const double *A) {
    double inf = 0, one = 0, *col = dp_doubles(n);
    for (int i = 0; i < m; i++) {
        double s = 0;
        for (int j = 0; j < n; j++) {
            s += fabs(A[(int64_t)i * n + j]);
            col[j] += fabs(A[(int64_t)i * n + j]);
        }
        inf = fmax(inf, s);
    }
    for (int j = 0; j < n; j++)
        one = fmax(one, col[j]);
    free(col);
    return sqrt(inf * one) * (1 + 0x1p-40);
}

/* |A|_2^2 is the largest eigenvalue of A'A. The computed G is within gamma_m |A|'|A| of it, whose
 * 2-norm is |A|_F^2 at most. A is scaled by a power of two to |A|_F about 1: nothing that counts
 * underflows in the square. */
double dp_norm2_up(int m, int n, const double *A) {
    const double f = dp_norm_fro((int64_t)m * n, A);
    if (!isfinite(f) || f == 0) return f;
    int exponent;
    frexp(f, &exponent);
    double *As = dp_copy(A, (int64_t)m * n), *G = dp_doubles((int64_t)n * n);
    for (int64_t i = 0; i < (int64_t)m * n; i++)
        As[i] = ldexp(As[i], -exponent);
    dp_mul_f64((dp_shape){1, 0, n, n, m}, As, As, G);
    const double fro2 =
        ldexp(f, -exponent) * ldexp(f, -exponent) * (1 + 2 * dp_gamma(m * n + 8, 0x1p-53));
    const double top = fmin(fro2, dp_eigenvalue_up(n, G) + dp_gamma(m + 2, 0x1p-53) * fro2);
    free(As);
    free(G);
    return ldexp(sqrt(top) * (1 + 0x1p-48), exponent);
}

/* ---- small tools ----------------------------------------------------------------------------- */

static double root(const dp_rounding *r, double x) { return r->p == 2 ? sqrt(x) : x; }

static double *absof(const double *x, int64_t n) {
    double *y = dp_doubles(n);
    for (int64_t i = 0; i < n; i++)
        y[i] = fabs(x[i]);
    return y;
}

static double *pwof(const dp_rounding *r, const double *x, int64_t n) {
    double *y = dp_doubles(n);
    for (int64_t i = 0; i < n; i++)
        y[i] = dp_pw(r, x[i]);
    return y;
}

/* C += a op(A) op(B), all non-negative */
static void addmm(double a, int ta, int tb, int m, int n, int k, const double *A, const double *B,
                  double *C) {
    dp_add_mul_f64((dp_shape){ta, tb, m, n, k}, a, A, B, C);
}

static double *product(int ta, int tb, int m, int n, int k, const double *A, const double *B) {
    double *C = dp_doubles((int64_t)m * n);
    addmm(1, ta, tb, m, n, k, A, B, C);
    return C;
}

/* D += (a |x|)^p */
static void add_scaled(const dp_rounding *r, double a, const double *x, int64_t n, double *D) {
    for (int64_t i = 0; i < n; i++)
        D[i] += dp_pw(r, a * x[i]);
}

/* D += (a |A||B|)^p: what summation costs */
static void add_sum(const dp_rounding *r, double a, int ta, int tb, int m, int n, int k,
                    const double *aA, const double *aB, double *D) {
    double *S = product(ta, tb, m, n, k, aA, aB);
    add_scaled(r, a, S, (int64_t)m * n, D);
    free(S);
}

static void add_const(double a, int64_t n, double *D) {
    for (int64_t i = 0; i < n; i++)
        D[i] += a;
}

static double norm2(const double *x, int n) {
    double s = 0;
    for (int i = 0; i < n; i++)
        s += x[i] * x[i];
    return sqrt(s);
}

static double column_norm(const double *A, int m, int n, int j) {
    double s = 0;
    for (int i = 0; i < m; i++)
        s += A[(int64_t)i * n + j] * A[(int64_t)i * n + j];
    return sqrt(s);
}

/* p-th power of the 2-norm of a vector of errors whose p-th powers are D[0], D[stride], ... */
static double error_norm(const dp_rounding *r, const double *D, int n, int64_t stride) {
    double s = 0;
    for (int i = 0; i < n; i++)
        s += r->p == 2 ? D[i * stride] : D[i * stride] * D[i * stride];
    return r->p == 2 ? s : sqrt(s);
}

/* ---- intra --------------------------------------------------------------------------------------
 * gcum is a running sum: a step adds the error of g_t, which depends on g_t alone and is added up
 * in absolute value (equal gates have equal errors), and the rounding u |gcum_t|. The error of
 * gcum_s - gcum_i is what the steps in between added (the common prefix cancels).
 * An exponent d computed with error Dd gives exp a relative error Dd + u |d| (the subtraction)
 * + 2 u (the function). Hence
 *   relative error of pair[s,i] : (D_s - D_i) + u |d| + 2u;
 *   of exp(gcum_s): D_s + 2u;   of exp(gcum_last - gcum_s) likewise.
 * L and Aqk are sums over K of three factors: each term has the relative error 2 ek + eps_pair, the
 * sum sum_error(K + 2) and, as a whole, the row errors 2 er;  Aqk the same with eq + ek and us
 * stored.
 *   A = I + B L:  DA = beta (DL + (eb + u) |L|).
 * Solve: the computed X satisfies (A + dA) X = rhs, |dA| <= sum_error(n) |A| (Higham 8.5),
 *   so DX = |T| (Drhs + (DA + ..|A|) |X|).
 * Inverse: DT = |T| (DA + sum_error(n + 1) |A|) |T| (Higham 14.2) + us |T| stored;
 *   then w = T rhs with rhs rounded by uo. */
static void intra_pairs(dp_chunk_bound *b) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int c = ch->c, R = ch->R, K = ch->K, n = ch->n;
    const double gK = dp_sum_error(r, K + 2), tiny = dp_pw(r, K * r->tiny);
    double *e = dp_doubles(2 * K), *ee = e + K;
    for (int s = 0; s < c; s++)
        for (int i = 0; i <= s; i++) {
            dp_bound_pair(b, s, i, e, ee);
            for (int m = 0; m < R; m++) {
                const double *ki = ch->k + (int64_t)(i * R + m) * K;
                const int64_t z = (int64_t)s * n + i * R + m;
                double D = 0, sum = 0;
                for (int x = 0; x < K; x++) {
                    const double t = fabs(ch->q[s * K + x] * ki[x]) * e[x];
                    sum += t;
                    D += dp_pw(
                        r, t * (b->eq[s * K + x] + b->ek[(int64_t)(i * R + m) * K + x] + ee[x]));
                }
                b->DAqk[z] = dp_pw(r, ch->scale) * (D + dp_pw(r, (gK + r->u) * sum)) +
                             dp_pw(r, 2 * b->er * ch->Aqk[z]) + dp_pw(r, r->us * ch->Aqk[z]) + tiny;
                for (int j = 0; j < R && i < s; j++) {
                    const double *ks = ch->k + (int64_t)(s * R + j) * K;
                    const int64_t y = (int64_t)(s * R + j) * n + i * R + m;
                    D = sum = 0;
                    for (int x = 0; x < K; x++) {
                        const double t = fabs(ks[x] * ki[x]) * e[x];
                        sum += t;
                        D += dp_pw(r, t * (b->ek[(int64_t)(s * R + j) * K + x] +
                                           b->ek[(int64_t)(i * R + m) * K + x] + ee[x]));
                    }
                    b->DL[y] = D + dp_pw(r, gK * sum) + dp_pw(r, 2 * b->er * ch->L[y]) + tiny;
                }
            }
        }
    free(e);
}

/* own: the stored inverse that w and u come from is exact. */
static void intra_solve(dp_chunk_bound *b, int own) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int n = ch->n, K = ch->K, V = ch->V;
    const int64_t nn = (int64_t)n * n, nK = (int64_t)n * K, nV = (int64_t)n * V;
    const double gn = dp_sum_error(r, n + 1);
    double *pT = pwof(r, ch->Akk, nn), *A = dp_doubles(nn), *aT = absof(ch->Akk, nn);
    double *rw = dp_doubles(nK), *ru = dp_doubles(nV), *Drw = dp_doubles(nK), *Dru = dp_doubles(nV);
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++) {
            const int64_t z = (int64_t)i * n + j;
            b->DA[z] = dp_pw(r, ch->beta[i]) * (b->DL[z] + dp_pw(r, (b->eb + r->u) * ch->L[z]));
            A[z] = i == j ? 1 : fabs(ch->beta[i] * ch->L[z]);
        }
    for (int i = 0; i < n; i++) {
        for (int x = 0; x < K; x++) {
            const int64_t z = (int64_t)i * K + x;
            rw[z] = fabs(ch->beta[i] * ch->kgam[z]);
            Drw[z] = dp_pw(r, rw[z] * (b->Dexp[(i / ch->R) * K + x] + b->ek[z] + b->er + b->eb +
                                       2 * r->u)) +
                     dp_pw(r, r->tiny);
        }
        for (int x = 0; x < V; x++) {
            const int64_t z = (int64_t)i * V + x;
            ru[z] = fabs(ch->beta[i] * ch->v[z]);
            Dru[z] = dp_pw(r, ru[z] * (b->ev[z] + b->eb + r->u)) + dp_pw(r, r->tiny);
        }
    }
    if (r->inverse) {
        double *prw = pwof(r, rw, nK), *pru = pwof(r, ru, nV);
        double *E = dp_copy(b->DA, nn), *TE;
        add_scaled(r, gn, A, nn, E);
        TE = product(0, 0, n, n, n, pT, E);
        b->DT = product(0, 0, n, n, n, TE, pT);
        add_scaled(r, r->us, ch->Akk, nn, b->DT);
        add_scaled(r, r->uo, rw, nK, Drw);
        add_scaled(r, r->uo, ru, nV, Dru);
        if (!own) {
            addmm(1, 0, 0, n, K, n, b->DT, prw, b->Dw);
            addmm(1, 0, 0, n, V, n, b->DT, pru, b->Du);
        }
        add_sum(r, gn, 0, 0, n, K, n, aT, rw, b->Dw);
        add_sum(r, gn, 0, 0, n, V, n, aT, ru, b->Du);
        free(prw);
        free(pru);
        free(E);
        free(TE);
    } else {
        double *pwv = pwof(r, ch->w, nK), *puv = pwof(r, ch->u, nV), *aw = absof(ch->w, nK),
               *au = absof(ch->u, nV);
        addmm(1, 0, 0, n, K, n, b->DA, pwv, Drw);
        addmm(1, 0, 0, n, V, n, b->DA, puv, Dru);
        add_sum(r, gn, 0, 0, n, K, n, A, aw, Drw);
        add_sum(r, gn, 0, 0, n, V, n, A, au, Dru);
        free(pwv);
        free(puv);
        free(aw);
        free(au);
    }
    addmm(1, 0, 0, n, K, n, pT, Drw, b->Dw);
    addmm(1, 0, 0, n, V, n, pT, Dru, b->Du);
    add_scaled(r, r->us, ch->w, nK, b->Dw);
    add_scaled(r, r->us, ch->u, nV, b->Du);
    free(pT);
    free(A);
    free(aT);
    free(rw);
    free(ru);
    free(Drw);
    free(Dru);
}

/* M_c = diag(eC) - kg' w:  DM = DeC + Dkg'|w| + |kg|'Dw + sum_error(n) |kg|'|w| + u |M_c| */
static void intra_factor(dp_chunk_bound *b) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int n = ch->n, K = ch->K;
    double *pwv = pwof(r, ch->w, (int64_t)n * K), *pkg = pwof(r, ch->kg, (int64_t)n * K),
           *aw = absof(ch->w, (int64_t)n * K), *akg = absof(ch->kg, (int64_t)n * K);
    dp_chunk_M(ch, b->M);
    b->mu = dp_norm2_up(K, K, b->M);
    addmm(1, 1, 0, K, K, n, b->Dkg, pwv, b->DM);
    addmm(1, 1, 0, K, K, n, pkg, b->Dw, b->DM);
    add_sum(r, dp_sum_error(r, n), 1, 0, K, K, n, akg, aw, b->DM);
    add_scaled(r, r->u, b->M, (int64_t)K * K, b->DM);
    for (int x = 0; x < K; x++)
        b->DM[(int64_t)x * K + x] += b->DeC[x];
    add_const(dp_pw(r, n * r->tiny), (int64_t)K * K, b->DM);
    free(pwv);
    free(pkg);
    free(aw);
    free(akg);
}

static void bound_alloc(dp_chunk_bound *b, const dp_chunk *ch, dp_rounding rounding,
                        const dp_input_error *in) {
    const int c = ch->c, K = ch->K, V = ch->V, n = ch->n;
    const int64_t cK = (int64_t)c * K, nK = (int64_t)n * K, nV = (int64_t)n * V,
                  nn = (int64_t)n * n, KK = (int64_t)K * K;
    *b = (dp_chunk_bound){.r = rounding, .ch = ch, .eb = in->beta, .er = in->qk_row};
    const struct {
        double **p;
        int64_t n;
    } a[] = {
        {&b->eq, cK},   {&b->ek, nK}, {&b->ev, nV},  {&b->Dcum, cK}, {&b->Dexp, cK},
        {&b->Dend, cK}, {&b->DeC, K}, {&b->DL, nn},  {&b->DA, nn},   {&b->DAqk, (int64_t)c * n},
        {&b->Dw, nK},   {&b->Du, nV}, {&b->Dkg, nK}, {&b->Dqg, cK},  {&b->DM, KK},
        {&b->M, KK}};
    for (size_t i = 0; i < sizeof a / sizeof *a; i++)
        *a[i].p = dp_doubles(a[i].n);
    for (int64_t i = 0; i < cK; i++)
        b->eq[i] = in->q + (in->rq ? in->rq[i] : 0);
    for (int64_t i = 0; i < nK; i++)
        b->ek[i] = in->k + (in->rk ? in->rk[i] : 0);
    for (int64_t i = 0; i < nV; i++)
        b->ev[i] = in->v + (in->rv ? in->rv[i] : 0);
}

static void intra_cumsum(dp_chunk_bound *b, const dp_input_error *in) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int c = ch->c, K = ch->K;
    for (int x = 0; x < K; x++) {
        double gates = 0, sums = 0;
        for (int t = 0; t < c; t++) {
            gates += in->g ? in->g[t * in->sg + (in->Kg == 1 ? 0 : x)] : 0;
            sums += t ? dp_pw(r, r->u * ch->gcum[t * K + x]) : 0;
            /* gates add up before the power: D_s - D_i >= (gates_s - gates_i)^p */
            b->Dcum[t * K + x] = dp_pw(r, gates) + sums;
        }
    }
}

/* kg, qg, eC */
static void intra_decay(dp_chunk_bound *b) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int c = ch->c, R = ch->R, K = ch->K;
    for (int t = 0; t < c; t++)
        for (int x = 0; x < K; x++) {
            const int z = t * K + x, last = (c - 1) * K + x;
            const double span = fabs(ch->gcum[last] - ch->gcum[z]);
            b->Dexp[z] = root(r, b->Dcum[z]) + 2 * r->u;
            b->Dend[z] = root(r, fmax(0, b->Dcum[last] - b->Dcum[z])) + r->u * span + 2 * r->u;
            b->Dqg[z] = dp_pw(r, ch->qg[z] * (b->Dexp[z] + b->eq[z] + b->er + r->u + r->us)) +
                        dp_pw(r, r->tiny);
            for (int j = 0; j < R; j++) {
                const int64_t i = (int64_t)(t * R + j) * K + x;
                b->Dkg[i] = dp_pw(r, ch->kg[i] * (b->Dend[z] + b->ek[i] + b->er + r->u + r->us)) +
                            dp_pw(r, r->tiny);
            }
            if (t == c - 1) b->DeC[x] = dp_pw(r, ch->eC[x] * b->Dexp[z]) + dp_pw(r, r->tiny);
        }
}

void dp_bound_intra(dp_chunk_bound *b, const dp_chunk *ch, dp_rounding r,
                    const dp_input_error *in) {
    bound_alloc(b, ch, r, in);
    intra_cumsum(b, in);
    intra_decay(b);
    intra_pairs(b);
    intra_solve(b, 0);
    intra_factor(b);
}

void dp_bound_own(dp_chunk_bound *b, const dp_chunk *ch, dp_rounding r) {
    bound_alloc(b, ch, r, &(dp_input_error){0});
    intra_decay(b);
    intra_solve(b, 1);
}

void dp_bound_exact(dp_chunk_bound *b) {
    const int64_t cK = (int64_t)b->ch->c * b->ch->K, nK = (int64_t)b->ch->n * b->ch->K,
                  nn = (int64_t)b->ch->n * b->ch->n;
    const struct {
        double *p;
        int64_t n;
    } a[] = {{b->DT, nn},  {b->DA, nn},  {b->Dw, nK},       {b->Du, (int64_t)b->ch->n * b->ch->V},
             {b->Dkg, nK}, {b->Dqg, cK}, {b->DeC, b->ch->K}};
    for (size_t i = 0; i < sizeof a / sizeof *a; i++)
        if (a[i].p) memset(a[i].p, 0, sizeof(double) * (size_t)a[i].n);
    intra_factor(b);
}

void dp_bound_free(dp_chunk_bound *b) {
    double **a[] = {&b->eq, &b->ek,   &b->ev, &b->Dcum, &b->Dexp, &b->Dend, &b->DeC, &b->DL, &b->DA,
                    &b->DT, &b->DAqk, &b->Dw, &b->Du,   &b->Dkg,  &b->Dqg,  &b->DM,  &b->M};
    for (size_t i = 0; i < sizeof a / sizeof *a; i++) {
        free(*a[i]);
        *a[i] = NULL;
    }
}

/* ---- state and output ---------------------------------------------------------------------------
 * X = u - w S, S_c = eC o S + kg' X
 *   =>  error of S_c = M_c (error of S) + F, and the error of X = -w (error of S) + local DX with
 *   DX  = Du + Dw |S| + uo |w||S| (operands) + (sum_error(K) + u) |w||S| + (u + us) |X|
 *   F   = DeC |S| + 2u eC |S| + Dkg' |X| + |kg|' DX
 *         + sum_error(n) |kg|'|X| + u |S_c|                                        (math.md j.6)
 * so  e_c[v] = mu e[v] + |F[:,v]|_2  column by column (p = 1),
 *     e_c = M_c^2 e + F  entry by entry (p = 2). */
static void carry(const dp_chunk_bound *b, int trans, const double *F, double *e) {
    const int K = b->ch->K, V = b->ch->V;
    if (b->r.p == 1) {
        for (int v = 0; v < V; v++)
            e[v] = b->mu * e[v] + column_norm(F, K, V, v);
        return;
    }
    const int64_t KV = (int64_t)K * V;
    double *old = dp_copy(e, 2 * KV), *pM = pwof(&b->r, b->M, (int64_t)K * K);
    memcpy(e, F, sizeof(double) * KV);
    memset(e + KV, 0, sizeof(double) * KV);
    for (int part = 0; part < 2; part++)
        addmm(1, trans, 0, K, V, K, pM, old + part * KV, e + part * KV);
    free(old);
    free(pM);
}

void dp_bound_state(const dp_chunk_bound *b, const double *S, double *e, double *DXout) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int n = ch->n, K = ch->K, V = ch->V;
    const int64_t nV = (int64_t)n * V, KV = (int64_t)K * V, nK = (int64_t)n * K;
    double *X = dp_doubles(nV), *Sc = dp_copy(S, KV), *aS = absof(S, KV), *pS = pwof(r, S, KV),
           *aw = absof(ch->w, nK), *pwv = pwof(r, ch->w, nK), *akg = absof(ch->kg, nK),
           *pkg = pwof(r, ch->kg, nK);
    dp_chunk_state(ch, Sc, X);
    double *aX = absof(X, nV), *pX = pwof(r, X, nV), *DX = dp_copy(b->Du, nV), *F = dp_doubles(KV);
    addmm(1, 0, 0, n, V, K, b->Dw, pS, DX);
    addmm(dp_pw(r, r->uo), 0, 0, n, V, K, pwv, pS, DX);
    add_sum(r, dp_sum_error(r, K) + r->u, 0, 0, n, V, K, aw, aS, DX);
    add_scaled(r, r->u + r->us, X, nV, DX);
    add_const(dp_pw(r, (K + 2) * r->tiny), nV, DX);
    for (int x = 0; x < K; x++)
        for (int v = 0; v < V; v++) {
            const int64_t z = (int64_t)x * V + v;
            F[z] = b->DeC[x] * pS[z] + dp_pw(r, 2 * r->u * ch->eC[x] * S[z]) +
                   dp_pw(r, r->u * Sc[z]) + dp_pw(r, (n + 2) * r->tiny);
        }
    addmm(1, 1, 0, K, V, n, b->Dkg, pX, F);
    addmm(1, 1, 0, K, V, n, pkg, DX, F);
    add_sum(r, dp_sum_error(r, n), 1, 0, K, V, n, akg, aX, F);
    carry(b, 0, F, e);
    if (DXout) memcpy(DXout, DX, sizeof(double) * nV);
    free(X);
    free(Sc);
    free(aS);
    free(pS);
    free(aw);
    free(pwv);
    free(akg);
    free(pkg);
    free(aX);
    free(pX);
    free(DX);
    free(F);
}

/* D[i][v] += what an error e of the state adds to sens * state; p = 2 */
static void propagate(const dp_rounding *r, const double *sens, int n, int K, int V,
                      const double *e, double *D) {
    double *p = pwof(r, sens, (int64_t)n * K);
    addmm(1, 0, 0, n, V, K, p, e, D);
    free(p);
}

/* o = scale qg S + Aqk X: through the state its error is (scale qg - Aqk w) dS, the rest is local.
 */
void dp_bound_output(const dp_chunk_bound *b, const double *e, const double *DX, double *row) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int c = ch->c, n = ch->n, K = ch->K, V = ch->V;
    assert(r->p == 2);
    const int64_t cV = (int64_t)c * V, cn = (int64_t)c * n, cK = (int64_t)c * K,
                  KV = (int64_t)K * V, nV = (int64_t)n * V;
    const double ps = dp_pw(r, ch->scale);
    double *aS = absof(ch->h, KV), *pS = pwof(r, ch->h, KV), *aX = absof(ch->v_new, nV),
           *pX = pwof(r, ch->v_new, nV), *aP = absof(ch->Aqk, cn), *pP = pwof(r, ch->Aqk, cn);
    double *aqg = absof(ch->qg, cK), *pqg = pwof(r, ch->qg, cK), *D = dp_doubles(cV),
           *sens = product(0, 0, c, K, n, ch->Aqk, ch->w), *o = dp_doubles(cV);
    for (int64_t i = 0; i < cK; i++)
        sens[i] = ch->scale * ch->qg[i] - sens[i];
    dp_chunk_output(ch, o);
    addmm(ps, 0, 0, c, V, K, b->Dqg, pS, D);
    addmm(ps * dp_pw(r, r->uo), 0, 0, c, V, K, pqg, pS, D);
    add_sum(r, fabs(ch->scale) * (dp_sum_error(r, K) + 3 * r->u), 0, 0, c, V, K, aqg, aS, D);
    addmm(1, 0, 0, c, V, n, b->DAqk, pX, D);
    addmm(1, 0, 0, c, V, n, pP, DX, D);
    add_sum(r, dp_sum_error(r, n), 0, 0, c, V, n, aP, aX, D);
    add_scaled(r, r->u + r->us, o, cV, D);
    add_const(dp_pw(r, (K + n + 3) * r->tiny), cV, D);
    propagate(r, sens, c, K, V, e, D);
    propagate(r, sens, c, K, V, e + KV, D);
    for (int s = 0; s < c; s++)
        row[s] = error_norm(r, D + (int64_t)s * V, V, 1);
    free(aS);
    free(pS);
    free(aX);
    free(pX);
    free(aP);
    free(pP);
    free(aqg);
    free(pqg);
    free(D);
    free(sens);
    free(o);
}

/* ---- backward state -----------------------------------------------------------------------------
 * dX = dvl + kg dS, dS_0 = eC o dS + scale qg' do - w' dX:
 *   the error of dS_0 is M_c' (error of dS) + G, that of dX kg (error of dS) + DdX:
 *   DdX = DAqk' |do| + (uo, sum_error(c)) |Aqk|'|do| + us |dvl|
 *         + Dkg |dS| + (uo, sum_error(K) + u) |kg||dS| + (u + us) |dX|
 *   G   = DeC |dS| + 2u eC |dS| + scale (Dqg'|do| + (uo, sum_error(c) + 3u) |qg|'|do|)
 *         + Dw'|dX| + |w|'DdX + sum_error(n) |w|'|dX| + 2u |dS_0| */
void dp_bound_state_bwd(const dp_chunk_bound *b, const double *dout, const double *dS, double *e,
                        double *DdXout) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int c = ch->c, n = ch->n, K = ch->K, V = ch->V;
    const int64_t nV = (int64_t)n * V, KV = (int64_t)K * V, nK = (int64_t)n * K,
                  cK = (int64_t)c * K, cV = (int64_t)c * V, cn = (int64_t)c * n;
    const double ps = dp_pw(r, ch->scale);
    double *dX = dp_doubles(nV), *d0 = dp_copy(dS, KV), *adS = absof(dS, KV),
           *pdS = pwof(r, dS, KV), *ado = absof(dout, cV), *pdo = pwof(r, dout, cV);
    double *aP = absof(ch->Aqk, cn), *pP = pwof(r, ch->Aqk, cn), *aw = absof(ch->w, nK),
           *pwv = pwof(r, ch->w, nK), *akg = absof(ch->kg, nK), *pkg = pwof(r, ch->kg, nK);
    double *aqg = absof(ch->qg, cK), *pqg = pwof(r, ch->qg, cK);
    dp_chunk_state_bwd(ch, dout, d0, dX);
    double *adX = absof(dX, nV), *pdX = pwof(r, dX, nV), *D = dp_doubles(nV), *G = dp_doubles(KV);
    addmm(1, 1, 0, n, V, c, b->DAqk, pdo, D);
    addmm(dp_pw(r, r->uo), 1, 0, n, V, c, pP, pdo, D);
    add_sum(r, dp_sum_error(r, c), 1, 0, n, V, c, aP, ado, D);
    add_scaled(r, r->us, ch->dvl, nV, D);
    addmm(1, 0, 0, n, V, K, b->Dkg, pdS, D);
    addmm(dp_pw(r, r->uo), 0, 0, n, V, K, pkg, pdS, D);
    add_sum(r, dp_sum_error(r, K) + r->u, 0, 0, n, V, K, akg, adS, D);
    add_scaled(r, r->u + r->us, dX, nV, D);
    add_const(dp_pw(r, (K + c + 2) * r->tiny), nV, D);
    for (int x = 0; x < K; x++)
        for (int v = 0; v < V; v++) {
            const int64_t z = (int64_t)x * V + v;
            G[z] = b->DeC[x] * pdS[z] + dp_pw(r, 2 * r->u * ch->eC[x] * dS[z]) +
                   dp_pw(r, 2 * r->u * d0[z]) + dp_pw(r, (n + c + 3) * r->tiny);
        }
    addmm(ps, 1, 0, K, V, c, b->Dqg, pdo, G);
    addmm(ps * dp_pw(r, r->uo), 1, 0, K, V, c, pqg, pdo, G);
    add_sum(r, fabs(ch->scale) * (dp_sum_error(r, c) + 3 * r->u), 1, 0, K, V, c, aqg, ado, G);
    addmm(1, 1, 0, K, V, n, b->Dw, pdX, G);
    addmm(1, 1, 0, K, V, n, pwv, D, G);
    add_sum(r, dp_sum_error(r, n), 1, 0, K, V, n, aw, adX, G);
    carry(b, 1, G, e);
    if (DdXout) memcpy(DdXout, D, sizeof(double) * nV);
    double *a[] = {dX, d0, adS, pdS, ado, pdo, aP, pP, aw, pwv, akg, pkg, aqg, pqg, adX, pdX, D, G};
    for (size_t i = 0; i < sizeof a / sizeof *a; i++)
        free(a[i]);
}

/* ---- gradients ----------------------------------------------------------------------------------
 * With dS0 = error of h (columns bounded by eS) and ddS = error of dh (columns bounded by edS),
 * first order:
 *   X :  -w dS0 + DX
 *   dX: kg ddS + DdX
 *   dZ = T' dX:  (T' kg) ddS + |T|'(DdX + rounding) (+ DT'|dX|)
 *   E = V - Kgam S_0 - L X:  -(Kgam - L w) dS0 + DKgam|S_0| + (uo, sum_error) |Kgam||S_0|
 *                            + DL|X| + |L| DX + ...
 *   dbeta = sum_v dZ o E,  dE = B dZ,  dL = -dE X',  dP = scale do X':   product rule, entrywise
 *   dq_s  = scale exp(gcum) o (S_0 do) + sum dP pair k;   (error of S_0) do entry by entry from eS
 *   dk    = read + write parts likewise.
 * dg is the reverse cumulative sum of q o dq + k o (dk_read - dk_write), whose pair terms c[s,i]
 * enter once with + at s and once with - at i: the SAME dP, dL, pair, q and k, so their errors
 * cancel there like the terms themselves, and what is left is the error of (math.md f)
 *   dg_t  = sum_(i < t <= s) c[s,i] + sum_(s >= t) r_s + sum_(i < t) w_i + z
 * plus what is not shared: the roundings of the two sums that c[s,i] went into, of their operands
 * (uo: kernels form q o dq and k o dk by separate matrix products), of the products with q and k,
 * and u of each partial sum, which is dg itself.
 * X1, dZ1, E1, dE1 hold what the shared parts of eS and edS add: it counts linearly in sums
 * over v. */
typedef struct {
    double *X, *dZ, *E, *dE, *X1, *dZ1, *E1, *dE1, *pX, *aX, *aE, *adZ, *adE, *dEv;
} grad_state;

static void grad_rows(const dp_chunk_bound *b, const double *eS, const double *edS,
                      const double *DX, const double *DdX, grad_state *g) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int n = ch->n, K = ch->K, V = ch->V;
    const int64_t nV = (int64_t)n * V, nK = (int64_t)n * K, nn = (int64_t)n * n;
    const double u = r->u, gn = dp_sum_error(r, n + 1);
    double *pT = pwof(r, ch->Akk, nn), *aT = absof(ch->Akk, nn), *pL = pwof(r, ch->L, nn),
           *aL = absof(ch->L, nn), *aS = absof(ch->h, (int64_t)K * V),
           *pS = pwof(r, ch->h, (int64_t)K * V);
    double *akgam = absof(ch->kgam, nK), *Dkgam = dp_doubles(nK), *t = dp_copy(DdX, nV),
           *adX = absof(ch->dX, nV), *pdX = pwof(r, ch->dX, nV), *A = dp_doubles(nn), *sens;
    double *dZv = product(1, 0, n, V, n, ch->Akk, ch->dX),
           *Ev = product(0, 0, n, V, K, ch->kgam, ch->h), *pdZ = pwof(r, dZv, nV);
    g->aX = absof(ch->v_new, nV);
    g->pX = pwof(r, ch->v_new, nV);
    g->adZ = absof(dZv, nV);

    const int64_t KV = (int64_t)K * V;
    g->X = dp_copy(DX, nV);
    g->X1 = dp_doubles(nV);
    g->dZ1 = dp_doubles(nV);
    g->E1 = dp_doubles(nV);
    g->dE1 = dp_doubles(nV);
    propagate(r, ch->w, n, K, V, eS, g->X);
    propagate(r, ch->w, n, K, V, eS + KV, g->X1);

    g->dZ = dp_doubles(nV);
    if (r->inverse) {
        addmm(1, 1, 0, n, V, n, b->DT, pdX, g->dZ);
        add_sum(r, gn, 1, 0, n, V, n, aT, adX, g->dZ);
        add_scaled(r, r->uo, ch->dX, nV, t);
    } else {
        for (int i = 0; i < n; i++)
            for (int j = 0; j < n; j++)
                A[(int64_t)i * n + j] = i == j ? 1 : fabs(ch->beta[i]) * aL[(int64_t)i * n + j];
        addmm(1, 1, 0, n, V, n, b->DA, pdZ, t);
        add_sum(r, gn, 1, 0, n, V, n, A, g->adZ, t);
    }
    addmm(1, 1, 0, n, V, n, pT, t, g->dZ);
    sens = product(1, 0, n, K, n, ch->Akk, ch->kg);
    propagate(r, sens, n, K, V, edS, g->dZ);
    propagate(r, sens, n, K, V, edS + KV, g->dZ1);
    free(sens);

    g->E = dp_doubles(nV);
    addmm(1, 0, 0, n, V, n, ch->L, ch->v_new, Ev);
    for (int64_t i = 0; i < nV; i++) {
        g->E[i] = dp_pw(r, (b->ev[i] + 2 * u) * fabs(ch->v[i]) + 2 * u * fabs(Ev[i])) +
                  dp_pw(r, (K + n) * r->tiny);
        Ev[i] = ch->v[i] - Ev[i];
    }
    g->aE = absof(Ev, nV);
    for (int i = 0; i < n; i++)
        for (int x = 0; x < K; x++)
            Dkgam[(int64_t)i * K + x] = dp_pw(
                r, akgam[(int64_t)i * K + x] * (b->Dexp[(i / ch->R) * K + x] +
                                                b->ek[(int64_t)i * K + x] + b->er + u + 2 * r->uo));
    addmm(1, 0, 0, n, V, K, Dkgam, pS, g->E);
    add_sum(r, dp_sum_error(r, K) + u, 0, 0, n, V, K, akgam, aS, g->E);
    addmm(1, 0, 0, n, V, n, b->DL, g->pX, g->E);
    addmm(1, 0, 0, n, V, n, pL, DX, g->E);
    addmm(dp_pw(r, 2 * r->uo), 0, 0, n, V, n, pL, g->pX, g->E);
    add_sum(r, gn + u, 0, 0, n, V, n, aL, g->aX, g->E);
    sens = product(0, 0, n, K, n, ch->L, ch->w);
    for (int64_t i = 0; i < nK; i++)
        sens[i] = ch->kgam[i] - sens[i];
    propagate(r, sens, n, K, V, eS, g->E);
    propagate(r, sens, n, K, V, eS + KV, g->E1);
    free(sens);

    g->dE = dp_doubles(nV);
    g->dEv = dp_doubles(nV);
    for (int i = 0; i < n; i++)
        for (int v = 0; v < V; v++) {
            const int64_t z = (int64_t)i * V + v;
            g->dEv[z] = ch->beta[i] * dZv[z];
            g->dE[z] = dp_pw(r, ch->beta[i]) * g->dZ[z] + dp_pw(r, (b->eb + u) * g->dEv[z]) +
                       dp_pw(r, r->tiny);
            g->dE1[z] = dp_pw(r, ch->beta[i]) * g->dZ1[z];
        }
    g->adE = absof(g->dEv, nV);
    double *a[] = {pT, aT, pL, aL, aS, pS, akgam, Dkgam, t, adX, pdX, A, dZv, Ev, pdZ};
    for (size_t i = 0; i < sizeof a / sizeof *a; i++)
        free(a[i]);
}

static void grad_state_free(grad_state *g) {
    double *a[] = {g->X,   g->dZ, g->E,  g->dE, g->X1,  g->dZ1, g->E1,
                   g->dE1, g->pX, g->aX, g->aE, g->adZ, g->adE, g->dEv};
    for (size_t i = 0; i < sizeof a / sizeof *a; i++)
        free(a[i]);
}

/* D of A B' over V, [m][n]: errors of A and B (NULL: none), operand roundings, the sum; a, b
 * absolute values. */
static double *outer_bound(const dp_rounding *r, int m, int n, int V, const double *a,
                           const double *Da, const double *b, const double *Db, double more) {
    double *D = dp_doubles((int64_t)m * n), *pa = pwof(r, a, (int64_t)m * V),
           *pb = pwof(r, b, (int64_t)n * V);
    if (Da) addmm(1, 0, 1, m, n, V, Da, pb, D);
    if (Db) addmm(1, 0, 1, m, n, V, pa, Db, D);
    addmm(dp_pw(r, 2 * r->uo), 0, 1, m, n, V, pa, pb, D);
    add_sum(r, dp_sum_error(r, V) + more, 0, 1, m, n, V, a, b, D);
    free(pa);
    free(pb);
    return D;
}

/* D [m][n] += (sum over v of sqrt(Da) b)^2: errors Da [m][V] shared over v against values b [n][V]
 * >= 0 */
static void add_shared(int m, int n, int V, const double *Da, const double *b, int transpose,
                       double *D) {
    double *a = dp_doubles((int64_t)m * V), *S;
    for (int64_t i = 0; i < (int64_t)m * V; i++)
        a[i] = sqrt(Da[i]);
    S = transpose ? product(0, 1, n, m, V, b, a) : product(0, 1, m, n, V, a, b);
    for (int64_t i = 0; i < (int64_t)m * n; i++)
        D[i] += S[i] * S[i];
    free(a);
    free(S);
}

/* out [rows][K]: squares of (error of the state) x_i, for rows x_i [V]; own: the part that differs
 * from column to column, else the shared one */
static double *through_state(const dp_rounding *r, int rows, int K, int V, const double *e,
                             const double *x, int own) {
    double *out, *px = own ? pwof(r, x, (int64_t)rows * V) : absof(x, (int64_t)rows * V);
    if (own)
        out = product(0, 1, rows, K, V, px, e);
    else {
        out = dp_doubles((int64_t)rows * K);
        add_shared(K, rows, V, e + (int64_t)K * V, px, 1, out);
    }
    free(px);
    return out;
}

void dp_bound_grads(const dp_chunk_bound *b, const double *dout, const double *eS,
                    const double *edS, const double *DX, const double *DdX, dp_grad_bound *out) {
    const dp_chunk *ch = b->ch;
    const dp_rounding *r = &b->r;
    const int c = ch->c, R = ch->R, n = ch->n, K = ch->K, V = ch->V;
    const int64_t cK = (int64_t)c * K, nK = (int64_t)n * K, cV = (int64_t)c * V,
                  KV = (int64_t)K * V, cn = (int64_t)c * n;
    assert(r->p == 2);
    const double u = r->u, gV = dp_sum_error(r, V);
    grad_state g;
    grad_rows(b, eS, edS, DX, DdX, &g);
    double *ado = absof(dout, cV), *aS = absof(ch->h, KV), *adS = absof(ch->dh, KV);
    double *DdP = outer_bound(r, c, n, V, ado, NULL, g.aX, g.X, 2 * u),
           *DdL = outer_bound(r, n, n, V, g.adE, g.dE, g.aX, g.X, 0);
    double *dP = product(0, 1, c, n, V, dout, ch->v_new),
           *dL = product(0, 1, n, n, V, g.dEv, ch->v_new);
    add_shared(n, c, V, g.X1, ado, 1, DdP); /* dP = do X', dL = -dE X' */
    add_shared(n, n, V, g.X1, g.adE, 1, DdL);
    add_shared(n, n, V, g.dE1, g.aX, 0, DdL);
    for (int64_t i = 0; i < cn; i++) {
        dP[i] *= fabs(ch->scale);
        DdP[i] *= dp_pw(r, ch->scale);
    }
    dp_pair_bounds ib = {.q = dp_doubles(cK),
                         .r = dp_doubles(nK),
                         .w = dp_doubles(nK),
                         .pair = dp_doubles(cK),
                         .round = dp_doubles(cK)};
    dp_bound_pairs(b, &(dp_pair_grads){dL, DdL, dP, DdP}, &ib);

    /* the products with the states: values, and D without what comes through the states' own errors
     */
    double *Sdo = product(0, 1, c, K, V, dout, ch->h), *SdE = product(0, 1, n, K, V, g.dEv, ch->h),
           *SX = product(0, 1, n, K, V, ch->v_new, ch->dh);
    double *DSdo = outer_bound(r, c, K, V, ado, NULL, aS, NULL, 0),
           *DSdE = outer_bound(r, n, K, V, g.adE, g.dE, aS, NULL, 0),
           *DSX = outer_bound(r, n, K, V, g.aX, g.X, adS, NULL, 0);

    /* and what does come through them */
    double *Pdo = through_state(r, c, K, V, eS, dout, 1),
           *PdE = through_state(r, n, K, V, eS, g.dEv, 1),
           *PX = through_state(r, n, K, V, edS, ch->v_new, 1);
    double *Qdo = through_state(r, c, K, V, eS, dout, 0),
           *QdE = through_state(r, n, K, V, eS, g.dEv, 0),
           *QX = through_state(r, n, K, V, edS, ch->v_new, 0);
    add_shared(n, K, V, g.dE1, aS, 0, QdE);
    add_shared(n, K, V, g.X1, adS, 0, QX);
    /* operands of dS_c X rounded here and there */
    double *pdS = pwof(r, ch->dh, KV), *UX = dp_doubles(nK);
    addmm(dp_pw(r, 2 * r->uo), 0, 1, n, K, V, g.pX, pdS, UX);

    dp_chunk_grad val; /* reference values, for q o dq and k o (dkr - dkw) */
    dp_chunk_grad_alloc(&val, ch);
    dp_chunk_grads(ch, dout, 0, &val);
    double *rs = dp_doubles(cK), *ws = dp_doubles(cK), *z = dp_doubles(K), *rs1 = dp_doubles(cK),
           *ws1 = dp_doubles(cK); /* D of r_s, w_i, z; shared parts */
    for (int s = 0; s < c; s++) {
        for (int x = 0; x < K; x++) {
            const int y = s * K + x;
            const double e = dp_exp_up(ch->gcum[y]),
                         own = dp_pw(r, ch->scale * e) * (DSdo[y] + Pdo[y]) +
                               dp_pw(r, ch->scale * e * Sdo[y] * (b->Dexp[y] + 4 * u));
            const double shared = dp_pw(r, ch->scale * e) * Qdo[y];
            ib.q[y] += own + shared + dp_pw(r, u * val.dq[y]) + dp_pw(r, (V + n) * r->tiny);
            rs1[y] += dp_pw(r, ch->q[y]) * shared;
            rs[y] += dp_pw(r, ch->q[y]) * own +
                     dp_pw(r, (b->eq[y] + b->er + 2 * u) * ch->q[y] * ch->scale * e * Sdo[y]);
            ib.round[y] += dp_pw(r, 2 * u * ch->q[y] * val.dq[y]) + dp_pw(r, (V + n) * r->tiny);
        }
        out->dq[s] = error_norm(r, ib.q + (int64_t)s * K, K, 1);
        if (out->edq)
            memcpy(out->edq + (int64_t)s * K, ib.q + (int64_t)s * K, sizeof(double) * (size_t)K);
    }
    for (int i = 0; i < n; i++) {
        double db = 0, zE = 0, z1 = 0, E1 = 0;
        const int t = i / R;
        for (int x = 0; x < K; x++) {
            const int y = t * K + x;
            const int64_t j = (int64_t)i * K + x;
            const double e = dp_exp_up(ch->gcum[y]),
                         end = dp_exp_up(ch->gcum[(c - 1) * K + x] - ch->gcum[y]);
            const double read = dp_pw(r, e) * (DSdE[j] + PdE[j]) +
                                dp_pw(r, e * SdE[j] * (b->Dexp[y] + 2 * u)),
                         write = dp_pw(r, end) * (DSX[j] + PX[j]) +
                                 dp_pw(r, end * SX[j] * (b->Dend[y] + 2 * u));
            const double read1 = dp_pw(r, e) * QdE[j], write1 = dp_pw(r, end) * QX[j];
            ib.r[j] += read + write + read1 + write1 + ib.w[j] + dp_pw(r, u * val.dk[j]) +
                       dp_pw(r, 2 * (V + n) * r->tiny);
            rs1[y] += dp_pw(r, ch->k[j]) * read1;
            ws1[y] += dp_pw(r, ch->k[j]) * write1;
            rs[y] += dp_pw(r, ch->k[j]) * read +
                     dp_pw(r, (b->ek[j] + b->er + 2 * u) * ch->k[j] * e * SdE[j]);
            ws[y] += dp_pw(r, ch->k[j]) * write +
                     dp_pw(r, (b->ek[j] + b->er + 2 * u) * ch->k[j] * end * SX[j]);
            ib.round[y] +=
                dp_pw(r, ch->k[j] * end) * UX[j] +
                dp_pw(r, 3 * u * ch->k[j] *
                             (fabs(val.dk[j]) + 2 * e * fabs(SdE[j]) + 2 * end * fabs(SX[j]))) +
                dp_pw(r, 2 * (V + n) * r->tiny);
        }
        out->dk[i] = error_norm(r, ib.r + (int64_t)i * K, K, 1);
        if (out->edk)
            memcpy(out->edk + (int64_t)i * K, ib.r + (int64_t)i * K, sizeof(double) * (size_t)K);
        for (int64_t v = (int64_t)i * V; out->edv && v < (int64_t)(i + 1) * V; v++)
            out->edv[v] = g.dE[v] + g.dE1[v];
        for (int v = 0; v < V; v++) {
            const int64_t z = (int64_t)i * V + v;
            db += g.dZ[z] * dp_pw(r, g.aE[z]) + dp_pw(r, g.adZ[z]) * g.E[z];
            zE += g.adZ[z] * g.aE[z];
            z1 += sqrt(g.dZ1[z]) * g.aE[z];
            E1 += g.adZ[z] * sqrt(g.E1[z]);
        }
        out->dv[i] = error_norm(r, g.dE + (int64_t)i * V, V, 1) +
                     error_norm(r, g.dE1 + (int64_t)i * V, V, 1);
        out->dbeta[i] = db + z1 * z1 + E1 * E1 + dp_pw(r, gV * zE) + dp_pw(r, V * r->tiny);
    }
    /* z = eC o rowsum(S_0 o dS_c); the chunk end also adds up z + sum_i w_i, and its rounding
     * reaches every token */
    for (int x = 0; x < K; x++) {
        double s = 0, D = 0, sum = 0, S1 = 0, dS1 = 0, operands = 0;
        for (int v = 0; v < V; v++) {
            const int64_t y = (int64_t)x * V + v;
            s += aS[y] * adS[y];
            operands += dp_pw(r, 2 * r->uo * ch->eC[x] * aS[y] * adS[y]);
            S1 += sqrt(eS[KV + y]) * adS[y];
            dS1 += sqrt(edS[KV + y]) * aS[y];
            D += eS[y] * dp_pw(r, adS[y]) + edS[y] * dp_pw(r, aS[y]);
        }
        z[x] = dp_pw(r, ch->eC[x]) * (D + S1 * S1 + dS1 * dS1 + dp_pw(r, (gV + 3 * u) * s)) +
               b->DeC[x] * dp_pw(r, s);
        for (int i = 0; i < n; i++) {
            const int64_t j = (int64_t)i * K + x;
            const double end = dp_exp_up(ch->gcum[(c - 1) * K + x] - ch->gcum[(i / R) * K + x]);
            sum += fabs(ch->k[j] * SX[j]) * end;
            operands += dp_pw(r, ch->k[j] * end) * UX[j];
        }
        ib.round[(c - 1) * K + x] +=
            operands + dp_pw(r, dp_sum_error(r, n + 4) * (sum + ch->eC[x] * s));
    }
    for (int x = 0; x < K; x++) {
        /* shared errors are the same at all tokens: they add up themselves */
        double from = 0, until = 0, from1 = 0, until1 = 0;
        for (int t = c - 1; t >= 0; t--) {
            from += rs[t * K + x] + ib.round[t * K + x] + dp_pw(r, u * val.dg[t * K + x]);
            from1 += sqrt(rs1[t * K + x]);
            out->dg[t * K + x] = ib.pair[t * K + x] + from + from1 * from1 + z[x];
        }
        for (int t = 0; t < c; t++) {
            out->dg[t * K + x] += until + until1 * until1;
            until += ws[t * K + x];
            until1 += sqrt(ws1[t * K + x]);
        }
    }
    for (int t = 0; t < c; t++)
        out->ndq[t] = norm2(val.dq + (int64_t)t * K, K);
    for (int i = 0; i < n; i++) {
        out->ndk[i] = norm2(val.dk + (int64_t)i * K, K);
        out->ndv[i] = norm2(val.dv + (int64_t)i * V, V);
        out->vdbeta[i] = val.dbeta[i];
    }
    memcpy(out->vdg, val.dg, sizeof(double) * cK);
    dp_chunk_grad_free(&val);
    grad_state_free(&g);
    double *a[] = {ado,      aS,  adS, DdP, DdL,  dP,   dL,  ib.q, ib.r, ib.w, ib.pair,
                   ib.round, Sdo, SdE, SX,  DSdo, DSdE, DSX, Pdo,  PdE,  PX,   Qdo,
                   QdE,      QX,  pdS, UX,  rs,   ws,   rs1, ws1,  z};
    for (size_t i = 0; i < sizeof a / sizeof *a; i++)
        free(a[i]);
}

/* ---- the chain and the merge ----------------------------------------------------------------- */

void dp_bound_chain_step(const dp_rounding *r, dp_format f, int K, const double *M,
                         const double *DM, double mu, const double *P, double *b, double *bias) {
    const int64_t KK = (int64_t)K * K;
    const dp_format_info *fi = &dp_formats[f];
    const double tiny = f == DP_FP64 ? 0x1p-1022 : 0x1p-126;
    double *E = dp_doubles(KK), *aP = absof(P, KK), *pP = pwof(r, P, KK), *aM = absof(M, KK);
    addmm(1, 0, 0, K, K, K, DM, pP, E);
    if (r->p == 1) {
        const double eta = dp_eta(f, K),
                     grow = *b > 0 ? eta * dp_norm_abs2_up(K, K, M) + dp_norm_fro(KK, DM) : 0;
        addmm(eta, 0, 0, K, K, K, aM, aP, E);
        *b = (mu + grow) * *b + dp_norm_fro(KK, E) + 3.0 * K * K * tiny;
    } else {
        double *pM = pwof(r, M, KK), *S = product(0, 0, K, K, K, aM, aP),
               *MP = product(0, 0, K, K, K, M, P), *old = dp_copy(b, KK);
        const double op = f == DP_TF32RZ   ? 0
                          : f == DP_TF32X3 ? 3 * 0x1p-23
                                           : fi->u_op,
                     sum = sqrt(K / 3.0 + 1) * fi->u_acc;
        addmm(2 * op * op, 0, 0, K, K, K, pM, pP, E);
        add_scaled(r, sum, S, KK, E);
        add_scaled(r, fi->u_store, MP, KK, E);
        add_const(dp_pw(r, 3.0 * K * tiny), KK, E);
        memcpy(b, E, sizeof(double) * KK);
        addmm(1, 0, 0, K, K, K, pM, old, b);
        if (f == DP_TF32RZ) *bias = mu * *bias + 2 * fi->u_op * dp_norm_fro(KK, S);
        free(pM);
        free(S);
        free(MP);
        free(old);
    }
    free(E);
    free(aP);
    free(pP);
    free(aM);
}

/* p = 1: |d'| <= |M|_2 |d| + |dM|_2 |S_hat| + |dH| + sum_error | |M_hat||S_hat| | + u (| |M||S| | +
 * |H|), S_hat <= S + d, column by column. p = 2: e' = M^2 e + b S^2 + eH + (sum_error |M||S|)^2 +
 * (u H)^2 entry by entry, products of two errors dropped like everywhere else. */
void dp_bound_merge_step(const dp_rounding *r, int K, int V, const double *M, double mu,
                         const double *b, double bias, const double *S, const double *H,
                         const double *eH, double *e) {
    const int64_t KK = (int64_t)K * K, KV = (int64_t)K * V;
    double *aM = absof(M, KK), *aS = absof(S, KV), *MS = product(0, 0, K, V, K, aM, aS);
    const double s = dp_sum_error(r, K) + r->u;
    if (r->p == 1) {
        const double grow = *b + s * dp_norm_abs2_up(K, K, M);
        for (int v = 0; v < V; v++) {
            const double S2 = column_norm(S, K, V, v), MS2 = column_norm(MS, K, V, v),
                         H2 = column_norm(H, K, V, v);
            e[v] = (mu + grow) * e[v] + *b * S2 + eH[v] + s * (MS2 + *b * S2) +
                   r->u * (H2 + eH[v]) + (K + 1.0) * K * r->tiny;
        }
    } else {
        double *pM = pwof(r, M, KK), *pS = pwof(r, S, KV), *old = dp_copy(e, 2 * KV),
               *shared = e + KV;
        memcpy(e, eH, sizeof(double) * 2 * KV);
        for (int part = 0; part < 2; part++)
            addmm(1, 0, 0, K, V, K, pM, old + part * KV, e + part * KV);
        addmm(1, 0, 0, K, V, K, b, pS, shared);
        add_scaled(r, s, MS, KV, e);
        add_scaled(r, r->u, H, KV, e);
        add_const(dp_pw(r, (K + 1.0) * r->tiny), KV, e);
        for (int v = 0; v < V && bias > 0; v++) {
            const double total = dp_pw(r, bias * column_norm(S, K, V, v)),
                         norm = dp_pw(r, column_norm(MS, K, V, v));
            for (int x = 0; x < K; x++)
                shared[(int64_t)x * V + v] +=
                    total * (1.0 / K + (norm > 0 ? dp_pw(r, MS[(int64_t)x * V + v]) / norm : 0));
        }
        free(pM);
        free(pS);
        free(old);
    }
    free(aM);
    free(aS);
    free(MS);
}
