/* Prints what was judged of a run and of its tensors (print_run.h). */
#include "print_run.h"
#include "harness/base/terminal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const dp_judgement *closest_to_bound(const dp_run *r) {
    double top = -1;
    const dp_judgement *worst = NULL;
    for (int i = 0; i < r->ntensor; i++)
        if (r->tensor[i].ratio > top) {
            top = r->tensor[i].ratio;
            worst = &r->tensor[i];
        }
    return worst;
}

/* The error common to a whole tensor, over its norm, from which on it would have failed; NAN: not
 * known. */
static double sees(const dp_judgement *t) {
    /* NOLINTNEXTLINE(*NullDereference): a run has its tensors */
    const dp_level_result *x = &t->expected.at[DP_LEVEL_TENSOR];
    /* the ratio counts what storing the tensor costs, `expected` does not */
    const double usual = x->ratio > 0 ? t->rel_fro / x->ratio : t->expected.expected;
    const double expected = isnan(t->expected.excess) ? NAN : x->limit * usual;
    return fmin(expected, t->bound); /* of a number and NAN the number */
}

/* The tensor that would have hidden the largest error. */
static void put_power(const dp_run *r, FILE *f) {
    const dp_judgement *weakest = NULL;
    double most = 0;
    for (int i = 0; i < r->ntensor && !r->exact; i++) {
        const double x = sees(&r->tensor[i]);
        if (r->tensor[i].verdict != DP_PASS || !(x > most)) continue;
        most = x;
        weakest = &r->tensor[i];
    }
    if (weakest) fprintf(f, "; smallest error that fails: %.2g of %s", most, weakest->name);
}

static void print_verdict(dp_verdict v, FILE *f) {
    static const dp_paint paint[DP_NVERDICTS] = {
        [DP_PASS] = DP_GOOD, [DP_FAIL] = DP_BAD, [DP_UNJUDGED] = DP_DOUBTFUL};
    dp_put(f, paint[v], dp_verdict_names[v], 8);
}

/* Verdict, and behind it what `put` writes of x. */
static void print_line(dp_verdict v, void (*put)(const void *x, FILE *f), const void *x, FILE *f) {
    DP_OWN char *text = NULL;
    size_t size;
    FILE *line = open_memstream(&text, &size);
    if (!line) abort();
    put(x, line);
    fclose(line);
    print_verdict(v, f);
    fputc(' ', f);
    dp_put_line(f, 9, text);
}

static void put_run(const void *x, FILE *f) {
    const dp_run *r = x;
    const dp_judgement *first = r->ntensor ? &r->tensor[0] : NULL, *worst = closest_to_bound(r);
    fprintf(f, "%s", r->id);
    if (first) fprintf(f, "  %s: error %.3g", first->name, first->rel_fro);
    if (r->verdict == DP_PASS)
        put_power(r, f);
    else if (worst)
        fprintf(f, "; closest to its bound: %s, %.2g times the bound", worst->name, worst->ratio);
    if (r->why[0]) fprintf(f, "  (%s)", r->why);
    if (r->fault && r->hit && !memchr(r->hit, 1, (size_t)r->nhit))
        fprintf(f, "  (the fault acts nowhere here)");
}

void dp_print_run(const dp_run *r, FILE *f) { print_line(r->verdict, put_run, r, f); }

static void print_row(const char *what, const dp_row *r, FILE *f) {
    fprintf(f, "  %s: rank %d, head %d", what, r->at.rank, r->at.head);
    if (r->at.sequence >= 0) fprintf(f, ", sequence %d", r->at.sequence);
    if (r->at.token >= 0) fprintf(f, ", token %lld", (long long)r->at.token);
    fprintf(f, ", entry %d: %.9g, truth %.9g; row |error| %.2g, |truth| %.2g", r->index, r->got,
            r->want, r->err, r->size);
}

static void put_tensor(const void *x, FILE *f) {
    const dp_judgement *t = x;
    fprintf(f, "%-11s %.3e", t->name, t->rel_fro);
    if (!isnan(t->bound)) fprintf(f, "  %.2g of its bound", t->ratio);
    if (!isnan(t->expected.excess))
        fprintf(f, ", %.2f times expected", t->expected.at[DP_LEVEL_TENSOR].ratio);
    if (t->N > 1) {
        fprintf(f, "  ranks");
        for (int r = 0; r < t->N; r++)
            isnan(t->per_rank[r]) ? fprintf(f, " -") : fprintf(f, " %.2e", t->per_rank[r]);
    }
    const dp_row *r = dp_judgement_row(t);
    if (r->at.rank >= 0) print_row(r == &t->worst ? "worst" : "wrong", r, f);
    if (t->why[0]) fprintf(f, "  (%s)", t->why);
}

void dp_print_tensor(const dp_judgement *t, FILE *f) { print_line(t->verdict, put_tensor, t, f); }
