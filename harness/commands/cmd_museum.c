/* deltaproof museum [CASE...]: every deliberate fault against the cases (museum.h). Exit status 0:
 * every fault was seen and nothing was red without one. 1: a fault was not seen, or a run without a
 * fault was red. 2: could not run. */
#include "commands.h"
#include "harness/search/museum.h"
#include "options.h"
#include "ref/files/cache.h"
#include "ref/files/output.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    dp_options of;
    const char *out, *fault; /* fault: of the pipeline or of the kernels */
    int kernels;
    dp_museum_options o;
} options;

enum { OPT_ALL = 256, OPT_LOCATE };

static error_t parse(int key, char *arg, struct argp_state *st) {
    options *o = st->input;
    switch (key) {
    case OPT_ALL:
        o->o.all = 1;
        o->o.nlocate = -1;
        break;
    case OPT_LOCATE:
        o->o.nlocate = (int)dp_option_number(st, "locate", arg, 0, 1000000);
        o->o.nlocate = o->o.nlocate ? o->o.nlocate : -1;
        break;
    case ARGP_KEY_END:
        if (o->kernels && (o->of.nname || o->o.all))
            argp_error(st, "--kernels has a list of problems of its own");
        if (!o->kernels && o->fault && dp_fault_find(o->fault) < 1)
            argp_error(st, "--fault %s: not known (see list --faults)", o->fault);
        if (!o->kernels && o->fault) o->o.only = (dp_fault)dp_fault_find(o->fault);
        break;
    default: return dp_option(key, arg, st, &o->of);
    }
    return 0;
}

static const struct argp_option OPTIONS[] = {
    DP_ROW_CASES,
    DP_ROW("all", OPT_ALL, 0,
           "every case, base, chain and merge order, every red run located (hours); default: "
           "generated cases, bases fp32 and bf16"),
    DP_FLAG(
        "kernels", kernels,
        "the faults of the CUDA kernels instead (gpu/fault.cuh), in a build that has them; --out "
        "writes kernels.json"),
    DP_TEXT("fault", fault, "NAME,..", "these faults only"),
    DP_ROW("locate", OPT_LOCATE, "CASES",
           "cases in which a red run of each fault is localised (default 3; 0: every case)"),
    DP_TEXT("out", out, "DIR", "write museum.json there; `deltaproof report DIR` then shows it"),
    DP_ROW_CACHE,
    {0}};

static int refuse(const dp_err *e) {
    fprintf(stderr, "deltaproof: museum: %s\n", e->msg);
    return 2;
}

static int status(const options *o, const dp_museum *m) {
    int unseen = 0;
    for (int f = 1; f < DP_NFAULTS; f++)
        unseen += (!o->o.only || (int)o->o.only == f) && !m->row[f].red;
    return m->clean_red || unseen ? 1 : 0;
}

/* In the folder of --out; NULL: there is none. */
static char *file_of(const options *o, const char *name) {
    char *path = NULL;
    if (o->out && asprintf(&path, "%s/%s", o->out, name) < 0) abort();
    return path;
}

static int kernels(const options *o) {
    DP_OWN dp_kernel_museum *m = dp_calloc(1, sizeof *m);
    dp_err e = {0};
    DP_OWN char *file = file_of(o, "kernels.json");
    if (file && dp_output_check(file, &e)) return refuse(&e);
    const dp_status st =
        dp_kernel_museum_run(dp_options_folder(&o->of), o->of.cache, o->fault, m, &e);
    int rc = st ? refuse(&e) : dp_kernel_museum_unseen(m) ? 1 : 0;
    if (!st) dp_kernel_museum_print(m, stdout);
    if (!st && file) {
        if (dp_kernel_museum_write(m, file, &e))
            rc = refuse(&e);
        else
            printf("record: %s\n", file);
    }
    return rc;
}

/* The command's cases, or all, with those of folder museum, which other commands leave out. */
static void find_cases(const options *o, char ***paths, int *n, dp_err *e) {
    char *folder = NULL, **more = NULL;
    int k = 0;
    if (dp_options_cases(&o->of, paths, n, e) || o->of.nname) return;
    if (asprintf(&folder, "%s/museum", dp_options_folder(&o->of)) < 0) abort();
    if (!access(folder, F_OK) && !dp_case_find_all(folder, &more, &k, e)) {
        *paths = dp_realloc(*paths, sizeof **paths * (size_t)(*n + k));
        memcpy(*paths + *n, more, sizeof *more * (size_t)k);
        *n += k;
        free(more);
    }
    free(folder);
}

int dp_cmd_museum(int argc, char **argv) {
    options o = {.of = dp_options_new(0, 256), .o = {.nlocate = 3, .quiet = !isatty(2)}};
    const struct argp a = {.options = OPTIONS,
                           .parser = parse,
                           .args_doc = "[CASE...]",
                           .doc = "Switch every deliberate fault on, run the cases, and say which "
                                  "verdict goes red and where it points."
                                  "\vExit status 0 every fault was seen, 1 one was not or a run "
                                  "without a fault was red, 2 could not run."};
    dp_err e = {0};
    char **paths = NULL, *file;
    int n = 0;
    dp_parse(&a, argc, argv, &o);
    o.o.cache = o.of.cache;
    if (o.out && dp_make_dirs(o.out)) {
        fprintf(stderr, "deltaproof: museum: --out %s: %s\n", o.out, strerror(errno));
        return 2;
    }
    if (o.kernels) return kernels(&o);
    file = file_of(&o, "museum.json");
    if (file) dp_output_check(file, &e);
    if (!e.code) find_cases(&o, &paths, &n, &e);
    if (e.code) {
        free(file);
        return refuse(&e);
    }
    DP_OWN dp_museum *m = dp_calloc(1, sizeof *m);
    dp_status st = dp_museum_run(paths, n, &o.o, m, &e);
    int rc = st ? refuse(&e) : status(&o, m);
    if (!st) dp_museum_print(m, &o.o, stdout);
    if (!st && file) {
        if (dp_museum_write(m, file, &e))
            rc = refuse(&e);
        else
            printf("record: %s\n", file);
    }
    dp_free_list(paths, n);
    free(file);
    return rc;
}
