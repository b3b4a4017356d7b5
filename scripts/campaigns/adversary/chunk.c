/* One head of one sequence in chunks: the WY form of math.md e and its gradients, math.md f. */
#include "adversary.h"
#include <math.h>
#include <stdlib.h>

#define RESET -120.0f /* a log gate below is 0 in fp32 and would drown the sum of the others */
#define FAR 76.0f     /* an operand beyond exp(76) is formed by itself */

/* A chunk of c tokens, n = c R rows; S0: state before it. */
typedef struct {
    int64_t t0;
    int c, n;
    pair_set pairs;
    float *gam, *early;        /* [c][K] running sum of gates; exp(-g) of the undecayed share */
    float *readers;            /* [c + n][K] */
    float *score, *P, *N;      /* [c + n][n] [c][n] [n][n] */
    float *inv, *kgam, *w, *u; /* [n][n] (NULL: substitution) [n][K] [n][K] [n][V] */
    float *folded;             /* [n][n] the inverse times B; NULL: B goes to the rows */
    float *kg, *qg, *end;      /* [n][K] [c][K] [K] */
    float *X, *S0;             /* [n][V] [K][V] */
} chunk;

typedef struct {
    const design *d;
    const head_in *in;
    head_out *out;
} work;

static void stored(const design *d, format f, float *x, int64_t n) {
    if (d->stored) round_all(f, x, n);
}

static void running_sum(const work *w, chunk *ch) {
    const int K = w->in->K;
    const float *g = w->in->g + ch->t0 * K;
    for (int x = 0; x < K; x++) {
        float sum = 0;
        for (int s = 0; s < ch->c; s++) {
            const float step = units_of(w->d, fmaxf(g[s * K + x], RESET));
            sum += step;
            ch->gam[s * K + x] = share(knob.rounded_cumsum, sum, round_to(BF16, sum));
            ch->early[s * K + x] = power_of(w->d, -undecayed_of(w->in) * fmaxf(step, -80));
        }
    }
}

static void fill_readers(const work *w, chunk *ch) {
    const int K = w->in->K, R = w->in->R;
    memcpy(ch->readers, w->in->q + ch->t0 * K, sizeof(float) * (size_t)(ch->c * K));
    const float *e = w->in->e + ch->t0 * R * K;
    for (int r = 0; r < ch->n; r++)
        for (int x = 0; x < K; x++)
            ch->readers[(ch->c + r) * K + x] = e[r * K + x] * ch->early[r / R * K + x];
}

/* Scores of q into P, of keys into N = B L. */
static void fill_scores(const work *w, chunk *ch) {
    const int n = ch->n, R = w->in->R, K = w->in->K;
    const float *beta = w->in->beta + ch->t0 * R;
    ch->pairs = (pair_set){.d = w->d,
                           .c = ch->c,
                           .R = R,
                           .K = K,
                           .m = ch->c + n,
                           .n = n,
                           .gam = ch->gam,
                           .readers = ch->readers,
                           .writers = w->in->k + ch->t0 * R * K};
    pair_decays(&ch->pairs);
    pair_scores(&ch->pairs, ch->score);
    float *L = ch->score + ch->c * n;
    for (int r = 0; knob.micro_steps != 0 && r < n; r++)
        for (int m = r / R * R; m < r; m++)
            for (int x = 0; x < K; x++)
                L[r * n + m] +=
                    knob.micro_steps * ch->pairs.writers[r * K + x] * ch->pairs.writers[m * K + x];
    for (int i = 0; i < ch->c * n; i++)
        ch->P[i] = w->in->scale * ch->score[i];
    for (int r = 0; r < n; r++)
        for (int m = 0; m < n; m++)
            ch->N[r * n + m] = beta[r] * L[r * n + m];
    stored(w->d, w->d->factors, ch->P, (int64_t)ch->c * n);
}

