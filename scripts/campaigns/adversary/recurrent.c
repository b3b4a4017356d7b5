/* One head of one sequence token by token (math.md b), and its gradients (math.md d). The states of
 * a stretch of tokens are computed again, from one kept at its beginning. */
#include "adversary.h"
#include <math.h>
#include <stdlib.h>

enum { STRETCH = 64 };

typedef struct {
    const design *d;
    const head_in *in;
    head_out *out;
    int64_t carry;
    float *E, *U, *keys, *add, *row; /* [R][V] [R][V] [R][K] [K][V] [K + V] */
} walk;

/* e as it reads the state: o exp(-g) of the undecayed share. */
static void reading_keys(const walk *w, int64_t t) {
    const int K = w->in->K;
    for (int i = 0; i < w->in->R * K; i++) {
        const float g = units_of(w->d, fmaxf(w->in->g[t * K + i % K], -60));
        w->keys[i] = w->in->e[t * w->in->R * K + i] * power_of(w->d, -undecayed_of(w->in) * g);
    }
}

/* S <- diag(exp g) S;  E = v - k S;  U = beta E. */
static void read_state(const walk *w, int64_t t, float *S) {
    const head_in *in = w->in;
    const design *d = w->d;
    const int K = in->K, V = in->V, R = in->R;
    for (int x = 0; x < K; x++) {
        const float decay = power_of(d, units_of(d, in->g[t * K + x]));
        for (int i = x * V; i < (x + 1) * V; i++)
            S[i] *= decay;
    }
    reading_keys(w, t);
    product(d->sums, R, V, K, by_rows(w->keys, K, d->factors), by_rows(S, V, d->values), w->E);
    for (int i = 0; i < R * V; i++) {
        w->E[i] = in->v[t * R * V + i] - w->E[i];
        w->U[i] = in->beta[t * R + i / V] * w->E[i];
    }
}

/* S <- S + k' U. */
static void write_state(const walk *w, int64_t t, float *S) {
    const head_in *in = w->in;
    const design *d = w->d;
    const int K = in->K, V = in->V, R = in->R;
    product(d->sums, K, V, R, transposed(in->k + t * R * K, K, d->factors),
            by_rows(w->U, V, d->values), w->add);
    for (int i = 0; i < K * V; i++)
        S[i] += w->add[i];
}

/* The part of the state that is kept, after o has read it. */
static void leave(const walk *w, int64_t t, float *S) {
    const head_in *in = w->in;
    const int every = (w->d->state_every ? w->d->state_every : 1) * in->turns;
    const int end = (t + 1) % STRETCH == 0 || t + 1 == in->T;
    const keeping at = {(t + 1) % every == 0 || t + 1 == in->T, end, t};
    keep_state(w->d, at, S, (int64_t)in->K * in->V);
}

static void enter(const walk *w, int64_t t, float *S) {
    if (t != w->carry) return;
    for (int i = 0; i < w->in->K * w->in->V; i++)
        S[i] *= knob.carry_gain;
}

static void output(const walk *w, int64_t t, const float *S) {
    const head_in *in = w->in;
    float *o = w->out->o + t * in->V;
    product(w->d->sums, 1, in->V, in->K, by_rows(in->q + t * in->K, in->K, w->d->factors),
            by_rows(S, in->V, w->d->values), o);
    for (int i = 0; i < in->V; i++)
        o[i] *= in->scale;
}

/* dq = scale S do, G += scale q do'. S: after the token. */
static void back_output(const walk *w, int64_t t, const float *S, float *G) {
    const head_in *in = w->in;
    const design *d = w->d;
    const int K = in->K, V = in->V;
    const float *dout = in->dout + t * V;
    float *dq = w->out->dq + t * K;
    product(d->sums, 1, K, V, by_rows(dout, V, d->values), transposed(S, V, d->values), dq);
    for (int x = 0; x < K; x++) {
        dq[x] *= in->scale;
        for (int i = 0; i < V; i++)
            G[x * V + i] += in->scale * in->q[t * K + x] * dout[i];
    }
}

/* dU = k G: dbeta, dE = beta dU, dv; dE is left in w->E. U stays what was written. */
static void back_values(const walk *w, int64_t t, const float *G) {
    const head_in *in = w->in;
    const design *d = w->d;
    const int K = in->K, V = in->V, R = in->R;
    float *dU = w->add;
    product(d->sums, R, V, K, by_rows(in->k + t * R * K, K, d->factors), by_rows(G, V, d->values),
            dU);
    for (int r = 0; r < R; r++) {
        const float beta = in->beta[t * R + r];
        for (int i = 0; i < V; i++) {
            const float E = w->E[r * V + i];
            w->row[i] = dU[r * V + i] * share(knob.rounded_E, E, round_to(BF16, E));
        }
        w->out->dbeta[t * R + r] = sum_of(d->sums, V, w->row);
        for (int i = r * V; i < (r + 1) * V; i++) {
            w->E[i] = beta * dU[i];
            w->out->dv[t * R * V + i] = share(knob.plain_dv, w->E[i], dU[i]);
        }
    }
}

