/* A subject to copy: the step recurrence of ref/math.md b and its adjoint (d), in fp32, one head
 * after the other.
 *
 *     cc -O2 -fPIC -shared -ffp-contract=off -Iharness harness/subject/example_subject.c \
 *         -o build/libexample.so -lm
 *     build/deltaproof run smoke-kda --subject build/libexample.so
 */
#include "deltaproof_subject.h"
#include <math.h>
#include <stdlib.h>

static const deltaproof_subject_info ABOUT = {
    .abi = DP_SUBJECT_ABI,
    .kind = DP_SUBJECT_WHOLE,
    .max_ranks = 1,
    .name = "example",
    .base = "fp32",
    .chain = "fp32",
    .writes = "o final_state states pool dq dk dv dg dbeta derase dwrite dA_log ddt_bias ds0"};
const deltaproof_subject_info *deltaproof_subject_about(void) { return &ABOUT; }
const char *deltaproof_subject_recurrences(void) {
    return "gdn kda mkda gdn2 gla ssd gated-deltaproduct";
}

typedef deltaproof_subject_problem problem;
enum {
    KEEP = 64
}; /* the forward pass keeps the state before every 64th token; the backward pass computes 64 at a
      time again */

/* The activated inputs of one token and head. The erasing keys e and the values y are k and v, for
 * GDN-2 erase o k and write o v (its beta is 1). GLA and SSD erase nothing: e is 0. */
typedef struct {
    float *q, *k, *e, *y, *decay, *beta, rq, *rk;
} token;

static float sigmoid(float x) { return x >= 0 ? 1 / (1 + expf(-x)) : expf(x) / (1 + expf(x)); }
static float softplus(float x) { return x > 0 ? x + log1pf(expf(-x)) : log1pf(expf(x)); }

static float unit(const double *x, int n, int norm,
                  float *y) { /* y = x / sqrt(sum of squares + 1e-6); returns the factor */
    float s = 0;
    for (int i = 0; norm && i < n; i++)
        s += (float)x[i] * (float)x[i];
    const float r = norm ? 1 / sqrtf(s + 1e-6f) : 1;
    for (int i = 0; i < n; i++)
        y[i] = (float)x[i] * r;
    return r;
}
static int erases(const problem *p) { return p->beta || p->erase; }

