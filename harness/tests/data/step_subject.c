/* A kernel written from deltaproof_subject.h alone: the recurrence token by token in fp32, forward.
 */
#include "deltaproof_subject.h"
#include <math.h>
#include <stdlib.h>

static const deltaproof_subject_info INFO = {DP_SUBJECT_ABI, DP_SUBJECT_WHOLE, 1, "mine", "fp32",
                                             "fp32",         "o final_state"};

const deltaproof_subject_info *deltaproof_subject_about(void) { return &INFO; }

typedef const deltaproof_subject_problem problem;

static float sig(float x) { return 1 / (1 + expf(-x)); }

static float gate_of(problem *p, int64_t t, int hv, int i) {
    const int gate = p->Kg == 1 ? 0 : i;
    const float g = p->g[(t * p->HV + hv) * p->Kg + gate], A = p->A_log ? p->A_log[hv] : 0,
                d = p->dt_bias ? p->dt_bias[hv * p->Kg + gate] : 0;
    if (p->gate_form == DP_SUBJECT_GATE_SOFTPLUS)
        return -expf(A) * (g + d > 20 ? g + d : log1pf(expf(g + d)));
    if (p->gate_form == DP_SUBJECT_GATE_LOWER_BOUND) return p->lower_bound * sig(expf(A) * (g + d));
    return g;
}

static void row_of(problem *p, const double *all, int64_t t, int h, float *row) {
    float sum = 0;
    for (int i = 0; i < p->K; i++) {
        row[i] = all[(t * p->H + h) * p->K + i];
        sum += row[i] * row[i];
    }
    for (int i = 0; p->l2norm && i < p->K; i++)
        row[i] /= sqrtf(sum + 1e-6f);
}

/* S <- exp(g) S + k b (v - k' exp(g) S)', o = scale q' S; q, k [K], e [V]: room. */
static void token(problem *p, int64_t t, int hv, float *S, float *q, float *k, float *e,
                  double *o) {
    const int K = p->K, V = p->V, h = hv / (p->HV / p->H);
    row_of(p, p->q, t, h, q);
    row_of(p, p->k, t, h, k);
    float b = p->beta[t * p->HV + hv];
    if (p->beta_form) b = sig(b) * p->beta_form;
    for (int i = 0; i < K; i++)
        for (int v = 0; v < V; v++)
            S[i * V + v] *= expf(gate_of(p, t, hv, i));
    for (int v = 0; v < V; v++) {
        e[v] = p->v[(t * p->HV + hv) * V + v];
        for (int i = 0; i < K; i++)
            e[v] -= k[i] * S[i * V + v];
    }
    for (int i = 0; i < K; i++)
        for (int v = 0; v < V; v++)
            S[i * V + v] += k[i] * b * e[v];
    for (int v = 0; v < V; v++) {
        float x = 0;
        for (int i = 0; i < K; i++)
            x += q[i] * S[i * V + v];
        o[(t * p->HV + hv) * V + v] = p->scale * x;
    }
}

int deltaproof_subject_run(const deltaproof_subject_problem *p, const deltaproof_subject_call *c) {
    double *o = deltaproof_subject_find(c, "o"), *end = deltaproof_subject_find(c, "final_state");
    if (p->R != 1) return DP_SUBJECT_UNSUPPORTED;
    const int K = p->K, V = p->V, KV = K * V;
    float *S = malloc(sizeof *S * (KV + 2 * K + V)), *q = S + KV, *k = q + K, *e = k + K;
    for (int n = 0; n < p->Nseq; n++)
        for (int hv = 0; hv < p->HV; hv++) {
            const int64_t state = ((int64_t)n * p->HV + hv) * KV;
            for (int i = 0; i < KV; i++)
                S[i] = p->initial_state ? (float)p->initial_state[state + i] : 0;
            for (int64_t t = p->cu[n]; t < p->cu[n + 1]; t++)
                token(p, t, hv, S, q, k, e, o);
            for (int i = 0; end && i < KV; i++)
                end[state + i] = S[i];
        }
    free(S);
    return DP_SUBJECT_OK;
}
