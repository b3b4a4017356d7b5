#include "bound.h"
#include "mm.h"

#include <cblas.h>
#include <lapacke.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Conventions. Dx bounds |computed x - exact x| entrywise, first order. ax = |x|. gamma_n(u) = n u / (1 - n u) bounds a sum of n products
 * in any order (Higham 3.1). A product with operands rounded by uo and inner length n has the local error (2 uo + gamma_n) |A||B|; where
 * an operand is stored in its short format already, its rounding is part of its own Dx and only the other operand's uo is added. */

dp_rounding dp_rounding_of(dp_base b) {
    dp_rounding r = {.u = 0x1p-53, .tiny = 0x1p-1022};
    if (b != DP_BASE_FP64) r.u = 0x1p-24, r.tiny = 0x1p-126;
    if (b == DP_BASE_BF16) r.us = r.uo = 0x1p-8, r.inverse = 1;
    return r;
}

double dp_norm_fro(int64_t n, const double *A) {
    double scale = 0, s = 0;
    for (int64_t i = 0; i < n; i++) scale = fmax(scale, fabs(A[i]));
    if (scale == 0 || !isfinite(scale)) return scale;
    for (int64_t i = 0; i < n; i++) s += (A[i] / scale) * (A[i] / scale);
    return scale * sqrt(s);
}

double dp_norm_abs2_up(int m, int n, const double *A) {
    double inf = 0, one = 0, *col = dp_doubles(n);
    for (int i = 0; i < m; i++) {
        double s = 0;
        for (int j = 0; j < n; j++) s += fabs(A[(int64_t)i * n + j]), col[j] += fabs(A[(int64_t)i * n + j]);
        inf = fmax(inf, s);
    }
    for (int j = 0; j < n; j++) one = fmax(one, col[j]);
    free(col);
    return sqrt(inf * one) * (1 + 0x1p-40);
}

/* |A|_2^2 is the largest eigenvalue of G = A'A. dsyev returns it within p(n) 2^-53 |G|_F of the computed G, and the computed G is within
 * gamma_m |A|'|A| of the exact one: both are below (m + 10 n) 2^-53 |A|_F^2. */
double dp_norm2_up(int m, int n, const double *A) {
    double *G = dp_doubles((int64_t)n * n), *w = dp_doubles(n);
    const double f = dp_norm_fro((int64_t)m * n, A);
    if (!isfinite(f) || f == 0) {
        free(G), free(w);
        return f;
    }
    double *As = dp_copy(A, (int64_t)m * n);                     /* scaled by |A|_F: no underflow in the square */
    for (int64_t i = 0; i < (int64_t)m * n; i++) As[i] /= f;
    dp_mm(DP_FP64, 1, 0, n, n, m, As, As, G);
    const int rc = LAPACKE_dsyev(LAPACK_ROW_MAJOR, 'N', 'U', n, G, n, w);
    const double top = rc ? 1 : fmin(1, w[n - 1] + (m + 10.0 * n) * 0x1p-52);
    free(G), free(w), free(As);
    return f * sqrt(top) * (1 + 0x1p-48);
}

/* exp for bounds: fp32 is enough, inflated by more than its error at any d in [-745, 0] (2^-24 |d| from rounding d, 2^-22 from expf). */
static double exp_up(double d) { return d < -700 ? 1e-304 : d < -80 ? exp(d) : (double)expf((float)d) * (1 + 0x1p-16); }

/* ---- small tools ----------------------------------------------------------------------------------------------------------- */

static double *absof(const double *x, int64_t n) {
    double *y = dp_doubles(n);
    for (int64_t i = 0; i < n; i++) y[i] = fabs(x[i]);
    return y;
}

/* C += a op(A) op(B), all non-negative */
static void addmm(double a, int ta, int tb, int m, int n, int k, const double *A, const double *B, double *C) {
    cblas_dgemm(CblasRowMajor, ta ? CblasTrans : CblasNoTrans, tb ? CblasTrans : CblasNoTrans, m, n, k, a, A, ta ? m : k, B, tb ? k : n, 1.0, C, n);
}

static double *product(int ta, int tb, int m, int n, int k, const double *A, const double *B) {
    double *C = dp_doubles((int64_t)m * n);
    addmm(1, ta, tb, m, n, k, A, B, C);
    return C;
}

static void add_scaled(double a, const double *x, int64_t n, double *y) {
    for (int64_t i = 0; i < n; i++) y[i] += a * fabs(x[i]);
}

static double norm2(const double *x, int n) {
    double s = 0;
    for (int i = 0; i < n; i++) s += x[i] * x[i];
    return sqrt(s);
}

static double column_norm(const double *A, int m, int n, int j) {
    double s = 0;
    for (int i = 0; i < m; i++) s += A[(int64_t)i * n + j] * A[(int64_t)i * n + j];
    return sqrt(s);
}

