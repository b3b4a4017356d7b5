/* The input tensors of each op (case_inputs.h). */
#include "case_inputs.h"

#include <stdio.h>
#include <string.h>

static int recurrence_inputs(dp_problem *p, dp_case_input *s) {
    const int64_t T = p->T, H = p->H, HV = p->HV, K = p->K, V = p->V, R = p->R, Kg = dp_Kg(p),
                  N = p->Nseq;
    const dp_case_input all[] = {
        {"q", NULL, DP_INPUT_REQUIRED, &p->q, 1, 0, 3, {T, H, K}},
        {"k", NULL, DP_INPUT_REQUIRED, &p->k, 1, 0, 4, {T, H, R, K}},
        {"v", NULL, DP_INPUT_REQUIRED, &p->v, 1, 0, 4, {T, HV, R, V}},
        {"g", NULL, DP_INPUT_REQUIRED, &p->g, 1, 0, 3, {T, HV, Kg}},
        {"beta", NULL, DP_INPUT_REQUIRED, &p->beta, 1, 0, 3, {T, HV, R}},
        {"A_log", NULL, DP_INPUT_GATE, &p->A_log, 0, 1, 1, {HV}},
        {"dt_bias", NULL, DP_INPUT_GATE, &p->dt_bias, 0, 1, 2, {HV, Kg}},
        {"s0", "initial_state", DP_INPUT_STATE, &p->s0, 0, 1, 4, {N, HV, K, V}},
        {"do", NULL, DP_INPUT_GRADIENT, &p->dout, 1, 0, 3, {T, HV, V}},
        {"dstate", "dht", DP_INPUT_GRADIENT, &p->dstate, 0, 1, 4, {N, HV, K, V}}};
    memcpy(s, all, sizeof all);
    return sizeof all / sizeof *all;
}

int dp_conv_inputs(dp_conv *c, dp_case_input *s) {
    const dp_case_input all[] = {{"x", NULL, DP_INPUT_REQUIRED, &c->x, 1, 0, 2, {c->T, c->D}},
                                 {"w", "weight", DP_INPUT_REQUIRED, &c->w, 0, 1, 2, {c->D, c->W}},
                                 {"bias", NULL, DP_INPUT_BIAS, &c->bias, 0, 1, 1, {c->D}},
                                 {"dy", NULL, DP_INPUT_GRADIENT, &c->dy, 1, 0, 2, {c->T, c->D}}};
    memcpy(s, all, sizeof all);
    return sizeof all / sizeof *all;
}

int dp_case_inputs(dp_case *c, dp_case_input *s) {
    return c->op == DP_OP_CONV ? dp_conv_inputs(&c->conv, s) : recurrence_inputs(&c->p, s);
}

int64_t dp_case_input_count(const dp_case_input *s) {
    int64_t n = 1;
    for (int i = 0; i < s->ndim; i++)
        n *= s->shape[i];
    return n;
}

void dp_case_input_index(const dp_case_input *s, int64_t i, char *out, size_t size) {
    int64_t rest = dp_case_input_count(s);
    size_t at = 0;
    for (int d = 0; d < s->ndim && at < size; d++) {
        rest /= s->shape[d];
        at += (size_t)snprintf(out + at, size - at, "%c%lld", d ? ',' : '[', (long long)(i / rest));
        i %= rest;
    }
    if (at < size) snprintf(out + at, size - at, "]");
}

const dp_tensor *dp_case_input_find(const dp_tensorfile *d, const dp_case_input *s) {
    const dp_tensor *t = dp_tensor_find(d, s->name);
    return t || !s->alias ? t : dp_tensor_find(d, s->alias);
}
