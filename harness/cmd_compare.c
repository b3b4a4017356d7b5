/* deltaproof compare - two records side by side: which runs appeared or vanished, whose verdicts changed, which errors moved and by how much against
 * run-to-run noise. Reads records (record.h), never runs anything.
 *
 * An error (a tensor's rel_fro, or its share on one rank) has moved when |ln(new / old)| exceeds twice its noise: the largest |ln| between OLD and any
 * record of `again`, further runs of what made OLD. Without any, what the simulation and judged files compute has none (they repeat bit for bit) and
 * the noise of other backends counts as unknown, 0, and the summary says so. It has become worse when it moved up by more than the factor `worse`.
 * Verdicts do not depend on that factor; how much growth matters is the reader's to say.
 *
 * compare OLD NEW [--again RECORD]... [--worse X] [--verbose] [--json FILE]: exit status 0 nothing worse; 1 a verdict became worse, an error became worse,
 * or a judged run or tensor vanished; 2 they cannot be compared. compare --history OUT.html RECORD..: reports/history.py over many records.
 */
#define _GNU_SOURCE
#include "commands.h"
#include "home.h"
#include "../ref/output.h"
#include "../ref/elementary.h"

#include <argp.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define WORSE 1.25
typedef struct {
    const char *path[256], *again[64], *json, *history;
    int npath, nagain, verbose;
    double worse;
} options;

/* ---- records ----------------------------------------------------------------------------------------------------------------------- */

typedef struct { json_t *root, *runs; const char *commit; } record;          /* runs: object, ID (with #2, #3 for repeats) -> run */

static const char *text(const json_t *o, const char *key) {
    const char *s = json_string_value(json_object_get(o, key));
    return s ? s : "";
}

static int load(const char *path, record *r) {
    struct stat st;
    json_error_t e;
    char *file = NULL, key[1200];
    if (stat(path, &st) == 0 && S_ISDIR(st.st_mode) ? asprintf(&file, "%s/results.json", path) < 0 : !(file = strdup(path))) abort();
    *r = (record){.root = json_load_file(file, 0, &e)};
    if (!r->root && e.line < 0) fprintf(stderr, "deltaproof: %s: cannot be read: %s\n", file, strerror(errno));
    else if (!r->root) fprintf(stderr, "deltaproof: %s:%d: %s\n", file, e.line, e.text);
    else if (strcmp(text(r->root, "schema"), "deltaproof-record")) fprintf(stderr, "deltaproof: %s: schema is '%s', not deltaproof-record\n", file, text(r->root, "schema"));
    else if (json_integer_value(json_object_get(r->root, "schema_version")) != 1)
        fprintf(stderr, "deltaproof: %s: schema_version %lld, this program reads 1\n", file, (long long)json_integer_value(json_object_get(r->root, "schema_version")));
    else if (!json_is_array(json_object_get(r->root, "runs"))) fprintf(stderr, "deltaproof: %s: runs: must be a list\n", file);
    else r->runs = json_object();
    free(file);
    size_t i;
    json_t *x;
    json_array_foreach(json_object_get(r->root, "runs"), i, x) {
        if (!r->runs) break;
        snprintf(key, sizeof key, "%.1000s", text(x, "id"));
        for (int n = 2; json_object_get(r->runs, key); n++) snprintf(key, sizeof key, "%.1000s#%d", text(x, "id"), n);
        json_object_set(r->runs, key, x);
    }
    r->commit = r->runs ? text(json_object_get(r->root, "program"), "commit") : "";
    return r->runs != NULL;
}

static void unload(record *r) {
    if (r->runs) json_decref(r->runs);
    if (r->root) json_decref(r->root);
}

static double number(const json_t *x) {                          /* null, or absent: NAN */
    if (json_is_number(x)) return json_number_value(x);
    const char *s = json_string_value(x);
    return !s || !strcmp(s, "nan") ? NAN : !strcmp(s, "inf") ? INFINITY : !strcmp(s, "-inf") ? -INFINITY : NAN;
}

static const json_t *tensor(const json_t *run, const char *name) {
    size_t i;
    json_t *t;
    json_array_foreach(json_object_get(run, "tensors"), i, t)
        if (!strcmp(text(t, "name"), name)) return t;
    return NULL;
}

/* rank -1: the whole tensor. */
static double error_at(const json_t *t, int rank) { return number(rank < 0 ? json_object_get(t, "rel_fro") : json_array_get(json_object_get(t, "per_rank"), (size_t)rank)); }

/* ---- what moved ---------------------------------------------------------------------------------------------------------------------- */

