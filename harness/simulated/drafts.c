/* Windows of a session as problems of their own (drafts.h). */
#include "drafts.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MOST_STEPS 1e6 /* entries of states that the truth of a set passes through: 0.5 s in MPFR */
#define MOST_CHUNKS 64 /* of all heads, each a bound: 1 s where K = V = 32 */

/* Is it an input of tokens that p has? */
static int of_tokens(const dp_problem *p, int input) {
    const dp_tensor_field *f = &dp_input_fields[input];
    return f->kind == DP_OF_TOKENS && !f->backward && dp_input_of(p, input);
}

/* n more numbers behind the first `have`; from NULL: zeros. */
static void append(double **x, int64_t have, const double *from, int64_t n) {
    *x = dp_realloc(*x, sizeof **x * (size_t)(have + n));
    if (from)
        memcpy(*x + have, from, sizeof **x * (size_t)n);
    else
        memset(*x + have, 0, sizeof **x * (size_t)n);
}

/* Shapes, forms and parameters of a call; no tokens yet. */
static void begin(dp_draft_set *s, const dp_problem *call) {
    s->p = *call;
    s->p.T = 0;
    s->p.Nseq = 0;
    s->p.cu = dp_calloc(1, sizeof *s->p.cu);
    for (int i = 0; i < DP_NINPUTS; i++)
        *dp_input_at(&s->p, i) = dp_input_fields[i].kind == DP_OF_HEADS
                                     ? dp_copy(dp_input_of(call, i), dp_input_count(call, i))
                                     : NULL;
}

/* Sequences of n tokens in all. */
static int affordable(const dp_draft_set *s, const dp_problem *call, int64_t sequences, int64_t n) {
    const double most = MOST_STEPS / ((double)call->HV * call->K * call->V);
    if (!s->p.Nseq) return 1;
    return (double)(s->p.T + n) <= most && (s->p.Nseq + sequences) * call->HV <= MOST_CHUNKS;
}

/* The first n tokens of sequence i of a call, the state after them, and o where it is there. */
static void add(dp_draft_set *s, const dp_problem *call, int i, int64_t n, const double *o,
                const double *state, const dp_draft_place *at) {
    const int64_t S = (int64_t)call->HV * call->K * call->V, rows = (int64_t)call->HV * call->V;
    if (!s->p.cu) begin(s, call);
    dp_problem *p = &s->p;
    for (int f = 0; f < DP_NINPUTS; f++) {
        const int64_t w = of_tokens(call, f) ? dp_input_width(call, f) : 0;
        if (w) append(dp_input_at(p, f), p->T * w, dp_input_of(call, f) + call->cu[i] * w, n * w);
    }
    append(&p->s0, p->Nseq * S, call->s0 ? call->s0 + i * S : NULL, S);
    append(&s->out.final_state, p->Nseq * S, state, S);
    if (o) append(&s->out.o, p->T * rows, o + call->cu[i] * rows, n * rows);
    s->place = dp_realloc(s->place, sizeof *s->place * ((size_t)p->Nseq + 1));
    p->cu = dp_realloc(p->cu, sizeof *p->cu * ((size_t)p->Nseq + 2));
    s->place[p->Nseq] = *at;
    s->place[p->Nseq++].tokens = n;
    p->T += n;
    p->cu[p->Nseq] = p->T;
}

/* A subject's state may be anything; a problem has finite numbers. */
static int all_finite(const double *x, int64_t n) {
    int all = 1;
    for (int64_t z = 0; x && z < n; z++)
        all &= isfinite(x[z]) != 0;
    return all;
}

void dp_drafts_take(dp_drafts *d, const dp_problem *call, int i, const dp_draft_place *at,
                    const dp_result *made, const double *states) {
    const int64_t S = (int64_t)call->HV * call->K * call->V, n = call->cu[i + 1] - call->cu[i];
    d->windows++;
    if (!all_finite(call->s0 ? call->s0 + i * S : NULL, S)) return;
    if (!affordable(&d->window, call, 1, n)) return;
    add(&d->window, call, i, n, made->o, made->final_state + i * S, at);
    if (!states) return;
    /* the last of them is judged already where it is the final state */
    const double *last = states + (call->cu[i + 1] - 1) * S, *final = made->final_state + i * S;
    const int64_t m = memcmp(last, final, sizeof *last * (size_t)S) ? n : n - 1;
    if (!affordable(&d->within, call, m, m * (m + 1) / 2)) return;
    for (int64_t j = 1; j <= m; j++)
        add(&d->within, call, i, j, NULL, states + (call->cu[i] + j - 1) * S, at);
}

static void free_set(dp_draft_set *s) {
    dp_problem_free(&s->p);
    dp_result_free(&s->out);
    free(s->place);
}

void dp_drafts_free(dp_drafts *d) {
    free_set(&d->window);
    free_set(&d->within);
    *d = (dp_drafts){0};
}
