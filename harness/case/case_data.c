/* Inputs of a case from a file of tensors (case_parts.h). */
#define _GNU_SOURCE
#include "case_parts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- names ----------------------------------------------------------------------------------- */

static dp_status unknown_tensor(const dp_case_data *x, const char *name, const dp_case_input *s,
                                int n, dp_err *e) {
    char all[256] = "";
    for (int j = 0, at = 0; j < n; j++)
        at += dp_case_input_names(all + at, sizeof all - (size_t)at, s[j].field);
    return dp_casefile_refuse(x->f, x->key, e, "tensor %.60s is no input of op = %s; known:%s",
                              name, dp_casefile_op_name(x->f), all);
}

/* Results that a recording may hold beside its inputs; they are not read. */
static int is_result(const char *name) {
    for (int i = 0; i < DP_CONV_NRESULTS; i++)
        if (dp_field_is(&dp_conv_result_fields[i], name)) return 1;
    return dp_result_find(name) >= 0;
}

/* A name that is written wrong would be an input that is silently absent. */
dp_status dp_case_check_names(const dp_case_data *x, const dp_case_input *s, int n, dp_err *e) {
    const dp_tensorfile *d = x->d;
    for (int i = 0; i < d->ntensor; i++) {
        const char *name = d->tensor[i].name;
        int known = !strcmp(name, "cu_seqlens") || is_result(name);
        for (int j = 0; j < n; j++)
            known |= dp_field_is(s[j].field, name);
        if (!known) return unknown_tensor(x, name, s, n, e);
    }
    for (int j = 0; j < n; j++) {
        const dp_tensor_field *f = s[j].field;
        if (f->alias && dp_tensor_find(d, f->name) && dp_tensor_find(d, f->alias))
            return dp_casefile_refuse(x->f, x->key, e,
                                      "holds the same tensor under two names, %s and %s", f->name,
                                      f->alias);
    }
    return DP_OK;
}

/* ---- values ---------------------------------------------------------------------------------- */

static dp_format format_of(const dp_tensor *t) {
    return !strcmp(t->dtype, "BF16") ? DP_BF16 : !strcmp(t->dtype, "F64") ? DP_FP64 : DP_FP32;
}

static dp_format wider(dp_format a, dp_format b) {
    return a == DP_FP64 || b == DP_FP64   ? DP_FP64
           : a == DP_FP32 || b == DP_FP32 ? DP_FP32
                                          : DP_BF16;
}

static int fits(const dp_tensor *t, const dp_case_input *s, int64_t tokens) {
    int64_t want[4] = {0};
    for (int i = 0; i < s->ndim; i++)
        want[i] = i == 0 && s->field->kind == DP_OF_TOKENS ? tokens : s->shape[i];
    return dp_case_same_shape(t, s->ndim, want, s->field->parameter);
}

static dp_status refuse_shape(const dp_case_data *x, const dp_tensor *t, const dp_case_input *s,
                              dp_err *e) {
    char have[128], want[128] = "", *at = want;
    for (int i = 0; i < s->ndim; i++)
        at += sprintf(
            at, "%s%lld", i ? "," : "",
            (long long)(i == 0 && s->field->kind == DP_OF_TOKENS ? x->tokens : s->shape[i]));
    dp_case_shape_text(t, have, sizeof have);
    return dp_casefile_refuse(x->f, "data", e, "tensor %s: shape %s, the case needs [%s]", t->name,
                              have, want);
}

dp_status dp_case_load_input(dp_case_data *x, dp_case_input *s, dp_err *e) {
    const dp_tensor *t = dp_case_input_find(x->d, s->field);
    if (!t && s->field->role == DP_ROLE_REQUIRED)
        return dp_casefile_refuse(x->f, "data", e, "tensor %s is missing", s->field->name);
    if (!t) return DP_OK;
    if (t->dtype[0] == 'I')
        return dp_casefile_refuse(x->f, "data", e, "tensor %s: dtype %s, must be a floating type",
                                  s->field->name, t->dtype);
    if (!fits(t, s, x->tokens)) return refuse_shape(x, t, s, e);
    free(*s->where);
    *s->where = dp_copy(t->data, dp_case_input_count(s));
    if (!s->field->parameter) x->widest = wider(x->widest, format_of(t));
    return DP_OK;
}

dp_status dp_case_load_data(const dp_casefile *f, const dp_tensorfile *d, dp_case *c,
                            int64_t tokens, dp_err *e) {
    dp_case_input s[DP_CASE_MAX_INPUTS];
    const int n = dp_case_inputs(c, s);
    dp_case_data x = {.f = f, .key = "data", .d = d, .tokens = tokens, .widest = DP_BF16};
    dp_status st = dp_case_check_names(&x, s, n, e);
    for (int i = 0; i < n && !st; i++)
        if (!s[i].field->backward || c->backward) st = dp_case_load_input(&x, &s[i], e);
    if (st) return st;
    if (f->gate == DP_GATE_LOG && (c->p.A_log || c->p.dt_bias))
        return dp_casefile_refuse(f, "data", e,
                                  "has A_log or dt_bias, so its gate is raw, but gate = log");
    if (dp_casefile_has(f, "dtype") && dp_case_dtype(f) != x.widest)
        return dp_casefile_refuse(f, "dtype", e, "%s has %s tensors", f->data,
                                  dp_formats[x.widest].name);
    c->input_dtype = c->spec.dtype = x.widest;
    return DP_OK;
}
