/* The recurrence and its adjoint in long double, an independent witness (oracle.h). */
#include "oracle.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef long double ld;

static ld *lds(int64_t n) { return dp_calloc((size_t)n, sizeof(ld)); }
static ld sigm(ld x) { return x >= 0 ? 1 / (1 + expl(-x)) : expl(x) / (1 + expl(x)); }

/* gate of (token, value head, channel): value, derivative by x, derivative by A_log */
static void gate_at(const dp_problem *p, int64_t t, int hv, int c, ld *g, ld *dx, ld *dA) {
    const int Kg = dp_Kg(p);
    const ld raw = p->g[(t * p->HV + hv) * Kg + c];
    if (p->gate == DP_GATE_LOG) {
        *g = raw;
        *dx = 1;
        *dA = 0;
        return;
    }
    const ld x = raw + (p->dt_bias ? p->dt_bias[hv * Kg + c] : 0),
             a = p->A_log ? expl(p->A_log[hv]) : 1;
    if (p->gate == DP_GATE_SOFTPLUS) {
        *g = -a * (x > 0 ? x + log1pl(expl(-x)) : log1pl(expl(x)));
        *dx = -a * sigm(x);
        *dA = *g;
    } else {
        const ld s = sigm(a * x), lb = p->lower_bound;
        *g = lb * s;
        *dx = lb * s * (1 - s) * a;
        *dA = *dx * x;
    }
}

static void beta_at(const dp_problem *p, double raw, ld *b, ld *db) {
    const ld z = p->beta_form == DP_BETA_SIGMOID2 ? 2 : 1, s = sigm(raw);
    *b = p->beta_form == DP_BETA_PLAIN ? (ld)raw : z * s;
    *db = p->beta_form == DP_BETA_PLAIN ? 1 : z * s * (1 - s);
}

static ld normalise(const dp_problem *p, const double *x, ld *y) {
    ld s = 0;
    for (int i = 0; i < p->K; i++)
        s += (ld)x[i] * x[i];
    const ld r = p->l2norm ? 1 / sqrtl(s + (ld)DP_L2_EPS) : 1;
    for (int i = 0; i < p->K; i++)
        y[i] = r * x[i];
    return r;
}

static void denormalise(const dp_problem *p, const ld *y, ld r, const ld *dy,
                        double *out) { /* adds */
    ld d = 0;
    for (int i = 0; i < p->K; i++)
        d += y[i] * dy[i];
    for (int i = 0; i < p->K; i++)
        out[i] += (double)(p->l2norm ? r * (dy[i] - y[i] * d) : dy[i]);
}

