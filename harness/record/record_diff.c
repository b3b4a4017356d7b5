/* harness/record/record_diff.c - compares two records (record_diff.h). */
#include "record_diff.h"
#include "harness/verdict/compare.h"
#include "ref/arithmetic/elementary.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const char *id, *name;
    double old, new, by, noise; /* by: ln(new / old) */
    int rank, worse;            /* rank -1: the whole tensor */
} move;

typedef struct {
    const dp_diff_request *q;
    FILE *f;
    int both, noisy;          /* runs in both records; those whose noise is unknown */
    int verdicts_worse, lost; /* lost: tensors that are gone or unjudged */
    int gone;                 /* runs that were judged */
    int record_worse;
    int other; /* lines about what is not in runs */
    json_t *verdicts, *tensors, *appeared, *vanished;
    move *move;
    int nmove, room, up, down, moved_worse;
} diff;

/* ---- errors ---------------------------------------------------------------------------------- */

/* ln(new / old); an error that is no number any more has grown without end. */
static double growth(double old, double new) {
    if (isnan(old) && isnan(new)) return 0;
    if (isnan(old)) return -INFINITY;
    if (old == new) return 0;
    if (isnan(new)) return INFINITY;
    if (new == 0) return -INFINITY;
    if (old == 0) return INFINITY;
    return isinf(new) && isinf(old) ? 0 : dp_log(new) - dp_log(old);
}

static double noise_of(const diff *d, const char *id, const char *name, const json_t *t, int rank) {
    double top = 0;
    for (int i = 0; i < d->q->nagain; i++) {
        const json_t *run = json_object_get(d->q->again[i].runs, id);
        const json_t *other = dp_old_tensor(run, name);
        if (!other) continue;
        top = fmax(top, fabs(growth(dp_old_error(t, rank), dp_old_error(other, rank))));
    }
    return top;
}

static void add_move(diff *d, move m) {
    if (d->nmove == d->room) {
        d->room = d->room ? 2 * d->room : 64;
        d->move = dp_realloc(d->move, sizeof *d->move * (size_t)d->room);
    }
    m.worse = m.by > dp_log(d->q->worse);
    d->move[d->nmove++] = m;
    d->up += m.by > 0;
    d->down += m.by < 0;
    d->moved_worse += m.worse;
}

/* The share of the tensor (whole, or one rank) that moved most, an increase before a decrease. */
static void compare_errors(diff *d, const char *id, const json_t *a, const json_t *b) {
    const int ranks = dp_old_ranks(a);
    const char *name = dp_old_text(a, "name");
    move best = {.id = id, .name = name, .rank = -2};
    for (int r = -1; r < (ranks > 1 ? ranks : 0); r++) {
        const double old = dp_old_error(a, r), new = dp_old_error(b, r), by = growth(old, new);
        const double noise = noise_of(d, id, name, a, r);
        if (fabs(by) <= 2 * noise + 1e-12) continue;
        const int known =
            best.rank > -2 && (best.by > 0 ? by <= best.by : by <= 0 && by >= best.by);
        if (known) continue;
        best.old = old;
        best.new = new;
        best.by = by;
        best.noise = noise;
        best.rank = r;
    }
    if (best.rank > -2) add_move(d, best);
}

/* ---- verdicts -------------------------------------------------------------------------------- */

static int badness(const char *verdict) {
    static const char *const order[] = {"pass", "unjudged", "skipped", "fail"};
    for (int i = 0; i < 4; i++)
        if (!strcmp(verdict, order[i])) return i;
    return 4; /* that of a record alone: error */
}

static int judged(const json_t *x) {
    const char *verdict = dp_old_text(x, "verdict");
    return !strcmp(verdict, "pass") || !strcmp(verdict, "fail");
}

