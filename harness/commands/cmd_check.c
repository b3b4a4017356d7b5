/* deltaproof check CASE...: what must hold between runs, without a truth (invariants.h). Exit
 * status 0: everything held, 1: something did not, 2: could not run. Options --tokens and --heads
 * change the size of the case's problem, with its law of inputs, for sizes that have no affordable
 * truth. Its heads are then made and checked in blocks of --block heads, so that memory holds one
 * block at a time. Foreign code is called with as many as were asked for. */
#include "commands.h"
#include "harness/case/case.h"
#include "harness/device/device_run.h"
#include "harness/search/invariants.h"
#include "large_problem.h"
#include "options.h"
#include "ref/files/output.h"
#include "write_record.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    dp_options of;
    const char *only;
    int heads, block, forward, every;
    int64_t tokens;
    dp_subject library;
    dp_check_subject s;
} options;

enum { OPT_TOKENS = 256, OPT_HEADS, OPT_BLOCK, OPT_ONLY, OPT_VARIANT };

static error_t parse(int key, char *arg, struct argp_state *st) {
    options *o = st->input;
    switch (key) {
    case OPT_VARIANT:
        o->s.variant = dp_option_name(st, "variant", arg, dp_cuda_variant_names, DP_NCUDA_VARIANTS);
        break;
    case OPT_TOKENS: o->tokens = dp_option_number(st, "tokens", arg, 1, (int64_t)1 << 30); break;
    case OPT_HEADS: o->heads = (int)dp_option_number(st, "heads", arg, 1, 1 << 20); break;
    case OPT_BLOCK: o->block = (int)dp_option_number(st, "block", arg, 1, 1 << 20); break;
    case OPT_ONLY:
        o->only = dp_check_names[dp_option_name(st, "only", arg, dp_check_names, DP_NCHECKS)];
        break;
    case ARGP_KEY_END:
        if (!o->of.nname) argp_error(st, "name a case");
        if (dp_options_foreign(&o->of) && (o->of.only[DP_ID_BACKEND].n || o->of.fault))
            argp_error(st, "--subject, --run and --serve go without --%s",
                       o->of.fault ? "fault" : "backend");
        if (dp_options_idle_design(&o->of)) argp_error(st, DP_IDLE_DESIGN);
        if (o->s.bitwise && !dp_options_foreign(&o->of))
            argp_error(st, "--bitwise: of your kernel (--subject, --run, --serve); ours claim it "
                           "always");
        if (o->s.variant && (!o->of.only[DP_ID_BACKEND].n ||
                             !dp_backends[o->of.only[DP_ID_BACKEND].of[0]].on_device))
            argp_error(st, "--variant %s: of the CUDA kernels (--backend cuda or nccl)",
                       dp_cuda_variant_names[o->s.variant]);
        break;
    default: return dp_option(key, arg, st, &o->of);
    }
    return 0;
}

static const struct argp_option OPTIONS[] = {
    DP_ROWS_ONE_RUN,
    DP_ROW("backend", DP_OPT_BACKEND, "NAME", "sim (default), mpi, cuda or nccl"),
    DP_ROW_SUBJECT(DP_LIBRARY ": rows whose bits differ must be within the bounds of its design"),
    DP_ROWS_PROGRAM,
    DP_FLAG("bitwise", s.bitwise, "with --subject, --run, --serve: the kernel claims equal bits"),
    DP_ROW_DESIGN,
    DP_ROW_MEMORY,
    DP_ROW("variant", OPT_VARIANT, "NAME", "which CUDA kernels (default plain; run --help)"),
    {"way", 0, 0, OPTION_ALIAS, 0, 0},
    DP_ROW("only", OPT_ONLY, "CHECK", "one check:" DP_CHECK_WORDS),
    DP_FLAG("forward", forward, "forward only, no gradients"),
    DP_ROW("tokens", OPT_TOKENS, "T", "that many tokens instead of the case's, one sequence"),
    DP_ROW("heads", OPT_HEADS, "HV",
           "that many heads (R and the law of inputs as in the case, H = HV)"),
    DP_ROW("block", OPT_BLOCK, "N",
           "with --tokens or --heads: heads checked at a time (default: all of a subject's; else "
           "so many that each block gets one check, at least 2)"),
    DP_FLAG("every", every, "every check on every block of heads (default: on one)"),
    DP_ROW_JSON_OF("results; -: standard output"),
    {0}};

