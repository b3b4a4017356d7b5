/* Checks by changing inputs: tokens, chunks, heads (invariants_work.h). */
#include "bisect.h"
#include "invariants_work.h"
#include "ref/inputs/inputs_large.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the checks ------------------------------------------------------------------------------ */

/* Among so many calls a race of one call in 50 shows in 95 of 100 checks. */
enum { LEAST_REPETITIONS = 2, MOST_REPETITIONS = 150 };
static const double REPEATED_S = 5;

static dp_status repeat_runs(dp_check_work *w) {
    char why[sizeof w->c->why] = "";
    const double t0 = dp_now();
    const int most = w->s->library ? MOST_REPETITIONS : LEAST_REPETITIONS;
    int differ = 0, i;
    for (i = 0; i < LEAST_REPETITIONS || (i < most && !differ && dp_now() - t0 < REPEATED_S); i++) {
        dp_check_outcome o;
        const dp_status st = dp_check_run_problem(w->s, w->p, w->N, w->backward, &o, w->e);
        if (st) return st;
        dp_check_same(w,
                      &(dp_check_pair){.p = w->p, .got = &o.r, .want = &w->base->r, .factor = 1});
        dp_check_outcome_free(&o);
        if (w->c->verdict != DP_FAIL) continue;
        if (!differ++) memcpy(why, w->c->why, sizeof why);
        w->c->verdict = DP_PASS;
    }
    if (!differ) return DP_OK;
    w->c->verdict = DP_FAIL;
    snprintf(w->c->why, sizeof w->c->why, "not repeatable, %d of %d: %.440s", differ, i, why);
    return DP_OK;
}

dp_status dp_check_repeat(dp_check_work *w) {
    if (dp_backends[w->s->backend].faulty) {
        dp_repeat x;
        const dp_sim_policy how = {w->N,        w->s->base,  w->s->chain,  w->s->merge,
                                   w->s->fault, w->backward, w->s->payload};
        const dp_status st = dp_repeat_sim(w->p, &how, 3, &x, w->e);
        if (!st) free(x.hit);
        w->c->compared = w->p->T * w->p->HV * w->p->V;
        if (!st && x.differ) {
            w->c->verdict = DP_FAIL;
            snprintf(w->c->why, sizeof w->c->why,
                     "%d of 2 repetitions differ, first in %s, rank %d, head %d", x.differ,
                     dp_stage_names[x.stage], x.rank, x.head);
        }
        return st;
    }
    return repeat_runs(w);
}

enum { EDITED_TOKENS = 4 };

/* First token of the chunk that holds t, and the token behind its last one: chunks restart at
 * sequences and at ranks. */
static int64_t chunk_of(const dp_check_work *w, int64_t t, int64_t *end) {
    const dp_problem *p = w->p;
    const int64_t L = p->T / w->N, rank = t / L * L, cu = p->cu[dp_sequence_of(p->cu, p->Nseq, t)],
                  from = rank > cu ? rank : cu, start = from + (t - from) / DP_CHUNK * DP_CHUNK;
    int64_t stop = p->cu[dp_sequence_of(p->cu, p->Nseq, t) + 1];
    if (stop > rank + L) stop = rank + L;
    *end = start + DP_CHUNK < stop ? start + DP_CHUNK : stop;
    return start;
}

/* The edited tokens: t[0] is in the middle of a chunk, t[3] begins that chunk, t[1] the last rank.
 * The second token of the last sequence with tokens is t[2]. */
static void edited_tokens(const dp_check_work *w, int64_t t[EDITED_TOKENS]) {
    const dp_problem *p = w->p;
    const int64_t L = p->T / w->N;
    int64_t end;
    int s = p->Nseq - 1;
    while (s > 0 && p->cu[s + 1] == p->cu[s])
        s--;
    t[0] = p->T / 2 + (p->T > 16 ? 5 : 0);
    t[1] = (w->N - 1) * L;
    t[2] = p->cu[s] + (p->cu[s] + 1 < p->T);
    t[3] = chunk_of(w, t[0], &end);
}

/* Another gate, exact in every format. By factors: a weaker one, since a strong one is refused
 * (DP_FACTORS_GATE). */
static dp_edit edit_of_gate(const dp_problem *p) {
    return dp_by_rows(p) ? DP_EDIT_WEAKER_GATE : DP_EDIT_GATE;
}