/* name NULL: the verdict of the run. */
static void verdict_changed(diff *d, const char *id, const char *name, const json_t *a,
                            const json_t *b) {
    const char *old = dp_old_text(a, "verdict"), *new = dp_old_text(b, "verdict");
    const int worse = badness(new) > badness(old);
    const char *why = dp_old_text(worse ? b : a, "why");
    json_t *x = json_pack("{s:s, s:s, s:s, s:b, s:s}", "id", id, "old", old, "new", new, "worse",
                          worse, "why", why);
    if (name) json_object_set_new(x, "tensor", json_string(name));
    json_array_append_new(name ? d->tensors : d->verdicts, x);
    fprintf(d->f, "%-7s %s%s%s: %s -> %s", worse ? "worse" : "better", id, name ? " " : "",
            name ? name : "", old, new);
    fprintf(d->f, *why ? " (%s)\n" : "\n", why);
    d->verdicts_worse += worse;
}

static void tensor_lost(diff *d, const char *id, const json_t *a, const json_t *b) {
    const char *name = dp_old_text(a, "name"), *now = b ? dp_old_text(b, "verdict") : "gone";
    const char *why = b ? dp_old_text(b, "why") : "";
    json_array_append_new(d->tensors, json_pack("{s:s, s:s, s:s, s:s, s:b, s:s}", "id", id,
                                                "tensor", name, "old", dp_old_text(a, "verdict"),
                                                "new", now, "worse", 1, "why", why));
    fprintf(d->f, "gone    %s %s: is not judged any more (%s%s%s)\n", id, name, now,
            *why ? ": " : "", why);
    d->lost++;
}

/* ran 0: NEW has no tensor at all, and the verdict of its run says why. */
static void compare_tensor(diff *d, const char *id, const json_t *a, const json_t *b, int ran,
                           int same_verdict) {
    if (!b && !ran) return;
    if (judged(a) && (!b || !judged(b))) tensor_lost(d, id, a, b);
    if (!b) return;
    const char *old = dp_old_text(a, "verdict"), *new = dp_old_text(b, "verdict");
    if (same_verdict && judged(a) && judged(b) && strcmp(old, new))
        verdict_changed(d, id, dp_old_text(a, "name"), a, b);
    compare_errors(d, id, a, b);
}

static void compare_run(diff *d, const char *id, const json_t *a, const json_t *b) {
    const char *old = dp_old_text(a, "verdict"), *new = dp_old_text(b, "verdict");
    const char *backend = dp_old_text(a, "backend"), *name;
    const int same = !strcmp(old, new), told = !same && badness(new) > badness(old);
    const int ran = json_object_size(dp_old_tensors(b)) > 0 || !told;
    json_t *x;
    d->both++;
    d->noisy += strcmp(backend, "sim") && strcmp(backend, "lapack") && strcmp(backend, "file");
    if (!same) verdict_changed(d, id, NULL, a, b);
    json_object_foreach(dp_old_tensors(a), name, x)
        compare_tensor(d, id, x, dp_old_tensor(b, name), ran, same);
}

static const char *const COUNTED[DP_NVERDICTS] = {[DP_PASS] = "pass",
                                                  [DP_FAIL] = "fail",
                                                  [DP_SKIPPED] = "are skipped",
                                                  [DP_UNJUDGED] = "are unjudged"};

/* Verdict and totals as the records state them; their runs may say something else. */
static void compare_records(diff *d) {
    const dp_old_record *a = d->q->old, *b = d->q->new;
    const int worse = badness(b->verdict) > badness(a->verdict) || b->errors > a->errors;
    const json_t *old = json_object_get(a->root, "totals"),
                 *new = json_object_get(b->root, "totals");
    if (strcmp(a->verdict, b->verdict) || a->errors != b->errors) {
        fprintf(d->f, "%-7s the record: %s -> %s, cases that could not be judged: %lld -> %lld\n",
                worse ? "worse" : "better", a->verdict, b->verdict, (long long)a->errors,
                (long long)b->errors);
        d->other++;
    }
    for (int i = 0; i < DP_NVERDICTS; i++) {
        const char *name = dp_verdict_names[i];
        const json_t *was = json_object_get(old, name), *is = json_object_get(new, name);
        if (json_equal(was, is) || (!was && !is)) continue;
        fprintf(d->f, "changed the record: runs that %s: %lld -> %lld\n", COUNTED[i],
                (long long)json_integer_value(was), (long long)json_integer_value(is));
        d->other++;
    }
    d->record_worse = worse;
}