static void activate(const problem *p, int64_t t, int hv, token *x) {
    const int h = hv / (p->HV / p->H), K = p->K, R = p->R;
    x->rq = unit(p->q + (t * p->H + h) * K, K, p->l2norm, x->q);
    for (int j = 0; j < R; j++)
        x->rk[j] = unit(p->k + ((t * p->H + h) * R + j) * K, K, p->l2norm, x->k + j * K);
    const int64_t at = t * p->HV + hv;
    for (int i = 0; i < R * K; i++)
        x->e[i] = p->erase ? (float)p->erase[at * K + i] * x->k[i] : erases(p) ? x->k[i] : 0;
    for (int i = 0; i < R * p->V; i++)
        x->y[i] = (p->write ? (float)p->write[at * p->V + i] : 1) * (float)p->v[at * R * p->V + i];
    for (int j = 0; j < R; j++) {
        const float b = p->beta ? (float)p->beta[at * R + j] : 1;
        x->beta[j] = p->beta_form == DP_SUBJECT_BETA_PLAIN
                         ? b
                         : (p->beta_form == DP_SUBJECT_BETA_SIGMOID2 ? 2 : 1) * sigmoid(b);
    }
    for (int i = 0; i < K; i++) {
        const int c = p->Kg == 1 ? 0 : i;
        const float raw = (float)p->g[(t * p->HV + hv) * p->Kg + c],
                    a = p->A_log ? expf((float)p->A_log[hv]) : 1,
                    y = raw + (p->dt_bias ? (float)p->dt_bias[hv * p->Kg + c] : 0);
        const float g = p->gate_form == DP_SUBJECT_GATE_LOG ? raw
                        : p->gate_form == DP_SUBJECT_GATE_SOFTPLUS
                            ? -a * softplus(y)
                            : (float)p->lower_bound * sigmoid(a * y);
        x->decay[i] = expf(g);
    }
}
/* S <- diag(decay) S. */
static void decay_state(const problem *p, const token *x, float *S) {
    for (int i = 0; i < p->K; i++)
        for (int c = 0; c < p->V; c++)
            S[i * p->V + c] *= x->decay[i];
}
/* E = y - e S of n keys from `first` on. */
static void read_state(const problem *p, const token *x, int first, int n, const float *S,
                       float *E) {
    const int K = p->K, V = p->V;
    for (int j = first; j < first + n; j++)
        for (int c = 0; c < V; c++) {
            float s = 0;
            for (int i = 0; i < K; i++)
                s += x->e[j * K + i] * S[i * V + c];
            E[j * V + c] = x->y[j * V + c] - s;
        }
}
/* S <- S + k' diag(beta) E of n keys from `first` on. */
static void write_state(const problem *p, const token *x, int first, int n, const float *E,
                        float *S) {
    const int K = p->K, V = p->V;
    for (int j = first; j < first + n; j++)
        for (int i = 0; i < K; i++)
            for (int c = 0; c < V; c++)
                S[i * V + c] += x->k[j * K + i] * (x->beta[j] * E[j * V + c]);
}
/* Keys that read one state and then write to it: all of a token, or each by itself. */
static int at_once(const problem *p) { return p->in_turn ? 1 : p->R; }
static void read_and_write(const problem *p, const token *x, float *S, float *E) {
    for (int j = 0, n = at_once(p); j < p->R; j += n) {
        read_state(p, x, j, n, S, E);
        write_state(p, x, j, n, E, S);
    }
}
/* Where a sequence begins and ends, [HV][K][V] each; NULL: from zeros, nowhere. */
typedef struct {
    const double *from;
    double *to;
} ends;
/* 0: the sequence is padding, and nothing is written for it. */
static int ends_of(const problem *p, int seq, double *pool, double *final_state, ends *e) {
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    *e = (ends){p->initial_state ? p->initial_state + seq * n : NULL,
                final_state ? final_state + seq * n : NULL};
    if (!deltaproof_subject_pooled(p)) return 1;
    if (p->read_slot[seq] < 0) return 0;
    *e = (ends){pool + p->read_slot[seq] * n, pool + p->write_slot[seq] * n};
    return 1;
}
/* One sequence of one head; kept [(tokens / KEEP) + 1][K][V], NULL: forward only. */
static void forward(const problem *p, int seq, int hv, token *x, float *S, float *E, float *kept,
                    double *o, const ends *e, double *states) {
    const int K = p->K, V = p->V;
    const int64_t at = (int64_t)hv * K * V, t0 = p->cu[seq];
    for (int i = 0; i < K * V; i++)
        S[i] = e->from ? (float)e->from[at + i] : 0;
    for (int64_t t = t0; t < p->cu[seq + 1]; t++) {
        if (kept && (t - t0) % KEEP == 0)
            memcpy(kept + (t - t0) / KEEP * K * V, S, sizeof *S * K * V);
        activate(p, t, hv, x);
        decay_state(p, x, S);
        read_and_write(p, x, S, E);
        for (int c = 0; c < V; c++) {
            float s = 0;
            for (int i = 0; i < K; i++)
                s += x->q[i] * S[i * V + c];
            if (o) o[(t * p->HV + hv) * V + c] = (float)p->scale * s;
        }
        for (int i = 0; states && i < K * V; i++)
            states[(t * p->HV + hv) * K * V + i] = S[i];
    }
    for (int i = 0; e->to && i < K * V; i++)
        e->to[at + i] = S[i];
}
/* d of the raw vector from d of its normalised form y: r (d - y <y, d>), added to out. */
static void add_unit(const float *y, const float *d, float r, int n, int norm, double *out) {
    float s = 0;
    for (int i = 0; norm && i < n; i++)
        s += y[i] * d[i];
    for (int i = 0; i < n; i++)
        out[i] = (float)out[i] + r * (d[i] - y[i] * s);
}
typedef struct {
    double *dq, *dk, *dv, *dg, *dbeta, *derase, *dwrite, *dA_log, *ddt_bias, *ds0;
} gradients;

