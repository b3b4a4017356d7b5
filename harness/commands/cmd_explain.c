/* deltaproof explain ID: what was compared in a run, which limit decided, how that limit was
 * derived and where. The run is made again, or found in a record; reports/explain.py explains it.
 * Exit status 0 explained, 2 not. */
#include "commands.h"
#include "options.h"
#include "ref/vocabulary/problem.h"

#include <argp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
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

/* Makes the run again by `run --id`, whose table goes to standard error. Its record goes to path,
 * which stays empty where there was none. */
static void make_again(const options *o, char *path) {
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
    fflush(stdout);
    const int out = dup(1);
    dup2(2, 1);
    dp_cmd_run(n, argv);
    fflush(stdout);
    dup2(out, 1);
    close(out);
}

static int explain(const options *o, const char *record) {
    char *const words[] = {(char *)record, (char *)o->of.name[0], (char *)o->tensor, NULL};
    return dp_script_run("reports/explain.py", words);
}

static int explain_again(const options *o) {
    const char *set = getenv("TMPDIR");
    DP_OWN char *path = NULL;
    if (asprintf(&path, "%s/deltaproof-explain-XXXXXX", set && *set ? set : "/tmp") < 0) abort();
    const int fd = mkstemp(path);
    if (fd < 0) {
        fprintf(stderr, "deltaproof: %s: cannot be made\n", path);
        return 2;
    }
    close(fd);
    make_again(o, path);
    struct stat st;
    const int made = !stat(path, &st) && st.st_size > 0, rc = made ? explain(o, path) : 2;
    if (!made) fprintf(stderr, "deltaproof: %s: could not be run\n", o->of.name[0]);
    unlink(path);
    return rc;
}

int dp_cmd_explain(int argc, char **argv) {
    options o = {.of = dp_options_new(1, 1)};
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
    return o.record ? explain(&o, o.record) : explain_again(&o);
}