/* ---- cases, and many of them together -------------------------------------------------------- */

/* Parts of the records beside runs: lists of objects, each known by some of its fields. */
typedef struct {
    const char *list, *word;
    const char *by[8];
} part;
static const part PARTS[] = {
    {"cases", "case", {"name"}},
    {"pooled", "all cases of", {"tensor", "backend", "way", "base", "undeclared", "fault"}}};

/* "o sim fp32" -> the object. The last one of several with one name. */
static json_t *by_name(const dp_old_record *r, const part *p) {
    json_t *all = json_object(), *x;
    size_t i;
    json_array_foreach(json_object_get(r->root, p->list), i, x) {
        char name[400];
        size_t n = 0;
        for (int k = 0; p->by[k] && n < sizeof name; k++) {
            const json_t *v = json_object_get(x, p->by[k]);
            const char *text = json_is_true(v) ? p->by[k] : dp_old_text(x, p->by[k]);
            n += (size_t)snprintf(name + n, sizeof name - n, *text && k ? " %s" : "%s", text);
        }
        json_object_set(all, name, x);
    }
    return all;
}

static void part_missing(diff *d, const part *p, const char *word, const char *name,
                         const json_t *x, json_t *list) {
    const char *verdict = dp_old_text(x, "verdict");
    fprintf(d->f, "%-7s %s %s%s%s%s\n", word, p->word, name, *verdict ? " (" : "", verdict,
            *verdict ? ")" : "");
    json_array_append_new(list, json_sprintf("%s %s", p->word, name));
    d->other++;
}

static void part_changed(diff *d, const part *p, const char *name, const json_t *a,
                         const json_t *b) {
    const char *old = dp_old_text(a, "verdict"), *new = dp_old_text(b, "verdict");
    char id[440];
    if (json_equal(a, b)) return;
    d->other++;
    snprintf(id, sizeof id, "%s %s", p->word, name);
    if (strcmp(old, new))
        verdict_changed(d, id, NULL, a, b);
    else
        fprintf(d->f, "changed %s\n", id);
}

static void compare_part(diff *d, const part *p) {
    json_auto_t *old = by_name(d->q->old, p), *new = by_name(d->q->new, p);
    json_t *x;
    const char *name;
    json_object_foreach(old, name, x) {
        const json_t *y = json_object_get(new, name);
        if (y) part_changed(d, p, name, x, y);
        if (y) continue;
        part_missing(d, p, "gone", name, x, d->vanished);
        d->gone++;
    }
    json_object_foreach(new, name, x) if (!json_object_get(old, name))
        part_missing(d, p, "new", name, x, d->appeared);
}

/* ---- digests --------------------------------------------------------------------------------- */

static const char *digest_says(const dp_diff_request *q) {
    const char *a = q->old->digest, *b = q->new->digest;
    if (!*a || !*b) return "unknown";
    return strcmp(a, b) ? "different" : "same";
}

static void print_digests(const dp_diff_request *q, FILE *f) {
    const char *a = q->old->digest, *b = q->new->digest, *says = digest_says(q);
    if (!strcmp(says, "same"))
        fprintf(f, "digest: the same, %s: every bit of every result of simulated ranks\n", a);
    else if (!strcmp(says, "different"))
        fprintf(f, "digest: %s and %s: results of simulated ranks differ, or their runs do\n", a,
                b);
    else
        fprintf(f, "digest: %s has none\n", *a ? "NEW" : *b ? "OLD" : "neither record");
}

/* ---- runs ------------------------------------------------------------------------------------ */

