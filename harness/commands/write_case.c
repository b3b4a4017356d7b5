/* Loads the case that a command writes, and writes the factors of a chain (write_case.h). */
#include "write_case.h"
#include "commands.h"
#include "ref/files/safetensors.h"
#include "ref/inputs/inputs.h"

#include <stdio.h>
#include <stdlib.h>

/* The factors of a chain of M. */
static dp_status write_factors(const dp_case *c, const char *path, dp_err *e) {
    const int64_t shape[3] = {c->ch.n, c->ch.K, c->ch.K}, n = shape[0] * shape[1] * shape[2];
    dp_tensorfile f = {0};
    float *m = dp_calloc((size_t)n, sizeof *m);
    double *x = dp_doubles(n), *mu = dp_doubles(c->ch.n);
    dp_inputs_chain(c->ch.regime, c->ch.n, c->ch.K, c->spec.seed, m, mu);
    for (int64_t i = 0; i < n; i++)
        x[i] = m[i];
    dp_tensorfile_add(&f, "factors", "F32", 3, shape, x);
    dp_tensorfile_add_meta(&f, "case", c->name);
    const dp_status st = dp_safetensors_write(path, &f, e);
    dp_tensorfile_free(&f);
    free(m);
    free(x);
    free(mu);
    return st;
}

int dp_write_case_usage(const char *command, const dp_options *o) {
    if (o->nname == 1 && o->output) return 0;
    fprintf(stderr, "deltaproof: %s: name one case and an output file (-o FILE.safetensors)\n",
            command);
    return 2;
}

int dp_write_case(const char *command, const dp_options *o,
                  dp_status (*write)(const dp_case *c, void *arg, dp_err *e), void *arg) {
    dp_err e = {0};
    dp_case c;
    char *path = dp_case_path(dp_options_folder(o), o->name[0]);
    if (!dp_case_load(path, &c, &e)) {
        if (dp_op_of(&c)->has_factors)
            write_factors(&c, o->output, &e);
        else if (!dp_op_of(&c)->is_recurrence)
            dp_fail(&e, DP_EINPUT, "%s: %s: op = %s has no recurrence", command, path, c.op_name);
        else
            write(&c, arg, &e);
        dp_case_free(&c);
    }
    free(path);
    return e.code ? dp_refuse(&e) : 0;
}
