/* deltaproof museum [CASE...]: every deliberate fault against the cases. Becomes reports/museum.py,
 * which runs this program and says what is seen, located, and written. */
#include "commands.h"
#include "options.h"
#include "write_record.h"

#include <argp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_WORDS = 400, OPT_ALL = 256, OPT_LAST = OPT_ALL + 5 };
static const struct argp_option OPTIONS[] = {
    DP_ROW_CASES,
    DP_ROW("all", OPT_ALL, 0,
           "every case, base, chain and merge order, every red run located (hours); default: "
           "generated cases, bases fp32 and bf16"),
    DP_ROW(
        "kernels", OPT_ALL + 1, 0,
        "the faults of the CUDA kernels instead (gpu/fault.cuh), in a build that has them; --out "
        "writes kernels.json"),
    DP_ROW("fault", OPT_ALL + 2, "NAME,..", "these faults only"),
    DP_ROW("locate", OPT_ALL + 3, "CASES",
           "cases in which a red run of each fault is localised (default 3; 0: every case)"),
    DP_ROW("shrink", OPT_ALL + 4, "DIR",
           "then shrink the largest case that shows each fault, and write it there"),
    DP_ROW("out", OPT_LAST, "DIR",
           "write museum.json there; `deltaproof report DIR` then shows it"),
    DP_ROW_CACHE,
    {0}};

/* The script reads the values. */
static error_t parse(int key, char *arg, struct argp_state *st) {
    dp_options unread = {.most = MOST_WORDS};
    return key == ARGP_KEY_ARG || (key >= OPT_ALL && key <= OPT_LAST)
               ? 0
               : dp_option(key, arg, st, &unread);
}

/* The file of an earlier museum, where this one writes; NULL: none. */
static char *old_file(int argc, char **argv) {
    const char *out = dp_argument("--out", argc, argv), *name = "museum";
    char *path = NULL;
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "--kernels")) name = "kernels";
    if (out && asprintf(&path, "%s/%s.json", out, name) < 0) abort();
    return path;
}

static void at_end(int status, void *file) {
    if (status && file) unlink(file);
}

int dp_cmd_museum(int argc, char **argv) {
    const struct argp a = {.options = OPTIONS,
                           .parser = parse,
                           .args_doc = "[CASE...]",
                           .doc = "Switch every deliberate fault on, run the cases, and say which "
                                  "verdict goes red and where it points."
                                  "\vExit status 0 every fault was seen, 1 one was not or a run "
                                  "without a fault was red, 2 could not run."};
    char *file = old_file(argc, argv);
    on_exit(at_end, file);
    dp_parse(&a, argc, argv, NULL);
    at_end(1, file);
    return dp_script_with_self("reports/museum.py", argv);
}