/* Runs of one case that only one record has: a line each up to three, one line above. */
static void print_missing(const diff *d, const dp_old_record *from, const char *word,
                          const json_t *ids, size_t first, size_t end) {
    const char *id = json_string_value(json_array_get(ids, first));
    if (end - first > 3 && !d->q->verbose) {
        fprintf(d->f, "%-7s %.*s: %zu runs\n", word, (int)strcspn(id, ":"), id, end - first);
        return;
    }
    for (size_t i = first; i < end; i++) {
        id = json_string_value(json_array_get(ids, i));
        fprintf(d->f, "%-7s %s (%s)\n", word, id,
                dp_old_text(json_object_get(from->runs, id), "verdict"));
    }
}

static int same_case(const json_t *ids, size_t a, size_t b) {
    const char *x = json_string_value(json_array_get(ids, a));
    const char *y = json_string_value(json_array_get(ids, b));
    const size_t n = strcspn(x, ":");
    return n == strcspn(y, ":") && !strncmp(x, y, n);
}

/* Runs of `from` that `in` lacks; returns how many of them were judged. */
static int list_missing(diff *d, const dp_old_record *from, const dp_old_record *in,
                        const char *word, json_t *out) {
    const char *id;
    json_t *x;
    int were_judged = 0;
    json_object_foreach(from->runs, id, x) {
        if (json_object_get(in->runs, id)) continue;
        json_array_append_new(out, json_string(id));
        were_judged += strcmp(dp_old_text(x, "verdict"), "skipped") != 0;
    }
    const size_t n = json_array_size(out);
    for (size_t i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && same_case(out, i, end);)
            end++;
        print_missing(d, from, word, out, i, end);
    }
    return were_judged;
}

/* ---- output ---------------------------------------------------------------------------------- */

static int by_growth(const void *a, const void *b) {
    const move *x = a, *y = b;
    if (x->by != y->by) return x->by < y->by ? 1 : -1;
    const int id = strcmp(x->id, y->id);
    return id ? id : strcmp(x->name, y->name);
}

static void percent(double by, char *out, size_t size) {
    if (isinf(by))
        snprintf(out, size, by > 0 ? "from 0 or to no number" : "to 0 or to a number");
    else if (by > dp_log(10))
        snprintf(out, size, "x %.3g", dp_exp(by));
    else
        snprintf(out, size, "%+.3g%%", 100 * dp_expm1(by));
}

static void print_move(const move *x, FILE *f) {
    char by[40], noise[40], rank[24] = "";
    percent(x->by, by, sizeof by);
    percent(x->noise, noise, sizeof noise);
    if (x->rank >= 0) snprintf(rank, sizeof rank, ", rank %d", x->rank);
    fprintf(f, "%-7s %s %s%s: %.4g -> %.4g, %s (noise %s)\n",
            x->worse    ? "worse"
            : x->by > 0 ? "up"
                        : "down",
            x->id, x->name, rank, x->old, x->new, by, x->noise ? noise + (noise[0] == '+') : "0");
}

static void print_moves(diff *d) {
    if (d->nmove) qsort(d->move, (size_t)d->nmove, sizeof *d->move, by_growth);
    for (int i = 0; i < d->nmove; i++)
        if (d->q->verbose || i < 10 || i >= d->nmove - 10)
            print_move(&d->move[i], d->f);
        else if (i == 10)
            fprintf(d->f, "        .. %d more, --verbose prints them\n", d->nmove - 20);
}

static json_t *real(double x) {
    if (isfinite(x)) return json_real(x);
    return json_string(isnan(x) ? "nan" : x > 0 ? "inf" : "-inf");
}

