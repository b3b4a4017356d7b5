/* deltaproof report DIR: the page and figures of a record, again. Exit status 0 made, 2 not. */
#include "commands.h"
#include "options.h"
#include "parse.h"
#include "report_page.h"

#include <argp.h>
#include <stdio.h>

static const struct argp_option OPTIONS[] = {{0}};

static error_t parse(int key, char *arg, struct argp_state *st) {
    return dp_option(key, arg, st, st->input);
}

int dp_cmd_report(int argc, char **argv) {
    dp_options o = dp_options_new(1, 1);
    const struct argp a = {.options = OPTIONS,
                           .parser = parse,
                           .args_doc = "DIR",
                           .doc = "Make DIR/report.html and figures from DIR/results.json."};
    dp_parse(&a, argc, argv, &o);
    if (o.nname != 1) {
        fprintf(stderr, "deltaproof: report: name the folder of one record\n");
        return 2;
    }
    if (dp_report_page(o.name[0])) return 2;
    printf("report: %s/report.html\n", o.name[0]);
    return 0;
}
