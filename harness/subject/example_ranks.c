/* A subject whose ranks are processes that share nothing but an all-gather (ref/math.md g.1):
 * forward, fp32, step by step.
 *
 *     cc -O2 -fPIC -shared -ffp-contract=off -Iharness harness/subject/example_ranks.c \
 *        -o build/libranks.so -lm
 *     build/deltaproof run packed-across --subject build/libranks.so
 *
 * A rank runs its last sub-sequence on [K][V+K] columns. The first V start from zeros and give H.
 * The others start from the identity, with v = 0, and give M. Every rank gathers all pairs and
 * merges S <- M S + H, beginning with the farthest rank that has tokens of its first sequence. It
 * then runs its tokens from S.
 */
#include "deltaproof_subject.h"
#include <math.h>
#include <stdlib.h>

static const deltaproof_subject_info ABOUT = {.abi = DP_SUBJECT_ABI,
                                              .kind = DP_SUBJECT_PER_RANK,
                                              .max_ranks = 8,
                                              .name = "example-ranks",
                                              .base = "fp32",
                                              .chain = "fp32",
                                              .writes = "o final_state M H S_in"};
const deltaproof_subject_info *deltaproof_subject_about(void) { return &ABOUT; }

typedef deltaproof_subject_problem problem;

/* Token t of this rank, on `cols` columns, the first p->V of which see v. */
static void step(const problem *p, int64_t t, int hv, int cols, float *S, float *E) {
    const int h = hv / (p->HV / p->H), K = p->K, R = p->R;
    const double *k = p->k + (t * p->H + h) * R * K, *v = p->v + (t * p->HV + hv) * R * p->V,
                 *beta = p->beta + (t * p->HV + hv) * R, *g = p->g + (t * p->HV + hv) * p->Kg;
    for (int i = 0; i < K; i++)
        for (int c = 0; c < cols; c++)
            S[i * cols + c] *= expf((float)g[p->Kg == 1 ? 0 : i]);
    for (int j = 0; j < R; j++)
        for (int c = 0; c < cols; c++) {
            float s = 0;
            for (int i = 0; i < K; i++)
                s += (float)k[j * K + i] * S[i * cols + c];
            E[j * cols + c] = (float)beta[j] * ((c < p->V ? (float)v[j * p->V + c] : 0) - s);
        }
    for (int j = 0; j < R; j++)
        for (int i = 0; i < K; i++)
            for (int c = 0; c < cols; c++)
                S[i * cols + c] += (float)k[j * K + i] * E[j * cols + c];
}
static int sequence_of(const problem *p, int64_t token) {
    int i = 0;
    while (p->cu[i + 1] <= token)
        i++;
    return i;
}
/* One sub-sequence [a, b) of this rank's tokens from S [K][V], outputs written. */
static void run(const problem *p, int64_t a, int64_t b, int hv, float *S, float *E, double *o) {
    const int K = p->K, V = p->V, h = hv / (p->HV / p->H);
    for (int64_t t = a; t < b; t++) {
        step(p, t, hv, V, S, E);
        for (int c = 0; c < V && o; c++) {
            float s = 0;
            for (int i = 0; i < K; i++)
                s += (float)p->q[(t * p->H + h) * K + i] * S[i * V + c];
            o[(t * p->HV + hv) * V + c] = (float)p->scale * s;
        }
    }
}
/* This rank's pair [HV][K][V+K]. */
static void pair(const problem *p, float *HM, float *E) {
    const int K = p->K, V = p->V, W = V + K;
    const int64_t start = p->cu[sequence_of(p, p->first + p->tokens - 1)] - p->first;
    for (int hv = 0; hv < p->HV; hv++) {
        float *S = HM + (int64_t)hv * K * W;
        memset(S, 0, sizeof *S * K * W);
        for (int i = 0; i < K; i++)
            S[i * W + V + i] = 1;
        for (int64_t t = start > 0 ? start : 0; t < p->tokens; t++)
            step(p, t, hv, W, S, E);
    }
}
/* State that enters this rank, from the pairs of the ranks before it back to where its first
 * sequence begins. */