static int refuse(const dp_err *e) {
    fprintf(stderr, "deltaproof: check: %s\n", e->msg);
    return 2;
}

static const char *who(const options *o) {
    return o->s.library ? o->s.library->name : dp_backend_names[o->s.backend];
}

static void record(json_t *list, const char *name, const dp_problem *p, int N, const options *o,
                   int head0, const dp_check *c) {
    const char *variant = o->s.variant ? dp_cuda_variant_names[o->s.variant] : NULL;
    json_array_append_new(list,
                          json_pack("{ss sI si si ss ss ss ss ss sI sf si sb ss* ss*}", "case",
                                    name, "T", (json_int_t)p->T, "HV", p->HV, "ranks", N, "backend",
                                    who(o), "base", dp_base_names[o->s.run.base], "check", c->name,
                                    "promise", c->promise, "verdict", dp_verdict_names[c->verdict],
                                    "compared", (json_int_t)c->compared, "seconds", c->seconds,
                                    "first_head", head0, "within_bounds", c->within_bounds,
                                    "variant", variant, "why", *c->why ? c->why : NULL));
}

/* Blocks of heads share the checks, so that each check sees one block and each block some checks;
 * --every: all of them. */
static const char *of_block(const options *o, int block, int blocks, char *names, size_t n) {
    if (o->only || o->every || blocks < 2) return o->only;
    for (int i = 0; i < DP_NCHECKS; i++)
        if (block >= DP_NCHECKS ? i == 0 : i % blocks == block)
            dp_text_add(names, n, "%s%s", *names ? "," : "", dp_check_names[i]);
    return names;
}

static dp_status check_problem(const char *name, const dp_problem *p, int N, const options *o,
                               const char *only, int head0, int count[DP_NVERDICTS], json_t *list,
                               dp_err *e) {
    dp_checks r;
    FILE *f = dp_options_table(&o->of);
    const dp_status st = dp_checks_run(p, &o->s, N, !o->forward && p->dout != NULL, only, &r, e);
    for (int i = 0; i < r.n && !st; i++) {
        const dp_check *c = &r.c[i];
        count[c->verdict]++;
        fprintf(f, "%-8s %-14s %-26s %12lld entries %7.2f s  %s\n", dp_verdict_names[c->verdict],
                c->name, c->promise, (long long)c->compared, c->seconds, c->why);
        fflush(f);
        record(list, name, p, N, o, head0, c);
    }
    return st;
}

static dp_status check_case(const char *path, options *o, int count[DP_NVERDICTS], json_t *list,
                            dp_err *e) {
    DP_FREED(dp_case_free) dp_case c;
    const int resized = o->tokens || o->heads;
    dp_status st = dp_case_load(path, &c, e);
    if (st) return st;
    if (!c.op->is_recurrence)
        st = dp_fail(e, DP_EINPUT, "%s: op = %s: only recurrences have these checks", path,
                     c.op_name);
    else if (c.allow_nonfinite)
        st = dp_fail(e, DP_EINPUT, "%s: nonfinite = allow: equalities of NaN prove nothing", path);
    if (!st) st = dp_options_split(&o->of, &c, o->tokens, e);
    o->s.run = dp_options_one(&o->of, &c, o->s.library);
    const int N = o->s.run.N;
    dp_design design;
    if (!st && o->s.library && o->library.design)
        st = dp_design_parse(o->library.design, o->s.run.base, &design, e);
    o->s.progress = resized;
    o->s.input_dtype = c.input_dtype;
    const int HV = o->heads ? o->heads : c.p.HV, each = HV / DP_NCHECKS > 2 ? HV / DP_NCHECKS : 2,
              block = !resized || (o->s.library && !o->block) ? HV
                      : o->block && o->block < HV             ? o->block
                      : o->block || HV < each                 ? HV
                                                              : each;
    for (int h = 0; h < HV && !st; h += block) {
        const int n = h + block < HV ? block : HV - h;
        const dp_memory *memory = dp_cuda_memory(&c.p, o->s.backend, N);
        dp_problem p = resized ? dp_large_problem(&c, o->tokens, n, !o->forward,
                                                  1000 + 16 * (uint64_t)h, memory)
                               : c.p;
        char names[256] = "";
        const char *only = of_block(o, h / block, (HV + block - 1) / block, names, sizeof names);
        FILE *f = dp_options_table(&o->of);
        fprintf(f,
                "%s: T = %lld, heads %d to %d of %d, K = %d, V = %d, %d ranks, base %s, chain %s, "
                "%s%s%s%s%s%s\n",
                c.name, (long long)p.T, h, h + n - 1, HV, p.K, p.V, N, dp_base_names[o->s.run.base],
                dp_formats[o->s.run.chain].name, who(o), p.memory ? ", arrays on the device" : "",
                o->s.variant ? ", variant " : "",
                o->s.variant ? dp_cuda_variant_names[o->s.variant] : "",
                o->s.run.fault ? ", fault " : "",
                o->s.run.fault ? dp_faults[o->s.run.fault].name : "");
        fflush(f);
        st = check_problem(c.name, &p, N, o, only, h, count, list, e);
        if (resized) dp_problem_free(&p);
    }
    return st;
}