static double growth(double old, double new) {                   /* ln(new / old); an error that is no number any more has grown without end */
    if (isnan(old) && isnan(new)) return 0;
    if (isnan(old) || old == new) return isnan(old) ? -INFINITY : 0;
    if (isnan(new)) return INFINITY;
    return new == 0 ? -INFINITY : old == 0 ? INFINITY : isinf(new) && isinf(old) ? 0 : dp_log(new) - dp_log(old);
}

typedef struct { const char *id, *name; double old, new, by, noise; int rank, worse; } move;
typedef struct { move *x; int n, up, down, worse; } moves;

static double noise_of(const record *again, int n, const char *id, const char *name, const json_t *t, int rank) {
    double top = 0;
    for (int i = 0; i < n; i++) {
        const json_t *other = tensor(json_object_get(again[i].runs, id), name);
        if (other) top = fmax(top, fabs(growth(error_at(t, rank), error_at(other, rank))));
    }
    return top;
}

/* The share of the tensor (whole, or one rank) that moved most, an increase before a decrease. */
static void compare_tensor(const options *o, const record *again, const char *id, const json_t *a, const json_t *b, moves *m) {
    const int ranks = (int)json_array_size(json_object_get(a, "per_rank"));
    move best = {.id = id, .name = text(a, "name"), .rank = -2};
    for (int r = -1; r < (ranks > 1 ? ranks : 0); r++) {
        const double by = growth(error_at(a, r), error_at(b, r)), noise = noise_of(again, o->nagain, id, best.name, a, r);
        if (fabs(by) <= 2 * noise + 1e-12) continue;
        const int better_known = best.rank > -2 && (best.by > 0 ? by <= best.by : by <= 0 && by >= best.by);
        if (!better_known) best.old = error_at(a, r), best.new = error_at(b, r), best.by = by, best.noise = noise, best.rank = r;
    }
    if (best.rank == -2) return;
    best.worse = best.by > dp_log(o->worse);
    m->x = realloc(m->x, sizeof *m->x * (size_t)(m->n + 1));
    if (!m->x) abort();
    m->x[m->n++] = best;
    m->up += best.by > 0, m->down += best.by < 0, m->worse += best.worse;
}

static int by_growth(const void *a, const void *b) {
    const move *x = a, *y = b;
    return x->by != y->by ? (x->by < y->by ? 1 : -1) : x->id != y->id ? strcmp(x->id, y->id) : strcmp(x->name, y->name);
}

static int badness(const char *verdict) { return !strcmp(verdict, "pass") ? 0 : !strcmp(verdict, "fail") ? 3 : !strcmp(verdict, "unjudged") ? 1 : 2; }

/* ---- digests -------------------------------------------------------------------------------------------------------------------------- */

/* Of all results of simulated ranks (harness/digest.h); "" in records that have none. */
static const char *digest(const record *r) { return text(json_object_get(r->root, "digest"), "value"); }

static const char *digest_says(const record *a, const record *b) {
    return !*digest(a) || !*digest(b) ? "unknown" : strcmp(digest(a), digest(b)) ? "different" : "same";
}

static void print_digests(const record *a, const record *b, FILE *f) {
    const char *says = digest_says(a, b);
    if (!strcmp(says, "same")) fprintf(f, "digest: the same, %s: every bit of every result of simulated ranks\n", digest(a));
    else if (!strcmp(says, "different")) fprintf(f, "digest: %s and %s: results of simulated ranks differ, or their runs do\n", digest(a), digest(b));
    else fprintf(f, "digest: %s has none\n", *digest(a) ? "NEW" : *digest(b) ? "OLD" : "neither record");
}

/* ---- output --------------------------------------------------------------------------------------------------------------------------- */

static void percent(double by, char *out, size_t size) {
    if (isinf(by)) snprintf(out, size, by > 0 ? "from 0 or to no number" : "to 0 or to a number");
    else if (by > dp_log(10)) snprintf(out, size, "x %.3g", dp_exp(by));
    else snprintf(out, size, "%+.3g%%", 100 * dp_expm1(by));
}

static void print_move(const move *x, FILE *f) {
    char by[40], noise[40], rank[24] = "";
    percent(x->by, by, sizeof by), percent(x->noise, noise, sizeof noise);
    if (x->rank >= 0) snprintf(rank, sizeof rank, ", rank %d", x->rank);
    fprintf(f, "%-7s %s %s%s: %.4g -> %.4g, %s (noise %s)\n", x->worse ? "worse" : x->by > 0 ? "up" : "down", x->id, x->name, rank, x->old, x->new, by, x->noise ? noise + (noise[0] == '+') : "0");
}

static json_t *real(double x) { return isfinite(x) ? json_real(x) : json_string(isnan(x) ? "nan" : x > 0 ? "inf" : "-inf"); }