static void sequence(const dp_problem *p, int seq, int hv, dp_result *out, int backward) {
    const int K = p->K, V = p->V, R = p->R, h = hv / dp_G(p), Kg = dp_Kg(p);
    const int64_t a = p->cu[seq], n = p->cu[seq + 1] - a, KV = (int64_t)K * V,
                  sh = ((int64_t)seq * p->HV + hv) * KV;
    ld *S = lds((n + 1) * KV), *Sb = lds(n * KV + 1), *E = lds(n * R * V + 1), *k = lds(R * K),
       *q = lds(K), *g = lds(K), *b = lds(R);
    for (int64_t i = 0; i < KV; i++)
        S[i] = p->s0 ? p->s0[sh + i] : 0;
    ld x1, x2;
    for (int64_t t = 0; t < n; t++) {
        const int64_t tok = a + t;
        ld *B = Sb + t * KV, *N = S + (t + 1) * KV;
        normalise(p, p->q + (tok * p->H + h) * K, q);
        for (int j = 0; j < R; j++) {
            normalise(p, p->k + ((tok * p->H + h) * R + j) * K, k + j * K);
            beta_at(p, p->beta[(tok * p->HV + hv) * R + j], &b[j], &x1);
        }
        for (int c = 0; c < K; c++) {
            gate_at(p, tok, hv, Kg == 1 ? 0 : c, &g[c], &x1, &x2);
            for (int v = 0; v < V; v++)
                B[c * V + v] = expl(g[c]) * S[t * KV + c * V + v];
        }
        memcpy(N, B, sizeof(ld) * KV);
        for (int j = 0; j < R; j++)
            for (int v = 0; v < V; v++) {
                ld e = p->v[((tok * p->HV + hv) * R + j) * V + v];
                for (int c = 0; c < K; c++)
                    e -= k[j * K + c] * B[c * V + v];
                E[(t * R + j) * V + v] = e;
                for (int c = 0; c < K; c++)
                    N[c * V + v] += k[j * K + c] * b[j] * e;
            }
        for (int v = 0; v < V; v++) {
            ld o = 0;
            for (int c = 0; c < K; c++)
                o += q[c] * N[c * V + v];
            out->o[(tok * p->HV + hv) * V + v] = (double)(p->scale * o);
        }
    }
    for (int64_t i = 0; i < KV; i++)
        out->final_state[sh + i] = (double)S[n * KV + i];
    if (!backward) goto done;

    ld *G = lds(KV), *dSb = lds(KV), *dq = lds(K), *dk = lds(R * K), *dU = lds(R * V);
    for (int64_t i = 0; i < KV; i++)
        G[i] = p->dstate ? p->dstate[sh + i] : 0;
    for (int64_t t = n - 1; t >= 0; t--) {
        const int64_t tok = a + t;
        const double *dout = p->dout + (tok * p->HV + hv) * V;
        const ld *B = Sb + t * KV, *N = S + (t + 1) * KV, *e = E + t * R * V;
        ld rk[64], dbraw, dgx, dgA, gv;
        const ld rq = normalise(p, p->q + (tok * p->H + h) * K, q);
        for (int j = 0; j < R; j++) {
            rk[j] = normalise(p, p->k + ((tok * p->H + h) * R + j) * K, k + j * K);
            beta_at(p, p->beta[(tok * p->HV + hv) * R + j], &b[j], &x1);
        }
        for (int c = 0; c < K; c++) {
            dq[c] = 0;
            for (int v = 0; v < V; v++) {
                G[c * V + v] += p->scale * q[c] * dout[v];
                dq[c] += p->scale * N[c * V + v] * dout[v];
            }
        }
        memcpy(dSb, G, sizeof(ld) * KV);
        for (int j = 0; j < R; j++) {
            ld db = 0;
            for (int v = 0; v < V; v++) {
                ld u = 0;
                for (int c = 0; c < K; c++)
                    u += k[j * K + c] * G[c * V + v];
                dU[j * V + v] = u;
                db += e[j * V + v] * u;
                out->dv[((tok * p->HV + hv) * R + j) * V + v] = (double)(b[j] * u);
            }
            beta_at(p, p->beta[(tok * p->HV + hv) * R + j], &x1, &dbraw);
            out->dbeta[(tok * p->HV + hv) * R + j] = (double)(db * dbraw);
            for (int c = 0; c < K; c++) {
                dk[j * K + c] = 0;
                for (int v = 0; v < V; v++) {
                    dk[j * K + c] +=
                        b[j] * e[j * V + v] * G[c * V + v] - b[j] * dU[j * V + v] * B[c * V + v];
                    dSb[c * V + v] -= k[j * K + c] * b[j] * dU[j * V + v];
                }
            }
        }
        ld scalar = 0;
        for (int c = 0; c < K; c++) {
            ld dg = 0;
            for (int v = 0; v < V; v++)
                dg += dSb[c * V + v] * B[c * V + v];
            gate_at(p, tok, hv, Kg == 1 ? 0 : c, &gv, &dgx, &dgA);
            for (int v = 0; v < V; v++)
                G[c * V + v] = expl(gv) * dSb[c * V + v];
            scalar += dg;
            if (Kg == 1 && c < K - 1) continue;
            if (Kg == 1) dg = scalar;
            out->dg[(tok * p->HV + hv) * Kg + (Kg == 1 ? 0 : c)] = (double)(dg * dgx);
            if (out->dA_log) out->dA_log[hv] += (double)(dg * dgA);
            if (out->ddt_bias) out->ddt_bias[hv * Kg + (Kg == 1 ? 0 : c)] += (double)(dg * dgx);
        }
        denormalise(p, q, rq, dq, out->dq + (tok * p->H + h) * K);
        for (int j = 0; j < R; j++)
            denormalise(p, k + j * K, rk[j], dk + j * K, out->dk + ((tok * p->H + h) * R + j) * K);
    }
    for (int64_t i = 0; i < KV; i++)
        out->ds0[sh + i] = (double)G[i];
    free(G);
    free(dSb);
    free(dq);
    free(dk);
    free(dU);
done:
    free(S), free(Sb), free(E), free(k), free(q), free(g), free(b);
}