static void merge(const problem *p, const float *all, int hv, float *S, float *X) {
    const int K = p->K, V = p->V, W = V + K, seq = sequence_of(p, p->first);
    const int64_t KV = (int64_t)K * V;
    for (int64_t i = 0; i < KV; i++)
        S[i] = p->initial_state ? (float)p->initial_state[((int64_t)seq * p->HV + hv) * KV + i] : 0;
    for (int64_t r = p->cu[seq] / p->tokens; r < p->rank; r++) {
        const float *HM = all + (r * p->HV + hv) * K * W;
        for (int i = 0; i < K; i++)
            for (int c = 0; c < V; c++) {
                float s = HM[i * W + c];
                for (int x = 0; x < K; x++)
                    s += HM[i * W + V + x] * S[x * V + c];
                X[i * V + c] = s;
            }
        memcpy(S, X, sizeof *S * (size_t)KV);
    }
}
/* The final state of a sequence without tokens is its initial state. With several ranks it belongs
 * to none. */
static void empty_sequences(const problem *p, double *final_state) {
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    for (int seq = 0; seq < p->Nseq && p->ranks == 1 && final_state; seq++)
        for (int64_t i = 0; p->cu[seq + 1] == p->cu[seq] && i < n; i++)
            final_state[seq * n + i] = p->initial_state ? p->initial_state[seq * n + i] : 0;
}

int deltaproof_subject_run(const deltaproof_subject_problem *p, const deltaproof_subject_call *c) {
    const int K = p->K, V = p->V, W = V + K;
    const int64_t KV = (int64_t)K * V, size = (int64_t)p->HV * K * W;
    double *o = deltaproof_subject_find(c, "o"),
           *final_state = deltaproof_subject_find(c, "final_state"),
           *M = deltaproof_subject_find(c, "M"), *H = deltaproof_subject_find(c, "H"),
           *S_in = deltaproof_subject_find(c, "S_in");
    if (p->gate_form != DP_SUBJECT_GATE_LOG || p->beta_form != DP_SUBJECT_BETA_PLAIN || p->l2norm) {
        strcpy(c->why, "takes the log decay, beta, q and k as they are, without activations");
        return DP_SUBJECT_UNSUPPORTED;
    }
    float *HM = malloc(sizeof *HM * (size_t)(size * (p->ranks + 1) + 2 * KV + p->R * W)),
          *all = HM + size, *S = all + size * p->ranks, *X = S + KV, *E = X + KV;
    pair(p, HM, E);
    if (c->comm) c->comm->all_gather(c->comm, HM, all, size * (int64_t)sizeof *HM);
    for (int hv = 0; hv < p->HV; hv++) {
        for (int i = 0; i < K; i++) {
            for (int v = 0; v < V && H; v++)
                H[(int64_t)hv * KV + i * V + v] = HM[((int64_t)hv * K + i) * W + v];
            for (int x = 0; x < K && M; x++)
                M[((int64_t)hv * K + i) * K + x] = HM[((int64_t)hv * K + i) * W + V + x];
        }
        for (int seq = sequence_of(p, p->first); seq < p->Nseq && p->cu[seq] < p->first + p->tokens;
             seq++) {
            const int64_t a = p->cu[seq] - p->first, b = p->cu[seq + 1] - p->first,
                          at = ((int64_t)seq * p->HV + hv) * KV;
            if (a < 0)
                merge(p, all, hv, S, X);
            else
                for (int64_t i = 0; i < KV; i++)
                    S[i] = p->initial_state ? (float)p->initial_state[at + i] : 0;
            for (int64_t i = 0; a < 0 && S_in && i < KV; i++)
                S_in[(int64_t)hv * KV + i] = S[i];
            run(p, a > 0 ? a : 0, b < p->tokens ? b : p->tokens, hv, S, E, o);
            for (int64_t i = 0; b <= p->tokens && b > a && final_state && i < KV; i++)
                final_state[at + i] = S[i];
        }
    }
    empty_sequences(p, final_state);
    free(HM);
    return DP_SUBJECT_OK;
}