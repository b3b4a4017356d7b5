/* deltaproof shrink CASE: the smallest input that still fails for the same reason (shrink.h), as a new case file. Exit status 0: written,
 * 1: --museum: a fault is not found where it lives or its case does not get 20 times smaller, 2: nothing fails, or bad input. */
#define _GNU_SOURCE
#include "bisect.h"
#include "commands.h"
#include "home.h"
#include "shrink.h"

#include <argp.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct {
    const char *cases_dir, *name, *output, *subject, *cache, *museum;
    int ranks, base, chain, merge, fault, tries, want_museum;
    double limit_s;
    FILE *log;
} options;

enum { OPT_RANKS = 256, OPT_BASE, OPT_CHAIN, OPT_MERGE, OPT_FAULT, OPT_SUBJECT, OPT_LIMIT, OPT_CACHE, OPT_TRIES, OPT_OUTPUTS, OPT_MUSEUM };

static const struct argp_option OPTIONS[] = {
    {"cases", 'c', "DIR", 0, "folder of the *.case files (default: those of the source tree)", 0},
    {"ranks", OPT_RANKS, "N", 0, "ranks (default: the case's largest number)", 0},
    {"base", OPT_BASE, "NAME", 0, "base policy: fp64 fp32 bf16 (default: the case's first; with --subject what it claims)", 0},
    {"chain", OPT_CHAIN, "FORMAT", 0, "format of the M chain (default: the case's first; with --subject what it claims)", 0},
    {"merge", OPT_MERGE, "NAME", 0, "allgather or ring (default: the case's first)", 0},
    {"fault", OPT_FAULT, "NAME", 0, "switch a deliberate fault on in the simulated ranks (see list --faults)", 0},
    {"subject", OPT_SUBJECT, "LIB", 0, "shrink what makes a kernel in a shared library fail (harness/deltaproof_subject.h)", 0},
    {"limit", OPT_LIMIT, "SECONDS", 0, "how long one run of the subject may take (default: 60)", 0},
    {"tries", OPT_TRIES, "N", 0, "stop after so many problems tried (default: 20000)", 0},
    {"output", 'o', "FILE", 0, "case file to write (default: CASE.min.case here)", 0},
    {"cache", OPT_CACHE, "DIR", 0, "folder of computed truths (default: build/cache; none: no cache)", 0},
    {"museum", OPT_MUSEUM, "[DIR]", OPTION_ARG_OPTIONAL, "every deliberate fault: shrink the largest generated case that shows it, print a table (and write the cases to DIR)", 0},
    {"outputs", OPT_OUTPUTS, "FILE", OPTION_HIDDEN, "", 0},
    {0}};

static int find(const char *name, const char *const *names, int n) {
    for (int i = 0; i < n; i++) if (!strcmp(name, names[i])) return i;
    return -1;
}

static error_t parse(int key, char *arg, struct argp_state *st) {
    options *o = st->input;
    char *end;
    switch (key) {
    case 'c': o->cases_dir = arg; break;
    case 'o': o->output = arg; break;
    case OPT_RANKS:
        o->ranks = atoi(arg);
        if (o->ranks < 1 || o->ranks > 4096) argp_error(st, "--ranks %s: must be 1 to 4096", arg);
        break;
    case OPT_BASE: if ((o->base = find(arg, dp_base_names, DP_NBASES)) < 0) argp_error(st, "--base %s: not known", arg); break;
    case OPT_MERGE: if ((o->merge = find(arg, dp_merge_names, DP_NMERGES)) < 0) argp_error(st, "--merge %s: not known", arg); break;
    case OPT_CHAIN: if ((o->chain = dp_format_find(arg)) < 0) argp_error(st, "--chain %s: not known", arg); break;
    case OPT_FAULT: if ((o->fault = dp_fault_find(arg)) < 0) argp_error(st, "--fault %s: not known (see list --faults)", arg); break;
    case OPT_SUBJECT: o->subject = arg; break;
    case OPT_OUTPUTS: argp_error(st, "--outputs: numbers in a file cannot be computed again for a smaller input; give the program as a shared library (--subject)"); break;
    case OPT_LIMIT:
        o->limit_s = strtod(arg, &end);
        if (end == arg || *end || !(o->limit_s > 0) || o->limit_s > 86400) argp_error(st, "--limit %s: must be seconds, above 0 and up to 86400", arg);
        break;
    case OPT_TRIES:
        o->tries = atoi(arg);
        if (o->tries < 1) argp_error(st, "--tries %s: must be a positive number", arg);
        break;
    case OPT_CACHE: o->cache = arg; break;
    case OPT_MUSEUM: o->want_museum = 1, o->museum = arg; break;
    case ARGP_KEY_ARG:
        if (o->name) argp_error(st, "one case at a time");
        o->name = arg;
        break;
    default: return ARGP_ERR_UNKNOWN;
    }
    return 0;
}

