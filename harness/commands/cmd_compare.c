/* deltaproof compare: two records side by side (record_diff.h), or the errors of many over their
 * dates.
 *
 * compare OLD NEW [--again RECORD]... [--worse X] [--verbose] [--json FILE]: exit status 0 nothing
 * worse; 1 something is worse; 2 they cannot be compared. The form compare --history OUT.html
 * RECORD.. runs reports/history.py over many records.
 */
#include "commands.h"
#include "harness/base/home.h"
#include "harness/record/record_diff.h"
#include "options.h"
#include "ref/files/output.h"
#include "ref/vocabulary/text.h"

#include <argp.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define WORSE 1.25
typedef struct {
    const char *path[256], *again[64], *json, *history;
    int npath, nagain, verbose;
    double worse;
} options;

static int compare(const options *o, const dp_old_record *a, const dp_old_record *b,
                   const dp_old_record *again) {
    FILE *f = o->json && !strcmp(o->json, "-") ? stderr : stdout;
    const dp_diff_request q = {.old = a,
                               .new = b,
                               .again = again,
                               .nagain = o->nagain,
                               .verbose = o->verbose,
                               .worse = o->worse};
    json_t *json = NULL;
    dp_err e = {0};
    int rc = dp_record_diff(&q, f, o->json ? &json : NULL);
    if (rc == DP_DIFF_NOTHING_IN_COMMON)
        fprintf(stderr, "deltaproof: compare: the records have no run in common\n");
    if (json && dp_json_write(json, o->json, 17, &e)) rc = dp_refuse(&e);
    return rc;
}

static int compare_files(const options *o) {
    DP_OWN dp_old_record *again = dp_calloc((size_t)o->nagain + 1, sizeof *again);
    DP_FREED(dp_old_record_free) dp_old_record a = {0}, b = {0};
    dp_err e = {0};
    dp_output_check(o->json, &e);
    if (!e.code) dp_old_record_read(o->path[0], &a, &e);
    if (!e.code) dp_old_record_read(o->path[1], &b, &e);
    for (int i = 0; i < o->nagain && !e.code; i++)
        dp_old_record_read(o->again[i], &again[i], &e);
    const int rc = e.code ? dp_refuse(&e) : compare(o, &a, &b, again);
    for (int i = 0; i < o->nagain; i++)
        dp_old_record_free(&again[i]);
    return rc;
}

/* Becomes the Python that draws. */
static int history(const options *o) {
    const char *py = dp_python(), *argv[264] = {py, DP_PYTHON_ISOLATED,
                                                dp_home("reports/history.py"), "--", o->history};
    for (int i = 0; i < o->npath; i++)
        argv[6 + i] = o->path[i];
    fflush(stdout);
    execvp(argv[0], (char *const *)argv);
    fprintf(stderr, "deltaproof: cannot start %s: %s\n", argv[0], strerror(errno));
    return 2;
}

/* ---- the command ----------------------------------------------------------------------------- */

enum { OPT_AGAIN = 256, OPT_WORSE, OPT_JSON, OPT_HISTORY };
static const struct argp_option OPTIONS[] = {
    DP_ROW("again", OPT_AGAIN, "RECORD",
           "a further record of OLD's kernel, for the noise from run to run; may be repeated"),
    DP_ROW(
        "worse", OPT_WORSE, "X",
        "an error that grows by more than this factor, and by more than its noise, makes the exit "
        "status 1 (default: 1.25)"),
    DP_ROW("verbose", 'v', 0, "print every error that moved, not only the 20 that moved most"),
    DP_ROW("json", OPT_JSON, "FILE", "write the comparison there; - for standard output"),
    DP_ROW("history", OPT_HISTORY, "OUT.html",
           "draw the errors of all RECORDs, or of all below a folder, over their dates"),
    {0}};

static error_t parse(int key, char *arg, struct argp_state *st) {
    options *o = st->input;
    switch (key) {
    case OPT_AGAIN:
        if (o->nagain == 64) argp_error(st, "--again: more than 64 records");
        o->again[o->nagain++] = arg;
        break;
    case OPT_WORSE:
        if (dp_number_real(arg, 1, HUGE_VAL, &o->worse) != DP_NUMBER_OK)
            argp_error(st, "--worse %s: must be a factor from 1 on", arg);
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
    const struct argp a = {.options = OPTIONS,
                           .parser = parse,
                           .args_doc = "OLD NEW\n--history OUT.html RECORD...",
                           .doc = "Compare two records: what moved, by how much against run-to-run "
                                  "noise, which verdicts changed.\v"
                                  "A record is a results.json or the folder that holds it. Exit "
                                  "status 0 nothing worse, 1 worse, 2 they cannot be compared."};
    dp_parse(&a, argc, argv, &o);
    if (o.history)
        return o.npath ? history(&o)
                       : (fprintf(stderr, "deltaproof: compare --history: name records\n"), 2);
    if (o.npath != 2) {
        fprintf(stderr, "deltaproof: compare: name two records, OLD and NEW\n");
        return 2;
    }
    return compare_files(&o);
}