static json_t *as_json(const diff *d, int worse) {
    json_t *o = json_object(), *list = json_array();
    for (int i = 0; i < d->nmove; i++) {
        const move *x = &d->move[i];
        json_t *rank = x->rank < 0 ? json_null() : json_integer(x->rank);
        json_array_append_new(list,
                              json_pack("{s:s, s:s, s:o, s:o, s:o, s:o, s:o, s:b}", "id", x->id,
                                        "tensor", x->name, "rank", rank, "old", real(x->old), "new",
                                        real(x->new), "ln_growth", real(x->by), "ln_noise",
                                        real(x->noise), "worse", x->worse));
    }
    json_object_set_new(o, "schema", json_string("deltaproof-comparison"));
    json_object_set_new(o, "schema_version", json_integer(1));
    json_object_set_new(o, "old", json_string(d->q->old->commit));
    json_object_set_new(o, "new", json_string(d->q->new->commit));
    json_object_set_new(o, "worse", json_boolean(worse));
    json_object_set_new(o, "digest", json_string(digest_says(d->q)));
    json_object_set_new(o, "moved", list);
    json_object_set(o, "verdicts", d->verdicts);
    json_object_set(o, "tensors", d->tensors);
    json_object_set(o, "appeared", d->appeared);
    json_object_set(o, "vanished", d->vanished);
    return o;
}

static void print_summary(const diff *d, int worse) {
    const dp_diff_request *q = d->q;
    const size_t changed = json_array_size(d->verdicts) + json_array_size(d->tensors);
    const size_t appeared = json_array_size(d->appeared), vanished = json_array_size(d->vanished);
    const int same = !changed && !d->nmove && !appeared && !vanished && !d->other &&
                     !strcmp(q->old->digest, q->new->digest);
    fprintf(d->f,
            "%d runs in both; verdicts: %zu changed, %d for the worse; errors: %d moved up, %d by "
            "more than %g, %d down; runs and cases: %zu appeared, %zu vanished\n",
            d->both, changed, d->verdicts_worse + d->lost, d->up, d->moved_worse, q->worse, d->down,
            appeared, vanished);
    if (q->nagain)
        fprintf(d->f, "noise: measured between OLD and %d further record%s of it\n", q->nagain,
                q->nagain > 1 ? "s" : "");
    else if (d->noisy)
        fprintf(d->f,
                "noise: unknown for %d runs on devices or of libraries, taken as 0 (give --again "
                "RECORD)\n",
                d->noisy);
    const int grew = d->verdicts_worse || d->moved_worse || d->record_worse;
    fprintf(d->f, "COMPARE: %s (%s -> %s)\n",
            grew    ? "WORSE"
            : worse ? "GONE: what was judged is not judged any more, nothing else is worse"
            : same  ? "SAME"
                    : "NOT WORSE",
            q->old->commit, q->new->commit);
}

dp_diff dp_record_diff(const dp_diff_request *q, FILE *f, json_t **json) {
    diff d = {.q = q,
              .f = f,
              .verdicts = json_array(),
              .tensors = json_array(),
              .appeared = json_array(),
              .vanished = json_array()};
    const char *id;
    json_t *x;
    compare_records(&d);
    json_object_foreach(q->old->runs, id, x) {
        const json_t *y = json_object_get(q->new->runs, id);
        if (y) compare_run(&d, id, x, y);
    }
    d.gone += list_missing(&d, q->old, q->new, "gone", d.vanished);
    list_missing(&d, q->new, q->old, "new", d.appeared);
    for (size_t i = 0; i < sizeof PARTS / sizeof *PARTS; i++)
        compare_part(&d, &PARTS[i]);
    print_moves(&d);
    const int worse = d.verdicts_worse || d.lost || d.moved_worse || d.gone || d.record_worse;
    print_digests(q, f);
    if (d.both) print_summary(&d, worse);
    if (json) *json = as_json(&d, worse);
    json_decref(d.verdicts);
    json_decref(d.tensors);
    json_decref(d.appeared);
    json_decref(d.vanished);
    free(d.move);
    return !d.both ? DP_DIFF_NOTHING_IN_COMMON : worse ? DP_DIFF_WORSE : DP_DIFF_NOT_WORSE;
}
