/* The input tensors of each op (case_inputs.h). */
#include "case_inputs.h"
#include "operations.h"

#include <stdio.h>

/* Rows [n] of the table, of these arrays; p: the problem that they are of, without those that its
 * recurrence does not have. */
static int inputs_of(const dp_tensor_field *field, int n, double **arrays, const dp_problem *p,
                     const dp_dims *d, dp_case_input *s) {
    int count = 0;
    for (int i = 0; i < n; i++) {
        if (p && !dp_input_belongs(p, i)) continue;
        s[count] = (dp_case_input){.field = &field[i], .where = &arrays[i]};
        s[count].ndim = dp_field_axes(&field[i], d, s[count].shape);
        count++;
    }
    return count;
}

int dp_conv_inputs(dp_conv *c, dp_case_input *s) {
    const dp_dims d = dp_conv_dims(c);
    return inputs_of(dp_conv_input_fields, DP_CONV_NINPUTS, c->in, NULL, &d, s);
}

int dp_case_inputs(dp_case *c, dp_case_input *s) {
    const dp_operation *op = c->op;
    const dp_dims d = op->dims(c);
    double **const arrays = op->has_problem ? c->p.in : c->conv.in;
    return inputs_of(op->inputs, op->ninputs, arrays, op->has_problem ? &c->p : NULL, &d, s);
}

int64_t dp_case_input_count(const dp_case_input *s) {
    int64_t n = 1;
    for (int i = 0; i < s->ndim; i++)
        n *= s->shape[i];
    return n;
}

void dp_case_input_index(const dp_case_input *s, int64_t i, char *out, size_t size) {
    int64_t rest = dp_case_input_count(s);
    *out = 0;
    for (int d = 0; d < s->ndim; d++) {
        rest /= s->shape[d];
        dp_text_add(out, size, "%c%lld", d ? ',' : '[', (long long)(i / rest));
        i %= rest;
    }
    dp_text_add(out, size, "]");
}

void dp_case_input_names(char *out, size_t size, const dp_tensor_field *f) {
    dp_text_add(out, size, f->alias ? " %s (or %s)" : " %s", f->name, f->alias);
}

const dp_tensor *dp_case_input_find(const dp_tensorfile *d, const dp_tensor_field *f) {
    const dp_tensor *t = dp_tensor_find(d, f->name);
    return t || !f->alias ? t : dp_tensor_find(d, f->alias);
}

dp_format dp_case_input_format(const dp_tensor_field *f, dp_format dtype) {
    return f->parameter && dtype != DP_FP64 ? DP_FP32 : dtype;
}
