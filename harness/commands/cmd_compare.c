/* deltaproof compare: two records side by side, or the errors of many over their dates. Becomes
 * reports/compare.py, which says what is compared and what is worse. */
#include "commands.h"
#include "options.h"
#include "write_record.h"

#include <argp.h>

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

/* The script reads the values. */
static error_t parse(int key, DP_UNUSED char *arg, DP_UNUSED struct argp_state *st) {
    return key == ARGP_KEY_ARG || key == 'v' || (key >= OPT_AGAIN && key <= OPT_HISTORY)
               ? 0
               : ARGP_ERR_UNKNOWN;
}

int dp_cmd_compare(int argc, char **argv) {
    const struct argp a = {.options = OPTIONS,
                           .parser = parse,
                           .args_doc = "OLD NEW\n--history OUT.html RECORD...",
                           .doc = "Compare two records: what moved, by how much against run-to-run "
                                  "noise, which verdicts changed.\v"
                                  "A record is a results.json or the folder that holds it. Exit "
                                  "status 0 nothing worse, 1 worse, 2 they cannot be compared."};
    dp_old_outputs_expect(argc, argv);
    dp_parse(&a, argc, argv, NULL);
    return dp_script_become("reports/compare.py", argv + 1);
}