/* Channel x of kg, before it is stored: row i of a token whose sum of gates is gam. */
static float written(const work *w, const chunk *ch, int i, int x, float gam) {
    const int K = w->in->K;
    const float k = ch->pairs.writers[i], last = ch->gam[(ch->c - 1) * K + x];
    const float to_first = ch->gam[x] - gam;
    if (!w->d->scored || to_first > FAR) return decay_by(w->d, last - gam) * k;
    const float operand = round_to(w->d->factors, decay_by(w->d, to_first) * k);
    return decay_by(w->d, last - ch->gam[x]) * operand;
}

static void fill_gated(const work *w, chunk *ch) {
    const int K = w->in->K, R = w->in->R;
    const float *last = ch->gam + (ch->c - 1) * K;
    const float *other = ch->c > 1 ? last - K : last;
    for (int x = 0; x < K; x++)
        ch->end[x] = power_of(w->d, last[x]);
    for (int i = 0; i < ch->c * K; i++)
        ch->qg[i] = decay_by(w->d, ch->gam[i]) * ch->readers[i];
    for (int i = 0; i < ch->n * K; i++) {
        const int x = i % K;
        const float gam = ch->gam[i / K / R * K + x];
        const float wrong = power_of(w->d, fminf(other[x] - gam, 0)) * ch->pairs.writers[i];
        ch->kgam[i] = decay_by(w->d, gam) * ch->readers[ch->c * K + i];
        ch->kg[i] = share(knob.end_decay, written(w, ch, i, x, gam), wrong);
    }
    stored(w->d, w->d->factors, ch->kg, (int64_t)ch->n * K);
    stored(w->d, w->d->factors, ch->qg, (int64_t)ch->c * K);
}

/* x [n][m] <- A^(-1) diag(beta) x. */
static void solve_written(const work *w, const chunk *ch, int m, const float *x, float *to) {
    const float *beta = w->in->beta + ch->t0 * w->in->R;
    const int n = ch->n;
    float *right = floats((int64_t)n * m);
    for (int r = 0; r < n; r++)
        for (int i = 0; i < m; i++)
            right[r * m + i] = (ch->folded ? 1 : beta[r]) * x[r * m + i];
    if (ch->inv) {
        const float *inverse = ch->folded ? ch->folded : ch->inv;
        product(w->d->sums, n, m, n, by_rows(inverse, n, w->d->factors),
                by_rows(right, m, w->d->values), to);
    } else {
        substitute(n, m, ch->N, 0, right);
        memcpy(to, right, sizeof *to * (size_t)(n * m));
    }
    stored(w->d, w->d->factors, to, (int64_t)n * m);
    free(right);
}

static void fold(const work *w, chunk *ch) {
    const float *beta = w->in->beta + ch->t0 * w->in->R;
    const int n = ch->n;
    ch->folded = floats((int64_t)n * n);
    for (int i = 0; i < n * n; i++)
        ch->folded[i] = ch->inv[i] * beta[i % n];
    stored(w->d, w->d->factors, ch->folded, (int64_t)n * n);
}

static void begin_chunk(const work *w, int64_t t0, int c, chunk *ch) {
    const int K = w->in->K, V = w->in->V, n = c * w->in->R;
    *ch = (chunk){.t0 = t0, .c = c, .n = n};
    ch->gam = floats(2 * (int64_t)c * K);
    ch->early = ch->gam + c * K;
    ch->readers = floats((int64_t)(c + n) * K);
    ch->score = floats((int64_t)(c + n) * n);
    ch->P = floats((int64_t)c * n);
    ch->N = floats((int64_t)n * n);
    ch->kgam = floats((int64_t)n * K);
    ch->w = floats((int64_t)n * K);
    ch->u = floats((int64_t)n * V);
    ch->kg = floats((int64_t)n * K);
    ch->qg = floats((int64_t)c * K);
    ch->end = floats(K);
    ch->X = floats((int64_t)n * V);
    ch->S0 = floats((int64_t)K * V);
    running_sum(w, ch);
    fill_readers(w, ch);
    fill_scores(w, ch);
    fill_gated(w, ch);
    if (w->d->inverse != SUBSTITUTION) {
        ch->inv = floats((int64_t)n * n);
        inverse_of(w->d, n, ch->N, ch->inv);
        if (w->d->folded) fold(w, ch);
        stored(w->d, w->d->factors, ch->inv, (int64_t)n * n);
    }
    solve_written(w, ch, K, ch->kgam, ch->w);
    solve_written(w, ch, V, w->in->v + t0 * w->in->R * V, ch->u);
}