/* ---- intra ----------------------------------------------------------------------------------------------------------------
 * gcum is a running sum: its error grows by the error of g_t and by u |gcum_t| a step, so with D_s = sum_(t<=s) (Dg_t + u |gcum_t|)
 *   |error of gcum_s| <= D_s,   |error of gcum_s - gcum_i| <= D_s - D_i  (the common prefix has the same error in both).
 * An exponent d computed with error Dd gives exp a relative error Dd + u |d| (the subtraction) + 2 u (the function). Hence
 *   relative error of pair[s,i] : (D_s - D_i) + u |d| + 2u;   of exp(gcum_s): D_s + 2u;   of exp(gcum_last - gcum_s) likewise.
 * L and Aqk are sums over K of three factors:  |DL| <= sum_k |k_s| pair |k_i| (2 ek + eps_pair + gamma_(K+2)),  Aqk with eq + ek, + us stored.
 * A = I + B L:  |DA| <= beta (DL + (eb + u) |L|).
 * Solve: the computed X satisfies (A + dA) X = rhs, |dA| <= gamma_n |A| (Higham 8.5), so |DX| <= |T| (Drhs + (DA + gamma_n |A|) |X|).
 * Inverse: |DT| <= |T| (DA + gamma_(n+1) |A|) |T| (Higham 14.2) + us |T| stored; then w = T rhs with rhs rounded by uo. */
static void intra_pairs(dp_chunk_bound *b, const double *D) {
    const dp_chunk *ch = b->ch;
    const int c = ch->c, R = ch->R, K = ch->K, n = ch->n;
    const double u = b->r.u, gK = dp_gamma(K + 2, u);
    double *e = dp_doubles(K), *ee = dp_doubles(K);
    for (int s = 0; s < c; s++)
        for (int i = 0; i <= s; i++) {
            for (int x = 0; x < K; x++) {
                const double d = ch->gcum[s * K + x] - ch->gcum[i * K + x];
                e[x] = exp_up(d);
                ee[x] = D[s * K + x] - D[i * K + x] + u * fabs(d) + 2 * u + gK;
            }
            for (int m = 0; m < R; m++) {
                const double *ki = ch->k + (int64_t)(i * R + m) * K;
                double p = 0;
                for (int x = 0; x < K; x++) p += fabs(ch->q[s * K + x] * ki[x]) * e[x] * (b->eq + b->ek + u + ee[x]);
                const int64_t z = (int64_t)s * n + i * R + m;
                b->DAqk[z] = fabs(ch->scale) * p + b->r.us * fabs(ch->Aqk[z]) + K * b->r.tiny;
                if (i == s) continue;
                for (int j = 0; j < R; j++) {
                    const double *ks = ch->k + (int64_t)(s * R + j) * K;
                    double l = 0;
                    for (int x = 0; x < K; x++) l += fabs(ks[x] * ki[x]) * e[x] * (2 * b->ek + ee[x]);
                    b->DL[(int64_t)(s * R + j) * n + i * R + m] = l + K * b->r.tiny;
                }
            }
        }
    free(e), free(ee);
}

static void intra_solve(dp_chunk_bound *b) {
    const dp_chunk *ch = b->ch;
    const int n = ch->n, K = ch->K, V = ch->V;
    const int64_t nn = (int64_t)n * n;
    const double u = b->r.u, gn = dp_gamma(n + 1, u);
    double *aT = absof(ch->Akk, nn), *aw = absof(ch->w, (int64_t)n * K), *au = absof(ch->u, (int64_t)n * V);
    double *E = dp_doubles(nn), *rw = dp_doubles((int64_t)n * K), *ru = dp_doubles((int64_t)n * V), *Drw = dp_doubles((int64_t)n * K), *Dru = dp_doubles((int64_t)n * V);
    for (int i = 0; i < n; i++)                                  /* DA, and E = DA + gamma |A| */
        for (int j = 0; j < n; j++) {
            const int64_t z = (int64_t)i * n + j;
            b->DA[z] = fabs(ch->beta[i]) * (b->DL[z] + (b->eb + u) * fabs(ch->L[z]));
            E[z] = b->DA[z] + gn * (i == j ? 1 : fabs(ch->beta[i] * ch->L[z]));
        }
    for (int i = 0; i < n; i++) {
        for (int x = 0; x < K; x++) {
            const int64_t z = (int64_t)i * K + x;
            rw[z] = fabs(ch->beta[i] * ch->kgam[z]);
            Drw[z] = rw[z] * (b->Dexp[(i / ch->R) * K + x] + b->ek + b->eb + 2 * u) + b->r.tiny;
        }
        for (int x = 0; x < V; x++) {
            const int64_t z = (int64_t)i * V + x;
            ru[z] = fabs(ch->beta[i] * ch->v[z]);
            Dru[z] = ru[z] * (b->ev + b->eb + u) + b->r.tiny;
        }
    }
    if (b->r.inverse) {
        double *TE = product(0, 0, n, n, n, aT, E);
        b->DT = product(0, 0, n, n, n, TE, aT);
        add_scaled(b->r.us, ch->Akk, nn, b->DT);
        add_scaled(b->r.uo + gn, rw, (int64_t)n * K, Drw);
        add_scaled(b->r.uo + gn, ru, (int64_t)n * V, Dru);
        addmm(1, 0, 0, n, K, n, b->DT, rw, b->Dw);
        addmm(1, 0, 0, n, V, n, b->DT, ru, b->Du);
        free(TE);
    } else {
        addmm(1, 0, 0, n, K, n, E, aw, Drw);
        addmm(1, 0, 0, n, V, n, E, au, Dru);
    }
    addmm(1, 0, 0, n, K, n, aT, Drw, b->Dw);
    addmm(1, 0, 0, n, V, n, aT, Dru, b->Du);
    add_scaled(b->r.us, ch->w, (int64_t)n * K, b->Dw);
    add_scaled(b->r.us, ch->u, (int64_t)n * V, b->Du);
    free(aT), free(aw), free(au), free(E), free(rw), free(ru), free(Drw), free(Dru);
}

