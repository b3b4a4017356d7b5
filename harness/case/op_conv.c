/* Op conv: a causal convolution (operations.h). */
#include "case_parts.h"

#define MAX_CHANNELS 65536

dp_dims dp_convolution_dims(const dp_case *c) { return dp_conv_dims(&c->conv); }

dp_status dp_convolution_shape(const dp_casefile *f, const dp_tensorfile *d, dp_case *c,
                               int64_t *tokens, dp_err *e) {
    dp_conv *v = &c->conv;
    const dp_tensor *x = d ? dp_tensor_find(d, "x") : NULL,
                    *w = d ? dp_case_input_find(d, &dp_conv_input_fields[DP_CONV_WEIGHT]) : NULL;
    int64_t D = 0, W = 0;
    dp_status s = dp_case_agree(f, "D", f->D, dp_case_dim_from_end(x, 1), 0, &D, e);
    if (!s) s = dp_case_agree(f, "W", f->W, dp_case_dim_from_end(w, 1), 0, &W, e);
    if (s) return s;
    if (d && (!x || !w || !x->n || !w->n || !D || !W || D > MAX_CHANNELS || W > DP_CONV_MAX_WIDTH))
        return dp_casefile_refuse(
            f, "data", e,
            "tensors x and w must be there, not empty, with D up to 65536 and W up to %d",
            DP_CONV_MAX_WIDTH);
    *tokens = x ? x->n / D : 0;
    v->D = (int)D;
    v->W = (int)W;
    v->silu = (int)f->activation;
    return dp_case_set_tokens(f, *tokens, &v->T, e);
}

void dp_convolution_fill(dp_case *c) { dp_inputs_fill_conv(&c->conv, &c->spec); }

void dp_convolution_fill_gradients(const dp_casefile *f, dp_case *c) {
    (void)f;
    if (c->conv.dy) return;
    c->conv.dy = dp_doubles(c->conv.T * c->conv.D);
    dp_inputs_fill_conv_dy(&c->conv, &c->spec);
}

void dp_convolution_describe(const dp_case *c, int ranks, char *out, size_t size) {
    snprintf(out, size, "T %lld on %d ranks, D %d, W %d, %d sequences", (long long)c->conv.T, ranks,
             c->conv.D, c->conv.W, c->conv.Nseq);
}

void dp_convolution_write(const dp_case *c, FILE *f) {
    fprintf(f, "D = %d\nW = %d\nactivation = %s\n", c->conv.D, c->conv.W,
            c->conv.silu ? "silu" : "none");
}
