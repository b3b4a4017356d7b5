/* deltaproof explain ID: what was compared in a run, which limit decided, how that limit was
 * derived and where. The run is made again, or found in a record. Exit status 0 explained, 2
 * not. */
#include "commands.h"
#include "harness/base/terminal.h"
#include "harness/record/record_read.h"
#include "options.h"

#include <argp.h>
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    dp_options of;
    const char *record, *tensor;
} options;

static const struct argp_option OPTIONS[] = {
    DP_TEXT(
        "record", record, "FILE",
        "take the run from this results.json instead of running it again; needed for judged files"),
    DP_TEXT("tensor", tensor, "NAME",
            "explain this tensor (default: those that failed, else the one nearest to its limit)"),
    DP_ROW("subject", DP_OPT_SUBJECT, "LIB", "the library, if the ID is of a library's run"),
    DP_ROWS_PROGRAM,
    DP_ROW_DESIGN,
    DP_ROW_CLAIM_DROP,
    DP_ROW_LIMIT,
    DP_ROW_MEMORY,
    DP_ROW_CASES,
    DP_ROW_TRUTH,
    DP_ROW_CACHE,
    {0}};

/* ---- what limits are ------------------------------------------------------------------------- */

static const struct {
    const char *tier, *what, *where;
} TIERS[] = {
    {"exact", "on these inputs nothing rounds in any format, so any error at all is a fault",
     "ref/inputs/inputs_exact.c; cases/README.md, keys = exact"},
    {"bound",
     "a bound of the rounding errors that the claimed formats can make of these inputs: the "
     "smaller of a worst case and of 6 standard deviations of independent roundings",
     "ref/bound/bound.c, above each function; ref/METHOD.md"},
    {"expected",
     "errors of right kernels of this design on nearby inputs, drawn several times, times "
     "an allowance for other orders of summation",
     "harness/verdict/levels.h; ref/METHOD.md; reports/verdicts.md"},
    {"sum", "the error that draws make in a head's sum over all its tokens",
     "harness/verdict/compare.c"},
};

static const char *text(const json_t *o, const char *key) {
    const char *s = json_string_value(json_object_get(o, key));
    return s ? s : "";
}

/* A number of a record; those that JSON lacks are text. */
static void number(const json_t *o, const char *key, char out[32]) {
    const json_t *x = json_object_get(o, key);
    if (json_is_number(x))
        snprintf(out, 32, "%.4g", json_number_value(x));
    else
        snprintf(out, 32, "%.31s", json_is_string(x) ? json_string_value(x) : "none");
}

/* A line of the explanation, behind its word. */
static void say(const char *word, const char *format, ...) {
    char line[2000];
    va_list ap;
    va_start(ap, format);
    vsnprintf(line, sizeof line, format, ap);
    va_end(ap);
    printf("%-13s", word);
    dp_put_words(stdout, 13, line);
}

static void explain_truth(const json_t *run) {
    const json_t *truth = json_object_get(run, "truth");
    char radius[32];
    number(truth, "radius", radius);
    say("truth",
        "the step recurrence in %s at %lld bits; its own error is at most %s of the tensor "
        "(ref/truth/truth.h)",
        text(truth, "kind"), (long long)json_integer_value(json_object_get(truth, "bits")), radius);
}

static void explain_claim(const json_t *run) {
    const json_t *p = json_object_get(run, "policy");
    say("claim", "base %s%s%s%s%s: limits are derived from these formats", text(p, "base"),
        *text(p, "chain") ? ", chain of M " : "", text(p, "chain"),
        *text(p, "design") ? ", design " : "", text(p, "design"));
}

/* The calls of a session, which the record keeps with its case. */
static void explain_calls(const json_t *rec, const json_t *run) {
    const json_t *c, *cases = json_object_get(rec, "cases");
    size_t i;
    json_array_foreach(cases, i, c) {
        if (strcmp(text(c, "name"), text(run, "case")) || !*text(c, "session")) continue;
        say("session", "%s; state between calls: %s%s%s", text(c, "session"),
            text(c, "session_state"), *text(run, "rollback") ? "; after a window: " : "",
            text(run, "rollback"));
        const long long prefix = json_integer_value(json_object_get(c, "session_prefix"));
        if (prefix)
            say("",
                "all sequences share the first %lld tokens: they are computed once, and each "
                "sequence continues from their state",
                prefix);
        const long long slots = json_integer_value(json_object_get(c, "session_slots"));
        if (slots)
            say("",
                "states lie in a pool of %lld slots; slots that a call does not write must keep "
                "their bits",
                slots);
        say("",
            "o of accepted tokens and the last state are judged by the whole case, each window by "
            "the state that it began from: %lld of %lld (cases/README.md, Sessions)",
            (long long)json_integer_value(json_object_get(run, "windows_judged")),
            (long long)json_integer_value(json_object_get(run, "windows")));
    }
}

