/* Groups failed runs (print_failures.h). */
#include "print_failures.h"
#include "harness/base/terminal.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    const dp_run *first;
    const dp_judgement *tensor; /* NULL: no tensor was judged, the run failed as a whole */
    int runs, of;               /* of: runs of that case that were judged */
} cause;

static const dp_judgement *failed_tensor(const dp_run *r) {
    return r->ntensor && r->speaks >= 0 ? &r->tensor[r->speaks] : NULL;
}

static const char *tier(const dp_judgement *t) { return t && t->tier ? t->tier : ""; }

static int same(const cause *c, const dp_run *r, const dp_judgement *t) {
    if (strcmp(c->first->case_name, r->case_name) || !c->tensor != !t) return 0;
    return !t || (!strcmp(c->tensor->name, t->name) && !strcmp(tier(c->tensor), tier(t)));
}

static int judged_of(const dp_runs *runs, const char *case_name) {
    int n = 0;
    for (int i = 0; i < runs->n; i++)
        n += !strcmp(runs->run[i].case_name, case_name) &&
             (runs->run[i].verdict == DP_PASS || runs->run[i].verdict == DP_FAIL);
    return n;
}

static int gather(const dp_runs *runs, cause *causes) {
    int n = 0, k;
    for (int i = 0; i < runs->n; i++) {
        const dp_run *r = &runs->run[i];
        if (r->verdict != DP_FAIL) continue;
        const dp_judgement *t = failed_tensor(r);
        for (k = 0; k < n && !same(&causes[k], r, t);)
            k++;
        if (k == n) causes[n++] = (cause){r, t, 0, judged_of(runs, r->case_name)};
        causes[k].runs++;
    }
    return n;
}

void dp_print_explain(const char *id, const char *record, const char *options, FILE *f) {
    if (record)
        fprintf(f, "explain: deltaproof explain --record%s '%s'\n", record, id);
    else
        fprintf(f, "explain: deltaproof explain '%s'%s\n", id, options);
}

void dp_print_begins(const dp_judgement *t, int indent, FILE *f) {
    const dp_place *at = &t->first.at;
    const int border = at->token && at->token % DP_CHUNK == 0 && at->sequence == 0;
    if (t->verdict != DP_FAIL || !t->nover || at->token < 0) return;
    fprintf(f, "%*sbegins:  %s at token %lld, head %d%s: %lld rows beyond their bounds\n", indent,
            "", t->name, (long long)at->token, at->head, border ? ", a chunk border" : "",
            (long long)t->nover);
}

/* The line of a subject's caller, with the case's name for each {case}. */
static void print_call(const char *call, const char *case_name, FILE *f) {
    static const char hole[] = "{case}";
    fputs("    again:   ", f);
    for (const char *at; (at = strstr(call, hole)); call = at + strlen(hole))
        fprintf(f, "%.*s'%s'", (int)(at - call), call, case_name);
    fprintf(f, "%s\n", call);
}

static void print_again(const dp_run *r, const dp_again *again, FILE *f) {
    const int foreign = r->backend == DP_BACKEND_SUBJECT;
    if (foreign && again->call)
        print_call(again->call, r->case_name, f);
    else
        fprintf(f, "    again:   deltaproof run --id '%s'%s\n", r->id,
                foreign ? again->subject : again->own);
    fputs("    ", f);
    dp_print_explain(r->id, again->record, foreign ? again->subject : again->own, f);
}

static void print_cause(const cause *c, const dp_again *again, FILE *f) {
    const dp_run *r = c->first;
    fprintf(f, "  %s: %s%s%s%s in %d of %d runs\n", r->case_name,
            c->tensor ? c->tensor->name : "the run", *tier(c->tensor) ? " (" : "", tier(c->tensor),
            *tier(c->tensor) ? ")" : "", c->runs, c->of);
    fputs("    ", f);
    dp_put_words(f, 4, r->why);
    if (c->tensor) dp_print_begins(c->tensor, 4, f);
    if (r->sized.K)
        fprintf(f, "    shape:   T %lld, HV %d, K %d, V %d\n", (long long)r->sized.L, r->sized.HV,
                r->sized.K, r->sized.V);
    print_again(r, again, f);
}

void dp_print_failures(const dp_runs *runs, const dp_again *again, FILE *f) {
    DP_OWN cause *causes = dp_calloc((size_t)runs->n + 1, sizeof *causes);
    const int n = gather(runs, causes);
    if (n) {
        dp_put(f, DP_BAD, "FAILURES", 0);
        fprintf(f, " by cause: %d\n", n);
    }
    for (int i = 0; i < n; i++)
        print_cause(&causes[i], again, f);
}

void dp_print_pooled(const dp_record *rec, FILE *f) {
    const int n = dp_record_pooled_failures(rec);
    char text[400];
    if (n) {
        dp_put(f, DP_BAD, "FAILURES", 0);
        fprintf(f, " of many cases together: %d\n", n);
    }
    for (int i = 0; i < rec->npooled; i++) {
        if (rec->pooled[i].verdict != DP_FAIL) continue;
        dp_pooled_text(&rec->pooled[i], text, sizeof text);
        fputs("  ", f);
        dp_put_words(f, 2, text);
    }
}
