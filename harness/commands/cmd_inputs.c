/* deltaproof inputs CASE -o FILE: the inputs of a case for a program that computes elsewhere. Exit
 * status 0 written, 2 not. */
#include "commands.h"
#include "harness/run/judge.h"
#include "options.h"
#include "parse.h"
#include "ref/files/output.h"
#include "write_case.h"

#include <argp.h>

static const struct argp_option OPTIONS[] = {DP_ROW_CASES, DP_ROW_SAFETENSORS, {0}};

static error_t parse(int key, char *arg, struct argp_state *st) {
    return dp_option(key, arg, st, st->input);
}

static dp_status write_inputs(const dp_case *c, void *arg, dp_err *e) {
    const dp_options *o = arg;
    return dp_judge_write_inputs(c, o->output, e);
}

int dp_cmd_inputs(int argc, char **argv) {
    dp_options o = dp_options_new(1, 1);
    dp_err e = {0};
    const struct argp a = {
        .options = OPTIONS,
        .parser = parse,
        .args_doc = "CASE -o FILE",
        .doc = "Write the inputs of a case as `judge --inputs` reads them, for a program that "
               "computes elsewhere. Op chain: its factors, fp32."};
    dp_parse(&a, argc, argv, &o);
    if (o.output && dp_output_check(o.output, &e)) return dp_refuse(&e);
    if (dp_write_case_usage("inputs", &o)) return 2;
    return dp_write_case("inputs", &o, write_inputs, &o);
}