static void gate_gradient(const problem *p, int64_t t, int hv, const float *dlog,
                          const gradients *d) { /* dlog [K]: of the log decay */
    for (int c = 0; c < p->Kg; c++) {
        const int64_t z = (t * p->HV + hv) * p->Kg + c;
        const float y = (float)p->g[z] + (p->dt_bias ? (float)p->dt_bias[hv * p->Kg + c] : 0),
                    a = p->A_log ? expf((float)p->A_log[hv]) : 1;
        float x = 0, dx = 1, dA = 0;
        for (int i = 0; i < (p->Kg == 1 ? p->K : 1); i++)
            x += dlog[p->Kg == 1 ? i : c];
        if (p->gate_form == DP_SUBJECT_GATE_SOFTPLUS) {
            dx = -a * sigmoid(y);
            dA = -a * softplus(y);
        }
        if (p->gate_form == DP_SUBJECT_GATE_LOWER_BOUND) {
            dx = (float)p->lower_bound * sigmoid(a * y) * sigmoid(-a * y) * a;
            dA = dx * y;
        }
        if (d->dg) d->dg[z] = x * dx;
        if (d->ddt_bias) d->ddt_bias[hv * p->Kg + c] = (float)d->ddt_bias[hv * p->Kg + c] + x * dx;
        if (d->dA_log) d->dA_log[hv] = (float)d->dA_log[hv] + x * dA;
    }
}
/* dq [K] of the output, which reads the state after the write, S + k' beta E. Adds the output's
 * part to the gradient G of that state. */
static void query_gradient(const problem *p, const token *x, const double *dout, const float *S,
                           const float *E, float *G, float *dq) {
    const int K = p->K, V = p->V;
    for (int i = 0; i < K; i++) {
        float s = 0;
        for (int c = 0; c < V; c++) {
            s += S[i * V + c] * (float)dout[c];
            G[i * V + c] += (float)p->scale * x->q[i] * (float)dout[c];
        }
        dq[i] = s;
    }
    for (int j = 0; j < p->R; j++) {
        float s = 0;
        for (int c = 0; c < V; c++)
            s += x->beta[j] * E[j * V + c] * (float)dout[c];
        for (int i = 0; i < K; i++)
            dq[i] += x->k[j * K + i] * s;
    }
    for (int i = 0; i < K; i++)
        dq[i] *= (float)p->scale;
}

/* For n keys from `first` on: dU [R][V], the gradient of E and of y, and the gradients of v, beta
 * and write. Key 0 of the token has index z in d. */
static void write_gradient(const problem *p, const token *x, int first, int n, int64_t z,
                           const float *G, const float *E, float *dU, const gradients *d) {
    const int K = p->K, V = p->V;
    for (int j = first; j < first + n; j++) {
        float db = 0;
        for (int c = 0; c < V; c++) {
            float s = 0;
            for (int i = 0; i < K; i++)
                s += x->k[j * K + i] * G[i * V + c];
            db += s * E[j * V + c];
            dU[j * V + c] = x->beta[j] * s;
            const int64_t i = (z + j) * V + c;
            if (d->dv) d->dv[i] = dU[j * V + c] * (p->write ? (float)p->write[i] : 1);
            if (d->dwrite) d->dwrite[i] = dU[j * V + c] * (float)p->v[i];
        }
        if (!p->beta) continue;
        const int plain = p->beta_form == DP_SUBJECT_BETA_PLAIN;
        const float b = plain ? 0 : sigmoid((float)p->beta[z + j]),
                    f = p->beta_form == DP_SUBJECT_BETA_SIGMOID2 ? 2 : 1;
        if (d->dbeta) d->dbeta[z + j] = plain ? db : db * f * b * (1 - b);
    }
}