static void explain_place(const json_t *t) {
    const json_t *row = json_object_get(t, "failed");
    const char *const keys[] = {"rank", "head", "sequence", "token", "index"};
    char times[32], error[32];
    if (!row) row = json_object_get(t, "worst_token");
    if (!row) return;
    char at[300] = "";
    for (size_t i = 0, n = 0; i < sizeof keys / sizeof *keys; i++) {
        const json_t *x = json_object_get(row, keys[i]);
        if (x && json_integer_value(x) >= 0)
            n += (size_t)snprintf(at + n, sizeof at - n, "%s%s %lld", n ? ", " : "", keys[i],
                                  (long long)json_integer_value(x));
    }
    say("place", "%s: got %.6g, truth %.6g", at, strtod(text(row, "got"), NULL),
        strtod(text(row, "want"), NULL));
    number(row, "times", times);
    number(row, "error", error);
    if (json_object_get(row, "times"))
        say("", "error of the row %s, %s times its limit", error, times);
}

static void explain_level(const json_t *t) {
    const json_t *e = json_object_get(t, "expected"), *level;
    char ratio[32], limit[32], rel[32];
    if (!e) return;
    level = json_object_get(e, text(e, "level"));
    number(e, "rel", rel);
    number(level, "ratio", ratio);
    number(level, "limit", limit);
    say("expected",
        "error expected of this design: %s of the tensor; level %s is nearest to its limit: %s "
        "times its expected error (limit %s)",
        rel, text(e, "level"), ratio, limit);
}

/* The smallest factor that the limits would have seen; the record holds nine digits of it. */
static void factor(const json_t *t, const char *name, char out[48]) {
    const double x = json_number_value(json_object_get(t, name));
    if (x > 1.01)
        snprintf(out, 48, "%.3g", x);
    else
        snprintf(out, 48, "1 + %.2g", fmax(x - 1, 5e-9));
}

static void explain_power(const json_t *t) {
    char seen[48], head[48];
    factor(t, "seen", seen);
    factor(t, "seen_head", head);
    if (!json_object_get(t, "seen"))
        say("power", "no factor of the tensor would have failed");
    else if (!json_object_get(t, "seen_head"))
        say("power", "the tensor times %s, or more, would have failed", seen);
    else
        say("power", "the tensor times %s, or more, would have failed; head %lld alone times %s",
            seen, (long long)json_integer_value(json_object_get(t, "blind_head")), head);
}

static void explain_tensor(const json_t *t) {
    char rel[32], ratio[32];
    number(t, "rel_fro", rel);
    number(t, "ratio", ratio);
    printf("\n%s %s\n", text(t, "name"), text(t, "verdict"));
    say("compared", "every row with the truth; error of all, |got - truth| / |truth|: %s", rel);
    if (json_object_get(t, "bound")) say("bound", "the largest share of a row's bound: %s", ratio);
    explain_level(t);
    if (strcmp(text(t, "verdict"), "fail")) explain_power(t);
    for (size_t i = 0; i < sizeof TIERS / sizeof *TIERS; i++) {
        if (strcmp(TIERS[i].tier, text(t, "tier"))) continue;
        say("decided by", "%s: %s", TIERS[i].tier, TIERS[i].what);
        say("derived in", "%s", TIERS[i].where);
    }
    explain_place(t);
    if (*text(t, "why")) say("why", "%s", text(t, "why"));
}