/* M_c = diag(eC) - kg' w:  DM <= DeC + Dkg'|w| + |kg|'Dw + gamma_n |kg|'|w| + u |M_c| */
static void intra_factor(dp_chunk_bound *b) {
    const dp_chunk *ch = b->ch;
    const int n = ch->n, K = ch->K;
    double *aw = absof(ch->w, (int64_t)n * K), *akg = absof(ch->kg, (int64_t)n * K);
    dp_chunk_M(ch, b->M);
    b->mu = dp_norm2_up(K, K, b->M);
    addmm(1, 1, 0, K, K, n, b->Dkg, aw, b->DM);
    addmm(1, 1, 0, K, K, n, akg, b->Dw, b->DM);
    addmm(dp_gamma(n, b->r.u), 1, 0, K, K, n, akg, aw, b->DM);
    add_scaled(b->r.u, b->M, (int64_t)K * K, b->DM);
    for (int x = 0; x < K; x++) b->DM[(int64_t)x * K + x] += b->DeC[x];
    for (int64_t i = 0; i < (int64_t)K * K; i++) b->DM[i] += n * b->r.tiny;
    free(aw), free(akg);
}

void dp_bound_intra(dp_chunk_bound *b, const dp_chunk *ch, dp_rounding r, const dp_input_error *in) {
    const int c = ch->c, R = ch->R, K = ch->K, V = ch->V, n = ch->n;
    const int64_t cK = (int64_t)c * K, nK = (int64_t)n * K, nV = (int64_t)n * V, nn = (int64_t)n * n, KK = (int64_t)K * K;
    *b = (dp_chunk_bound){.r = r, .ch = ch, .eq = in->q, .ek = in->k, .ev = in->v, .eb = in->beta};
    const struct { double **p; int64_t n; } a[] = {{&b->Dexp, cK}, {&b->Dend, cK}, {&b->DeC, K}, {&b->DL, nn}, {&b->DA, nn}, {&b->DAqk, (int64_t)c * n},
        {&b->Dw, nK}, {&b->Du, nV}, {&b->Dkg, nK}, {&b->Dqg, cK}, {&b->DM, KK}, {&b->M, KK}, {&b->Dg, cK}};
    for (size_t i = 0; i < sizeof a / sizeof *a; i++) *a[i].p = dp_doubles(a[i].n);
    double *D = dp_doubles(cK);
    for (int x = 0; x < K; x++) {
        double s = 0;
        for (int t = 0; t < c; t++) {
            b->Dg[t * K + x] = in->g ? in->g[t * in->sg + (in->Kg == 1 ? 0 : x)] : 0;
            D[t * K + x] = s += b->Dg[t * K + x] + (t ? r.u * fabs(ch->gcum[t * K + x]) : 0);
        }
    }
    for (int t = 0; t < c; t++)
        for (int x = 0; x < K; x++) {
            const int z = t * K + x, last = (c - 1) * K + x;
            const double span = fabs(ch->gcum[last] - ch->gcum[z]);
            b->Dexp[z] = D[z] + 2 * r.u;
            b->Dend[z] = D[last] - D[z] + r.u * span + 2 * r.u;
            b->Dqg[z] = fabs(ch->qg[z]) * (b->Dexp[z] + b->eq + r.u + r.us) + r.tiny;
            for (int j = 0; j < R; j++) {
                const int64_t i = (int64_t)(t * R + j) * K + x;
                b->Dkg[i] = fabs(ch->kg[i]) * (b->Dend[z] + b->ek + r.u + r.us) + r.tiny;
            }
            if (t == c - 1) b->DeC[x] = ch->eC[x] * b->Dexp[z] + r.tiny;
        }
    intra_pairs(b, D);
    intra_solve(b);
    intra_factor(b);
    free(D);
}

void dp_bound_free(dp_chunk_bound *b) {
    double **a[] = {&b->Dexp, &b->Dend, &b->DeC, &b->DL, &b->DA, &b->DT, &b->DAqk, &b->Dw, &b->Du, &b->Dkg, &b->Dqg, &b->DM, &b->M, &b->Dg};
    for (size_t i = 0; i < sizeof a / sizeof *a; i++) {
        free(*a[i]);
        *a[i] = NULL;
    }
}

/* ---- state and output -------------------------------------------------------------------------------------------------------
 * X = u - w S, S_c = eC o S + kg' X  =>  error of S_c = M_c (error of S) + F, and the error of X = -w (error of S) + local DX with
 *   DX  = Du + Dw |S| + (uo + gamma_K) |w||S| + (u + us) |X| + u |w S|
 *   F   = DeC |S| + 2 u eC |S| + Dkg' |X| + |kg|' DX + gamma_n |kg|'|X| + u |S_c|                            (math.md j.6)
 * so column by column  e_c[v] <= mu e[v] + |F[:,v]|_2. */
