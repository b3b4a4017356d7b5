/* Op step: the convolutions before q, k and v, drawn or from conv_data (operations.h). */
#include "case_parts.h"
#include "front.h"

#include <stdlib.h>
#include <string.h>

/* The data's x is [tokens or more, D], its w [D, W] with the W that the case file states, if any.
 */
static dp_status check_shapes(const dp_case_data *x, const dp_conv *v, dp_err *e) {
    const dp_casefile *f = x->f;
    const dp_tensor *tx = dp_tensor_find(x->d, "x"),
                    *tw = dp_case_input_find(x->d, &dp_conv_input_fields[DP_CONV_WEIGHT]);
    const int64_t W = dp_case_dim_from_end(tw, 1);
    if (!tx || !tw || dp_case_dim_from_end(tx, 1) != v->D || tx->n / v->D < v->T || W < 1 ||
        tw->n != v->D * W)
        return dp_casefile_refuse(f, "conv_data", e, "needs x [%lld or more,%d] and w [%d,W]",
                                  (long long)v->T, v->D, v->D);
    if (W > DP_CONV_MAX_WIDTH)
        return dp_casefile_refuse(f, "conv_data", e, "tensor %s: width %lld, at most %d", tw->name,
                                  (long long)W, DP_CONV_MAX_WIDTH);
    if (f->W && f->W != W)
        return dp_casefile_refuse(f, "W", e, "%s has %lld", f->conv_data, (long long)W);
    return DP_OK;
}

/* x, w and bias from tensors; v has T and D. */
static dp_status load_conv(dp_case_data *x, dp_conv *v, dp_err *e) {
    dp_case_input s[DP_CASE_MAX_INPUTS] = {0};
    dp_status st = check_shapes(x, v, e);
    if (st) return st;
    v->W = (int)dp_case_dim_from_end(
        dp_case_input_find(x->d, &dp_conv_input_fields[DP_CONV_WEIGHT]), 1);
    x->tokens = dp_tensor_find(x->d, "x")->n / v->D;
    const int n = dp_conv_inputs(v, s);
    st = dp_case_check_names(x, s, n, e);
    for (int i = 0; i < n && !st; i++)
        if (!s[i].field->backward) st = dp_case_load_input(x, &s[i], e);
    return st;
}

/* w and bias of the one convolution, and its x in place of what stands for its output. */
static dp_status step_data(const dp_casefile *f, dp_case *c, double **x, dp_conv *v, dp_err *e) {
    dp_tensorfile d;
    dp_conv read = {.T = v->T, .D = v->D};
    char *path = dp_case_sibling(c->path, f->conv_data);
    dp_status st = dp_safetensors_read(path, &d, e);
    free(path);
    if (st) return st;
    dp_case_data data = {.f = f, .key = "conv_data", .d = &d, .widest = c->input_dtype};
    st = load_conv(&data, &read, e);
    if (st)
        dp_conv_free(&read);
    else {
        free(*x);
        *x = read.x;
        v->w = read.w;
        v->bias = read.bias;
        v->W = read.W;
    }
    c->input_dtype = data.widest;
    dp_tensorfile_free(&d);
    return st;
}

/* Convolution i, before q, k or v. */
static dp_status one_conv(const dp_casefile *f, dp_case *c, int i, dp_err *e) {
    dp_problem *p = &c->p;
    dp_conv *v = &c->step.conv[i];
    dp_inputs_spec law = c->spec;
    law.seed += 1 + (uint64_t)i;
    v->T = p->T;
    v->D = dp_qkv_heads(p, i) * dp_qkv_width(p, i);
    v->W = (int)f->W;
    v->silu = (int)f->activation;
    c->step.on[i] = 1;
    if (f->conv_data) return step_data(f, c, dp_qkv_at(p, i), v, e);
    v->w = dp_doubles((int64_t)v->D * v->W);
    v->bias = f->bias ? dp_doubles(v->D) : NULL;
    dp_inputs_fill_conv(v, &law);
    return DP_OK;
}

/* Finite x and w may convolve to what is not. */
static dp_status check_outputs(const dp_casefile *f, const dp_case *c, dp_err *e) {
    dp_err inner = {0};
    if (!dp_problem_check(&c->p, c->allow_nonfinite, &inner)) return DP_OK;
    return dp_casefile_refuse(f, f->conv_data ? "conv_data" : "conv", e,
                              "after the convolution, %s", inner.msg);
}

dp_status dp_step_finish(const dp_casefile *f, dp_case *c, dp_err *e) {
    dp_status st = DP_OK;
    if (f->conv_data && f->conv.n != 1)
        return dp_casefile_refuse(f, "conv_data", e,
                                  "goes with one convolution, conv = q, k or v, not %d", f->conv.n);
    if (!f->conv_data && !f->W)
        return dp_casefile_refuse(f, "W", e, "missing; required unless conv_data gives it");
    for (int n = 0; n < f->conv.n && !st; n++)
        st = one_conv(f, c, (int)f->conv.v[n], e);
    if (!st) st = dp_step_build(c, e);
    return st ? st : check_outputs(f, c, e);
}