static void shape_text(const dp_case *c, int ranks, char *out, size_t size) {
    const dp_problem *p = &c->p;
    if (c->op == DP_OP_CHAIN) snprintf(out, size, "%d factors, K %d", c->ch.n, c->ch.K);
    else if (c->op == DP_OP_CONV) snprintf(out, size, "T %lld on %d ranks, D %d, W %d, %d sequences", (long long)c->conv.T, ranks, c->conv.D, c->conv.W, c->conv.Nseq);
    else snprintf(out, size, "T %lld on %d ranks, H %d, HV %d, K %d, V %d, R %d, %d sequences", (long long)p->T, ranks, p->H, p->HV, p->K, p->V, p->R, p->Nseq);
}

static void on_step(const char *what, const dp_case *c, int ranks, int64_t numbers, int tries, void *arg) {
    (void)c, (void)ranks;
    const options *o = arg;
    if (o->log) fprintf(o->log, "  %-52s %9lld numbers  %5d tried\n", what, (long long)numbers, tries), fflush(o->log);
}

static dp_shrink_options request(const options *o, const dp_case *c, const dp_subject *s) {
    return (dp_shrink_options){.ranks = o->ranks ? o->ranks : dp_case_most_ranks(c, s ? s->max_ranks : INT_MAX), .base = o->base >= 0 ? (dp_base)o->base : s ? s->base : c->base[0], .chain = o->chain >= 0 ? (dp_format)o->chain : s ? s->chain : c->chain[0],
                               .merge = o->merge >= 0 ? (dp_merge)o->merge : c->merge[0], .fault = (dp_fault)o->fault, .subject = s, .limit_s = o->limit_s, .max_tries = o->tries,
                               .cache = strcmp(o->cache, "none") ? o->cache : NULL, .step = on_step, .arg = (void *)o};
}

static char *command_of(const options *o, const dp_case *c, const dp_shrink_options *r) {
    char *text;
    if (asprintf(&text, "deltaproof shrink %s --ranks %d --base %s --chain %s --merge %s%s%s%s%s", c->name, r->ranks, dp_base_names[r->base], dp_formats[r->chain].name, dp_merge_names[r->merge],
                 o->fault ? " --fault " : "", o->fault ? dp_faults[o->fault].name : "", o->subject ? " --subject " : "", o->subject ? o->subject : "") < 0) abort();
    return text;
}

/* What was written is read again and must fail for the same reason. */
static dp_status write_and_check(const options *o, const dp_case *c, const dp_shrink_options *r, dp_shrunk *s, const char *path, dp_err *e) {
    char why[256], reason[600], *source = command_of(o, c, r);
    dp_failure f;
    dp_case again;
    dp_failure_text(&s->after, why, sizeof why);
    snprintf(reason, sizeof reason, "The smallest part of %.200s (%lld of its %lld numbers) that fails for the same reason: %.200s.", c->name, (long long)s->numbers, (long long)s->numbers_before, why);
    dp_status st = dp_case_write(&s->c, reason, source, path, e);
    free(source);
    if (st || (st = dp_case_load(path, &again, e))) return st;
    const dp_shrink_options now = {.fault = r->fault, .subject = r->subject, .limit_s = r->limit_s};
    st = dp_failure_of(&again, &now, s->before.kind == DP_FAILS_UNSTEADY ? DP_BISECT_RUNS : 1, 1, &f, e);
    if (!st && !dp_failure_same(&s->before, &f)) st = dp_fail(e, DP_EIO, "%s: read again it does not fail as before", path);
    dp_case_free(&again);
    return st;
}