void oracle_run(const dp_problem *p, dp_result *r, int backward) {
    for (int i = 0; i < DP_NRESULTS; i++) {
        int64_t rows, width;
        dp_result_shape(p, i, &rows, &width);
        if (*dp_result_at(r, i))
            memset(*dp_result_at(r, i), 0, sizeof(double) * (size_t)(rows * width));
    }
    for (int s = 0; s < p->Nseq; s++)
        for (int hv = 0; hv < p->HV; hv++)
            sequence(p, s, hv, r, backward);
}

double oracle_maxrel(const double *got, const double *want, int64_t n) {
    double e = 0, m = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(got[i])) return INFINITY;
        e = fmax(e, fabs(got[i] - want[i]));
        m = fmax(m, fabs(want[i]));
    }
    return m > 0 ? e / m : e;
}

static uint64_t state;
static double uni(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 11) * 0x1p-53;
}
static double norm(void) {
    double s = -6;
    for (int i = 0; i < 12; i++)
        s += uni();
    return (double)(float)s;
}
static void fill(double *x, int64_t n, double a) {
    if (x)
        for (int64_t i = 0; i < n; i++)
            x[i] = (double)(float)(a * norm());
}

void oracle_problem(dp_problem *p, const oracle_spec *s) {
    *p = (dp_problem){.model = s->model,
                      .T = s->T,
                      .H = s->H,
                      .HV = s->HV,
                      .K = s->K,
                      .V = s->V,
                      .R = s->R,
                      .gate = s->gate,
                      .beta_form = s->beta,
                      .l2norm = s->l2norm,
                      .lower_bound = s->gate == DP_GATE_LOWER_BOUND ? -5 : 0,
                      .scale = 1 / sqrt(s->K)};
    if (s->cu) {
        p->Nseq = s->Nseq;
        p->cu = dp_calloc((size_t)s->Nseq + 1, sizeof *p->cu);
        memcpy(p->cu, s->cu, sizeof(int64_t) * (s->Nseq + 1));
    }
    state = s->seed * 2654435761u + 12345;
    dp_problem_alloc(p);
    const int64_t T = p->T, KV = (int64_t)p->K * p->V, ng = T * p->HV * dp_Kg(p);
    fill(p->q, T * p->H * p->K, 1);
    fill(p->k, T * p->H * p->R * p->K, 1);
    fill(p->v, T * p->HV * p->R * p->V, 1);
    if (!p->l2norm)
        for (int64_t i = 0; i < T * p->H * p->R; i++) {
            double n = 0;
            for (int c = 0; c < p->K; c++)
                n += p->k[i * p->K + c] * p->k[i * p->K + c];
            for (int c = 0; c < p->K; c++)
                p->k[i * p->K + c] = (double)(float)(p->k[i * p->K + c] / sqrt(n));
        }
    for (int64_t i = 0; i < ng; i++) { /* another rate for every head */
        const double rate = s->g_scale * (1 + (double)((i / dp_Kg(p)) % p->HV));
        p->g[i] =
            (double)(float)(p->gate == DP_GATE_LOG ? rate * log(uni() + 1e-9) : norm() + log(rate));
        if (p->g[i] > 0 && p->gate == DP_GATE_LOG) p->g[i] = 0;
    }
    for (int64_t i = 0; i < T * p->HV * p->R; i++)
        p->beta[i] = (double)(float)(p->beta_form == DP_BETA_PLAIN
                                         ? (0.1 + 0.9 * uni()) * (p->R > 2 ? 2.0 / p->R : 1)
                                         : norm() - (p->R > 1 ? p->R : 0));
    if (p->gate != DP_GATE_LOG) {
        p->A_log = dp_doubles(p->HV);
        p->dt_bias = dp_doubles((int64_t)p->HV * dp_Kg(p));
        fill(p->A_log, p->HV, 0.3);
        fill(p->dt_bias, (int64_t)p->HV * dp_Kg(p), 1);
    }
    if (s->s0) {
        p->s0 = dp_doubles(p->Nseq * p->HV * KV);
        fill(p->s0, p->Nseq * p->HV * KV, 0.5);
    }
    if (s->backward) {
        p->dout = dp_doubles(T * p->HV * p->V);
        fill(p->dout, T * p->HV * p->V, 1);
        if (s->s0) {
            p->dstate = dp_doubles(p->Nseq * p->HV * KV);
            fill(p->dstate, p->Nseq * p->HV * KV, 0.5);
        }
    }
}
