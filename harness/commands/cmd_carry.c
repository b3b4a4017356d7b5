/* deltaproof carry CASE...: how long a session may keep its state in a short format. It prints the
 * error over steps in every format, against the bounds of storing. Exit status 0: every error is
 * within its sound bound, 1: one is not, 2: could not run. */
#include "commands.h"
#include "harness/case/case.h"
#include "options.h"
#include "ref/arithmetic/elementary.h"
#include "ref/bound/carried.h"
#include "ref/files/output.h"
#include "ref/vocabulary/text.h"
#include "write_record.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    dp_options of;
    dp_carried_options c;
    int head; /* -1: all */
} options;

enum { OPT_STEPS = 256, OPT_EVERY, OPT_NEED, OPT_HEAD };

static const struct argp_option OPTIONS[] = {
    DP_ROW_CASES,
    DP_ROW(
        "steps", OPT_STEPS, "N",
        "tokens to compute (default: 100000); after the case's last token comes its first again"),
    DP_ROW("every", OPT_EVERY, "N",
           "steps of one call: the state is stored after each (default: 1)"),
    DP_ROW("need", OPT_NEED, "E",
           "largest error of o, relative to the rms of its rows so far (default: 0.01)"),
    DP_ROW("head", OPT_HEAD, "N", "one head (default: the worst of all)"),
    DP_ROW_JSON_OF("points of all heads; -: standard output"),
    {0}};

static error_t parse(int key, char *arg, struct argp_state *st) {
    options *o = st->input;
    switch (key) {
    case OPT_STEPS: o->c.steps = dp_option_number(st, "steps", arg, 1, 1000000000); break;
    case OPT_EVERY: o->c.every = (int)dp_option_number(st, "every", arg, 1, 1000000); break;
    case OPT_HEAD: o->head = (int)dp_option_number(st, "head", arg, 0, 1 << 20); break;
    case OPT_NEED:
        if (dp_number_real(arg, 0, 1e9, &o->c.need) != DP_NUMBER_OK || o->c.need == 0)
            argp_error(st, "--need %s: must be above 0", arg);
        break;
    case ARGP_KEY_END:
        if (!o->of.nname) argp_error(st, "name a case");
        break;
    default: return dp_option(key, arg, st, &o->of);
    }
    return 0;
}

static json_t *numbers(const double *x, int n) {
    json_t *list = json_array();
    for (int i = 0; i < n; i++)
        json_array_append_new(list, isfinite(x[i]) ? json_real(x[i]) : json_null());
    return list;
}

static json_t *json_of(const char *name, const options *o, const dp_carried *r) {
    json_t *steps = json_array();
    for (int i = 0; i < r->n; i++)
        json_array_append_new(steps, json_integer(r->step[i]));
    json_t *x =
        json_pack("{ss ss si sI si sf so so so so sI}", "case", name, "format",
                  dp_carried_formats[r->format].name, "head", r->head, "steps",
                  (json_int_t)o->c.steps, "every", o->c.every, "need", o->c.need, "step", steps,
                  "error", numbers(r->error, r->n), "sound", numbers(r->sound, r->n), "probable",
                  numbers(r->probable, r->n), "exceeded", (json_int_t)r->exceeded);
    const struct {
        const char *key;
        double value;
    } more[] = {{"largest_o", r->largest_o},
                {"of_sound", r->of_sound},
                {"of_probable", r->of_probable},
                {"slope", r->slope},
                {"bias", r->bias}};
    for (size_t i = 0; i < sizeof more / sizeof *more; i++)
        json_object_set_new(x, more[i].key,
                            isfinite(more[i].value) ? json_real(more[i].value) : json_null());
    return x;
}

/* Compares two heads in one format; the worse one represents it. */
static int worse(const dp_carried *a, const dp_carried *b) {
    if (!a->exceeded != !b->exceeded) return a->exceeded != 0;
    if (a->exceeded != b->exceeded) return a->exceeded < b->exceeded;
    return a->largest_o > b->largest_o;
}