/* S: the state that they read. */
static void key_gradient(const problem *p, const token *x, int first, int n, int64_t z,
                         const float *S, const float *G, const float *E, const float *dU, float *dk,
                         const gradients *d) {
    const int K = p->K, V = p->V;
    for (int j = first; j < first + n; j++)
        for (int i = 0; i < K; i++) {
            float written = 0, erased = 0;
            for (int c = 0; c < V; c++) {
                written += G[i * V + c] * (x->beta[j] * E[j * V + c]);
                erased -= S[i * V + c] * dU[j * V + c];
            }
            dk[j * K + i] = written + (p->erase ? (float)p->erase[z * K + i] : erases(p)) * erased;
            if (d->derase) d->derase[z * K + i] = x->k[i] * erased;
        }
}

/* G: from the state after they wrote to the one that they read. */
static void erase_gradient(const problem *p, const token *x, int first, int n, const float *dU,
                           float *G) {
    const int K = p->K, V = p->V;
    for (int i = 0; i < K; i++)
        for (int c = 0; c < V; c++)
            for (int j = first; j < first + n; j++)
                G[i * V + c] -= x->e[j * K + i] * dU[j * V + c];
}

/* G: from the decayed state to the one before; dlog [K]: of the log decay. */
static void decay_gradient(const problem *p, const token *x, const float *S, float *G,
                           float *dlog) {
    const int K = p->K, V = p->V;
    for (int i = 0; i < K; i++) {
        float s = 0;
        for (int c = 0; c < V; c++) {
            s += G[i * V + c] * S[i * V + c];
            G[i * V + c] *= x->decay[i];
        }
        dlog[i] = s;
    }
}

/* Token t from the state before it (S) and the gradient of the state after it (G, replaced by that
 * of the state before it). */
