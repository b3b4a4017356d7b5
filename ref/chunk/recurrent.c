/* The step recurrence and its adjoint in fp32 (math.md b, d): see recurrent.h for what is rounded.
 *
 * The backward keeps the state at every SEGMENT-th token and computes the tokens between again.
 */
#include "recurrent.h"
#include "gate.h"
#include "ref/arithmetic/elementary.h"
#include "ref/vocabulary/stored.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SEGMENT 64

/* Inputs after their activations, widened fp32 as dp_activate_f32 leaves them, and gradients of
 * them; dq and dk of each value head by itself. */
typedef struct {
    const dp_problem *p;
    const dp_design *design;
    const dp_recurrent_keep *keep;
    double *q, *k, *g, *beta, *rstd_q, *rstd_k;
    double *erasing, *values; /* NULL: the keys, the values themselves */
    float *dq, *dk;           /* [T][HV][K], [T][HV][R][K] */
    double *dg, *dbeta, *derasing, *dvalues;
    dp_result *out;
} recurrence;

/* One value head of one sequence. */
typedef struct {
    const recurrence *r;
    int seq, hv;
    int64_t begin, end;
    float *S;     /* [K][V] */
    float *E, *U; /* [R][V] of the present token */
} head;

/* ---- a token --------------------------------------------------------------------------------- */

static const double *key(const head *h, int64_t t) {
    const dp_problem *p = h->r->p;
    return h->r->k + (t * p->H + h->hv / dp_G(p)) * dp_rows(p) * p->K;
}

static const double *query(const head *h, int64_t t) {
    const dp_problem *p = h->r->p;
    return h->r->q + (t * p->H + h->hv / dp_G(p)) * p->K;
}

static const double *erasing(const head *h, int64_t t) {
    return dp_erasing_at(h->r->p, h->r->k, h->r->erasing, t, h->hv);
}

static float decay(const head *h, int64_t t, int x) {
    const int Kg = dp_Kg(h->r->p);
    const double g = h->r->g[(t * h->r->p->HV + h->hv) * Kg + (Kg == 1 ? 0 : x)];
    if (!h->r->design->fast_decays) return dp_expf((float)g);
    return (float)(dp_exp((float)(g * DP_LOG2_E) * DP_LN_2) * dp_fast_decay_error(g));
}

/* row [V] += a b [V] */
static void add_row(float a, const float *b, int V, float *row) {
    for (int v = 0; v < V; v++)
        row[v] += a * b[v];
}

static void decay_state(const head *h, int64_t t, float *S) {
    const int V = h->r->p->V;
    for (int x = 0; x < h->r->p->K; x++) {
        const float d = decay(h, t, x);
        for (int v = 0; v < V; v++)
            S[(int64_t)x * V + v] *= d;
    }
}

/* E = v - k Sbar, U = diag(beta) E of n keys from `first` on */
static void residuals(const head *h, int64_t t, int first, int n, const float *Sbar) {
    const dp_problem *p = h->r->p;
    const int64_t at = t * p->HV + h->hv;
    for (int j = first; j < first + n; j++) {
        const double *k = erasing(h, t) + (int64_t)j * p->K;
        const double *value = dp_values_at(p, h->r->values, t, h->hv) + (int64_t)j * p->V;
        const float beta = (float)h->r->beta[at * dp_rows(p) + j];
        float *E = h->E + (int64_t)j * p->V;
        memset(E, 0, sizeof *E * (size_t)p->V);
        for (int x = 0; x < p->K; x++)
            add_row((float)k[x], Sbar + (int64_t)x * p->V, p->V, E);
        for (int v = 0; v < p->V; v++) {
            E[v] = (float)value[v] - E[v];
            h->U[(int64_t)j * p->V + v] = beta * E[v];
        }
    }
}

static void write_state(const head *h, int64_t t, int first, int n, const float *U, float *S) {
    const dp_problem *p = h->r->p;
    for (int j = first; j < first + n; j++)
        for (int x = 0; x < p->K; x++)
            add_row((float)key(h, t)[(int64_t)j * p->K + x], U + (int64_t)j * p->V, p->V,
                    S + (int64_t)x * p->V);
}

/* A state or its gradient, as it is carried to the next token. */
static void round_carried(const head *h, dp_format f, float *S) {
    const int K = h->r->p->K, V = h->r->p->V;
    if (f == DP_FP32) return;
    double *x = dp_doubles((int64_t)K * V);
    for (int64_t i = 0; i < (int64_t)K * V; i++)
        x[i] = S[i];
    dp_store_state(f, 1, K, V, x);
    for (int64_t i = 0; i < (int64_t)K * V; i++)
        S[i] = (float)x[i];
    free(x);
}