void dp_bound_state(const dp_chunk_bound *b, const double *S, double *e, double *DXout) {
    const dp_chunk *ch = b->ch;
    const int n = ch->n, K = ch->K, V = ch->V;
    const int64_t nV = (int64_t)n * V, KV = (int64_t)K * V;
    const double u = b->r.u;
    double *X = dp_doubles(nV), *Sc = dp_copy(S, KV), *aS = absof(S, KV), *aw = absof(ch->w, (int64_t)n * K), *akg = absof(ch->kg, (int64_t)n * K);
    dp_chunk_state(ch, Sc, X);
    double *aX = absof(X, nV), *wS = product(0, 0, n, V, K, aw, aS), *DX = dp_copy(b->Du, nV), *F = dp_doubles(KV);
    addmm(1, 0, 0, n, V, K, b->Dw, aS, DX);
    add_scaled(b->r.uo + dp_gamma(K, u) + u, wS, nV, DX);
    add_scaled(u + b->r.us, X, nV, DX);
    for (int64_t i = 0; i < nV; i++) DX[i] += (K + 2) * b->r.tiny;
    for (int x = 0; x < K; x++)
        for (int v = 0; v < V; v++) {
            const int64_t z = (int64_t)x * V + v;
            F[z] = (b->DeC[x] + 2 * u * ch->eC[x]) * aS[z] + u * fabs(Sc[z]) + (n + 2) * b->r.tiny;
        }
    addmm(1, 1, 0, K, V, n, b->Dkg, aX, F);
    addmm(1, 1, 0, K, V, n, akg, DX, F);
    addmm(dp_gamma(n, u), 1, 0, K, V, n, akg, aX, F);
    for (int v = 0; v < V; v++) e[v] = b->mu * e[v] + column_norm(F, K, V, v);
    if (DXout) memcpy(DXout, DX, sizeof(double) * nV);
    free(X), free(Sc), free(aS), free(aw), free(akg), free(aX), free(wS), free(DX), free(F);
}

/* o = scale qg S + Aqk X: through the state its error is (scale qg - Aqk w) dS, the rest is local. */
void dp_bound_output(const dp_chunk_bound *b, const double *e, const double *DX, double *row) {
    const dp_chunk *ch = b->ch;
    const int c = ch->c, n = ch->n, K = ch->K, V = ch->V;
    const int64_t cV = (int64_t)c * V;
    const double u = b->r.u, sc = fabs(ch->scale);
    double *aS = absof(ch->h, (int64_t)K * V), *aX = absof(ch->v_new, (int64_t)n * V), *aP = absof(ch->Aqk, (int64_t)c * n), *aqg = absof(ch->qg, (int64_t)c * K);
    double *D = dp_doubles(cV), *sens = product(0, 0, c, K, n, ch->Aqk, ch->w), *o = dp_doubles(cV);
    for (int64_t i = 0; i < (int64_t)c * K; i++) sens[i] = ch->scale * ch->qg[i] - sens[i];
    dp_chunk_output(ch, o);
    addmm(sc, 0, 0, c, V, K, b->Dqg, aS, D);
    addmm(sc * (b->r.uo + dp_gamma(K, u) + 3 * u), 0, 0, c, V, K, aqg, aS, D);
    addmm(1, 0, 0, c, V, n, b->DAqk, aX, D);
    addmm(1, 0, 0, c, V, n, aP, DX, D);
    addmm(dp_gamma(n, u), 0, 0, c, V, n, aP, aX, D);
    add_scaled(u + b->r.us, o, cV, D);
    for (int s = 0; s < c; s++) {
        const double ns = norm2(sens + (int64_t)s * K, K);
        for (int v = 0; v < V; v++) D[(int64_t)s * V + v] += ns * e[v] + (K + n + 3) * b->r.tiny;
        row[s] = norm2(D + (int64_t)s * V, V);
    }
    free(aS), free(aX), free(aP), free(aqg), free(D), free(sens), free(o);
}

/* ---- backward state ---------------------------------------------------------------------------------------------------------
 * dX = dvl + kg dS, dS_0 = eC o dS + scale qg' do - w' dX: the error of dS_0 is M_c' (error of dS) + G, that of dX kg (error of dS) + DdX:
 *   Ddvl = DAqk' |do| + (uo + gamma_c) |Aqk|'|do| + us |dvl|
 *   DdX  = Ddvl + Dkg |dS| + (uo + gamma_K + u) |kg||dS| + (u + us) |dX|
 *   G    = DeC |dS| + 2u eC |dS| + scale (Dqg'|do| + (uo + gamma_c + 3u) |qg|'|do|) + Dw'|dX| + |w|'DdX + gamma_n |w|'|dX| + 2u |dS_0| */