static int wanted(const options *o, const json_t *run, const json_t *t) {
    if (o->tensor) return !strcmp(o->tensor, text(t, "name"));
    if (!strcmp(text(run, "verdict"), "fail")) return !strcmp(text(t, "verdict"), "fail");
    const json_t *all = json_object_get(run, "tensors"), *x, *nearest = NULL;
    double most = -1;
    size_t i;
    json_array_foreach(all, i, x) {
        const double ratio = json_number_value(json_object_get(x, "ratio"));
        if (ratio <= most) continue;
        most = ratio;
        nearest = x;
    }
    return t == nearest;
}

static int explain_run(const options *o, const json_t *rec, const json_t *run) {
    const json_t *tensors = json_object_get(run, "tensors"), *t;
    size_t i;
    int n = 0;
    char said[2000];
    printf("%s\n", text(run, "id"));
    snprintf(said, sizeof said, "%s%s%s", text(run, "verdict"), *text(run, "why") ? ": " : "",
             text(run, "why"));
    dp_put_words(stdout, 0, said);
    printf("\n");
    explain_truth(run);
    explain_claim(run);
    explain_calls(rec, run);
    json_array_foreach(tensors, i, t) {
        if (!wanted(o, run, t)) continue;
        explain_tensor(t);
        n++;
    }
    if (n || !o->tensor) return 0;
    fprintf(stderr, "deltaproof: explain: the run has no tensor %s\n", o->tensor);
    return 2;
}

/* ---- the record ------------------------------------------------------------------------------ */

static json_t *read_record(const char *path, dp_err *e) {
    dp_old_record r;
    if (dp_old_record_read(path, &r, e)) return NULL;
    json_t *rec = json_incref(r.root);
    dp_old_record_free(&r);
    return rec;
}

/* The run made again by `run --id`, whose table goes to standard error. */
static json_t *made_again(const options *o, dp_err *e) {
    char path[] = "/tmp/deltaproof-explain-XXXXXX";
    const int fd = mkstemp(path);
    char *argv[8 + DP_AGAIN_WORDS] = {(char *)"deltaproof run",
                                      (char *)"--id",
                                      (char *)o->of.name[0],
                                      (char *)"--json",
                                      path,
                                      (char *)"--cache",
                                      (char *)(o->of.cache ? o->of.cache : "none")};
    int n = 7;
    for (int i = 0; i < o->of.nagain; i++)
        argv[n++] = (char *)o->of.again[i];
    if (fd < 0) {
        dp_fail(e, DP_EIO, "%s: cannot be made", path);
        return NULL;
    }
    close(fd);
    fflush(stdout);
    const int out = dup(1);
    dup2(2, 1);
    const int rc = dp_cmd_run(n, argv);
    fflush(stdout);
    dup2(out, 1);
    close(out);
    json_t *rec = rc == 2 ? NULL : read_record(path, e);
    if (rc == 2) dp_fail(e, DP_EINPUT, "%s: could not be run", o->of.name[0]);
    unlink(path);
    return rec;
}

static int explain(const options *o, const json_t *rec, dp_err *e) {
    const json_t *runs = json_object_get(rec, "runs"), *run;
    size_t i;
    json_array_foreach(
        runs, i, run) if (!strcmp(text(run, "id"), o->of.name[0])) return explain_run(o, rec, run);
    dp_fail(e, DP_EINPUT, "%s: has no run %s", o->record ? o->record : "the record", o->of.name[0]);
    return dp_refuse(e);
}

int dp_cmd_explain(int argc, char **argv) {
    options o = {.of = dp_options_new(1, 1)};
    dp_err e = {0};
    const struct argp a = {
        .options = OPTIONS,
        .parser = dp_option_alone,
        .args_doc = "ID",
        .doc = "Explain the verdict of one run: what was compared, which limit decided, how it was "
               "derived, where.\vExit status 0 explained, 2 could not explain."};
    dp_parse(&a, argc, argv, &o);
    if (o.of.nname != 1) {
        fprintf(stderr, "deltaproof: explain: name the ID of one run\n");
        return 2;
    }
    if (!o.record && !strncmp(o.of.name[0], "judge:", 6)) {
        fprintf(stderr,
                "deltaproof: explain: %s is of judged files, whose record explains it: give "
                "--record FILE (judge writes it with --json FILE or --out DIR)\n",
                o.of.name[0]);
        return 2;
    }
    json_auto_t *rec = o.record ? read_record(o.record, &e) : made_again(&o, &e);
    return rec ? explain(&o, rec, &e) : dp_refuse(&e);
}