static void end_chunk(chunk *ch) {
    float *all[] = {ch->gam,  ch->readers, ch->score,       ch->P,     ch->N,  ch->inv,
                    ch->kgam, ch->w,       ch->u,           ch->kg,    ch->qg, ch->end,
                    ch->X,    ch->S0,      ch->pairs.decay, ch->folded};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

/* X = u - w S;  S <- eC o S + kg' X. */
static void advance(const work *w, chunk *ch, float *S) {
    const design *d = w->d;
    const int K = w->in->K, V = w->in->V, n = ch->n;
    float *read = floats(2 * (int64_t)K * V), *add = read + K * V;
    memcpy(ch->S0, S, sizeof *S * (size_t)(K * V));
    for (int i = 0; i < K * V; i++)
        read[i] = share(knob.decayed_first, S[i], ch->end[i / V] * S[i]);
    product(d->sums, n, V, K, by_rows(ch->w, K, d->factors), by_rows(read, V, d->values), ch->X);
    for (int i = 0; i < n * V; i++)
        ch->X[i] = ch->u[i] - ch->X[i];
    stored(d, d->values, ch->X, (int64_t)n * V);
    product(d->sums, K, V, n, transposed(ch->kg, K, d->factors), by_rows(ch->X, V, d->values), add);
    for (int i = 0; i < K * V; i++)
        S[i] = ch->end[i / V] * S[i] + add[i];
    keep_state(d, (keeping){1, 1, ch->t0}, S, (int64_t)K * V);
    free(read);
}

/* o = scale qg S0 + P X. */
static void write_output(const work *w, const chunk *ch) {
    const design *d = w->d;
    const int K = w->in->K, V = w->in->V, c = ch->c;
    float *near = floats((int64_t)c * V);
    float *o = w->out->o + ch->t0 * V;
    product(d->sums, c, V, K, by_rows(ch->qg, K, d->factors), by_rows(ch->S0, V, d->values), o);
    product(d->sums, c, V, ch->n, by_rows(ch->P, ch->n, d->factors), by_rows(ch->X, V, d->values),
            near);
    for (int i = 0; i < c * V; i++)
        o[i] = w->in->scale * o[i] + near[i];
    free(near);
}

/* Gradients of a chunk in progress. */
typedef struct {
    float *dX, *dZ, *dE;      /* [n][V] */
    float *coef;              /* [c + n][n] of the scores */
    float *dreaders, *dwrite; /* [c + n][K] [n][K] */
    float *boundary;          /* [K]: rowsum(dS o S) after the chunk */
} adjoint;

static adjoint adjoint_new(const chunk *ch, int K, int V) {
    const int n = ch->n, m = ch->c + n;
    return (adjoint){floats((int64_t)n * V),
                     floats((int64_t)n * V),
                     floats((int64_t)n * V),
                     floats((int64_t)m * n),
                     floats((int64_t)m * K),
                     floats((int64_t)n * K),
                     floats(K)};
}

static void adjoint_free(adjoint *a) {
    float *all[] = {a->dX, a->dZ, a->dE, a->coef, a->dreaders, a->dwrite, a->boundary};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

/* dX = P' do + kg dS;  dZ = A^(-T) dX. */
static void back_to_written(const work *w, const chunk *ch, const float *dS, adjoint *a) {
    const design *d = w->d;
    const int K = w->in->K, V = w->in->V, n = ch->n;
    const float *dout = w->in->dout + ch->t0 * V;
    product(d->sums, n, V, ch->c, transposed(ch->P, n, d->factors), by_rows(dout, V, d->values),
            a->dE);
    stored(d, d->values, a->dE, (int64_t)n * V);
    product(d->sums, n, V, K, by_rows(ch->kg, K, d->factors), by_rows(dS, V, d->values), a->dX);
    for (int i = 0; i < n * V; i++)
        a->dX[i] += a->dE[i];
    stored(d, d->values, a->dX, (int64_t)n * V);
    if (ch->inv) {
        product(d->sums, n, V, n, transposed(ch->inv, n, d->factors), by_rows(a->dX, V, d->values),
                a->dZ);
    } else {
        memcpy(a->dZ, a->dX, sizeof *a->dZ * (size_t)(n * V));
        substitute(n, V, ch->N, 1, a->dZ);
    }
}

/* E = V - Kgam S0 - L X;  dbeta = <dZ, E>, dE = B dZ, dv = dE. */
static void back_to_values(const work *w, const chunk *ch, adjoint *a) {
    const design *d = w->d;
    const int K = w->in->K, V = w->in->V, n = ch->n;
    const int64_t row = ch->t0 * w->in->R;
    float *E = floats(3 * (int64_t)n * V);
    float *near = E + n * V, *terms = near + n * V;
    product(d->sums, n, V, K, by_rows(ch->kgam, K, d->factors), by_rows(ch->S0, V, d->values), E);
    product(d->sums, n, V, n, by_rows(ch->score + ch->c * n, n, d->factors),
            by_rows(ch->X, V, d->values), near);
    for (int i = 0; i < n * V; i++) {
        E[i] = w->in->v[row * V + i] - E[i] - near[i];
        E[i] = share(knob.rounded_E, E[i], round_to(BF16, E[i]));
        terms[i] = a->dZ[i] * E[i];
    }
    for (int r = 0; r < n; r++) {
        const float beta = w->in->beta[row + r];
        w->out->dbeta[row + r] = sum_of(d->sums, V, terms + r * V);
        for (int i = r * V; i < (r + 1) * V; i++) {
            a->dE[i] = beta * a->dZ[i];
            w->out->dv[row * V + i] = share(knob.plain_dv, a->dE[i], a->dZ[i]);
        }
    }
    free(E);
}

/* The scores: scale do X' for q, -dE X' for keys, where the pair is allowed. */
static void back_to_scores(const work *w, const chunk *ch, adjoint *a) {
    const design *d = w->d;
    const int V = w->in->V, R = w->in->R, n = ch->n, c = ch->c;
    product(d->sums, c, n, V, by_rows(w->in->dout + ch->t0 * V, V, d->values),
            transposed(ch->X, V, d->values), a->coef);
    product(d->sums, n, n, V, by_rows(a->dE, V, d->values), transposed(ch->X, V, d->values),
            a->coef + c * n);
    for (int r = 0; r < c + n; r++)
        for (int i = 0; i < n; i++) {
            const int s = r < c ? r : (r - c) / R;
            const int allowed = i / R < s || (i / R == s && r < c);
            a->coef[r * n + i] *= !allowed ? 0 : r < c ? w->in->scale : -1;
        }
    pair_gradients(&ch->pairs, a->coef, a->dreaders, a->dwrite);
}

/* The parts through the states before and after the chunk. */
static void back_to_states(const work *w, const chunk *ch, const float *dS, adjoint *a) {
    const design *d = w->d;
    const int K = w->in->K, V = w->in->V, R = w->in->R, n = ch->n, c = ch->c;
    const float *last = ch->gam + (c - 1) * K;
    float *part = floats((int64_t)(n > c ? n : c) * K);
    product(d->sums, c, K, V, by_rows(w->in->dout + ch->t0 * V, V, d->values),
            transposed(ch->S0, V, d->values), part);
    for (int i = 0; i < c * K; i++)
        a->dreaders[i] += w->in->scale * power_of(d, ch->gam[i]) * part[i];
    product(d->sums, n, K, V, by_rows(a->dE, V, d->values), transposed(ch->S0, V, d->values), part);
    for (int i = 0; i < n * K; i++) {
        const int at = i / K / R * K + i % K;
        a->dreaders[c * K + i] -= power_of(d, ch->gam[at]) * part[i];
        a->dreaders[c * K + i] *= ch->early[at];
    }
    product(d->sums, n, K, V, by_rows(ch->X, V, d->values), transposed(dS, V, d->values), part);
    for (int i = 0; i < n * K; i++) {
        const int at = i / K / R * K + i % K;
        const float through = power_of(d, last[i % K] - ch->gam[at]) * part[i];
        a->dwrite[i] += through;
        a->boundary[i % K] += ch->pairs.writers[i] * through;
    }
    free(part);
}

/* rowsum(dS o S_end) from the terms that stand in dk too: they cancel in dg, whatever their own
 * rounding was. A share of it from the states themselves. */
static void finish_boundary(const work *w, const chunk *ch, const float *dS, const float *S_end,
                            adjoint *a) {
    const int V = w->in->V;
    float *terms = floats(2 * V);
    for (int x = 0; x < w->in->K; x++) {
        for (int i = 0; i < V; i++) {
            terms[i] = dS[x * V + i] * ch->S0[x * V + i];
            terms[V + i] = dS[x * V + i] * S_end[x * V + i];
        }
        a->boundary[x] += ch->end[x] * sum_of(w->d->sums, V, terms);
        const float direct = sum_of(w->d->sums, V, terms + V);
        a->boundary[x] = share(knob.state_boundary, a->boundary[x], direct);
        a->boundary[x] *= knob.boundary_gain;
    }
    free(terms);
}

static float dq_share(float x) { return share(knob.rounded_dq, x, round_to(BF16, x)); }

/* Gradient of the running sum of gates, token by token, then of the gates. */
static void back_to_gates(const work *w, const chunk *ch, const adjoint *a) {
    const int K = w->in->K, R = w->in->R, c = ch->c;
    const float *q = w->in->q + ch->t0 * K, *k = ch->pairs.writers, *e = w->in->e + ch->t0 * R * K;
    float *dg = w->out->dg + ch->t0 * K;
    for (int i = 0; i < c * K; i++)
        dg[i] = q[i] * dq_share(a->dreaders[i]);
    for (int i = 0; i < ch->n * K; i++) {
        const float read = dq_share(a->dreaders[c * K + i]), written = dq_share(a->dwrite[i]);
        float *own = dg + i / K / R * K + i % K;
        if (e != k) { /* what reads before its decay sees the gates up to the token before */
            if (!w->in->undecayed) *own += e[i] * read;
            if (w->in->undecayed && i / K / R > 0) own[-K] += e[i] * read;
            *own -= k[i] * written;
        } else {
            *own += k[i] * (read - written);
        }
    }
    for (int x = 0; x < K; x++)
        dg[(c - 1) * K + x] += a->boundary[x];
    for (int s = 0; w->in->one_gate && s < c; s++) {
        dg[s * K] = sum_of(w->d->sums, K, dg + s * K);
        memset(dg + s * K + 1, 0, sizeof *dg * (size_t)(K - 1));
    }
    for (int s = c - 2; s >= 0; s--)
        for (int x = 0; x < K; x++)
            dg[s * K + x] += dg[(s + 1) * K + x];
}

/* dq and dk: pairs of one token, which the gates do not see, come last. */
static void write_dq_dk(const work *w, const chunk *ch, adjoint *a) {
    const int K = w->in->K, R = w->in->R, c = ch->c;
    const float *k = ch->pairs.writers;
    for (int r = 0; r < ch->n; r++) {
        const int s = r / R;
        const float own = a->coef[s * ch->n + r];
        for (int x = 0; x < K; x++) {
            a->dreaders[s * K + x] += own * k[r * K + x];
            a->dwrite[r * K + x] += own * ch->readers[s * K + x];
        }
    }
    memcpy(w->out->dq + ch->t0 * K, a->dreaders, sizeof(float) * (size_t)(c * K));
    memcpy(w->out->dk + ch->t0 * R * K, a->dwrite, sizeof(float) * (size_t)(ch->n * K));
    memcpy(w->out->de + ch->t0 * R * K, a->dreaders + c * K, sizeof(float) * (size_t)(ch->n * K));
}

/* dS_0 = eC o dS + scale qg' do - w' dX. */
static void retreat(const work *w, const chunk *ch, const adjoint *a, float *dS) {
    const design *d = w->d;
    const int K = w->in->K, V = w->in->V;
    float *from_o = floats(2 * (int64_t)K * V);
    float *from_X = from_o + K * V;
    product(d->sums, K, V, ch->c, transposed(ch->qg, K, d->factors),
            by_rows(w->in->dout + ch->t0 * V, V, d->values), from_o);
    product(d->sums, K, V, ch->n, transposed(ch->w, K, d->factors), by_rows(a->dX, V, d->values),
            from_X);
    for (int x = 0; x < K; x++)
        for (int i = x * V; i < (x + 1) * V; i++)
            dS[i] = ch->end[x] * dS[i] + w->in->scale * from_o[i] - from_X[i];
    keep_gradient(d, (keeping){1, 1, w->in->T + ch->t0}, dS, (int64_t)K * V);
    free(from_o);
}

static void chunk_back(const work *w, const chunk *ch, const float *S_end, float *dS) {
    adjoint a = adjoint_new(ch, w->in->K, w->in->V);
    back_to_written(w, ch, dS, &a);
    back_to_values(w, ch, &a);
    back_to_scores(w, ch, &a);
    back_to_states(w, ch, dS, &a);
    finish_boundary(w, ch, dS, S_end, &a);
    back_to_gates(w, ch, &a);
    write_dq_dk(w, ch, &a);
    retreat(w, ch, &a, dS);
    adjoint_free(&a);
}

static void scale_all(float by, float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        x[i] *= by;
}

/* Chunks start anew where a rank starts. */
static int64_t chunk_end(const design *d, const head_in *in, int64_t t0) {
    const int64_t next_rank = in->rank_tokens - (in->first + t0) % in->rank_tokens;
    const int64_t chunk = (int64_t)d->chunk * in->turns;
    int64_t n = in->T - t0 < chunk ? in->T - t0 : chunk;
    if (next_rank < n) n = next_rank;
    return t0 + n;
}

void chunk_head(const design *d, const head_in *in, head_out *out) {
    const work w = {d, in, out};
    const int64_t KV = (int64_t)in->K * in->V, carry = carry_token(d, in->T);
    int count = 0;
    for (int64_t t = 0; t < in->T; t = chunk_end(d, in, t))
        count++;
    chunk *all = calloc((size_t)count + 1, sizeof *all);
    memcpy(out->state, in->s0, sizeof(float) * (size_t)KV);
    int64_t t0 = 0;
    for (int i = 0; i < count; i++, t0 = chunk_end(d, in, t0)) {
        begin_chunk(&w, t0, (int)(chunk_end(d, in, t0) - t0), &all[i]);
        if (t0 == carry) scale_all(knob.carry_gain, out->state, KV);
        advance(&w, &all[i], out->state);
        write_output(&w, &all[i]);
        if (!in->backward) end_chunk(&all[i]);
    }
    if (in->backward) memcpy(out->ds0, in->dstate, sizeof(float) * (size_t)KV);
    for (int i = count - 1; in->backward && i >= 0; i--) {
        chunk_back(&w, &all[i], i + 1 < count ? all[i + 1].S0 : out->state, out->ds0);
        if (all[i].t0 == carry) scale_all(knob.dcarry_gain, out->ds0, KV);
    }
    for (int i = 0; in->backward && i < count; i++)
        end_chunk(&all[i]);
    free(all);
}
