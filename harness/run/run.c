/* Begin and end of a run: options, tiers, the tensor that represents it (run.h). */
#define _GNU_SOURCE
#include "harness/record/run.h"
#include "harness/mpi/processes.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int dp_case_is_exact(const dp_case *c) {
    return dp_op_of(c)->is_recurrence && c->spec.keys == DP_KEYS_EXACT && !c->data;
}

dp_run *dp_runs_add(dp_runs *r, const dp_case *c) {
    if (r->n == r->cap) {
        r->cap = r->cap ? 2 * r->cap : 16;
        r->run = dp_realloc(r->run, sizeof *r->run * (size_t)r->cap);
    }
    dp_run *x = &r->run[r->n++];
    *x = (dp_run){.case_name = dp_strdup(c->name),
                  .op = c->op_name,
                  .backend = DP_BACKEND_SIM,
                  .ranks = 1,
                  .truth_kind = "mpfr",
                  .truth_radius = NAN,
                  .slope = NAN,
                  .may_unjudged = c->unjudged};
    x->exact = dp_case_is_exact(c);
    if (dp_op_of(c)->is_recurrence)
        x->sized = (dp_exchange_size){.HV = c->p.HV, .K = c->p.K, .V = c->p.V, .L = c->p.T};
    return x;
}

void dp_runs_move(dp_runs *to, dp_runs *from) {
    if (to->n + from->n > to->cap) {
        to->cap = 2 * (to->n + from->n);
        to->run = dp_realloc(to->run, sizeof *to->run * (size_t)to->cap);
    }
    if (from->n) memcpy(to->run + to->n, from->run, sizeof *to->run * (size_t)from->n);
    to->n += from->n;
    free(from->run);
    *from = (dp_runs){0};
}

void dp_runs_free(dp_runs *r) {
    for (int i = 0; i < r->n; i++) {
        dp_run *x = &r->run[i];
        for (int j = 0; j < x->ntensor; j++)
            dp_judgement_free(&x->tensor[j]);
        free(x->hit);
        free(x->tensor);
        free(x->point);
        free(x->id);
        free(x->case_name);
    }
    free(r->run);
    *r = (dp_runs){0};
}

/* Inputs on which nothing rounds: bounds play no part, an error of 0 passes and any other fails. */
static void judge_exactly(dp_judgement *t) {
    t->verdict = t->rel_fro == 0 ? DP_PASS : DP_FAIL;
    t->tier = "exact";
    t->failed = t->worst;
    t->why[0] = 0;
    if (t->verdict == DP_FAIL)
        snprintf(t->why, sizeof t->why,
                 "nothing rounds in this case, but the error is %.3g: got %g, want %g%s%s",
                 t->rel_fro, t->worst.got, t->worst.want, *t->source ? "; " : "", t->source);
}

/* The failing tensor that says whose data it holds, the earliest in the pipeline; NULL: none does.
 */
static const dp_judgement *with_source(const dp_run *r) {
    static const char *const order[] = {"H", "M", "S_in", "dH", "dM", "dS_out", "final_state", "o"};
    const dp_judgement *any = NULL;
    for (size_t k = 0; k < sizeof order / sizeof *order; k++)
        for (int i = 0; i < r->ntensor; i++) {
            const dp_judgement *t = &r->tensor[i];
            if (t->verdict != DP_FAIL || !*t->source) continue;
            if (!strcmp(t->name, order[k])) return t;
            if (!any) any = t;
        }
    return any;
}

/* Is the name in a list with commas, which a colon ends? */
static int is_listed(const char *list, const char *name) {
    size_t n;
    for (const char *p = list; p && *p && *p != ':'; p += n) {
        p += strspn(p, " ,");
        n = strcspn(p, " ,:");
        if (n == strlen(name) && !strncmp(p, name, n)) return 1;
    }
    return 0;
}

/* Says how many tensors are unjudged, and why the first of them is. */
static void say_unjudged(const dp_judgement *un, int n, dp_run *r) {
    snprintf(r->why, sizeof r->why, "%d tensor%s unjudged%s, %s: %s", n, n > 1 ? "s" : "",
             un->allowed ? ", as may be" : "", un->name, un->why);
}

/* The condition of the problem, which explains no entry that was never written. */
static void say_condition(const dp_judgement *bad, dp_run *r) {
    const size_t n = strlen(r->why);
    if (r->exact || (r->verdict != DP_PASS && r->verdict != DP_FAIL)) return;
    if (bad && bad->flaw != DP_FLAW_NONE) return;
    if (bad && bad->nblank)
        snprintf(r->why + n, sizeof r->why - n, "; rows of 0, as if never written: %lld",
                 (long long)bad->nblank);
    else if (r->cond.condition > 0)
        dp_condition_explain(&r->cond, r->base, r->verdict, r->why, sizeof r->why);
}

