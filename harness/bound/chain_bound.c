/* Errors of the chain of M, and of the states that the merges hand to each rank. */
#include "error_bound_impl.h"
#include "ref/arithmetic/mm.h"

#include <string.h>

/* M and DM of a chunk, transposed where the adjoint chain wants them. */
static void chain_factor(const dp_chunk_bound *cb, int K, int trans, double *M, double *D) {
    for (int x = 0; x < K; x++)
        for (int y = 0; y < K; y++) {
            const int64_t from = trans ? (int64_t)y * K + x : (int64_t)x * K + y;
            M[(int64_t)x * K + y] = cb->M[from];
            D[(int64_t)x * K + y] = cb->DM[from];
        }
}

dp_chain_error dp_chain_error_of(const dp_error_bound_base *w, dp_chain_span span, double *traj) {
    const int K = w->ref->p->K, n = span.g1 - span.g0;
    const int64_t KK = (int64_t)K * K;
    dp_chain_error e = {.b = dp_doubles(dp_chain_error_size(&w->r, K))};
    double *P = dp_doubles(KK), *Q = dp_doubles(KK), *M = dp_doubles(KK), *D = dp_doubles(KK),
           bias = 0;
    /* the chain starts at I: its first factor is rounded too */
    for (int x = 0; x < K; x++)
        P[(int64_t)x * K + x] = 1;
    for (int i = 0; i < n; i++) {
        const dp_chunk_bound *cb =
            dp_error_bound_chunk(w, span.trans ? span.g1 - 1 - i : span.g0 + i, span.hv);
        chain_factor(cb, K, span.trans, M, D);
        const dp_factor_error x = dp_factor_error_of(cb, span.trans);
        dp_bound_chain_step(&w->r, span.format, K, M, D, &x, cb->mu, P, e.b, &bias);
        dp_mm(DP_FP64, 0, 0, K, K, K, M, P, Q);
        double *t = P;
        P = Q;
        Q = t;
        e.fro = dp_chain_error_norm(&w->r, K, e.b) + bias;
        if (traj && (i & (i + 1)) == 0) *traj++ = e.fro;
    }
    e.bias = bias / DP_LAMBDA;
    free(P);
    free(Q);
    free(M);
    free(D);
    return e;
}

double **dp_merge_errors(const dp_error_bound_base *w, int dir, const dp_chain_error *bM,
                         double **eH, double *fro) {
    dp_sim *s = w->ref;
    const dp_problem *p = s->p;
    const int HV = p->HV, K = p->K, V = p->V;
    const int64_t KV = (int64_t)K * V;
    double **e = dp_calloc((size_t)s->N * HV, sizeof *e), *mu = dp_doubles((int64_t)s->N * HV);
    for (int i = 0; i < s->N * HV; i++) {
        const double *M = (dir > 0 ? s->M : s->dM)[i];
        if (M) mu[i] = dp_norm2_up(K, K, M);
    }
    for (int i = 0; i < s->N * HV; i++) {
        const int r = i / HV, hv = i % HV;
        const dp_context *c = &s->ctx[r];
        if (dir > 0 ? c->is_first : c->is_last) continue;
        const int far = dir > 0 ? r - c->pre_num_ranks : r + c->post_num_ranks;
        e[i] = dp_state_error_new(w);
        for (int j = far; j != r; j += dir) {
            const int z = j * HV + hv;
            const double *H = (dir > 0 ? s->H : s->dH)[z],
                         *S = j != far ? (dir > 0 ? s->S_in : s->dS_out)[z] : NULL;
            const int seq =
                dir > 0 ? s->ctx[far].local_seq[s->ctx[far].nlocal - 1] : s->ctx[far].local_seq[0];
            const double *start = dir > 0 ? p->s0 : p->dstate;
            if (!S && start) S = start + ((int64_t)seq * HV + hv) * KV;
            /* zeros times M: only H arrives, as it is */
            if (!S)
                memcpy(e[i], eH[z], sizeof(double) * dp_state_error_size(&w->r, K, V));
            else
                dp_bound_merge_step(&w->r, K, V, (dir > 0 ? s->M : s->dM)[z], mu[z], bM[z].b,
                                    bM[z].bias, S, H, eH[z], e[i]);
        }
        fro[i] = dp_state_error_fro(w, e[i]);
    }
    free(mu);
    return e;
}
