/* The commands that write one case as one file, with exit status 0 written, 2 not.
 *   deltaproof truth CASE -o FILE    its truth with radii
 *   deltaproof inputs CASE -o FILE   its inputs, for a program that computes elsewhere */
#include "commands.h"
#include "harness/library/tensor_files.h"
#include "harness/record/run.h"
#include "harness/run/judge.h"
#include "options.h"
#include "ref/files/output.h"
#include "ref/files/safetensors.h"
#include "ref/inputs/inputs.h"
#include "ref/truth/truth.h"

#include <argp.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* ---- one case, written as one file ----------------------------------------------------------- */

/* The factors of a chain of M. */
static dp_status write_factors(const dp_case *c, const char *path, dp_err *e) {
    const int64_t shape[3] = {c->ch.n, c->ch.K, c->ch.K}, n = shape[0] * shape[1] * shape[2];
    DP_FREED(dp_tensorfile_free) dp_tensorfile f = {0};
    DP_OWN float *m = dp_calloc((size_t)n, sizeof *m);
    DP_OWN double *x = dp_doubles(n), *mu = dp_doubles(c->ch.n);
    dp_inputs_chain(c->ch.regime, c->ch.n, c->ch.K, c->spec.seed, m, mu);
    for (int64_t i = 0; i < n; i++)
        x[i] = m[i];
    dp_tensorfile_add(&f, "factors", "F32", 3, shape, x);
    dp_tensorfile_add_meta(&f, "case", c->name);
    return dp_safetensors_write(path, &f, e);
}

/* Loads the case that is named and has it written. Op chain: the factors, fp32, for a kernel that
 * multiplies them elsewhere; a recurrence by `write`; other ops are refused. The exit status. */
static int write_case(const char *command, const dp_options *o,
                      dp_status (*write)(const dp_case *c, void *arg, dp_err *e), void *arg) {
    dp_err e = {0};
    dp_case c;
    if (o->nname != 1 || !o->output) {
        fprintf(stderr, "deltaproof: %s: name one case and an output file (-o FILE.safetensors)\n",
                command);
        return 2;
    }
    if (dp_output_check(o->output, &e)) return dp_refuse(&e);
    DP_OWN char *path = dp_case_path(dp_options_folder(o), o->name[0]);
    if (!dp_case_load(path, &c, &e)) {
        if (c.rows) dp_user_recurrence_install(c.rows); /* its names are the file's */
        if (c.op->has_factors)
            write_factors(&c, o->output, &e);
        else if (!c.op->is_recurrence)
            dp_fail(&e, DP_EINPUT, "%s: %s: op = %s has no recurrence", command, path, c.op_name);
        else
            write(&c, arg, &e);
        dp_case_free(&c);
    }
    return e.code ? dp_refuse(&e) : 0;
}

/* ---- inputs ---------------------------------------------------------------------------------- */

static dp_status write_inputs(const dp_case *c, void *arg, dp_err *e) {
    const dp_options *o = arg;
    return dp_judge_write_inputs(c, o->output, e);
}

int dp_cmd_inputs(int argc, char **argv) {
    static const struct argp_option rows[] = {DP_ROW_CASES, DP_ROW_SAFETENSORS, {0}};
    dp_options o = dp_options_new(1, 1);
    const struct argp a = {
        .options = rows,
        .parser = dp_option_alone,
        .args_doc = "CASE -o FILE",
        .doc = "Write the inputs of a case as `judge --inputs` reads them, for a program that "
               "computes elsewhere. Op chain: its factors, fp32."};
    dp_parse(&a, argc, argv, &o);
    return write_case("inputs", &o, write_inputs, &o);
}

/* ---- truth ----------------------------------------------------------------------------------- */

typedef struct {
    dp_options of;
    int bits;               /* 0: the case's */
    dp_judge_options judge; /* of files of inputs: where they are, and their settings */
} options;

enum { OPT_BITS = 256 };

static const struct argp_option OPTIONS[] = {
    DP_ROW_CASES,
    DP_ROW_SAFETENSORS,
    DP_ROW("bits", OPT_BITS, "N", "MPFR precision (default: the case's)"),
    DP_TEXT("inputs", judge.inputs, "IN", "safetensors file of inputs, in place of a case"),
    DP_TEXT("gate", judge.gate, "FORM", "with --inputs: " DP_GATE_WORDS),
    DP_ROW_TRUTH,
    DP_ROW_CACHE,
    {0}};