static int shrink(options *o, dp_case *c, const dp_subject *lib, dp_err *e) {
    const dp_shrink_options r = request(o, c, lib);
    dp_shrunk s;
    char text[256], *path;
    if (o->output) path = strdup(o->output);
    else if (asprintf(&path, "%s.min.case", c->name) < 0) abort();
    o->log = stdout;
    if (c->op > DP_OP_CONV) return dp_shrink(c, &r, &s, e), free(path), 2;
    shape_text(c, r.ranks, text, sizeof text);
    printf("%s: %s, base %s, chain %s%s%s: %lld numbers\n", c->name, text, dp_base_names[r.base], dp_formats[r.chain].name, o->fault ? ", fault " : "", o->fault ? dp_faults[o->fault].name : "",
           (long long)dp_case_numbers(c, NULL));
    fflush(stdout);
    dp_status st = dp_shrink(c, &r, &s, e);
    if (!st) {
        st = write_and_check(o, c, &r, &s, path, e);
        shape_text(&s.c, s.c.ranks[0], text, sizeof text);
        if (!st) printf("%s\n%lld numbers, %lld of them not zero: %.4gx smaller, %d problems tried\n", text, (long long)s.numbers, (long long)s.nonzero, (double)s.numbers_before / (double)s.numbers, s.tries);
        dp_failure_text(&s.before, text, sizeof text);
        if (!st) printf("before: %s%s\n", text, s.before.red ? "; the run fails" : "");
        dp_failure_text(&s.after, text, sizeof text);
        if (!st) printf("after:  %s%s\nwritten: %s\n", text, s.after.red ? "; the run fails" : "", path);
        dp_shrink_free(&s);
    }
    free(path);
    return st ? 2 : 0;
}

/* ---- the museum ------------------------------------------------------------------------------------------------------------------------ */

/* Is it found in its stage, on a rank and head where it acts? Sums over ranks have no rank, q and k and their gradients the heads of q and k; wrong cuts and
 * orders of summation act everywhere. */
static int found_right(const dp_case *c, dp_fault fault, const dp_failure *f) {
    dp_sim s;
    int acts = f->rank < 0 || fault == DP_FAULT_CU_DIVIDED || fault == DP_FAULT_ORDER_BY_RUN;
    if (c->op != DP_OP_RECURRENCE) return 1;                     /* one stage, no ranks that matter to it */
    if (!dp_fault_lives_in(fault, f->stage)) return 0;
    if (acts || dp_sim_new(&s, &c->p, c->base[0], c->ranks[0], fault, NULL)) return acts;
    for (int k = 0; k < DP_BISECT_RUNS; k++) dp_sim_run(&s, c->chain[0], c->merge[0], c->backward);
    for (int hv = 0; hv < c->p.HV; hv++)
        acts |= s.hit[f->rank * c->p.HV + hv] && (f->head < 0 || f->head == hv || (c->p.H != c->p.HV && f->head == hv / dp_G(&c->p)));
    dp_sim_free(&s);
    return acts;
}

typedef struct { char *path; int64_t numbers; } candidate;
static int larger_first(const void *a, const void *b) {
    const int64_t x = ((const candidate *)a)->numbers, y = ((const candidate *)b)->numbers;
    return (x < y) - (x > y);
}

/* Where a fault can show: a convolution's in convolutions, the others in recurrences. */
static int concerns(dp_fault f, const dp_case *c) { return (f == DP_FAULT_HALO_LEAK) == (c->op == DP_OP_CONV) && (c->op == DP_OP_CONV || c->op == DP_OP_RECURRENCE); }

/* Does it show, in its own stage? Tries the case's rank counts, the largest first. Base fp32, where faults show most. */
static int shows(options *o, dp_fault fault, const dp_case *c, dp_shrink_options *r) {
    const int unsteady = fault == DP_FAULT_RACE || fault == DP_FAULT_ORDER_BY_RUN;
    if (!concerns(fault, c)) return 0;
    for (int i = c->nranks - 1; i >= 0; i--) {
        dp_failure f;
        dp_case one = *c;
        o->fault = fault, o->base = DP_BASE_FP32, o->chain = DP_FP32, o->ranks = c->ranks[i];
        *r = request(o, c, NULL);
        one.ranks[0] = r->ranks, one.base[0] = r->base, one.chain[0] = r->chain, one.merge[0] = r->merge, one.nranks = one.nbase = one.nchain = one.nmerge = 1;
        if (!dp_failure_of(&one, r, unsteady ? DP_BISECT_RUNS : 1, 0, &f, NULL) && f.kind && found_right(&one, fault, &f)) return 1;
    }
    return 0;
}

static void print_row(const char *name, dp_fault fault, const dp_shrunk *s, int right, int same, double seconds) {
    char shape[128];
    shape_text(&s->c, s->c.ranks[0], shape, sizeof shape);
    printf("%-21s %-16s %-16s %-8s %4d  %-5s %-4s %9lld %6lld %7.0fx  %s  (%.1f s)\n", dp_faults[fault].name, name, s->after.stage, s->after.tensor, s->after.rank, right ? "yes" : "NO", same ? "yes" : "NO",
           (long long)s->numbers_before, (long long)s->numbers, (double)s->numbers_before / (double)s->numbers, shape, seconds);
    fflush(stdout);
}

