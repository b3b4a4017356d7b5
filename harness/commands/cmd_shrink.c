/* deltaproof shrink CASE: the smallest input that still fails for the same reason (shrink.h), as a
 * new case file. Exit status 0: written. 2: nothing fails, or bad input. */
#include "commands.h"
#include "harness/search/bisect.h"
#include "harness/search/shrink.h"
#include "options.h"
#include "ref/files/output.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    dp_options of;
    FILE *log;
} options;

static const struct argp_option OPTIONS[] = {
    DP_ROWS_ONE_RUN,
    DP_ROW_MEMORY,
    DP_ROW_CACHE,
    DP_ROW_SUBJECT(
        "shrink the failure of a kernel in a shared library (harness/deltaproof_subject.h)"),
    DP_ROWS_PROGRAM,
    DP_ROW_DESIGN,
    DP_ROW_TRIES("stop after so many tried problems (default: 20000)"),
    DP_ROW_SECONDS("stop after so many seconds, and write the smallest so far"),
    DP_ROW("output", DP_OPT_OUTPUT, "FILE", "case file to write (default: CASE.min.case here)"),
    {"outputs", DP_OPT_OUTPUTS, "FILE", OPTION_HIDDEN, "", 0},
    {0}};

static error_t parse(int key, char *arg, struct argp_state *st) {
    options *o = st->input;
    switch (key) {
    case DP_OPT_OUTPUTS:
        argp_error(st, "--outputs: numbers in a file cannot be computed again for a smaller input; "
                       "give the program as a shared library (--subject) or as a command (--run)");
        break;
    case ARGP_KEY_END:
        if (!o->of.nname) argp_error(st, "name a case");
        if (dp_options_foreign(&o->of) && o->of.fault)
            argp_error(st, "--fault goes with the simulated ranks, not with --subject, --run and "
                           "--serve");
        if (dp_options_idle_design(&o->of)) argp_error(st, DP_IDLE_DESIGN);
        break;
    default: return dp_option(key, arg, st, &o->of);
    }
    return 0;
}

static void on_step(const char *what, DP_UNUSED const dp_case *c, DP_UNUSED int ranks,
                    int64_t numbers, int tries, void *arg) {
    const options *o = arg;
    if (o->log) {
        fprintf(o->log, "  %-52s %9lld numbers  %5d tried\n", what, (long long)numbers, tries);
        fflush(o->log);
    }
}

static dp_shrink_options request(const options *o, const dp_case *c, const dp_subject *s) {
    return (dp_shrink_options){.run = dp_options_one(&o->of, c, s),
                               .subject = s,
                               .limit_s = o->of.limit_s,
                               .max_tries = o->of.tries ? o->of.tries : 20000,
                               .max_s = o->of.seconds,
                               .cache = o->of.cache,
                               .step = on_step,
                               .arg = (void *)o};
}

static char *command_of(const options *o, const dp_case *c, const dp_shrink_options *r) {
    DP_OWN char *subject = dp_options_again_text(&o->of, 1);
    return dp_text_new("deltaproof shrink %s --ranks %d --base %s --chain %s --exchange %s"
                       "%s%s%s%s%s",
                       c->name, r->run.N, dp_base_names[r->run.base], dp_formats[r->run.chain].name,
                       dp_exchange_names[r->run.merge], r->run.payload ? " --payload " : "",
                       r->run.payload ? dp_payload_names[r->run.payload] : "",
                       r->run.fault ? " --fault " : "",
                       r->run.fault ? dp_faults[r->run.fault].name : "", subject);
}

