/* Op chain: a product of M factors, drawn where they are used (operations.h). */
#include "case_parts.h"

dp_dims dp_chain_dims(const dp_case *c) {
    return (dp_dims){{[DP_AXIS_CHUNKS] = c->ch.n, [DP_AXIS_K] = c->ch.K}};
}

dp_status dp_chain_shape(const dp_casefile *f, const dp_tensorfile *d, dp_case *c, int64_t *tokens,
                         dp_err *e) {
    (void)d;
    *tokens = 0;
    c->ch.regime = (dp_regime)f->regime;
    c->ch.n = (int)f->chunks;
    c->ch.K = (int)f->K;
    if (!f->K) return dp_casefile_refuse(f, "K", e, "missing; key width");
    if ((double)f->chunks * f->K * f->K > (double)DP_CASE_MAX_NUMBERS)
        return dp_casefile_refuse(f, "chunks", e, "the factors hold more than %lld numbers",
                                  DP_CASE_MAX_NUMBERS);
    return DP_OK;
}

void dp_chain_describe(const dp_case *c, int ranks, char *out, size_t size) {
    (void)ranks;
    snprintf(out, size, "%d factors, K %d", c->ch.n, c->ch.K);
}

void dp_chain_write(const dp_case *c, FILE *f) {
    fprintf(f, "regime = %s\nchunks = %d\nK = %d\nseed = %llu\nchain = %s\n",
            dp_regime_names[c->ch.regime], c->ch.n, c->ch.K, (unsigned long long)c->spec.seed,
            dp_formats[c->chain[0]].name);
}