static dp_status open_subject(options *o, dp_err *e) {
    if (!dp_options_foreign(&o->of)) return DP_OK;
    const dp_status st = dp_options_open(&o->of, &o->library, e);
    if (st) return st;
    o->s.backend = DP_BACKEND_SUBJECT;
    o->s.library = &o->library;
    o->s.limit_s = o->of.limit_s;
    return DP_OK;
}

int dp_cmd_check(int argc, char **argv) {
    options o = {.of = dp_options_new(1, 64)};
    const struct argp a = {.options = OPTIONS,
                           .parser = parse,
                           .args_doc = "CASE...",
                           .doc =
                               "Check properties that must hold between runs of one subject: "
                               "causality, independence of heads and sequences, ranks, prefixes, "
                               "scaling and signs. No truth is needed, so any size will do.\vExit "
                               "status 0 everything held, 1 something did not, 2 could not run."};
    dp_err e = {0};
    int count[DP_NVERDICTS] = {0}, rc = 0;
    dp_parse_writing(&a, argc, argv, &o);
    dp_old_outputs_remove(NULL, o.of.json);
    if (o.of.only[DP_ID_BACKEND].n) o.s.backend = o.of.only[DP_ID_BACKEND].of[0];
    if (open_subject(&o, &e)) return refuse(&e);
    json_t *list = json_array();
    if (dp_backends[o.s.backend].processes) dp_procs_start();
    const char *no = dp_unavailable(o.s.backend, dp_option_first(&o.of, DP_ID_RANKS, 1));
    if (dp_output_check(o.of.json, &e)) rc = refuse(&e);
    if (o.s.backend == DP_BACKEND_LAPACK) {
        dp_fail(&e, DP_EINPUT, "--backend lapack: check knows sim, mpi, cuda and nccl");
        rc = refuse(&e);
    } else if (no) {
        dp_fail(&e, DP_EDEVICE, "--backend %s: %s", dp_backend_names[o.s.backend], no);
        rc = refuse(&e);
    }
    for (int i = 0; i < o.of.nname && !rc; i++) {
        DP_OWN char *path = dp_case_path(dp_options_folder(&o.of), o.of.name[i]);
        if (check_case(path, &o, count, list, &e)) rc = refuse(&e);
    }
    if (dp_json_write(list, o.of.json, 17, &e)) rc = refuse(&e);
    if (!rc) {
        fprintf(dp_options_table(&o.of), "CHECK: %s (%d held, %d did not, %d skipped)\n",
                count[DP_FAIL]   ? "FAIL"
                : count[DP_PASS] ? "PASS"
                                 : "NOTHING CHECKED",
                count[DP_PASS], count[DP_FAIL], count[DP_SKIPPED]);
        rc = count[DP_FAIL] ? 1 : count[DP_PASS] ? 0 : 2;
    }
    dp_subject_close(&o.library);
    return rc;
}