/* The written file is read again and must fail for the same reason. */
static dp_status write_and_check(const options *o, const dp_case *c, const dp_shrink_options *r,
                                 dp_shrunk *s, const char *path, dp_err *e) {
    DP_OWN char *source = command_of(o, c, r);
    char why[256], reason[1024];
    dp_failure f;
    DP_FREED(dp_case_free) dp_case again = {0};
    dp_failure_text(&s->after, why, sizeof why);
    snprintf(reason, sizeof reason,
             "The smallest part of %.255s (%lld of its %lld numbers) that fails for the same "
             "reason: %.200s.",
             c->name, (long long)(dp_shrunk_by_laws(s) ? s->law_numbers : s->numbers),
             (long long)s->numbers_before, why);
    dp_status st = dp_shrunk_write(s, reason, source, path, e);
    if (st || (st = dp_case_load(path, &again, e))) return st;
    const dp_shrink_options now = {
        .run.fault = r->run.fault, .subject = r->subject, .limit_s = r->limit_s};
    st = dp_failure_of(&again, &now, s->before.kind == DP_FAILS_UNSTEADY ? DP_BISECT_RUNS : 1, 1,
                       &f, e);
    if (!st && !dp_failure_same(&s->before, &f))
        st = dp_fail(e, DP_EIO, "%s: read again it does not fail as before", path);
    return st;
}

static int shrink(options *o, dp_case *c, const dp_subject *lib, dp_err *e) {
    const dp_shrink_options r = request(o, c, lib);
    dp_shrunk s;
    char text[256];
    DP_OWN char *path =
        o->of.output ? dp_strdup(o->of.output) : dp_text_new("%s.min.case", c->name);
    if (strlen(path) < 6 || strcmp(path + strlen(path) - 5, ".case"))
        dp_fail(e, DP_EINPUT, "%s: the name of a case file ends in .case", path);
    if (e->code || dp_output_check(path, e)) return 2;
    o->log = stdout;
    if (!c->op->shrinks) {
        dp_shrink(c, &r, &s, e);
        return 2;
    }
    c->op->describe(c, r.run.N, text, sizeof text);
    printf("%s: %s, base %s, chain %s%s%s: %lld numbers\n", c->name, text,
           dp_base_names[r.run.base], dp_formats[r.run.chain].name, r.run.fault ? ", fault " : "",
           r.run.fault ? dp_faults[r.run.fault].name : "", (long long)dp_case_numbers(c, NULL));
    fflush(stdout);
    dp_status st = dp_shrink(c, &r, &s, e);
    if (!st) {
        st = write_and_check(o, c, &r, &s, path, e);
        c->op->describe(&s.c, s.c.ranks[0], text, sizeof text);
        if (!st)
            printf("%s\n%lld numbers, %lld of them not zero: %.4gx smaller, %d problems tried\n",
                   text, (long long)s.numbers, (long long)s.nonzero,
                   (double)s.numbers_before / (double)s.numbers, s.tries);
        dp_failure_text(&s.before, text, sizeof text);
        if (!st) printf("before: %s%s\n", text, s.before.red ? "; the run fails" : "");
        dp_failure_text(&s.after, text, sizeof text);
        if (!st)
            printf("after:  %s%s\nwritten: %s%s\n", text, s.after.red ? "; the run fails" : "",
                   path,
                   dp_shrunk_by_laws(&s) ? ", by its laws, since those numbers fit no text" : "");
        dp_shrink_free(&s);
    }
    return st ? 2 : 0;
}

int dp_cmd_shrink(int argc, char **argv) {
    const struct argp a = {
        .options = OPTIONS,
        .parser = parse,
        .args_doc = "CASE",
        .doc = "Find the smallest case that still fails for the same reason: the same stage and "
               "tensor by `bisect stage`, and the run's verdict if that failed. Ranks, tokens, "
               "heads, sequences, K, V, tensors and values are removed; the rest is written as a "
               "case file.\vExit status 0 written, 2 nothing fails or bad input."};
    options o = {.of = dp_options_new(1, 1)};
    dp_err e = {0};
    dp_case c;
    dp_subject lib;
    int rc = 2;
    dp_parse(&a, argc, argv, &o);
    const int foreign = dp_options_foreign(&o.of);
    if (!foreign || !dp_options_open(&o.of, &lib, &e)) {
        DP_OWN char *path = dp_case_path(dp_options_folder(&o.of), o.of.name[0]);
        if (!dp_case_load(path, &c, &e)) {
            rc = dp_options_split(&o.of, &c, 0, &e) ? 2 : shrink(&o, &c, foreign ? &lib : NULL, &e);
            dp_case_free(&c);
        }
        if (foreign) dp_subject_close(&lib);
    }
    if (e.code) fprintf(stderr, "deltaproof: %s\n", e.msg);
    return e.code ? 2 : rc;
}