/* The largest case that shows the fault; -1: an error. */
static int museum_row(options *o, dp_fault fault, const candidate *list, int n, dp_err *e) {
    for (int i = 0; i < n; i++) {
        dp_case c;
        dp_shrink_options r;
        dp_shrunk s;
        char path[4200];
        if (dp_case_load(list[i].path, &c, e)) return -1;
        if (shows(o, fault, &c, &r)) {
            const double t0 = dp_now();
            dp_status st = dp_shrink(&c, &r, &s, e);
            if (st) return dp_case_free(&c), -1;
            snprintf(path, sizeof path, "%s/%s.case", o->museum, dp_faults[fault].name);
            st = write_and_check(o, &c, &r, &s, path, e);
            const int right = found_right(&s.c, fault, &s.after), same = dp_failure_same(&s.before, &s.after), good = s.numbers * 20 <= s.numbers_before;
            print_row(c.name, fault, &s, right, same, dp_now() - t0);
            dp_shrink_free(&s), dp_case_free(&c);
            return st ? -1 : good && right && same;
        }
        dp_case_free(&c);
    }
    printf("%-21s no generated case shows it\n", dp_faults[fault].name);
    return 0;
}

static int museum(options *o, dp_err *e) {
    char **path, dir[] = "/tmp/deltaproof-XXXXXX";
    int n, m = 0, good = 0, all = 0;
    if (!o->museum && !(o->museum = mkdtemp(dir))) return dp_fail(e, DP_EIO, "%s: cannot be made", dir), 2;
    if (mkdir(o->museum, 0777) && access(o->museum, W_OK)) return dp_fail(e, DP_EIO, "%s: cannot be written to", o->museum), 2;
    if (dp_case_find_all(o->cases_dir, &path, &n, e)) return 2;
    candidate *list = dp_calloc((size_t)n, sizeof *list);
    for (int i = 0; i < n; i++) {
        dp_case c;
        if (!dp_case_load(path[i], &c, e) && !c.data && (c.op == DP_OP_CONV || c.op == DP_OP_RECURRENCE) && dp_case_numbers(&c, NULL) <= 400000) list[m++] = (candidate){path[i], dp_case_numbers(&c, NULL)};
        if (e->code) return 2;
        dp_case_free(&c);
    }
    qsort(list, (size_t)m, sizeof *list, larger_first);
    printf("%-21s %-16s %-16s %-8s %4s  %-5s %-4s %9s %6s %8s  %s\n", "fault", "case", "stage", "tensor", "rank", "right", "same", "numbers", "left", "smaller", "what is left");
    for (int f = 1; f < DP_NFAULTS && !e->code; f++)
        if (!o->fault || o->fault == f) {
            const int only = o->fault;
            good += museum_row(o, (dp_fault)f, list, m, e) > 0, all++;
            o->fault = only;
        }
    if (!e->code) printf("%d of %d faults: found in their stage and rank, at least 20 times smaller, failing for the same reason\n", good, all);
    for (int i = 0; i < n; i++) free(path[i]);
    free(path), free(list);
    return good < all;
}

int dp_cmd_shrink(int argc, char **argv) {
    const struct argp a = {.options = OPTIONS, .parser = parse, .args_doc = "CASE", .doc = "Take away from a failing case what its failure does not need: ranks, tokens, heads, sequences, K, V, tensors, values. "
        "What is left is written as a case file that fails for the same reason: the same stage and tensor by `bisect stage`, and by the run's verdict where that failed.\v"
        "Exit status 0 written, 1 (--museum) a fault was not found or did not get 20 times smaller, 2 nothing fails or bad input."};
    options o = {.cases_dir = dp_home("cases"), .cache = dp_home("build/cache"), .base = -1, .chain = -1, .merge = -1, .tries = 20000};
    dp_err e = {0};
    dp_case c;
    dp_subject lib;
    char name[] = "deltaproof shrink";
    int rc = 2;
    argv[0] = name;
    argp_parse(&a, argc, argv, 0, NULL, &o);
    if (o.want_museum) rc = museum(&o, &e);
    else if (!o.name) dp_fail(&e, DP_EINPUT, "shrink: name a case");
    else if (o.subject && o.fault) dp_fail(&e, DP_EINPUT, "shrink: --fault goes with the simulated ranks, not with --subject");
    else if (!o.subject || !dp_subject_open(o.subject, &lib, &e)) {
        char *path = dp_case_path(o.cases_dir, o.name);
        if (!dp_case_load(path, &c, &e)) rc = shrink(&o, &c, o.subject ? &lib : NULL, &e), dp_case_free(&c);
        if (o.subject) dp_subject_close(&lib);
        free(path);
    }
    if (e.code) fprintf(stderr, "deltaproof: %s\n", e.msg);
    return e.code ? 2 : rc;
}
