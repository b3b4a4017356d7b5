/* A kernel written from deltaproof_subject.h alone: the recurrence token by token in fp32, forward.
 */
#include "deltaproof_subject.h"
#include <math.h>
#include <stdlib.h>
static const deltaproof_subject_info INFO = {DP_SUBJECT_ABI, DP_SUBJECT_WHOLE, 1, "mine", "fp32",
                                             "fp32",         "o final_state"};
const deltaproof_subject_info *deltaproof_subject_about(void) { return &INFO; }
static float sig(float x) { return 1 / (1 + expf(-x)); }
int deltaproof_subject_run(const deltaproof_subject_problem *p, const deltaproof_subject_call *c) {
    double *o = deltaproof_subject_find(c, "o"), *fs = deltaproof_subject_find(c, "final_state");
    if (p->R != 1) return DP_SUBJECT_UNSUPPORTED;
    int K = p->K, V = p->V;
    float *S = malloc(sizeof *S * K * V), *k = malloc(sizeof *k * K), *q = malloc(sizeof *q * K),
          *E = malloc(sizeof *E * V);
    for (int n = 0; n < p->Nseq; n++)
        for (int hv = 0; hv < p->HV; hv++) {
            int h = hv / (p->HV / p->H);
            for (int i = 0; i < K * V; i++)
                S[i] = p->initial_state
                           ? (float)p->initial_state[((int64_t)n * p->HV + hv) * K * V + i]
                           : 0;
            for (int64_t t = p->cu[n]; t < p->cu[n + 1]; t++) {
                float nq = 0, nk = 0;
                for (int i = 0; i < K; i++) {
                    q[i] = p->q[(t * p->H + h) * K + i];
                    k[i] = p->k[(t * p->H + h) * K + i];
                    nq += q[i] * q[i];
                    nk += k[i] * k[i];
                }
                if (p->l2norm)
                    for (int i = 0; i < K; i++) {
                        q[i] /= sqrtf(nq + 1e-6f);
                        k[i] /= sqrtf(nk + 1e-6f);
                    }
                float b = p->beta[t * p->HV + hv];
                if (p->beta_form) b = sig(b) * p->beta_form;
                for (int i = 0; i < K; i++) {
                    int gi = p->Kg == 1 ? 0 : i;
                    float g = p->g[(t * p->HV + hv) * p->Kg + gi], A = p->A_log ? p->A_log[hv] : 0,
                          d = p->dt_bias ? p->dt_bias[hv * p->Kg + gi] : 0;
                    if (p->gate_form == DP_SUBJECT_GATE_SOFTPLUS)
                        g = -expf(A) * (g + d > 20 ? g + d : log1pf(expf(g + d)));
                    if (p->gate_form == DP_SUBJECT_GATE_LOWER_BOUND)
                        g = p->lower_bound * sig(expf(A) * (g + d));
                    for (int v = 0; v < V; v++)
                        S[i * V + v] *= expf(g);
                }
                for (int v = 0; v < V; v++) {
                    E[v] = p->v[(t * p->HV + hv) * V + v];
                    for (int i = 0; i < K; i++)
                        E[v] -= k[i] * S[i * V + v];
                }
                for (int i = 0; i < K; i++)
                    for (int v = 0; v < V; v++)
                        S[i * V + v] += k[i] * b * E[v];
                for (int v = 0; v < V; v++) {
                    float x = 0;
                    for (int i = 0; i < K; i++)
                        x += q[i] * S[i * V + v];
                    o[(t * p->HV + hv) * V + v] = p->scale * x;
                }
            }
            if (fs)
                for (int i = 0; i < K * V; i++)
                    fs[((int64_t)n * p->HV + hv) * K * V + i] = S[i];
        }
    free(S);
    free(k);
    free(q);
    free(E);
    return DP_SUBJECT_OK;
}