void dp_run_close(dp_run *r, double seconds) {
    int n[DP_NVERDICTS] = {0};
    const dp_judgement *bad = NULL, *un = NULL;
    int open = 0; /* unjudged, and may not be */
    r->seconds = seconds;
    for (int i = 0; i < r->ntensor; i++) {
        dp_judgement *t = &r->tensor[i];
        if (r->exact) judge_exactly(t);
        n[t->verdict]++;
        if (t->verdict == DP_FAIL && dp_judgement_says_more(bad, t)) bad = t;
        if (t->verdict != DP_UNJUDGED) continue;
        t->allowed = is_listed(r->may_unjudged, t->name) || is_listed(r->let_unjudged, t->name);
        open += !t->allowed;
        if (!un || un->allowed > t->allowed) un = t;
    }
    r->verdict = n[DP_FAIL]       ? DP_FAIL
                 : open           ? DP_UNJUDGED
                 : n[DP_PASS]     ? DP_PASS
                 : n[DP_UNJUDGED] ? DP_UNJUDGED
                                  : DP_SKIPPED;
    const dp_judgement *source = r->exact ? with_source(r) : NULL;
    if (source) bad = source;
    const dp_place *at = bad ? &dp_judgement_row(bad)->at : NULL;
    r->tier = bad ? bad->tier : "";
    r->speaks = bad ? (int)(bad - r->tensor) : -1;
    if (source)
        snprintf(r->why, sizeof r->why, "%s: %s", bad->name, bad->why); /* names the place itself */
    else if (bad && at->token >= 0)
        snprintf(r->why, sizeof r->why, "%s: %s (rank %d, sequence %d, token %lld, head %d)",
                 bad->name, bad->why, at->rank, at->sequence, (long long)at->token, at->head);
    else if (bad && at->sequence >= 0)
        snprintf(r->why, sizeof r->why, "%s: %s (rank %d, sequence %d, head %d)", bad->name,
                 bad->why, at->rank, at->sequence, at->head);
    else if (bad)
        snprintf(r->why, sizeof r->why, "%s: %s (rank %d, head %d)", bad->name, bad->why, at->rank,
                 at->head);
    else if (un)
        say_unjudged(un, n[DP_UNJUDGED], r);
    say_condition(bad, r);
}

int dp_options_want(const dp_run_options *o, dp_backend b) {
    for (int i = 0; i < o->nbackend; i++)
        if (o->backend[i] == b) return 1;
    return !o->nbackend && dp_backends[b].by_default;
}

const char *dp_unavailable(dp_backend b, int N) {
    return dp_backends[b].peers ? dp_mpi_unavailable(N) : dp_cuda_unavailable(b, N);
}

const char *dp_options_absent(const dp_run_options *o, dp_backend b) {
    const int whole = !o->nranks && !o->nbase && !o->nchain && !o->nmerge && !o->fault;
    return dp_options_want(o, b) && (whole || o->nbackend) ? dp_unavailable(b, 1) : NULL;
}

static dp_status skip_case(const dp_case *c, const dp_run_options *o, dp_backend b,
                           const char *path, const char *why, dp_runs *out) {
    dp_run *r = dp_runs_add(out, c);
    r->backend = b;
    r->path = path;
    r->verdict = DP_SKIPPED;
    r->id = dp_run_id(r);
    snprintf(r->why, sizeof r->why, "%s", why);
    if (o->done) o->done(r, o->arg);
    return DP_OK;
}

/* Who runs and judges an operation. */
static dp_status (*const RUNS[DP_NOPS])(const dp_case *, const dp_run_options *, dp_runs *,
                                        dp_err *) = {[DP_OP_RECURRENCE] = dp_run_recurrence,
                                                     [DP_OP_CHAIN] = dp_run_chain,
                                                     [DP_OP_CONV] = dp_run_conv,
                                                     [DP_OP_STEP] = dp_run_recurrence,
                                                     [DP_OP_SESSION] = dp_run_recurrence,
                                                     [DP_OP_STEP_SESSION] = dp_run_recurrence};

/* Backends were named, and none of them computes this. */
static int none_computes(const dp_case *c, const dp_run_options *o) {
    for (int i = 0; i < o->nbackend; i++)
        if (dp_case_on(c, o->backend[i])) return 0;
    return o->nbackend > 0;
}

static const char *why_none(const dp_case *c, const dp_run_options *o) {
    const dp_operation *op = dp_op_of(c);
    const int lapack = o->nbackend == 1 && o->backend[0] == DP_BACKEND_LAPACK;
    return lapack || !op->why_none
               ? "the chunk solver over LAPACKE computes the recurrence, and no more"
               : op->why_none;
}

dp_status dp_case_run(const dp_case *c, const dp_run_options *o, dp_runs *out, dp_err *e) {
    char why[128];
    const dp_operation *op = dp_op_of(c);
    snprintf(why, sizeof why, "a subject computes the recurrence, this case is op = %s",
             c->op_name);
    if (o->subject && !dp_op_on(op, DP_BACKEND_SUBJECT))
        return skip_case(c, o, DP_BACKEND_SUBJECT, o->subject->name, why, out);
    if (none_computes(c, o)) return skip_case(c, o, o->backend[0], NULL, why_none(c, o), out);
    return RUNS[c->op](c, o, out, e);
}