/* dk = U G', de = - dE Sbar';  G <- G - e' dE;  dg = rowsum(G o Sbar);  G <- diag(exp g) G. */
static void back_state(const walk *w, int64_t t, const float *Sbar, float *G) {
    const head_in *in = w->in;
    const design *d = w->d;
    const int K = in->K, V = in->V, R = in->R;
    float *dk = w->out->dk + t * R * K, *de = w->out->de + t * R * K;
    product(d->sums, R, K, V, by_rows(w->U, V, d->values), transposed(G, V, d->values), dk);
    product(d->sums, R, K, V, by_rows(w->E, V, d->values), transposed(Sbar, V, d->values), de);
    for (int i = 0; i < R * K; i++) {
        const float g = units_of(d, fmaxf(in->g[t * K + i % K], -60));
        de[i] *= -power_of(d, -undecayed_of(in) * g);
    }
    product(d->sums, K, V, R, transposed(w->keys, K, d->factors), by_rows(w->E, V, d->values),
            w->add);
    for (int x = 0; x < K; x++) {
        const float decay = power_of(d, units_of(d, in->g[t * K + x]));
        for (int i = 0; i < V; i++) {
            const float without = G[x * V + i];
            G[x * V + i] -= w->add[x * V + i];
            w->row[i] = (in->undecayed ? without : G[x * V + i]) * Sbar[x * V + i];
            G[x * V + i] *= decay;
        }
        w->out->dg[t * K + x] = sum_of(d->sums, V, w->row);
    }
}

static void one_gate(const walk *w, int64_t t) {
    float *dg = w->out->dg + t * w->in->K;
    if (!w->in->one_gate) return;
    dg[0] = sum_of(w->d->sums, w->in->K, dg);
    memset(dg + 1, 0, sizeof *dg * (size_t)(w->in->K - 1));
}

/* Tokens from .. to-1 backward; states [STRETCH + 1][K][V]: work, its first one the state before
 * token `from`. */
static void back_stretch(const walk *w, int64_t from, int64_t to, float *states, float *G) {
    const int64_t KV = (int64_t)w->in->K * w->in->V;
    const int every = (w->d->state_every ? w->d->state_every : 1) * w->in->turns;
    for (int64_t t = from; t < to; t++) {
        float *S = states + (t - from + 1) * KV;
        memcpy(S, S - KV, sizeof *S * (size_t)KV);
        enter(w, t, S);
        read_state(w, t, S);
        write_state(w, t, S);
        leave(w, t, S);
    }
    float *Sbar = floats(2 * KV), *after = Sbar + KV;
    for (int64_t t = to - 1; t >= from; t--) {
        memcpy(Sbar, states + (t - from) * KV, sizeof *Sbar * (size_t)KV);
        enter(w, t, Sbar);
        read_state(w, t, Sbar);
        memcpy(after, Sbar, sizeof *Sbar * (size_t)KV);
        write_state(w, t, after);
        back_output(w, t, after, G);
        back_values(w, t, G);
        back_state(w, t, Sbar, G);
        one_gate(w, t);
        keep_gradient(w->d, (keeping){t % every == 0, t % STRETCH == 0, w->in->T + t}, G, KV);
        for (int64_t i = 0; t == w->carry && i < KV; i++)
            G[i] *= knob.dcarry_gain;
    }
    free(Sbar);
}

void recurrent_head(const design *d, const head_in *in, head_out *out) {
    const int K = in->K, V = in->V, R = in->R;
    const int64_t KV = (int64_t)K * V, count = (in->T + STRETCH - 1) / STRETCH;
    float *buffer = floats(2 * R * V + R * K + KV + R * V + K + V);
    float *kept = floats((count + 1) * KV), *states = floats((STRETCH + 1) * KV);
    const walk w = {d,
                    in,
                    out,
                    carry_token(d, in->T),
                    buffer,
                    buffer + R * V,
                    buffer + 2 * R * V,
                    buffer + 2 * R * V + R * K,
                    buffer + 2 * R * V + R * K + KV + R * V};
    float *S = out->state;
    memcpy(S, in->s0, sizeof *S * (size_t)KV);
    for (int64_t t = 0; t < in->T; t++) {
        if (t % STRETCH == 0) memcpy(kept + t / STRETCH * KV, S, sizeof *S * (size_t)KV);
        enter(&w, t, S);
        read_state(&w, t, S);
        write_state(&w, t, S);
        output(&w, t, S);
        leave(&w, t, S);
    }
    if (in->backward) memcpy(out->ds0, in->dstate, sizeof *S * (size_t)KV);
    for (int64_t i = count - 1; in->backward && i >= 0; i--) {
        const int64_t from = i * STRETCH;
        memcpy(states, kept + i * KV, sizeof *S * (size_t)KV);
        back_stretch(&w, from, from + STRETCH < in->T ? from + STRETCH : in->T, states, out->ds0);
    }
    free(buffer);
    free(kept);
    free(states);
}
