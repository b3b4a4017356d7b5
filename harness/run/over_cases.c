/* The runs of many cases: their tensors by who computed them, each group pooled (record.h). */
#include "harness/record/record.h"
#include "outputs.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

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
    DP_OWN dp_share *each = dp_calloc((size_t)n, sizeof *each);
    int k = 0;
    for (; k < n && !by_case(items, items + k); k++)
        each[k] = items[k].tensor->expected.share;
    *of_case = dp_share_of_runs(k, each);
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
    DP_OWN dp_share *shares = dp_calloc((size_t)n, sizeof *shares);
    DP_OWN double *factor = dp_doubles(n);
    int cases = 0;
    for (int i = 0; i < n; cases++) {
        factor[cases] = dp_run_allowance(items[i].run).factor;
        i += one_case(items + i, n - i, &shares[cases]);
    }
    if (cases >= DP_POOLED_CASES) {
        row.is = dp_pool(cases, shares, factor);
        row.verdict = row.is.chance > DP_ALARM ? DP_PASS : DP_FAIL;
    }
    return row;
}

void dp_over_cases(dp_record *r) {
    const int n = items_of(r->runs, NULL);
    DP_OWN item *items = dp_calloc((size_t)n + 1, sizeof *items);
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
}

void dp_over_cases_free(dp_record *r) {
    free(r->pooled);
    r->pooled = NULL;
    r->npooled = 0;
}