void dp_bound_state_bwd(const dp_chunk_bound *b, const double *dout, const double *dS, double *e, double *DdXout) {
    const dp_chunk *ch = b->ch;
    const int c = ch->c, n = ch->n, K = ch->K, V = ch->V;
    const int64_t nV = (int64_t)n * V, KV = (int64_t)K * V;
    const double u = b->r.u, sc = fabs(ch->scale);
    double *dX = dp_doubles(nV), *d0 = dp_copy(dS, KV), *adS = absof(dS, KV), *ado = absof(dout, (int64_t)c * V), *aP = absof(ch->Aqk, (int64_t)c * n);
    double *aw = absof(ch->w, (int64_t)n * K), *akg = absof(ch->kg, (int64_t)n * K), *aqg = absof(ch->qg, (int64_t)c * K);
    dp_chunk_state_bwd(ch, dout, d0, dX);
    double *adX = absof(dX, nV), *D = dp_doubles(nV), *G = dp_doubles(KV);
    addmm(1, 1, 0, n, V, c, b->DAqk, ado, D);
    addmm(b->r.uo + dp_gamma(c, u), 1, 0, n, V, c, aP, ado, D);
    add_scaled(b->r.us, ch->dvl, nV, D);
    addmm(1, 0, 0, n, V, K, b->Dkg, adS, D);
    addmm(b->r.uo + dp_gamma(K, u) + u, 0, 0, n, V, K, akg, adS, D);
    add_scaled(u + b->r.us, dX, nV, D);
    for (int64_t i = 0; i < nV; i++) D[i] += (K + c + 2) * b->r.tiny;
    for (int x = 0; x < K; x++)
        for (int v = 0; v < V; v++) {
            const int64_t z = (int64_t)x * V + v;
            G[z] = (b->DeC[x] + 2 * u * ch->eC[x]) * adS[z] + 2 * u * fabs(d0[z]) + (n + c + 3) * b->r.tiny;
        }
    addmm(sc, 1, 0, K, V, c, b->Dqg, ado, G);
    addmm(sc * (b->r.uo + dp_gamma(c, u) + 3 * u), 1, 0, K, V, c, aqg, ado, G);
    addmm(1, 1, 0, K, V, n, b->Dw, adX, G);
    addmm(1, 1, 0, K, V, n, aw, D, G);
    addmm(dp_gamma(n, u), 1, 0, K, V, n, aw, adX, G);
    for (int v = 0; v < V; v++) e[v] = b->mu * e[v] + column_norm(G, K, V, v);
    if (DdXout) memcpy(DdXout, D, sizeof(double) * nV);
    free(dX), free(d0), free(adS), free(ado), free(aP), free(aw), free(akg), free(aqg), free(adX), free(D), free(G);
}

/* ---- gradients --------------------------------------------------------------------------------------------------------------
 * With dS0 = error of h (columns bounded by eS) and ddS = error of dh (columns bounded by edS), first order:
 *   X :  -w dS0 + DX          dX: kg ddS + DdX          dZ = T' dX:  (T' kg) ddS + |T|'(DdX + rounding) (+ DT'|dX|)
 *   E = V - Kgam S_0 - L X:  -(Kgam - L w) dS0 + DKgam|S_0| + (uo.. + gamma) |Kgam||S_0| + DL|X| + |L| DX + ...
 *   dbeta = sum_v dZ o E,  dE = B dZ,  dL = -dE X',  dP = scale do X':   product rule, entrywise
 *   dq_s  = scale exp(gcum) o (S_0 do) + sum dP pair k;   |S_0-error do|_2 <= sum_v eS[v] |do_v| over the whole K vector
 *   dk    = read + write parts likewise;   dgam = q o dq + k o (dk_read - dk_write) + last token: rowsum(dS_c o S_c)
 *   dg    = reverse cumsum: bounds add up, plus gamma_c of the partial sums.
 * Entrywise bounds get the norm of the propagated vector as an entrywise bound where an entrywise one is needed (dgam). */
typedef struct { double *X, *dX, *dZ, *E, *dE, *aX, *adX, *aE, *adZ, *adE, *dZv, *Ev, *dEv; } grad_state;

static void propagate(const double *sens, int n, int K, int V, const double *e, double *D) {
    for (int i = 0; i < n; i++) {
        const double ns = norm2(sens + (int64_t)i * K, K);
        for (int v = 0; v < V; v++) D[(int64_t)i * V + v] += ns * e[v];
    }
}