static error_t parse(int key, char *arg, struct argp_state *st) {
    options *o = st->input;
    switch (key) {
    case OPT_BITS: o->bits = (int)dp_option_number(st, "bits", arg, 64, 4096); break;
    default: return dp_option(key, arg, st, &o->of);
    }
    return 0;
}

static void print_note(const dp_truth *t, const dp_truth_note *note) {
    printf("truth: %s, %d bits", dp_truth_kind_names[t->kind], t->bits);
    if (note->device)
        printf(", on %s", note->device);
    else if (note->cached)
        printf(", from the cache");
    if (note->audit.columns)
        printf("; audited by MPFR: %d columns, %lld tokens, largest difference %.2g of both radii",
               note->audit.columns, (long long)note->audit.tokens, note->audit.worst);
    printf("\n");
}

static void add_ball(dp_tensorfile *f, const dp_problem *p, int result, const dp_ball *b) {
    const dp_tensor_field *field = &dp_result_fields[result];
    int64_t shape[DP_MAX_AXES];
    const int ndim = dp_file_shape(p, field, shape);
    char n[64];
    if (!b->rows) return;
    dp_tensorfile_add(f, field->name, "F64", ndim, shape, b->hi);
    snprintf(n, sizeof n, "%s" DP_TRUTH_LOW, field->name);
    dp_tensorfile_add(f, n, "F64", ndim, shape, b->lo);
    snprintf(n, sizeof n, "%s" DP_TRUTH_RADIUS, field->name);
    dp_tensorfile_add(f, n, "F64", 1, &b->rows, b->rad);
}

static dp_status write_tensors(const dp_case *c, const dp_truth *t, const char *path, dp_err *e) {
    DP_FREED(dp_tensorfile_free) dp_tensorfile f = {0};
    char bits[16];
    snprintf(bits, sizeof bits, "%d", t->bits);
    for (int i = 0; i < DP_NRESULTS; i++)
        add_ball(&f, &c->p, i, &t->field[i]);
    dp_tensorfile_add_meta(&f, "producer", argp_program_version);
    dp_tensorfile_add_meta(&f, "case", c->name);
    dp_tensorfile_add_meta(&f, "truth", dp_truth_kind_names[t->kind]);
    dp_tensorfile_add_meta(&f, "bits", bits);
    dp_tensorfile_add_meta(&f, "value",
                           "name + name" DP_TRUTH_LOW ", within name" DP_TRUTH_RADIUS
                           " in the 2-norm of each row");
    return dp_safetensors_write(path, &f, e);
}

static dp_status write_truth(const dp_case *c, void *arg, dp_err *e) {
    const options *o = arg;
    const dp_truth_pick pick = o->of.has_truth ? o->of.truth : c->truth;
    dp_truth t;
    dp_truth_note note;
    int ncut;
    DP_OWN int64_t *cut = dp_case_cuts(c, &ncut);
    const dp_truth_request rq = {.bits = o->bits ? o->bits : c->bits,
                                 .backward = c->backward,
                                 .ncut = ncut,
                                 .cut = cut,
                                 .want_M = ncut > 0,
                                 .progress = isatty(2)};
    dp_status st = dp_case_truth(c, rq, pick, o->of.cache, &t, &note, e);
    if (st) return st;
    print_note(&t, &note);
    st = write_tensors(c, &t, o->of.output, e);
    dp_truth_free(&t);
    return st;
}

/* Writes the truth of a file of inputs; returns the exit status. */
static int of_inputs(options *o) {
    dp_case c;
    dp_err e = {0};
    if (!o->of.output) {
        fputs("deltaproof: truth: give -o FILE\n", stderr);
        return 2;
    }
    if (dp_output_check(o->of.output, &e)) return dp_refuse(&e);
    if (dp_judge_load_inputs(&o->judge, &c, &e)) return dp_refuse(&e);
    const dp_status s = write_truth(&c, o, &e);
    dp_case_free(&c);
    return s ? dp_refuse(&e) : 0;
}

int dp_cmd_truth(int argc, char **argv) {
    options o = {.of = dp_options_new(1, 1)};
    const struct argp a = {
        .options = OPTIONS,
        .parser = parse,
        .args_doc = "CASE -o FILE\n--inputs IN -o FILE",
        .doc =
            "Write the truth of a case, or of a file of inputs: every tensor as NAME (fp64, in the "
            "shape that judge reads), NAME.lo and NAME.radius (one a row). "
            "Op chain: its factors, fp32."};
    dp_parse(&a, argc, argv, &o);
    if (o.judge.inputs) return of_inputs(&o);
    return write_case("truth", &o.of, write_truth, &o);
}
