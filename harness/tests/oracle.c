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

/* One head of one sequence, for the backward: states before each token, after its decay, and errors
 * of its values; the rows of one token. */
typedef struct {
    const dp_problem *p;
    dp_result *out;
    int hv, h;
    int64_t first, n; /* tokens */
    ld *S, *decayed;  /* [n + 1][K][V], [n][K][V] */
    ld *E;            /* [n][R][V]: v - k' decayed */
    ld *q, *k, *b;    /* of a token: [K], [R][K], [R] */
    ld *erasing;      /* [R][K]: the keys, or erase o k */
    ld rq, *rk;       /* what q and the keys were divided by, inverted; [R] */
    ld *G, *dS;       /* [K][V]: gradient of the state after, and after its decay */
    ld *dq, *dk, *dU; /* [K], [R][K], [R][V] */
    ld *read;         /* [K][V]: what a key reads, the decayed state or what its token left of it */
} walk;

static walk walk_of(const dp_problem *p, int seq, int hv, dp_result *out) {
    const int K = p->K, V = p->V, R = p->R;
    const int64_t n = p->cu[seq + 1] - p->cu[seq], KV = (int64_t)K * V;
    return (walk){.p = p,
                  .out = out,
                  .hv = hv,
                  .h = hv / dp_G(p),
                  .first = p->cu[seq],
                  .n = n,
                  .S = lds((n + 1) * KV),
                  .decayed = lds(n * KV + 1),
                  .E = lds(n * R * V + 1),
                  .q = lds(K),
                  .k = lds(R * K),
                  .b = lds(R),
                  .erasing = lds(R * K),
                  .rk = lds(R),
                  .G = lds(KV),
                  .dS = lds(KV),
                  .dq = lds(K),
                  .dk = lds(R * K),
                  .dU = lds(R * V),
                  .read = lds(KV)};
}