static void grad_rows(const dp_chunk_bound *b, const double *eS, const double *edS, const double *DX, const double *DdX, grad_state *g) {
    const dp_chunk *ch = b->ch;
    const int n = ch->n, K = ch->K, V = ch->V;
    const int64_t nV = (int64_t)n * V, nK = (int64_t)n * K, nn = (int64_t)n * n;
    const double u = b->r.u, gn = dp_gamma(n + 1, u);
    double *aT = absof(ch->Akk, nn), *aL = absof(ch->L, nn), *aS = absof(ch->h, (int64_t)K * V), *akgam = absof(ch->kgam, nK), *Dkgam = dp_doubles(nK);
    double *t = dp_doubles(nV), *A = dp_doubles(nn), *sens;
    g->aX = absof(ch->v_new, nV), g->adX = absof(ch->dX, nV);
    g->dZv = product(1, 0, n, V, n, ch->Akk, ch->dX);
    g->adZ = absof(g->dZv, nV);

    g->X = dp_copy(DX, nV);
    propagate(ch->w, n, K, V, eS, g->X);
    g->dX = dp_copy(DdX, nV);
    propagate(ch->kg, n, K, V, edS, g->dX);

    memcpy(t, DdX, sizeof(double) * nV);                         /* dZ */
    if (b->r.inverse) {
        g->dZ = product(1, 0, n, V, n, b->DT, g->adX);
        add_scaled(b->r.uo + gn, g->adX, nV, t);
    } else {
        g->dZ = dp_doubles(nV);
        for (int i = 0; i < n; i++)
            for (int j = 0; j < n; j++) {
                const int64_t z = (int64_t)i * n + j;
                A[z] = b->DA[z] + gn * (i == j ? 1 : fabs(ch->beta[i]) * aL[z]);
            }
        addmm(1, 1, 0, n, V, n, A, g->adZ, t);
    }
    addmm(1, 1, 0, n, V, n, aT, t, g->dZ);
    sens = product(1, 0, n, K, n, ch->Akk, ch->kg);
    propagate(sens, n, K, V, edS, g->dZ);
    free(sens);

    g->E = dp_doubles(nV);                                       /* E */
    g->Ev = product(0, 0, n, V, K, ch->kgam, ch->h);
    addmm(1, 0, 0, n, V, n, ch->L, ch->v_new, g->Ev);
    for (int64_t i = 0; i < nV; i++) {
        g->E[i] = (b->ev + 2 * u) * fabs(ch->v[i]) + 2 * u * fabs(g->Ev[i]) + (K + n) * b->r.tiny;
        g->Ev[i] = ch->v[i] - g->Ev[i];
    }
    g->aE = absof(g->Ev, nV);
    for (int i = 0; i < n; i++)
        for (int x = 0; x < K; x++) Dkgam[(int64_t)i * K + x] = akgam[(int64_t)i * K + x] * (b->Dexp[(i / ch->R) * K + x] + b->ek + u + 2 * b->r.uo + dp_gamma(K, u) + u);
    addmm(1, 0, 0, n, V, K, Dkgam, aS, g->E);
    addmm(1, 0, 0, n, V, n, b->DL, g->aX, g->E);
    addmm(1, 0, 0, n, V, n, aL, DX, g->E);
    addmm(2 * b->r.uo + gn + u, 0, 0, n, V, n, aL, g->aX, g->E);
    sens = product(0, 0, n, K, n, ch->L, ch->w);
    for (int64_t i = 0; i < nK; i++) sens[i] = ch->kgam[i] - sens[i];
    propagate(sens, n, K, V, eS, g->E);
    free(sens);

    g->dE = dp_doubles(nV), g->dEv = dp_doubles(nV);
    for (int i = 0; i < n; i++)
        for (int v = 0; v < V; v++) {
            const int64_t z = (int64_t)i * V + v;
            g->dEv[z] = ch->beta[i] * g->dZv[z];
            g->dE[z] = fabs(ch->beta[i]) * g->dZ[z] + (b->eb + u) * fabs(g->dEv[z]) + b->r.tiny;
        }
    g->adE = absof(g->dEv, nV);
    free(aT), free(aL), free(aS), free(akgam), free(Dkgam), free(t), free(A);
}

static void grad_state_free(grad_state *g) {
    double *a[] = {g->X, g->dX, g->dZ, g->E, g->dE, g->aX, g->adX, g->aE, g->adZ, g->adE, g->dZv, g->Ev, g->dEv};
    for (size_t i = 0; i < sizeof a / sizeof *a; i++) free(a[i]);
}

/* |A| |B|' + rounding for a product of A = (value a, error Da) and B' over V */
static double *outer_bound(int m, int n, int V, const double *a, const double *Da, const double *x, const double *Dx, double round) {
    double *D = dp_doubles((int64_t)m * n);
    if (Da) addmm(1, 0, 1, m, n, V, Da, x, D);
    if (Dx) addmm(1, 0, 1, m, n, V, a, Dx, D);
    addmm(round, 0, 1, m, n, V, a, x, D);
    return D;
}

/* sum over v of e[v] |x_v|: 2-norm over K of (error of the state) x */
static double through_state(const double *e, const double *x, int V) {
    double s = 0;
    for (int v = 0; v < V; v++) s += e[v] * fabs(x[v]);
    return s;
}

typedef struct { double *q, *r, *w; } intra_bound;     /* entrywise bounds of the three K-vector sums: dq, dk read, dk write */

