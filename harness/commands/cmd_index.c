/* deltaproof index FOLDER: FOLDER/index.html over all records below it (reports/index.py). Exit
 * status 0 made, 2 not. */
#include "commands.h"
#include "harness/base/home.h"
#include "options.h"
#include "parse.h"

#include <argp.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const struct argp_option OPTIONS[] = {{0}};

static error_t parse(int key, char *arg, struct argp_state *st) {
    return dp_option(key, arg, st, st->input);
}

int dp_cmd_index(int argc, char **argv) {
    dp_options o = dp_options_new(1, 1);
    const struct argp a = {.options = OPTIONS,
                           .parser = parse,
                           .args_doc = "FOLDER",
                           .doc =
                               "Make FOLDER/index.html, a page over every results.json below "
                               "FOLDER: by kernel and machine, with verdicts, trends and links."};
    dp_parse(&a, argc, argv, &o);
    if (o.nname != 1) {
        fprintf(stderr, "deltaproof: index: name one folder\n");
        return 2;
    }
    const char *python = dp_python(), *script = dp_home("reports/index.py");
    fflush(stdout);
    execlp(python, python, DP_PYTHON_ISOLATED, script, "--", o.name[0], (char *)NULL);
    fprintf(stderr, "deltaproof: cannot start %s: %s\n", python, strerror(errno));
    return 2;
}