static void read_output(const head *h, int64_t t, const float *S) {
    const dp_problem *p = h->r->p;
    double *o = h->r->out->o + (t * p->HV + h->hv) * p->V;
    float *sum = dp_calloc((size_t)p->V, sizeof *sum);
    for (int x = 0; x < p->K; x++)
        add_row((float)query(h, t)[x], S + (int64_t)x * p->V, p->V, sum);
    for (int v = 0; v < p->V; v++)
        o[v] = dp_store(h->r->design->out[DP_RESULT_O], (float)p->scale * sum[v]);
    free(sum);
}

/* ---- forward --------------------------------------------------------------------------------- */

/* At token t: S is what the caller says, and is kept. */
static void pass_boundary(const head *h, int64_t t, float *S, int gradient) {
    const dp_recurrent_keep *keep = h->r->keep;
    const int64_t KV = (int64_t)h->r->p->K * h->r->p->V;
    for (int i = 0; keep && i < keep->n; i++) {
        const int64_t at = (i * (int64_t)h->r->p->HV + h->hv) * KV;
        double *to = gradient ? keep->dS : keep->S;
        const double *in = gradient ? keep->dS_in : keep->S_in;
        if (keep->t[i] != t) continue;
        for (int64_t z = 0; in && z < KV; z++)
            S[z] = (float)in[at + z];
        for (int64_t z = 0; to && z < KV; z++)
            to[at + z] = S[z];
    }
}

static void start(const head *h) {
    const int64_t KV = (int64_t)h->r->p->K * h->r->p->V;
    const double *s0 = h->r->p->s0;
    if (s0) s0 += ((int64_t)h->seq * h->r->p->HV + h->hv) * KV;
    for (int64_t i = 0; i < KV; i++)
        h->S[i] = s0 ? (float)s0[i] : 0;
}

/* One token; Sbar, S, E, U of it are kept where they are not NULL. */
static void step(const head *h, int64_t t, float *Sbar) {
    decay_state(h, t, h->S);
    if (Sbar) memcpy(Sbar, h->S, sizeof *Sbar * (size_t)h->r->p->K * (size_t)h->r->p->V);
    for (int j = 0, n = dp_keys_at_once(h->r->p); j < dp_rows(h->r->p); j += n) {
        residuals(h, t, j, n, h->S);
        write_state(h, t, j, n, h->U, h->S);
    }
}