/* In-chunk parts of dq, dk_read, dk_write: values (absolute sums) and bounds, pair by pair. */
static void grad_pairs(const dp_chunk_bound *b, const double *dL, const double *DdL, const double *dP, const double *DdP, intra_bound *o) {
    const dp_chunk *ch = b->ch;
    const int c = ch->c, R = ch->R, K = ch->K, n = ch->n;
    const double u = b->r.u, g = dp_gamma(2 * c * R + 4, u);
    for (int s = 0; s < c; s++)
        for (int i = 0; i <= s; i++)
            for (int x = 0; x < K; x++) {
                const double d = ch->gcum[s * K + x] - ch->gcum[i * K + x], e = exp_up(d);
                const double ee = (b->Dexp[s * K + x] - b->Dexp[i * K + x]) + u * fabs(d) + 2 * u + g;
                const double aq = fabs(ch->q[s * K + x]);
                for (int m = 0; m < R; m++) {
                    const int im = i * R + m;
                    const double ai = fabs(ch->k[(int64_t)im * K + x]), p = fabs(dP[(int64_t)s * n + im]), Dp = DdP[(int64_t)s * n + im];
                    o->q[s * K + x] += e * ai * (Dp + p * (ee + b->ek));
                    o->w[(int64_t)im * K + x] += e * aq * (Dp + p * (ee + b->eq));
                    if (i == s) continue;
                    for (int j = 0; j < R; j++) {
                        const int64_t sj = s * R + j;
                        const double as = fabs(ch->k[sj * K + x]), l = fabs(dL[sj * n + im]), Dl = DdL[sj * n + im];
                        o->r[sj * K + x] += e * ai * (Dl + l * (ee + b->ek));
                        o->w[(int64_t)im * K + x] += e * as * (Dl + l * (ee + b->ek));
                    }
                }
            }
}

void dp_bound_grads(const dp_chunk_bound *b, const double *dout, const double *eS, const double *edS, const double *DX, const double *DdX, dp_grad_bound *out) {
    const dp_chunk *ch = b->ch;
    const int c = ch->c, R = ch->R, n = ch->n, K = ch->K, V = ch->V;
    const int64_t cK = (int64_t)c * K, nK = (int64_t)n * K, cV = (int64_t)c * V, KV = (int64_t)K * V;
    const double u = b->r.u, gV = dp_gamma(V, u) + 2 * b->r.uo, sc = fabs(ch->scale);
    grad_state g;
    grad_rows(b, eS, edS, DX, DdX, &g);
    double *ado = absof(dout, cV), *aS = absof(ch->h, KV), *adS = absof(ch->dh, KV);
    double *DdP = outer_bound(c, n, V, ado, NULL, g.aX, g.X, gV + 2 * u), *DdL = outer_bound(n, n, V, g.adE, g.dE, g.aX, g.X, gV);
    double *dP = product(0, 1, c, n, V, dout, ch->v_new), *dL = product(0, 1, n, n, V, g.dEv, ch->v_new);
    for (int64_t i = 0; i < (int64_t)c * n; i++) dP[i] *= sc, DdP[i] *= sc;
    intra_bound ib = {.q = dp_doubles(cK), .r = dp_doubles(nK), .w = dp_doubles(nK)};
    grad_pairs(b, dL, DdL, dP, DdP, &ib);

    double *Sdo = outer_bound(c, K, V, ado, NULL, aS, NULL, 1), *SdE = outer_bound(n, K, V, g.adE, NULL, aS, NULL, 1), *SX = outer_bound(n, K, V, g.aX, NULL, adS, NULL, 1);
    double *DSdE = outer_bound(n, K, V, g.dE, NULL, aS, NULL, 1), *DSX = outer_bound(n, K, V, g.X, NULL, adS, NULL, 1);

    /* the values, in fp64, for q o dq and k o (dkr - dkw) */
    dp_chunk_grad val;
    dp_chunk_grad_alloc(&val, ch);
    dp_chunk_grads(ch, dout, 0, &val);
    double *dgam = dp_doubles(cK);
    for (int s = 0; s < c; s++) {
        const double ps = sc * through_state(eS, dout + (int64_t)s * V, V);
        double loc = 0, emax = 0;
        for (int x = 0; x < K; x++) {
            const int z = s * K + x;
            const double e = exp(ch->gcum[z]);
            ib.q[z] += sc * e * Sdo[z] * (b->Dexp[z] + gV + 4 * u) + u * fabs(val.dq[z]) + (V + n) * b->r.tiny;
            loc += ib.q[z] * ib.q[z];
            emax = fmax(emax, e);
            dgam[z] += fabs(ch->q[z]) * (ib.q[z] + e * ps) + (b->eq + 2 * u) * fabs(ch->q[z] * val.dq[z]);
        }
        out->dq[s] = sqrt(loc) + emax * ps;
    }
    for (int i = 0; i < n; i++) {
        const double pr = through_state(eS, g.dEv + (int64_t)i * V, V), pw = through_state(edS, ch->v_new + (int64_t)i * V, V);
        double loc = 0, er = 0, ew = 0, dv = 0, db = 0;
        for (int x = 0; x < K; x++) {
            const int t = i / R, z = t * K + x;
            const int64_t j = (int64_t)i * K + x;
            const double e = exp(ch->gcum[z]), end = exp(ch->gcum[(c - 1) * K + x] - ch->gcum[z]);
            ib.r[j] += e * (DSdE[j] + SdE[j] * (b->Dexp[z] + gV + 2 * u)) + (V + n) * b->r.tiny;
            ib.w[j] += end * (DSX[j] + SX[j] * (b->Dend[z] + gV + 2 * u)) + (V + n) * b->r.tiny;
            const double l = ib.r[j] + ib.w[j] + u * fabs(val.dk[j]);
            loc += l * l;
            er = fmax(er, e), ew = fmax(ew, end);
            dgam[z] += fabs(ch->k[j]) * (l + e * pr + end * pw + (b->ek + 3 * u) * (e * SdE[j] + end * SX[j])) + 3 * u * fabs(ch->k[j] * val.dk[j]);
        }
        out->dk[i] = sqrt(loc) + er * pr + ew * pw;
        for (int v = 0; v < V; v++) {
            const int64_t z = (int64_t)i * V + v;
            dv += g.dE[z] * g.dE[z];
            db += g.dZ[z] * g.aE[z] + g.adZ[z] * g.E[z] + dp_gamma(V, u) * g.adZ[z] * g.aE[z];
        }
        out->dv[i] = sqrt(dv);
        out->dbeta[i] = db + V * b->r.tiny;
    }
    /* last token: rowsum(dS_c o S_c) formed as eC o rowsum(S_0 o dS_c) + sum_i kg_i o (dS_c X_i) */
    for (int x = 0; x < K; x++) {
        double s = 0, p = 0, Dend = 0;
        for (int v = 0; v < V; v++) {
            const int64_t z = (int64_t)x * V + v;
            s += aS[z] * adS[z];
            p += eS[v] * adS[z] + edS[v] * aS[z];
        }
        for (int i = 0; i < n; i++) {
            const int64_t j = (int64_t)i * K + x;
            const double end = exp(ch->gcum[(c - 1) * K + x] - ch->gcum[(i / R) * K + x]);
            Dend += fabs(ch->k[j]) * end * (DSX[j] + SX[j] * (b->Dend[(i / R) * K + x] + b->ek + gV + (n + 4) * u) + through_state(edS, ch->v_new + (int64_t)i * V, V));
        }
        dgam[(c - 1) * K + x] += b->DeC[x] * s + ch->eC[x] * (p + (dp_gamma(V, u) + 3 * u) * s) + Dend;
    }
    for (int x = 0; x < K; x++) {
        double sum = 0, part = 0;
        for (int t = c - 1; t >= 0; t--) {
            part += fabs(val.dg[t * K + x]);                     /* partial sums of the reverse cumsum are dg itself */
            sum += dgam[t * K + x];
            out->dg[t * K + x] = sum + u * part;
        }
    }
    for (int t = 0; t < c; t++) out->ndq[t] = norm2(val.dq + (int64_t)t * K, K);
    for (int i = 0; i < n; i++) {
        out->ndk[i] = norm2(val.dk + (int64_t)i * K, K);
        out->ndv[i] = norm2(val.dv + (int64_t)i * V, V);
        out->vdbeta[i] = val.dbeta[i];
    }
    memcpy(out->vdg, val.dg, sizeof(double) * cK);
    dp_chunk_grad_free(&val);
    grad_state_free(&g);
    double *a[] = {ado, aS, adS, DdP, DdL, dP, dL, ib.q, ib.r, ib.w, Sdo, SdE, SX, DSdE, DSX, dgam};
    for (size_t i = 0; i < sizeof a / sizeof *a; i++) free(a[i]);
}