/* Inputs of tokens that have a role: another token's values, and another gate. */
static void edit(dp_problem *p, dp_role role, int64_t t) {
    const int64_t other = (t + p->T / 2 + 1) % p->T;
    for (int i = 0; i < DP_NINPUTS; i++) {
        const int64_t n = dp_input_width(p, i);
        const dp_tensor_field *f = &dp_input_fields[i];
        if (!dp_input_of(p, i) || f->role != role || f->kind != DP_OF_TOKENS) continue;
        double *x = dp_check_own(p, i), *row = dp_doubles(n);
        dp_memory_get(p->memory, row, x + (i == DP_INPUT_G ? t : other) * n, n);
        for (int64_t z = 0; i == DP_INPUT_G && z < n; z++)
            row[z] = dp_edited(edit_of_gate(p), row[z], 0);
        for (int64_t z = 0; i == DP_INPUT_DO && z < n; z++)
            row[z] *= 4;
        dp_memory_put(p->memory, x + t * n, row, n);
        free(row);
    }
}

typedef struct {
    int64_t t, chunk;
    int seq;
} token_edit;

int dp_check_keep_before(const void *ctx, int f, int64_t token, int head, int seq) {
    const token_edit *x = ctx;
    (void)head;
    return dp_result_fields[f].kind != DP_OF_HEADS &&
           (seq != x->seq || ((f == DP_RESULT_O || f == DP_RESULT_DQ) && token < x->chunk));
}

int dp_check_keep_behind(const void *ctx, int f, int64_t token, int head, int seq) {
    const token_edit *x = ctx;
    (void)head;
    if (f == DP_RESULT_O || f == DP_RESULT_FINAL_STATE) return 1;
    if (dp_result_fields[f].kind == DP_OF_HEADS) return 0;
    return seq != x->seq ||
           (f != DP_RESULT_DS0 && (f == DP_RESULT_DQ ? token != x->t : token > x->t));
}

/* Adds to a failure which tokens or heads were changed. */
static void say_changed(dp_check_work *w, const char *what, int64_t n, const char *which) {
    const size_t used = strnlen(w->c->why, 260);
    if (w->c->verdict == DP_FAIL)
        snprintf(w->c->why + used, sizeof w->c->why - used, ", after %s %lld%s changed", what,
                 (long long)n, which);
}

dp_status dp_check_edits(dp_check_work *w, dp_role role, dp_check_keep *keep) {
    int64_t t[EDITED_TOKENS], end;
    dp_status st = DP_OK;
    edited_tokens(w, t);
    for (int i = 0; i < EDITED_TOKENS && !st && w->c->verdict == DP_PASS; i++) {
        dp_problem p = dp_check_copy(w->p, w->backward);
        const token_edit x = {t[i], chunk_of(w, t[i], &end),
                              dp_sequence_of(w->p->cu, w->p->Nseq, t[i])};
        edit(&p, role, t[i]);
        st = dp_check_changed(w, &p, NULL, 0, keep, &x);
        say_changed(w, "token", t[i], "");
    }
    return st;
}

/* Value heads [from, to) are changed, and all of q and k that no other head reads. */
typedef struct {
    int from, to, G;
} head_edit;

static int keep_others(const void *ctx, int f, int64_t token, int head, int seq) {
    const head_edit *x = ctx;
    (void)token;
    (void)seq;
    return f == DP_RESULT_DQ || f == DP_RESULT_DK
               ? (head + 1) * x->G <= x->from || head * x->G >= x->to
               : head < x->from || head >= x->to;
}

/* Exact in every format: gates of another strength, beta (erase, write) of another token, all else
 * mirrored. */
static dp_edit edit_of(const dp_problem *p, int i) {
    if (i == DP_INPUT_G || dp_input_fields[i].role == DP_ROLE_GATE) return edit_of_gate(p);
    const int of_strength = dp_input_fields[i].role == DP_ROLE_REQUIRED && i > DP_INPUT_G;
    return of_strength ? DP_EDIT_MIRRORED : DP_EDIT_SIGN;
}

static void edit_host(const dp_memory_edit *e) {
#pragma omp parallel for if (e->rows * e->width > 1 << 22)
    for (int64_t t = 0; t < e->rows; t++)
        for (int64_t at = e->from; at < e->to; at++)
            e->into[t * e->width + at] = dp_edited(e->edit, e->of[t * e->width + at],
                                                   e->of[(e->rows - 1 - t) * e->width + at]);
}

