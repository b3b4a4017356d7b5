/* One number for all results that are the same on every machine (harness/record/digest.h). */
#include "digest.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

static void put(FILE *f, double x) {
    uint64_t bits;
    const double y = x == 0 ? 0 : x;
    memcpy(&bits, &y, sizeof bits);
    if (isnan(x))
        fputs(" nan", f);
    else
        fprintf(f, " %016llx", (unsigned long long)bits);
}

static void put_tensor(FILE *f, const dp_judgement *t) {
    const dp_levels_result *e = &t->expected;
    fprintf(f, "tensor %s %s %s", t->name, dp_verdict_names[t->verdict],
            t->tier && *t->tier ? t->tier : "-");
    const double x[] = {t->rel_fro, t->bound, t->ratio, t->worst_rel, e->expected, e->excess};
    for (size_t i = 0; i < sizeof x / sizeof *x; i++)
        put(f, x[i]);
    for (int l = 0; l < DP_NLEVELS && !isnan(e->excess); l++) {
        const dp_level_result *y = &e->at[l];
        const double z[] = {y->ratio, y->median, y->limit, y->freedom, y->draw};
        for (size_t i = 0; i < sizeof z / sizeof *z; i++)
            put(f, z[i]);
    }
    fputs("\nranks", f);
    for (int i = 0; i < t->N; i++)
        put(f, t->per_rank[i]);
    fputc('\n', f);
}

static void put_point(FILE *f, const dp_chain_point *p) {
    const double x[] = {p->rel, p->effect, p->bound, p->abs, p->norm};
    fprintf(f, "point %d %d", p->rank, p->chunks);
    for (size_t i = 0; i < sizeof x / sizeof *x; i++)
        put(f, x[i]);
    fputc('\n', f);
}

static void put_run(FILE *f, const dp_run *r) {
    fprintf(f, "run %s %s %s %d", r->id, dp_verdict_names[r->verdict], r->truth_kind,
            r->truth_bits);
    const double audit = r->truth_audit.columns ? r->truth_audit.worst : NAN;
    const double x[] = {r->truth_radius, audit,         r->cond.condition,
                        r->cond.inverse, r->cond.entry, r->slope};
    for (size_t i = 0; i < sizeof x / sizeof *x; i++)
        put(f, x[i]);
    fputc('\n', f);
    for (int i = 0; i < r->ntensor; i++)
        put_tensor(f, &r->tensor[i]);
    for (int i = 0; i < r->npoint; i++)
        put_point(f, &r->point[i]);
    if (!r->bits.npoint) return;
    fputs("bits", f);
    for (int m = 0; m < DP_NBITMODELS; m++)
        put(f, r->bits.bits[m]);
    put(f, r->bits.truncated);
    fputc('\n', f);
}

char *dp_digest_text(const dp_run *r) {
    char *text = NULL;
    size_t size;
    FILE *f = open_memstream(&text, &size);
    dp_run as = *r;
    if (!f) abort();
    if (dp_backends[r->backend].peers) as.backend = DP_BACKEND_SIM; /* whose bits it must have */
    as.id = dp_run_id(&as);
    put_run(f, &as);
    free(as.id);
    fclose(f);
    return text;
}

typedef struct {
    char *text;
    int peers;
} line;

static int by_text(const void *a, const void *b) {
    const line *x = a, *y = b;
    const int order = strcmp(x->text, y->text);
    return order ? order : x->peers - y->peers;
}

/* A run without its processes is none, and has no chain. Runs that simulated ranks refuse, too,
 * count as theirs. A run in both counts once. */
static int covered(const dp_run *r) {
    const dp_backend_traits *t = &dp_backends[r->backend];
    return t->simulated && (!t->peers || r->verdict != DP_SKIPPED || r->has_chain);
}

dp_digest dp_digest_of(const dp_runs *r) {
    dp_digest d = {.runs = 0};
    line *lines = dp_calloc((size_t)r->n + 1, sizeof *lines);
    XXH3_state_t *s = XXH3_createState();
    XXH128_canonical_t c;
    int n = 0;
    for (int i = 0; i < r->n; i++)
        if (covered(&r->run[i]))
            lines[n++] = (line){dp_digest_text(&r->run[i]), dp_backends[r->run[i].backend].peers};
    qsort(lines, (size_t)n, sizeof *lines, by_text);
    XXH3_128bits_reset(s);
    for (int i = 0; i < n; i++) {
        if (i && lines[i].peers && !strcmp(lines[i].text, lines[i - 1].text)) continue;
        XXH3_128bits_update(s, lines[i].text, strlen(lines[i].text));
        d.runs++;
    }
    XXH128_canonicalFromHash(&c, XXH3_128bits_digest(s));
    for (int i = 0; i < 16; i++)
        snprintf(d.hex + 2 * i, 3, "%02x", c.digest[i]);
    XXH3_freeState(s);
    for (int i = 0; i < n; i++)
        free(lines[i].text);
    free(lines);
    return d;
}