static void step_back(const problem *p, int64_t t, int hv, token *x, float *S, float *G, float *E,
                      float *w, const gradients *d) {
    const int K = p->K, V = p->V, R = p->R, h = hv / (p->HV / p->H);
    float *dq = w, *dlog = w + K, *dU = w + 2 * K, *dk = dU + R * V, *read = dk + R * K;
    const int64_t z = (t * p->HV + hv) * R;
    activate(p, t, hv, x);
    decay_state(p, x, S); /* S: decayed, not yet written to */
    memcpy(read, S, sizeof *S * (size_t)(K * V));
    read_and_write(p, x, read, E);
    query_gradient(p, x, p->dout + (t * p->HV + hv) * V, S, E, G, dq);
    for (int n = at_once(p), j = R - n; j >= 0; j -= n) {
        memcpy(read, S, sizeof *S * (size_t)(K * V));
        write_state(p, x, 0, j, E, read);
        write_gradient(p, x, j, n, z, G, E, dU, d);
        key_gradient(p, x, j, n, z, read, G, E, dU, dk, d);
        erase_gradient(p, x, j, n, dU, G);
    }
    decay_gradient(p, x, S, G, dlog);
    if (d->dq) add_unit(x->q, dq, x->rq, K, p->l2norm, d->dq + (t * p->H + h) * K);
    for (int j = 0; d->dk && j < R; j++)
        add_unit(x->k + j * K, dk + j * K, x->rk[j], K, p->l2norm,
                 d->dk + ((t * p->H + h) * R + j) * K);
    gate_gradient(p, t, hv, dlog, d);
}
static void backward(const problem *p, int seq, int hv, token *x, float *S, float *E,
                     const float *kept, float *again, float *G, float *w, const gradients *d) {
    const int K = p->K, V = p->V;
    const int64_t at = ((int64_t)seq * p->HV + hv) * K * V, t0 = p->cu[seq];
    for (int i = 0; i < K * V; i++)
        G[i] = p->dfinal_state ? (float)p->dfinal_state[at + i] : 0;
    for (int64_t t = p->cu[seq + 1] - 1; t >= t0; t--) {
        const int64_t from = t0 + (t - t0) / KEEP * KEEP;
        if (t == p->cu[seq + 1] - 1 ||
            (t - t0) % KEEP ==
                KEEP - 1) { /* again [KEEP][K][V]: states before the tokens from .. t */
            memcpy(S, kept + (from - t0) / KEEP * K * V, sizeof *S * K * V);
            for (int64_t z = from; z <= t; z++) {
                memcpy(again + (z - from) * K * V, S, sizeof *S * K * V);
                activate(p, z, hv, x);
                decay_state(p, x, S);
                read_and_write(p, x, S, E);
            }
        }
        step_back(p, t, hv, x, again + (t - from) * K * V, G, E, w, d);
    }
    for (int i = 0; d->ds0 && i < K * V; i++)
        d->ds0[at + i] = G[i];
}
static void zero(double *x, int64_t n) {
    if (x) memset(x, 0, sizeof *x * (size_t)n);
}
int deltaproof_subject_run(const deltaproof_subject_problem *p, const deltaproof_subject_call *c) {
    const int64_t K = p->K, V = p->V, R = p->R, KV = K * V;
    double *o = deltaproof_subject_find(c, "o"),
           *final_state = deltaproof_subject_find(c, "final_state"),
           *pool = deltaproof_subject_find(c, "pool"),
           *states = deltaproof_subject_find(c, "states");
    const gradients d = {
        deltaproof_subject_find(c, "dq"),       deltaproof_subject_find(c, "dk"),
        deltaproof_subject_find(c, "dv"),       deltaproof_subject_find(c, "dg"),
        deltaproof_subject_find(c, "dbeta"),    deltaproof_subject_find(c, "derase"),
        deltaproof_subject_find(c, "dwrite"),   deltaproof_subject_find(c, "dA_log"),
        deltaproof_subject_find(c, "ddt_bias"), deltaproof_subject_find(c, "ds0")};
    float *work = malloc(sizeof *work * (size_t)(3 * KV + 4 * K + 3 * R * K + 2 * R + 3 * R * V)),
          *kept = malloc(sizeof *kept * (size_t)((p->T / KEEP + 1) * KV)),
          *again = malloc(sizeof *again * KEEP * (size_t)KV);
    if (!work || !kept || !again) {
        strcpy(c->why, "out of memory");
        return 1;
    }
    float *S = work, *G = S + KV, *at = G + KV;
    token x = {.q = at,
               .decay = at + K,
               .k = at + 2 * K,
               .beta = at + 2 * K + R * K,
               .rk = at + 2 * K + R * K + R,
               .e = at + 2 * K + R * K + 2 * R,
               .y = at + 2 * K + 2 * R * K + 2 * R};
    float *E = x.y + R * V, *w = E + R * V; /* w: dq [K], dlog [K], dU [R][V], dk [R][K],
                                           the state that a key reads [K][V] */
    zero(d.dq, p->T * p->H * K);
    zero(d.dk, p->T * p->H * R * K);
    zero(d.dA_log, p->HV);
    zero(d.ddt_bias, p->HV * p->Kg);
    for (int seq = 0; seq < p->Nseq; seq++) {
        ends e;
        if (!ends_of(p, seq, pool, final_state, &e)) continue;
        for (int hv = 0; hv < p->HV; hv++) {
            forward(p, seq, hv, &x, S, E, p->backward ? kept : NULL, o, &e, states);
            if (p->backward) backward(p, seq, hv, &x, S, E, kept, again, G, w, &d);
        }
    }
    free(work);
    free(kept);
    free(again);
    return DP_SUBJECT_OK;
}