static void free_walk(walk *w) {
    ld *const all[] = {w->S, w->decayed, w->E,  w->q,  w->k,  w->b,       w->rk,
                       w->G, w->dS,      w->dq, w->dk, w->dU, w->erasing, w->read};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static int64_t of_token(const walk *w, int64_t t) { return (w->first + t) * w->p->HV + w->hv; }
static int64_t of_key_head(const walk *w, int64_t t) { return (w->first + t) * w->p->H + w->h; }

static void read_token(walk *w, int64_t t) {
    const dp_problem *p = w->p;
    const int K = p->K, R = p->R;
    ld slope;
    w->rq = normalise(p, p->q + of_key_head(w, t) * K, w->q);
    for (int j = 0; j < R; j++) {
        w->rk[j] = normalise(p, p->k + (of_key_head(w, t) * R + j) * K, w->k + j * K);
        w->b[j] = 1;
        if (p->beta) beta_at(p, p->beta[of_token(w, t) * R + j], &w->b[j], &slope);
        for (int c = 0; c < K; c++)
            w->erasing[j * K + c] =
                w->k[j * K + c] * (p->beta    ? 1
                                   : p->erase ? (ld)p->erase[of_token(w, t) * K + c]
                                              : 0);
    }
}

/* S <- exp(g) S; then S <- S + k b e' for each key, e = v - k' S of the decayed state; o = q' S. */
static void forward_token(walk *w, int64_t t) {
    const dp_problem *p = w->p;
    const int K = p->K, V = p->V, R = p->R;
    const int64_t KV = (int64_t)K * V;
    const ld *before = w->S + t * KV;
    ld *decayed = w->decayed + t * KV, *after = w->S + (t + 1) * KV, *e = w->E + t * R * V;
    read_token(w, t);
    for (int c = 0; c < K; c++) {
        ld g, x1, x2;
        gate_at(p, w->first + t, w->hv, dp_Kg(p) == 1 ? 0 : c, &g, &x1, &x2);
        for (int v = 0; v < V; v++)
            decayed[c * V + v] = expl(g) * before[c * V + v];
    }
    memcpy(after, decayed, sizeof(ld) * KV);
    for (int j = 0; j < R; j++)
        for (int v = 0; v < V; v++) {
            e[j * V + v] = p->v[(of_token(w, t) * R + j) * V + v];
            if (p->write) e[v] *= p->write[of_token(w, t) * V + v];
            for (int c = 0; c < K; c++)
                e[j * V + v] -=
                    w->erasing[j * K + c] * (dp_in_turn(p) ? after : decayed)[c * V + v];
            for (int c = 0; c < K; c++)
                after[c * V + v] += w->k[j * K + c] * w->b[j] * e[j * V + v];
        }
    for (int v = 0; v < V; v++) {
        ld o = 0;
        for (int c = 0; c < K; c++)
            o += w->q[c] * after[c * V + v];
        w->out->o[of_token(w, t) * V + v] = (double)(p->scale * o);
    }
}

/* o = scale q' S: its shares of G, and dq. */
static void backward_output(walk *w, int64_t t) {
    const dp_problem *p = w->p;
    const int V = p->V;
    const double *dout = p->dout + of_token(w, t) * V;
    const ld *after = w->S + (t + 1) * p->K * V;
    for (int c = 0; c < p->K; c++) {
        w->dq[c] = 0;
        for (int v = 0; v < V; v++) {
            w->G[c * V + v] += p->scale * w->q[c] * dout[v];
            w->dq[c] += p->scale * after[c * V + v] * dout[v];
        }
    }
}

/* The same of erase and write, from dU: S = decayed + k' (write o v - erase o k decayed). */
static void backward_gates(walk *w, int64_t t, int64_t row) {
    const dp_problem *p = w->p;
    const int K = p->K, V = p->V;
    const ld *decayed = w->decayed + t * K * V, *e = w->E + t * V;
    for (int v = 0; v < V; v++) {
        w->out->dv[row * V + v] = (double)(w->dU[v] * p->write[row * V + v]);
        w->out->dwrite[row * V + v] = (double)(w->dU[v] * p->v[row * V + v]);
    }
    for (int c = 0; c < K; c++) {
        ld written = 0, erased = 0;
        for (int v = 0; v < V; v++) {
            written += e[v] * w->G[c * V + v];
            erased -= w->dU[v] * decayed[c * V + v];
            w->dS[c * V + v] -= w->erasing[c] * w->dU[v];
        }
        w->out->derase[row * K + c] = (double)(w->k[c] * erased);
        w->dk[c] = written + p->erase[row * K + c] * erased;
    }
}

/* The state after the keys before j of a token, if its keys read one after another. */
static void state_read(walk *w, int64_t t, int j) {
    const int K = w->p->K, V = w->p->V;
    memcpy(w->read, w->decayed + t * K * V, sizeof(ld) * (size_t)(K * V));
    for (int m = 0; m < j && dp_in_turn(w->p); m++)
        for (int i = 0; i < K * V; i++)
            w->read[i] += w->k[m * K + i / V] * w->b[m] * w->E[(t * w->p->R + m) * V + i % V];
}

/* One key: dv, dbeta, dk, and its share of the decayed state's gradient. If keys read one after
 * another, that is the gradient of the state after the key before it. */
static void backward_key(walk *w, int64_t t, int j) {
    const dp_problem *p = w->p;
    const int K = p->K, V = p->V, R = p->R;
    const int64_t row = of_token(w, t) * R + j;
    const ld *e = w->E + (t * R + j) * V, *k = w->k + j * K, *G = dp_in_turn(p) ? w->dS : w->G;
    const ld b = w->b[j];
    ld *dU = w->dU + j * V, *dk = w->dk + j * K, db = 0, same, slope;
    for (int v = 0; v < V; v++) {
        dU[v] = 0;
        for (int c = 0; c < K; c++)
            dU[v] += k[c] * G[c * V + v];
        db += e[v] * dU[v];
        w->out->dv[row * V + v] = (double)(b * dU[v]);
    }
    if (p->erase) {
        backward_gates(w, t, row);
        return;
    }
    if (!p->beta) { /* S = decayed + k' v */
        for (int i = 0; i < K * V; i++)
            dk[i / V] = (i % V ? dk[i / V] : 0) + e[i % V] * w->G[i];
        return;
    }
    state_read(w, t, j);
    beta_at(p, p->beta[row], &same, &slope);
    w->out->dbeta[row] = (double)(db * slope);
    for (int c = 0; c < K; c++) {
        dk[c] = 0;
        for (int v = 0; v < V; v++) {
            dk[c] += b * e[v] * G[c * V + v] - b * dU[v] * w->read[c * V + v];
            w->dS[c * V + v] -= k[c] * b * dU[v];
        }
    }
}

/* The decay: dg, dA_log, ddt_bias, and G of the token before. */
static void backward_gate(walk *w, int64_t t) {
    const dp_problem *p = w->p;
    const int K = p->K, V = p->V, Kg = dp_Kg(p);
    const ld *decayed = w->decayed + t * K * V;
    ld sum = 0;
    for (int c = 0; c < K; c++) {
        const int gate = Kg == 1 ? 0 : c;
        ld g, dgx, dgA, dg = 0;
        for (int v = 0; v < V; v++)
            dg += w->dS[c * V + v] * decayed[c * V + v];
        gate_at(p, w->first + t, w->hv, gate, &g, &dgx, &dgA);
        for (int v = 0; v < V; v++)
            w->G[c * V + v] = expl(g) * w->dS[c * V + v];
        sum += dg;
        if (Kg == 1 && c < K - 1) continue;
        if (Kg == 1) dg = sum;
        w->out->dg[of_token(w, t) * Kg + gate] = (double)(dg * dgx);
        if (w->out->dA_log) w->out->dA_log[w->hv] += (double)(dg * dgA);
        if (w->out->ddt_bias) w->out->ddt_bias[w->hv * Kg + gate] += (double)(dg * dgx);
    }
}

static void backward_token(walk *w, int64_t t) {
    const dp_problem *p = w->p;
    const int K = p->K, R = p->R;
    read_token(w, t);
    backward_output(w, t);
    memcpy(w->dS, w->G, sizeof(ld) * K * p->V);
    for (int j = R - 1; j >= 0; j--)
        backward_key(w, t, j);
    backward_gate(w, t);
    denormalise(p, w->q, w->rq, w->dq, w->out->dq + of_key_head(w, t) * K);
    for (int j = 0; j < R; j++)
        denormalise(p, w->k + j * K, w->rk[j], w->dk + j * K,
                    w->out->dk + (of_key_head(w, t) * R + j) * K);
}

static void sequence(const dp_problem *p, int seq, int hv, dp_result *out, int backward) {
    walk w = walk_of(p, seq, hv, out);
    const int64_t KV = (int64_t)p->K * p->V, state = ((int64_t)seq * p->HV + hv) * KV;
    for (int64_t i = 0; i < KV; i++)
        w.S[i] = p->s0 ? p->s0[state + i] : 0;
    for (int64_t t = 0; t < w.n; t++)
        forward_token(&w, t);
    for (int64_t i = 0; i < KV; i++)
        out->final_state[state + i] = (double)w.S[w.n * KV + i];
    for (int64_t i = 0; backward && i < KV; i++)
        w.G[i] = p->dstate ? p->dstate[state + i] : 0;
    for (int64_t t = w.n - 1; backward && t >= 0; t--)
        backward_token(&w, t);
    for (int64_t i = 0; backward && i < KV; i++)
        out->ds0[state + i] = (double)w.G[i];
    free_walk(&w);
}

void oracle_run(const dp_problem *p, dp_result *r, int backward) {
    for (int i = 0; i < DP_NRESULTS; i++) {
        int64_t rows, width;
        dp_result_shape(p, i, &rows, &width);
        if (r->out[i]) memset(r->out[i], 0, sizeof(double) * (size_t)(rows * width));
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
    for (int64_t i = 0; p->erase && i < T * p->HV * p->K; i++)
        p->erase[i] = (double)(float)(0.1 + 0.9 * uni());
    for (int64_t i = 0; p->write && i < T * p->HV * p->V; i++)
        p->write[i] = (double)(float)(0.1 + 0.9 * uni());
    for (int64_t i = 0; p->beta && i < T * p->HV * p->R; i++)
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

oracle_spec oracle_packed(dp_model model, int K, const int64_t *cu, uint64_t seed) {
    return (oracle_spec){.model = model,
                         .T = cu[4],
                         .H = 1,
                         .HV = 2,
                         .K = K,
                         .V = 12,
                         .R = 1,
                         .Nseq = 4,
                         .cu = cu,
                         .gate = DP_GATE_SOFTPLUS,
                         .beta = DP_BETA_PLAIN,
                         .l2norm = 1,
                         .s0 = 1,
                         .backward = 1,
                         .g_scale = 0.05,
                         .seed = seed};
}
