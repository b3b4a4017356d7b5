/* One nearby problem in one design: convolutions, then the pipeline or the token recurrence. */
#include "drawn_run.h"
#include "drawn_sent.h"
#include "ref/chunk/recurrent.h"

#include <assert.h>
#include <stdlib.h>

static dp_conv_policy conv_policy(dp_base base) {
    return base == DP_BASE_FP64 ? DP_CONV_FP64 : base == DP_BASE_FP32 ? DP_CONV_FP32 : DP_CONV_BF16;
}

/* q, k or v; with dy: the gradients, too. */
static void convolve(dp_drawn_run *x, int i, double *dy) {
    dp_conv_result_free(&x->front[i]);
    x->conv[i].dy = dy;
    dp_conv_result_alloc(&x->front[i], &x->conv[i]);
    const dp_status st =
        dp_conv_ranks(&x->conv[i], x->N, conv_policy(x->design.base), &x->front[i], NULL);
    assert(!st); /* the caller has split the problem this way already */
    (void)st;
}

static int has_front(const dp_drawn_run *x) { return x->conv[0].x || x->conv[1].x || x->conv[2].x; }

/* q, k and v that come out of convolutions: of all tokens at once, which have the bits of calls. */
static void open_front(dp_drawn_run *x, const dp_conv conv[3]) {
    double **const input[3] = {&x->p.q, &x->p.k, &x->p.v};
    for (int i = 0; i < 3; i++) {
        x->conv[i] = conv[i];
        if (!conv[i].x) continue;
        convolve(x, i, NULL);
        *input[i] = dp_copy(x->front[i].y, conv[i].T * conv[i].D);
    }
}

void dp_drawn_open(dp_drawn_run *x, const dp_design *design, const dp_problem *p,
                   const dp_conv conv[3], int N, int backward) {
    *x = (dp_drawn_run){.design = *design, .N = N, .backward = backward, .p = *p};
    open_front(x, conv);
    if (!design->chunk) return;
    const dp_status st = dp_sim_new_design(&x->sim, &x->p, design, N, NULL);
    assert(!st);
    (void)st;
}

void dp_drawn_open_calls(dp_drawn_run *x, const dp_design *design, const dp_problem *p,
                         const dp_conv conv[3], const dp_session *session) {
    *x = (dp_drawn_run){.design = *design, .N = 1, .p = *p, .session = session};
    open_front(x, conv);
}

/* Is there a pipeline that stays between runs? */
static int has_sim(const dp_drawn_run *x) { return x->design.chunk && !x->session; }

static void forget_recurrent(dp_drawn_run *x) {
    dp_result_free(&x->out);
    free(x->S);
    free(x->dS);
    free(x->dg);
    dp_drawn_pairs_free(&x->pairs);
    x->S = x->dS = x->dg = NULL;
}

void dp_drawn_close(dp_drawn_run *x) {
    double *const input[3] = {x->p.q, x->p.k, x->p.v};
    if (has_sim(x))
        dp_sim_free(&x->sim);
    else
        forget_recurrent(x);
    for (int i = 0; i < 3; i++) {
        if (!x->conv[i].x) continue;
        free(input[i]);
        dp_conv_result_free(&x->front[i]);
    }
}

void dp_drawn_split(dp_drawn_run *x, int N) {
    const dp_design design = x->design;
    if (N == x->N) return;
    if (design.chunk && !has_front(x) && dp_sim_split(&x->sim, N)) {
        x->N = N;
        return;
    }
    if (!design.chunk && !has_front(x)) {
        forget_recurrent(x);
        x->N = N;
        return;
    }
    const dp_problem p = x->p; /* q, k, v behind a convolution are made anew */
    const dp_conv conv[3] = {x->conv[0], x->conv[1], x->conv[2]};
    const int backward = x->backward;
    dp_drawn_close(x);
    dp_drawn_open(x, &design, &p, conv, N, backward);
}

static void run_recurrent(dp_drawn_run *x) {
    const dp_problem *p = &x->p;
    const int64_t KV = (int64_t)p->K * p->V;
    const int N = x->N;
    int64_t *cut = dp_calloc((size_t)N, sizeof *cut);
    for (int r = 1; r < N; r++)
        cut[r] = dp_own_cut(p->own.kind, p->T, N, r);
    x->S = dp_doubles(N * p->HV * KV);
    x->dS = dp_doubles(N * p->HV * KV);
    x->dg = dp_doubles(p->T * p->HV * dp_Kg(p));
    const dp_recurrent_keep keep = {N, cut, x->S, x->dS, x->dg, NULL, NULL},
                            sent = {N, cut, NULL, NULL, x->dg, x->S, x->dS};
    dp_recurrent_run(p, &x->design, x->backward, &keep, &x->out);
    dp_drawn_pairs_make(&x->pairs, p, &x->design, N, x->backward);
    if (N > 1 && dp_drawn_rounds(x->design.sending)) {
        dp_drawn_arrives(p, x->design.sending, N, &x->pairs, x->S, x->backward ? x->dS : NULL);
        dp_result_free(&x->out);
        dp_recurrent_run(p, &x->design, x->backward, &sent, &x->out);
    }
    free(cut);
}

static dp_status run_call(void *who, const dp_problem *call, int states, dp_call_result *out,
                          dp_err *e) {
    const dp_design *design = who;
    (void)states;
    dp_sim s;
    if (!design->chunk) {
        dp_recurrent_run(call, design, 0, NULL, &out->out);
        return DP_OK;
    }
    const dp_status st = dp_sim_new_design(&s, call, design, 1, e);
    if (!st) dp_calls_of_sim(&s, out);
    return st;
}

static void run_calls(dp_drawn_run *x) {
    const dp_caller by = {.run = run_call, .who = &x->design};
    const dp_status st = dp_calls_run(&x->p, x->session, DP_FAULT_NONE, &by, &x->out, NULL, NULL);
    assert(!st); /* one rank splits any problem */
    (void)st;
}

dp_result *dp_drawn_results(dp_drawn_run *x) { return has_sim(x) ? &x->sim.out : &x->out; }

void dp_drawn_all(dp_drawn_run *x, dp_format chain) {
    if (has_sim(x))
        dp_sim_run(&x->sim, chain, x->design.sending.exchange, x->backward);
    else if (!x->out.o)
        x->session ? run_calls(x) : run_recurrent(x);
    const dp_result *r = dp_drawn_results(x);
    double *const dy[3] = {r->dq, r->dk, r->dv};
    for (int i = 0; x->backward && i < 3; i++)
        if (x->conv[i].x) convolve(x, i, dy[i]);
}

const double *dp_drawn_rank_value(const dp_drawn_run *x, int tensor, int64_t z) {
    const int64_t KV = (int64_t)x->p.K * x->p.V;
    const int64_t HV = x->p.HV;
    if (x->session) return NULL;
    if (x->design.chunk) return dp_sim_rank_list(&x->sim, tensor)[z];
    if (tensor == DP_RANK_S_IN) return x->S + z * KV;
    if (tensor == DP_RANK_DS_OUT) return z / HV + 1 < x->N ? x->dS + (z + HV) * KV : NULL;
    return x->pairs.of[tensor] ? x->pairs.of[tensor][z] : NULL;
}

const double *dp_drawn_dg(const dp_drawn_run *x) { return x->design.chunk ? x->sim.dg : x->dg; }