static void print_row(const options *o, const dp_carried *r) {
    const dp_carried_format *f = &dp_carried_formats[r->format];
    char until[32];
    if (r->exceeded)
        snprintf(until, sizeof until, "%lld", (long long)r->exceeded - 1);
    else
        snprintf(until, sizeof until, "all %lld", (long long)o->c.steps);
    fprintf(dp_options_table(&o->of),
            "%-7s %5.2f %5d %9.2g %9.2g %6.1f %6.2f %6.2f %8.2g %8.2g  %s\n", f->name, f->bytes,
            r->head, r->n ? r->error[r->n - 1] : NAN, r->largest_o,
            r->n && r->error[r->n - 1] > 0 ? -dp_log(r->error[r->n - 1]) * 0x1.71547652b82fep0
                                           : INFINITY,
            r->slope, r->bias, r->of_sound, r->of_probable, until);
}

static dp_status carry_case(const dp_case *c, const options *o, json_t *list, int *broken,
                            dp_err *e) {
    const dp_problem *p = &c->p;
    const int first = o->head < 0 ? 0 : o->head, n = o->head < 0 ? p->HV : 1;
    DP_OWN dp_carried *r = dp_calloc((size_t)n * DP_NCARRIED, sizeof *r);
    dp_status st = DP_OK;
#pragma omp parallel for schedule(dynamic)
    for (int i = 0; i < n * DP_NCARRIED; i++) {
        dp_err own = {0};
        const dp_status one =
            dp_carried_run(p, first + i / DP_NCARRIED, i % DP_NCARRIED, &o->c, &r[i], &own);
#pragma omp critical
        if (one && !st) {
            st = one;
            *e = own;
        }
    }
    if (!st) {
        fprintf(dp_options_table(&o->of),
                "%s: %lld steps of %lld tokens, K = %d, V = %d, the state stored after every %d\n"
                "format  bytes  head  error S   error o   bits  slope   bias  /sound    /prob.  "
                "o within %g for\n",
                c->name, (long long)o->c.steps, (long long)(p->cu[1] - p->cu[0]), p->K, p->V,
                o->c.every, o->c.need);
        for (int f = 0; f < DP_NCARRIED; f++) {
            const dp_carried *worst = &r[f];
            for (int h = 0; h < n; h++) {
                const dp_carried *x = &r[h * DP_NCARRIED + f];
                if (worse(x, worst)) worst = x;
                *broken += x->of_sound > 1;
                json_array_append_new(list, json_of(c->name, o, x));
            }
            print_row(o, worst);
        }
    }
    return st;
}

static dp_status carry_file(const char *path, const options *o, json_t *list, int *broken,
                            dp_err *e) {
    DP_FREED(dp_case_free) dp_case c;
    dp_status st = dp_case_load(path, &c, e);
    if (st) return st;
    if (!c.op->is_recurrence)
        st = dp_fail(e, DP_EINPUT, "%s: op = %s: only a recurrence carries a state", path,
                     c.op_name);
    else if (c.allow_nonfinite)
        st = dp_fail(e, DP_EINPUT, "%s: nonfinite = allow: errors of NaN say nothing", path);
    else if (o->head >= c.p.HV)
        st = dp_fail(e, DP_EINPUT, "%s: HV = %d: there is no --head %d", path, c.p.HV, o->head);
    if (!st) st = carry_case(&c, o, list, broken, e);
    return st;
}

int dp_cmd_carry(int argc, char **argv) {
    options o = {
        .of = dp_options_new(1, 64), .c = {.steps = 100000, .every = 1, .need = 0.01}, .head = -1};
    const struct argp a = {
        .options = OPTIONS,
        .parser = parse,
        .args_doc = "CASE...",
        .doc = "How long may a session keep its state in a short format? The recurrence runs token "
               "by token, beside copies of its state that are stored in fp32, bf16, fp16, fp8 or "
               "int8 between calls (ref/bound/carried.h).\vExit status 0 every error is "
               "within its sound bound, 1 one is not, 2 could not run."};
    dp_err e = {0};
    int rc = 0, broken = 0;
    dp_parse_writing(&a, argc, argv, &o);
    if (dp_output_check(o.of.json, &e)) return dp_refuse(&e);
    json_t *list = json_array();
    for (int i = 0; i < o.of.nname && !rc; i++) {
        DP_OWN char *path = dp_case_path(dp_options_folder(&o.of), o.of.name[i]);
        if (carry_file(path, &o, list, &broken, &e)) rc = dp_refuse(&e);
    }
    if (dp_json_write(list, o.of.json, 17, &e)) rc = dp_refuse(&e);
    if (!rc && broken)
        fprintf(dp_options_table(&o.of), "CARRY: %d errors beyond their sound bounds\n", broken);
    return rc ? rc : broken > 0;
}