/* ---- the chain and the merge ------------------------------------------------------------------------------------------------ */

double dp_bound_chain_step(dp_format f, int K, const double *M, const double *DM, double mu, const double *P, double b) {
    const int64_t KK = (int64_t)K * K;
    const double eta = dp_eta(f, K), tiny = f == DP_FP64 ? 0x1p-1022 : 0x1p-126;
    double *E = dp_doubles(KK), *aP = absof(P, KK), *aM = absof(M, KK);
    for (int64_t i = 0; i < KK; i++) aM[i] = eta * aM[i] + (DM ? DM[i] : 0);
    addmm(1, 0, 0, K, K, K, aM, aP, E);
    const double local = dp_norm_fro(KK, E), grow = b > 0 ? eta * dp_norm_abs2_up(K, K, M) + (DM ? dp_norm_fro(KK, DM) : 0) : 0;
    free(E), free(aP), free(aM);
    return (mu + grow) * b + local + 3.0 * K * K * tiny;
}

/* |d'| <= |M|_2 |d| + |dM|_2 |S_hat| + |dH| + eta | |M_hat||S_hat| | + u (| |M||S| | + |H|), S_hat <= S + d, column by column. */
void dp_bound_merge_step(int K, int V, double eta, double u, const double *M, double mu, double bM, const double *S, const double *H, const double *eH, double *e) {
    double *aM = absof(M, (int64_t)K * K), *aS = absof(S, (int64_t)K * V), *MS = product(0, 0, K, V, K, aM, aS);
    const double aM2 = dp_norm_abs2_up(K, K, M);
    for (int v = 0; v < V; v++) {
        const double S2 = column_norm(S, K, V, v), MS2 = column_norm(MS, K, V, v), H2 = column_norm(H, K, V, v);
        e[v] = (mu + bM + (eta + u) * aM2) * e[v] + bM * S2 + eH[v] + (eta + u) * (MS2 + bM * S2) + u * (H2 + eH[v]) + (K + 1.0) * K * 0x1p-126;
    }
    free(aM), free(aS), free(MS);
}