static void forward(const head *h, float *checkpoint) {
    const int64_t KV = (int64_t)h->r->p->K * h->r->p->V;
    double *final = h->r->out->final_state + ((int64_t)h->seq * h->r->p->HV + h->hv) * KV;
    start(h);
    for (int64_t t = h->begin; t < h->end; t++) {
        const int64_t i = t - h->begin;
        if (t > h->begin) pass_boundary(h, t, h->S, 0);
        if (checkpoint && i % SEGMENT == 0)
            memcpy(checkpoint + i / SEGMENT * KV, h->S, sizeof *h->S * (size_t)KV);
        step(h, t, NULL);
        read_output(h, t, h->S);
        round_carried(h, h->r->design->state, h->S);
    }
    for (int64_t i = 0; i < KV; i++)
        final[i] = h->S[i];
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Data of the forward pass that a token's adjoint needs. */
typedef struct {
    float *Sbar, *S; /* [SEGMENT][K][V] */
    float *E, *U;    /* [SEGMENT][R][V] */
    float *G;        /* [K][V] adjoint of the state */
    float *dU, *dE;  /* [R][V] */
    float *read;     /* [K][V] what a later key of a token reads */
} adjoint;

static adjoint adjoint_new(const dp_problem *p) {
    const size_t KV = (size_t)p->K * (size_t)p->V;
    const size_t RV = (size_t)dp_rows(p) * (size_t)p->V;
    adjoint a;
    a.Sbar = dp_calloc(SEGMENT * KV, sizeof(float));
    a.S = dp_calloc(SEGMENT * KV, sizeof(float));
    a.E = dp_calloc(SEGMENT * RV, sizeof(float));
    a.U = dp_calloc(SEGMENT * RV, sizeof(float));
    a.G = dp_calloc(KV, sizeof(float));
    a.dU = dp_calloc(RV, sizeof(float));
    a.dE = dp_calloc(RV, sizeof(float));
    a.read = dp_calloc(KV, sizeof(float));
    return a;
}

static void adjoint_free(adjoint *a) {
    free(a->Sbar);
    free(a->S);
    free(a->E);
    free(a->U);
    free(a->G);
    free(a->dU);
    free(a->dE);
    free(a->read);
}

/* The tokens of a segment again, from its checkpoint. */
static void recompute(const head *h, int64_t from, int64_t to, const float *checkpoint,
                      adjoint *a) {
    const dp_problem *p = h->r->p;
    const int64_t KV = (int64_t)p->K * p->V;
    const int64_t RV = (int64_t)dp_rows(p) * p->V;
    memcpy(h->S, checkpoint, sizeof *h->S * (size_t)KV);
    for (int64_t t = from; t < to; t++) {
        const int64_t i = t - from;
        if (i) pass_boundary(h, t, h->S, 0); /* a checkpoint has it */
        step(h, t, a->Sbar + i * KV);
        memcpy(a->S + i * KV, h->S, sizeof *h->S * (size_t)KV);
        memcpy(a->E + i * RV, h->E, sizeof *h->E * (size_t)RV);
        memcpy(a->U + i * RV, h->U, sizeof *h->U * (size_t)RV);
        round_carried(h, h->r->design->state, h->S);
    }
}

static float dot(const float *a, const float *b, int n) {
    float s = 0;
    for (int i = 0; i < n; i++)
        s += a[i] * b[i];
    return s;
}

/* G += scale q do'; dq = scale S do */
static void through_output(const head *h, int64_t t, const float *S, adjoint *a) {
    const dp_problem *p = h->r->p;
    const double *dout = p->dout + (t * p->HV + h->hv) * p->V;
    float *scaled = dp_calloc((size_t)p->V, sizeof *scaled);
    for (int v = 0; v < p->V; v++)
        scaled[v] = (float)p->scale * (float)dout[v];
    for (int x = 0; x < p->K; x++) {
        add_row((float)query(h, t)[x], scaled, p->V, a->G + (int64_t)x * p->V);
        h->r->dq[(t * p->HV + h->hv) * p->K + x] = dot(S + (int64_t)x * p->V, scaled, p->V);
    }
    free(scaled);
}

/* dU = k G, dbeta = sum E o dU, dE = diag(beta) dU = dv of n keys from `first` on */
static void through_write(const head *h, int64_t t, int first, int n, const float *E, adjoint *a) {
    const dp_problem *p = h->r->p;
    const int64_t at = (t * p->HV + h->hv) * dp_rows(p);
    memset(a->dU, 0, sizeof *a->dU * (size_t)dp_rows(p) * (size_t)p->V);
    for (int j = first; j < first + n; j++) {
        float *dU = a->dU + (int64_t)j * p->V;
        float *dE = a->dE + (int64_t)j * p->V;
        for (int x = 0; x < p->K; x++)
            add_row((float)key(h, t)[(int64_t)j * p->K + x], a->G + (int64_t)x * p->V, p->V, dU);
        h->r->dbeta[at + j] = dot(E + (int64_t)j * p->V, dU, p->V);
        for (int v = 0; v < p->V; v++) {
            dE[v] = (float)h->r->beta[at + j] * dU[v];
            if (h->r->dvalues)
                h->r->dvalues[(at + j) * p->V + v] = dE[v];
            else
                h->r->out->dv[(at + j) * p->V + v] =
                    dp_store(h->r->design->out[DP_RESULT_DV], dE[v]);
        }
    }
}

/* The state that key j of a token reads, of Sbar and what the keys before it wrote. */
static const float *state_read(const head *h, int64_t t, int j, const float *Sbar, const float *U,
                               adjoint *a) {
    const dp_problem *p = h->r->p;
    if (!j) return Sbar;
    memcpy(a->read, Sbar, sizeof *Sbar * (size_t)p->K * (size_t)p->V);
    write_state(h, t, 0, j, U, a->read);
    return a->read;
}

/* dk = U G' - dE S', S as read; G <- G - k' dE of n keys from `first` on */
static void through_keys(const head *h, int64_t t, int first, int n, const float *S, const float *U,
                         adjoint *a) {
    const dp_problem *p = h->r->p;
    for (int x = 0; x < p->K; x++) {
        float *G = a->G + (int64_t)x * p->V;
        const float *before = S + (int64_t)x * p->V;
        for (int j = first; j < first + n; j++) {
            const float *dE = a->dE + (int64_t)j * p->V;
            const int64_t at = ((t * p->HV + h->hv) * dp_rows(p) + j) * p->K + x;
            const float write = dot(U + (int64_t)j * p->V, G, p->V);
            const float read = dot(dE, before, p->V);
            h->r->dk[at] = h->r->derasing ? write : write - read;
            if (h->r->derasing) h->r->derasing[at] = -read;
        }
        for (int j = first; j < first + n; j++)
            add_row(-(float)erasing(h, t)[(int64_t)j * p->K + x], a->dE + (int64_t)j * p->V, p->V,
                    G);
    }
}

/* dg = rowsum(G o Sbar); G <- diag(exp g) G */
static void through_decay(const head *h, int64_t t, const float *Sbar, adjoint *a) {
    const dp_problem *p = h->r->p;
    const int Kg = dp_Kg(p);
    double *dg = h->r->dg + (t * p->HV + h->hv) * Kg;
    for (int x = 0; x < p->K; x++) {
        float *G = a->G + (int64_t)x * p->V;
        const float *before = Sbar + (int64_t)x * p->V;
        const float own = dot(G, before, p->V);
        dg[Kg == 1 ? 0 : x] = Kg == 1 ? (float)((float)dg[0] + own) : own;
        const float d = decay(h, t, x);
        for (int v = 0; v < p->V; v++)
            G[v] *= d;
    }
}

static void backward(const head *h, const float *checkpoint) {
    const dp_problem *p = h->r->p;
    const int64_t KV = (int64_t)p->K * p->V;
    const int64_t RV = (int64_t)dp_rows(p) * p->V;
    const int64_t state = ((int64_t)h->seq * p->HV + h->hv) * KV;
    const int64_t segments = (h->end - h->begin + SEGMENT - 1) / SEGMENT;
    adjoint a = adjoint_new(p);
    for (int64_t i = 0; p->dstate && i < KV; i++)
        a.G[i] = (float)p->dstate[state + i];
    for (int64_t s = segments - 1; s >= 0; s--) {
        const int64_t from = h->begin + s * SEGMENT;
        const int64_t to = from + SEGMENT < h->end ? from + SEGMENT : h->end;
        recompute(h, from, to, checkpoint + s * KV, &a);
        for (int64_t t = to - 1; t >= from; t--) {
            if (t + 1 < h->end) pass_boundary(h, t + 1, a.G, 1);
            through_output(h, t, a.S + (t - from) * KV, &a);
            const float *Sbar = a.Sbar + (t - from) * KV, *U = a.U + (t - from) * RV;
            for (int n = dp_keys_at_once(p), j = dp_rows(p) - n; j >= 0; j -= n) {
                const float *S = state_read(h, t, j, Sbar, U, &a);
                through_write(h, t, j, n, a.E + (t - from) * RV, &a);
                through_keys(h, t, j, n, S, U, &a);
            }
            through_decay(h, t, Sbar, &a);
            round_carried(h, h->r->design->dstate, a.G);
        }
    }
    for (int64_t i = 0; i < KV; i++)
        h->r->out->ds0[state + i] = a.G[i];
    adjoint_free(&a);
}

/* ---- all heads ------------------------------------------------------------------------------- */

static void run_head(const recurrence *r, int seq, int hv, int with_backward) {
    const dp_problem *p = r->p;
    const size_t KV = (size_t)p->K * (size_t)p->V;
    head h = {.r = r, .seq = seq, .hv = hv, .begin = p->cu[seq], .end = p->cu[seq + 1]};
    const size_t segments = (size_t)((h.end - h.begin + SEGMENT - 1) / SEGMENT);
    float *checkpoint = with_backward ? dp_calloc(segments * KV, sizeof(float)) : NULL;
    h.S = dp_calloc(KV, sizeof *h.S);
    h.E = dp_calloc((size_t)dp_rows(p) * (size_t)p->V, sizeof *h.E);
    h.U = dp_calloc((size_t)dp_rows(p) * (size_t)p->V, sizeof *h.U);
    forward(&h, checkpoint);
    if (with_backward) backward(&h, checkpoint);
    free(checkpoint);
    free(h.S);
    free(h.E);
    free(h.U);
}

/* Sums over the value heads of a group, in their order: [T][HV][n] to [T][H][n]. */
static double *over_group(const dp_problem *p, const float *x, int64_t n) {
    const int G = dp_G(p);
    double *y = dp_doubles(p->T * p->H * n);
    for (int64_t th = 0; th < p->T * p->H; th++)
        for (int64_t i = 0; i < n; i++) {
            float s = 0;
            for (int v = 0; v < G; v++)
                s += x[(th * G + v) * n + i];
            y[th * n + i] = s;
        }
    return y;
}

static void store_all(dp_format f, double *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        x[i] = dp_store(f, x[i]);
}

static void through_activations(const recurrence *r) {
    const dp_problem *p = r->p;
    const dp_format *f = r->design->out;
    double *dq = over_group(p, r->dq, p->K);
    double *dk = over_group(p, r->dk, (int64_t)dp_rows(p) * p->K);
    for (int i = 0; r->out->dA_log && i < p->HV; i++)
        r->out->dA_log[i] = 0;
    for (int i = 0; r->out->ddt_bias && i < p->HV * dp_Kg(p); i++)
        r->out->ddt_bias[i] = 0;
    if (r->values)
        dp_activate_writes_bwd_f32(p, 0, p->T, r->k, r->derasing, r->dvalues, dk, r->dg, r->out);
    dp_activate_bwd_f32(p, 0, p->T, r->q, r->k, r->rstd_q, r->rstd_k, dq, dk, r->dg, r->dbeta,
                        r->out);
    if (p->angle) dp_sum_angles_f32(p, r->out->dangle);
    for (int i = 0; i < DP_NRESULTS; i++) {
        int64_t rows, width;
        dp_result_shape(p, i, &rows, &width);
        if (rows && dp_result_fields[i].backward && dp_result_fields[i].kind == DP_OF_TOKENS &&
            (i != DP_RESULT_DV || r->values)) /* dv as it is left before */
            store_all(f[i], *dp_result_at(r->out, i), rows * width);
    }
    free(dq);
    free(dk);
}

static void activate(recurrence *r) {
    const dp_problem *p = r->p;
    const int64_t q = p->T * p->H * p->K;
    r->q = dp_doubles(q);
    r->k = dp_doubles(q * dp_rows(p));
    r->g = dp_doubles(p->T * p->HV * dp_Kg(p));
    r->beta = dp_doubles(p->T * p->HV * dp_rows(p));
    r->rstd_q = dp_doubles(p->T * p->H);
    r->rstd_k = dp_doubles(p->T * p->H * dp_rows(p));
    dp_activate_f32(p, 0, p->T, r->q, r->k, r->g, r->beta, r->rstd_q, r->rstd_k);
    if (r->design->stored_inputs) {
        store_all(dp_design_kept(r->design), r->q, q);
        store_all(dp_design_kept(r->design), r->k, q * dp_rows(p));
    }
    dp_writes_new(p, &r->erasing, &r->values);
    dp_activate_writes_f32(p, 0, p->T, r->k, r->erasing, r->values);
}

static void release(recurrence *r) {
    double *const wide[] = {r->q,  r->k,     r->g,       r->beta,   r->rstd_q,   r->rstd_k,
                            r->dg, r->dbeta, r->erasing, r->values, r->derasing, r->dvalues};
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++)
        free(wide[i]);
    free(r->dq);
    free(r->dk);
}

