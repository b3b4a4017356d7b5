/* Convolutions in the calls of a session (conv_states.h). */
#include "conv_states.h"

#include <stdlib.h>
#include <string.h>

static size_t bytes(int64_t n) { return sizeof(double) * (size_t)n; }

void dp_conv_states_free(dp_conv_states *s) {
    for (int i = 0; i < DP_NQKV; i++)
        free(s->of[i]);
    *s = (dp_conv_states){{NULL}};
}

void dp_conv_calls_free(dp_conv_calls *c) {
    for (int i = 0; i < DP_NQKV; i++)
        free(c->y[i]);
    dp_conv_states_free(&c->got);
    dp_conv_states_free(&c->want);
}

int64_t dp_conv_state_size(const dp_conv *c) { return (int64_t)(c->W - 1) * c->D; }
static int64_t all_of(const dp_conv *v) { return v->Nseq * dp_conv_state_size(v); }

void dp_conv_calls_begin(dp_conv_calls *c, dp_conv_states *first) {
    *first = (dp_conv_states){{NULL}};
    for (int i = 0; i < DP_NQKV; i++) {
        const dp_conv *v = c->conv[i];
        if (!v) continue;
        c->y[i] = dp_doubles(v->T * v->D);
        first->of[i] = dp_doubles(all_of(v));
    }
}

/* The state of one sequence behind its token `at`, which may lie before its first. */
static void true_state(const dp_conv *v, int seq, int64_t at, double *to) {
    for (int j = 0; j < v->W - 1; j++, to += v->D) {
        const int64_t t = at - (v->W - 1) + j;
        if (t >= v->cu[seq])
            memcpy(to, v->x + t * v->D, bytes(v->D));
        else
            memset(to, 0, bytes(v->D));
    }
}

/* The true states where sequence i has tokens up to at[i]. */
static void conv_states_true(const dp_conv_calls *c, const int64_t *at, dp_conv_states *s) {
    for (int i = 0; i < DP_NQKV; i++)
        for (int q = 0; c->conv[i] && q < c->conv[i]->Nseq; q++)
            true_state(c->conv[i], q, at[q], s->of[i] + q * dp_conv_state_size(c->conv[i]));
}

static int spoil_one(const dp_conv *v, dp_fault fault, const int64_t *at, double *before) {
    const int64_t n = dp_conv_state_size(v);
    double *was = dp_copy(before, all_of(v));
    for (int q = 0; q < v->Nseq; q++) {
        double *own = before + q * n;
        if (fault == DP_FAULT_CONV_OF_OTHER) memcpy(own, was + (q + 1) % v->Nseq * n, bytes(n));
        if (fault == DP_FAULT_CONV_ZEROED) memset(own, 0, bytes(n));
        if (fault == DP_FAULT_CONV_LATE) true_state(v, q, at[q] - 1, own);
    }
    const int differs = n && memcmp(was, before, bytes(all_of(v))) != 0;
    free(was);
    return differs;
}

int dp_conv_states_spoil(const dp_conv_calls *c, dp_fault fault, const int64_t *at,
                         dp_conv_states *before) {
    int any = 0;
    for (int i = 0; i < DP_NQKV; i++)
        if (c->conv[i]) any |= spoil_one(c->conv[i], fault, at, before->of[i]);
    return any;
}

void dp_conv_states_look(dp_conv_calls *c, const int64_t *at, int64_t call,
                         const dp_conv_states *after) {
    int wrong = 0;
    for (int i = 0; i < DP_NQKV; i++) {
        const dp_conv *v = c->conv[i];
        if (!v || c->wrong) continue;
        if (!c->got.of[i]) c->got.of[i] = dp_doubles(all_of(v));
        if (!c->want.of[i]) c->want.of[i] = dp_doubles(all_of(v));
        if (all_of(v)) memcpy(c->got.of[i], after->of[i], bytes(all_of(v)));
    }
    if (!c->wrong) conv_states_true(c, at, &c->want);
    for (int i = 0; i < DP_NQKV && !c->wrong; i++)
        wrong |= c->conv[i] && all_of(c->conv[i]) &&
                 memcmp(c->got.of[i], c->want.of[i], bytes(all_of(c->conv[i])));
    if (wrong) c->call = call;
    c->wrong += wrong;
}

void dp_conv_states_run(const dp_conv *shape, dp_base policy, const double *x, const int64_t *cu,
                        const double *before, double **y, double **after) {
    const int Nseq = shape->Nseq, m = shape->W - 1;
    const int64_t D = shape->D, n = dp_conv_state_size(shape);
    dp_conv v = *shape;
    dp_conv_result r;
    v.T = cu[Nseq] + (int64_t)Nseq * m;
    v.dy = NULL;
    v.x = dp_doubles(v.T * D);
    v.cu = dp_calloc((size_t)Nseq + 1, sizeof *v.cu);
    *y = dp_doubles(cu[Nseq] * D);
    *after = dp_doubles(Nseq * n);
    for (int q = 0; q < Nseq; q++) {
        v.cu[q + 1] = cu[q + 1] + (int64_t)(q + 1) * m;
        if (n) memcpy(v.x + v.cu[q] * D, before + q * n, bytes(n));
        memcpy(v.x + (v.cu[q] + m) * D, x + cu[q] * D, bytes((cu[q + 1] - cu[q]) * D));
        if (n) memcpy(*after + q * n, v.x + (v.cu[q + 1] - m) * D, bytes(n));
    }
    dp_conv_result_alloc(&r, &v);
    dp_must(dp_conv_ranks(&v, 1, policy, &r, NULL)); /* one rank splits anything */
    for (int q = 0; q < Nseq; q++)
        memcpy(*y + cu[q] * D, r.y + (v.cu[q] + m) * D, bytes((cu[q + 1] - cu[q]) * D));
    dp_conv_result_free(&r);
    free(v.x);
    free(v.cu);
}
