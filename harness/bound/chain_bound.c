/* Errors of the chain of M. */
#include "error_bound_impl.h"
#include "ref/arithmetic/mm.h"

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