void dp_leave_states(const dp_problem *p, const dp_design *design, double *S) {
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    for (int i = 0; i < p->Nseq; i++)
        dp_store_state(design->final_state, p->HV, p->K, p->V, S + i * n);
}

void dp_recurrent_run(const dp_problem *p, const dp_design *design, int backward,
                      const dp_recurrent_keep *keep, dp_result *out) {
    recurrence r = {.p = p, .design = design, .keep = keep, .out = out};
    dp_result_alloc(out, p, backward);
    activate(&r);
    if (backward) {
        r.dq = dp_calloc((size_t)(p->T * p->HV * p->K), sizeof *r.dq);
        r.dk = dp_calloc((size_t)(p->T * p->HV * dp_rows(p) * p->K), sizeof *r.dk);
        r.dg = dp_doubles(p->T * p->HV * dp_Kg(p));
        r.dbeta = dp_doubles(p->T * p->HV * dp_rows(p));
        if (r.erasing) r.derasing = dp_doubles(p->T * p->HV * dp_rows(p) * p->K);
        if (r.values) r.dvalues = dp_doubles(p->T * p->HV * dp_rows(p) * p->V);
    }
#pragma omp parallel for schedule(dynamic, 1)
    for (int i = 0; i < p->Nseq * p->HV; i++)
        run_head(&r, i / p->HV, i % p->HV, backward);
    dp_leave_states(p, design, out->final_state);
    if (backward) through_activations(&r);
    if (backward && keep && keep->dg)
        memcpy(keep->dg, r.dg, sizeof *r.dg * (size_t)(p->T * p->HV * dp_Kg(p)));
    release(&r);
}