static void edit_heads(const dp_problem *p0, dp_problem *p, const head_edit *x) {
    for (int i = 0; i < DP_NINPUTS; i++) {
        const int heads = dp_input_heads(p0, i), group = p0->HV / heads;
        const int from = (x->from + group - 1) / group, to = x->to / group;
        const int64_t width = dp_input_width(p0, i), per = width / heads;
        if (!dp_input_of(p, i) || from >= to) continue; /* p: gradients come in backward alone */
        const dp_memory_edit e = {.into = dp_check_own(p, i),
                                  .of = dp_input_of(p0, i),
                                  .rows = dp_input_count(p0, i) / width,
                                  .width = width,
                                  .from = from * per,
                                  .to = to * per,
                                  .edit = edit_of(p0, i)};
        (p0->memory ? p0->memory->edit : edit_host)(&e);
    }
}

/* The first head alone, the last one alone, all but the first. */
dp_status dp_check_heads(dp_check_work *w) {
    const dp_problem *p0 = w->p;
    dp_status st = DP_OK;
    if (p0->HV < 2) return dp_check_skip(w, "one head");
    for (int z = 0; z < 3 && !st && w->c->verdict == DP_PASS; z++) {
        const head_edit x = {z == 0 ? 0 : z == 1 ? p0->HV - 1 : 1, z ? p0->HV : 1, dp_G(p0)};
        dp_problem p = dp_check_copy(p0, w->backward);
        edit_heads(p0, &p, &x);
        st = dp_check_changed(w, &p, NULL, 0, keep_others, &x);
        say_changed(w, z == 2 ? "heads" : "head", x.from, z == 2 ? " and up" : "");
    }
    return st;
}

/* Runs the chunk of the first edited token as a sequence of its own, on one rank. Each run edits
 * another one of every seventh token. */
dp_status dp_check_chunk(dp_check_work *w) {
    int64_t t[EDITED_TOKENS], end;
    edited_tokens(w, t);
    const int64_t start = chunk_of(w, t[0], &end);
    if (end - start < 2) return dp_check_skip(w, "the chunk has one token");
    dp_problem a = dp_check_slice(w->p, start, end, NULL, NULL, w->backward);
    dp_check_outcome x;
    dp_check_work v = *w;
    v.p = &a;
    v.N = 1;
    dp_status st = dp_check_run_problem(w->s, &a, 1, w->backward, &x, w->e);
    const int ran = !st;
    for (token_edit z = {(end - start - 1) % 7 ? (end - start - 1) % 7 : 7, 0, 0};
         z.t < end - start && !st && w->c->verdict == DP_PASS; z.t += 7) {
        dp_problem b = dp_check_copy(&a, w->backward);
        dp_check_outcome y;
        z.chunk = z.t;
        edit(&b, DP_ROLE_REQUIRED, z.t);
        st = dp_check_run_problem(w->s, &b, 1, w->backward, &y, w->e);
        if (!st) {
            dp_check_same(&v, &(dp_check_pair){.p = &a,
                                               .got = &y.r,
                                               .want = &x.r,
                                               .factor = 1,
                                               .keep = dp_check_keep_before,
                                               .ctx = &z});
            dp_check_outcome_free(&y);
        }
        say_changed(w, "token", z.t, " of its chunk");
        dp_problem_free(&b);
    }
    if (ran) dp_check_outcome_free(&x);
    dp_problem_free(&a);
    return st;
}

dp_status dp_check_no_state(dp_check_work *w) {
    dp_problem none = dp_check_copy(w->p, w->backward);
    dp_free_of(&none, none.s0);
    none.s0 = NULL;
    dp_problem zeros = dp_check_copy(&none, w->backward);
    zeros.s0 = dp_doubles_of(&zeros, dp_input_count(&zeros, DP_INPUT_S0));
    dp_check_work v = *w;
    v.p = &none;
    dp_check_outcome want = {0}, got = {0};
    dp_status st = dp_check_run_problem(w->s, &none, w->N, w->backward, &want, w->e);
    if (!st) st = dp_check_run_problem(w->s, &zeros, w->N, w->backward, &got, w->e);
    if (!st)
        dp_check_same(&v,
                      &(dp_check_pair){.p = &zeros, .got = &got.r, .want = &want.r, .factor = 1});
    dp_check_outcome_free(&want);
    dp_check_outcome_free(&got);
    dp_problem_free(&zeros);
    dp_problem_free(&none);
    return st;
}