static int write_json(const char *path, const record *a, const record *b, const moves *m, json_t *changed, json_t *appeared, json_t *vanished, int worse) {
    json_t *o = json_object(), *list = json_array();
    for (int i = 0; i < m->n; i++) {
        const move *x = &m->x[i];
        json_array_append_new(list, json_pack("{s:s, s:s, s:o, s:o, s:o, s:o, s:o, s:b}", "id", x->id, "tensor", x->name, "rank", x->rank < 0 ? json_null() : json_integer(x->rank), "old", real(x->old), "new",
                                              real(x->new), "ln_growth", real(x->by), "ln_noise", real(x->noise), "worse", x->worse));
    }
    json_object_set_new(o, "schema", json_string("deltaproof-comparison")), json_object_set_new(o, "schema_version", json_integer(1));
    json_object_set_new(o, "old", json_string(a->commit)), json_object_set_new(o, "new", json_string(b->commit)), json_object_set_new(o, "worse", json_boolean(worse));
    json_object_set_new(o, "digest", json_string(digest_says(a, b)));
    json_object_set_new(o, "moved", list), json_object_set(o, "verdicts", changed), json_object_set(o, "appeared", appeared), json_object_set(o, "vanished", vanished);
    dp_err e = {0};
    if (dp_json_write(o, path, 17, &e)) fprintf(stderr, "deltaproof: %s\n", e.msg);
    return e.code != DP_OK;
}

/* ---- the comparison ------------------------------------------------------------------------------------------------------------------- */

typedef struct { int both, noisy, verdict_worse, lost; json_t *changed, *appeared, *vanished; } tally;

static void compare_run(const options *o, const record *again, const char *id, const json_t *a, const json_t *b, FILE *f, tally *t, moves *m) {
    const char *va = text(a, "verdict"), *vb = text(b, "verdict"), *backend = text(a, "backend");
    size_t i;
    json_t *x;
    t->both++;
    t->noisy += strcmp(backend, "sim") && strcmp(backend, "lapack") && strcmp(backend, "file");
    if (strcmp(va, vb)) {
        const int worse = badness(vb) > badness(va);
        t->verdict_worse += worse;
        json_array_append_new(t->changed, json_pack("{s:s, s:s, s:s, s:b, s:s}", "id", id, "old", va, "new", vb, "worse", worse, "why", text(worse ? b : a, "why")));
        fprintf(f, "%-7s %s: %s -> %s%s%s%s\n", worse ? "worse" : "better", id, va, vb, *text(worse ? b : a, "why") ? " (" : "", text(worse ? b : a, "why"), *text(worse ? b : a, "why") ? ")" : "");
    }
    json_array_foreach(json_object_get(a, "tensors"), i, x) {
        const json_t *y = tensor(b, text(x, "name"));
        if (y) compare_tensor(o, again, id, x, y, m);
        else if (json_array_size(json_object_get(b, "tensors"))) t->lost++, fprintf(f, "worse   %s %s: is not judged any more\n", id, text(x, "name"));
    }
}

static void list_missing(const record *from, const record *in, const char *word, json_t *out, int *judged, FILE *f) {
    const char *id;
    json_t *x;
    json_object_foreach(from->runs, id, x) {
        if (json_object_get(in->runs, id)) continue;
        json_array_append_new(out, json_string(id));
        if (judged) *judged += strcmp(text(x, "verdict"), "skipped") != 0;
        fprintf(f, "%-7s %s (%s)\n", word, id, text(x, "verdict"));
    }
}

static int compare(const options *o, const record *a, const record *b, const record *again) {
    FILE *f = o->json && !strcmp(o->json, "-") ? stderr : stdout;
    tally t = {.changed = json_array(), .appeared = json_array(), .vanished = json_array()};
    moves m = {0};
    const char *id;
    json_t *x;
    int gone = 0;
    json_object_foreach(a->runs, id, x) {
        const json_t *y = json_object_get(b->runs, id);
        if (y) compare_run(o, again, id, x, y, f, &t, &m);
    }
    list_missing(a, b, "gone", t.vanished, &gone, f), list_missing(b, a, "new", t.appeared, NULL, f);
    if (m.n) qsort(m.x, (size_t)m.n, sizeof *m.x, by_growth);
    for (int i = 0; i < m.n; i++)
        if (o->verbose || i < 10 || i >= m.n - 10) print_move(&m.x[i], f);
        else if (i == 10) fprintf(f, "        .. %d more, --verbose prints them\n", m.n - 20);
    int worse = t.verdict_worse || m.worse || gone || t.lost, rc = worse;
    fprintf(f, "%d runs in both; verdicts: %zu changed, %d for the worse; errors: %d moved up, %d by more than %g, %d down; runs: %zu appeared, %zu vanished\n", t.both, json_array_size(t.changed), t.verdict_worse,
            m.up, m.worse, o->worse, m.down, json_array_size(t.appeared), json_array_size(t.vanished));
    if (o->nagain) fprintf(f, "noise: measured between OLD and %d further record%s of it\n", o->nagain, o->nagain > 1 ? "s" : "");
    else if (t.noisy) fprintf(f, "noise: unknown for %d runs on devices or of libraries, taken as 0 (give --again RECORD)\n", t.noisy);
    print_digests(a, b, f);
    if (!t.both) fprintf(stderr, "deltaproof: compare: the records have no run in common\n"), rc = 2;
    else fprintf(f, "COMPARE: %s (%s -> %s)\n", worse ? "WORSE" : m.n || json_array_size(t.changed) ? "NOT WORSE" : "SAME", a->commit, b->commit);
    if (o->json && write_json(o->json, a, b, &m, t.changed, t.appeared, t.vanished, worse)) rc = 2;
    json_decref(t.changed), json_decref(t.appeared), json_decref(t.vanished), free(m.x);
    return rc;
}

