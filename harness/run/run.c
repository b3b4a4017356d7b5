/* Begin and end of a run: options, tiers, the tensor that represents it (run.h). Then the runs of
 * many cases: their tensors by who computed them, each group pooled (record.h).
 */
#include "harness/mpi/processes.h"
#include "harness/record/record.h"
#include "limits.h"
#include "ref/vocabulary/text.h"

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

static int is_listed(const char *list, const char *name) {
    char one[64];
    while ((list = dp_next_name(list, one, sizeof one)))
        if (!strcmp(one, name)) return 1;
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

void dp_run_done(dp_run *r, const dp_run_options *o) {
    if (o->done) o->done(r, o->arg);
}

void dp_run_skip(dp_run *r, const char *why, const dp_run_options *o) {
    if (!r->id) r->id = dp_run_id(r);
    r->verdict = DP_SKIPPED;
    snprintf(r->why, sizeof r->why, "%s", why);
    dp_run_done(r, o);
}

static dp_status skip_case(const dp_case *c, const dp_run_options *o, dp_backend b,
                           const char *path, const char *why, dp_runs *out) {
    dp_run *r = dp_runs_add(out, c);
    r->backend = b;
    r->path = path;
    dp_run_skip(r, why, o);
    return DP_OK;
}

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
    return dp_run_subjects(c, o, out, e);
}

/* ---- over many cases ------------------------------------------------------------------------- */

/* One tensor of one run. */
typedef struct {
    const dp_run *run;
    const dp_judgement *tensor;
} item;

/* Same group: 0. */
static int by_group(const item *a, const item *b) {
    const dp_run *x = a->run, *y = b->run;
    const int key[][2] = {{(int)x->backend, (int)y->backend},
                          {(int)x->variant, (int)y->variant},
                          {(int)x->base, (int)y->base},
                          {x->undeclared, y->undeclared},
                          {(int)x->fault, (int)y->fault}};
    for (size_t i = 0; i < sizeof key / sizeof *key; i++)
        if (key[i][0] != key[i][1]) return key[i][0] < key[i][1] ? -1 : 1;
    return strcmp(a->tensor->name, b->tensor->name);
}

static int by_case(const item *a, const item *b) {
    return strcmp(a->run->case_name, b->run->case_name);
}

/* By group, case, ID: the same order whatever thread ran what. */
static int in_order(const void *a, const void *b) {
    const int group = by_group(a, b);
    const int of_case = group ? group : by_case(a, b);
    return of_case ? of_case : strcmp(((const item *)a)->run->id, ((const item *)b)->run->id);
}

static int expected_by_draws(const dp_judgement *t) {
    const dp_share *s = &t->expected.share;
    return !isnan(t->expected.excess) && isfinite(s->square) && s->top > 0 && s->bottom > 0;
}

static int items_of(const dp_runs *runs, item *items) {
    int n = 0;
    for (int i = 0; i < runs->n; i++) {
        const dp_run *r = &runs->run[i];
        for (int t = 0; t < r->ntensor && r->has_base && !r->exact; t++) {
            if (!expected_by_draws(&r->tensor[t])) continue;
            if (items) items[n] = (item){r, &r->tensor[t]};
            n++;
        }
    }
    return n;
}

/* The runs of one case at items[0..]: how many; their share. */
static int one_case(const item *items, int n, dp_share *of_case) {
    dp_share *each = dp_calloc((size_t)n, sizeof *each);
    int k = 0;
    for (; k < n && !by_case(items, items + k); k++)
        each[k] = items[k].tensor->expected.share;
    *of_case = dp_share_of_runs(k, each);
    free(each);
    return k;
}

/* The n items of one group. */
static dp_pooled_row row_of(const item *items, int n) {
    const dp_run *r = items->run;
    dp_pooled_row row = {.backend = r->backend,
                         .variant = r->variant,
                         .base = r->base,
                         .undeclared = r->undeclared,
                         .fault = r->fault,
                         .tensor = items->tensor->name,
                         .verdict = DP_UNJUDGED};
    dp_share *shares = dp_calloc((size_t)n, sizeof *shares);
    double *factor = dp_doubles(n);
    int cases = 0;
    for (int i = 0; i < n; cases++) {
        factor[cases] = dp_run_allowance(items[i].run).factor;
        i += one_case(items + i, n - i, &shares[cases]);
    }
    if (cases >= DP_POOLED_CASES) {
        row.is = dp_pool(cases, shares, factor);
        row.verdict = row.is.chance > DP_ALARM ? DP_PASS : DP_FAIL;
    }
    free(shares);
    free(factor);
    return row;
}

void dp_over_cases(dp_record *r) {
    const int n = items_of(r->runs, NULL);
    item *items = dp_calloc((size_t)n + 1, sizeof *items);
    items_of(r->runs, items);
    qsort(items, (size_t)n, sizeof *items, in_order);
    r->pooled = dp_calloc((size_t)n + 1, sizeof *r->pooled);
    r->npooled = 0;
    for (int i = 0, k; i < n; i += k) {
        for (k = 1; i + k < n && !by_group(&items[i], &items[i + k]);)
            k++;
        r->pooled[r->npooled] = row_of(&items[i], k);
        r->npooled += r->pooled[r->npooled].verdict != DP_UNJUDGED;
    }
    free(items);
}

void dp_over_cases_free(dp_record *r) {
    free(r->pooled);
    r->pooled = NULL;
    r->npooled = 0;
}