static int compare_files(const options *o) {
    record a = {0}, b = {0}, *again = dp_calloc((size_t)o->nagain + 1, sizeof *again);
    int ok = load(o->path[0], &a) && load(o->path[1], &b);
    for (int i = 0; i < o->nagain && ok; i++) ok = load(o->again[i], &again[i]);
    const int rc = ok ? compare(o, &a, &b, again) : 2;
    unload(&a), unload(&b);
    for (int i = 0; i < o->nagain; i++) unload(&again[i]);
    free(again);
    return rc;
}

/* Becomes the Python that draws. */
static int history(const options *o) {
    const char *py = dp_python(), *argv[260] = {py, dp_home("reports/history.py"), o->history};
    for (int i = 0; i < o->npath; i++) argv[3 + i] = o->path[i];
    fflush(stdout);
    execvp(argv[0], (char *const *)argv);
    fprintf(stderr, "deltaproof: cannot start %s: %s\n", argv[0], strerror(errno));
    return 2;
}

/* ---- the command ---------------------------------------------------------------------------------------------------------------------- */

enum { OPT_AGAIN = 256, OPT_WORSE, OPT_JSON, OPT_HISTORY };
static const struct argp_option OPTIONS[] = {
    {"again", OPT_AGAIN, "RECORD", 0, "a further record of what made OLD, for the noise from run to run; may be repeated", 0},
    {"worse", OPT_WORSE, "X", 0, "an error that grows by more than this factor, and by more than its noise, makes the exit status 1 (default: 1.25)", 0},
    {"verbose", 'v', 0, 0, "print every error that moved, not only the 20 that moved most", 0},
    {"json", OPT_JSON, "FILE", 0, "write the comparison there; - for standard output", 0},
    {"history", OPT_HISTORY, "OUT.html", 0, "draw the errors of all RECORDs, or of all below a folder, over their dates", 0}, {0}};

static error_t parse(int key, char *arg, struct argp_state *st) {
    options *o = st->input;
    char *end;
    switch (key) {
    case OPT_AGAIN:
        if (o->nagain == 64) argp_error(st, "--again: more than 64 records");
        o->again[o->nagain++] = arg;
        break;
    case OPT_WORSE:
        o->worse = strtod(arg, &end);
        if (end == arg || *end || !(o->worse >= 1) || isinf(o->worse)) argp_error(st, "--worse %s: must be a factor from 1 on", arg);
        break;
    case OPT_JSON: o->json = arg; break;
    case OPT_HISTORY: o->history = arg; break;
    case 'v': o->verbose = 1; break;
    case ARGP_KEY_ARG:
        if (o->npath == 256) argp_error(st, "more than 256 records");
        o->path[o->npath++] = arg;
        break;
    default: return ARGP_ERR_UNKNOWN;
    }
    return 0;
}

int dp_cmd_compare(int argc, char **argv) {
    options o = {.worse = WORSE};
    const struct argp a = {.options = OPTIONS, .parser = parse, .args_doc = "OLD NEW\n--history OUT.html RECORD...", .doc = "Compare two records: what moved, by how much against run-to-run noise, which verdicts changed.\v"
        "A record is a results.json or the folder that holds it. Exit status 0 nothing worse, 1 worse, 2 they cannot be compared."};
    argp_parse(&a, argc, argv, 0, NULL, &o);
    if (o.history) return o.npath ? history(&o) : (fprintf(stderr, "deltaproof: compare --history: name records\n"), 2);
    if (o.npath != 2) return fprintf(stderr, "deltaproof: compare: name two records, OLD and NEW\n"), 2;
    return compare_files(&o);
}
