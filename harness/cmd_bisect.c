/* deltaproof bisect stage CASE: which stage is wrong (bisect.h). Exit status 0: every stage keeps to its budget, 1: one does not, 2: could not tell.
 * deltaproof bisect precision CASE: which stages need a wider format (precision.h). Exit status 0: found, 1: not even the wide policy will do, 2: bad input. */
#define _GNU_SOURCE
#include "bisect.h"
#include "case.h"
#include "commands.h"
#include "precision.h"

#include <argp.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct {
    const char *cases_dir, *name, *what;
    int ranks, base, chain, merge, fault, verbose, runs, from, to, chain_from, chain_to, tries, have_need;
    double need[10];       /* -1, ranks 0: the case's first */
} options;

enum { OPT_RANKS = 256, OPT_BASE, OPT_CHAIN, OPT_MERGE, OPT_FAULT, OPT_RUNS, OPT_FROM, OPT_TO, OPT_CHAIN_FROM, OPT_CHAIN_TO, OPT_NEED, OPT_TRIES };

static const struct argp_option STAGE_OPTIONS[] = {
    {"cases", 'c', "DIR", 0, "folder of the *.case files (default: cases)", 0},
    {"ranks", OPT_RANKS, "N", 0, "ranks (default: the case's largest number)", 0},
    {"base", OPT_BASE, "NAME", 0, "base policy: fp64 fp32 bf16 (default: the case's first)", 0},
    {"chain", OPT_CHAIN, "FORMAT", 0, "format of the M chain (default: the case's first)", 0},
    {"merge", OPT_MERGE, "NAME", 0, "allgather or ring (default: the case's first)", 0},
    {"fault", OPT_FAULT, "NAME", 0, "switch a deliberate fault on in the simulated ranks (see list --faults)", 0},
    {"runs", OPT_RUNS, "N", 0, "how often each stage runs on the same inputs (default: 3)", 0},
    {"verbose", 'v', 0, 0, "try every stage, not only up to the first wrong one", 0},
    {0}};

static const struct argp_option PRECISION_OPTIONS[] = {
    {"cases", 'c', "DIR", 0, "folder of the *.case files (default: cases)", 0},
    {"ranks", OPT_RANKS, "N", 0, "ranks (default: the case's largest number)", 0},
    {"merge", OPT_MERGE, "NAME", 0, "allgather or ring (default: the case's first)", 0},
    {"from", OPT_FROM, "NAME", 0, "base policy that is too coarse: bf16 (default), fp32", 0},
    {"to", OPT_TO, "NAME", 0, "base policy that stages may be raised to: fp32 (default), fp64", 0},
    {"chain-from", OPT_CHAIN_FROM, "FORMAT", 0, "format of the M chain with it (default: that of --from)", 0},
    {"chain-to", OPT_CHAIN_TO, "FORMAT", 0, "format that the M chain may be raised to (default: that of --to)", 0},
    {"need", OPT_NEED, "LIST", 0, "what is needed: TENSOR=ERROR,..., relative errors of whole tensors, e.g. o=1e-3,dk=5e-3 (default: every row within the bound of the policy --to)", 0},
    {"tries", OPT_TRIES, "N", 0, "policies to try at most in each search for a better one (default: 2000)", 0},
    {0}};

static int find(const char *name, const char *const *names, int n) {
    for (int i = 0; i < n; i++) if (!strcmp(name, names[i])) return i;
    return -1;
}

static void parse_need(struct argp_state *st, const char *text, options *o) {
    char *copy = strdup(text), *save, *end;
    for (int i = 0; i < 10; i++) o->need[i] = NAN;
    for (char *t = strtok_r(copy, ",", &save); t; t = strtok_r(NULL, ",", &save)) {
        char *v = strchr(t, '=');
        int f = -1;
        if (v) *v++ = 0;
        for (int i = 0; i < dp_result_nfields; i++) if (!strcmp(t, dp_result_fields[i].name)) f = i;
        if (f < 0 || !v) argp_error(st, "--need %s: '%s' is no tensor with =ERROR", text, t);
        o->need[f] = strtod(v, &end);
        if (end == v || *end || !(o->need[f] > 0)) argp_error(st, "--need %s: '%s' is not a positive number", text, v);
        o->have_need = 1;
    }
    if (!o->have_need) argp_error(st, "--need: the list is empty");
    free(copy);
}

static error_t parse(int key, char *arg, struct argp_state *st) {
    options *o = st->input;
    switch (key) {
    case 'c': o->cases_dir = arg; break;
    case 'v': o->verbose = 1; break;
    case OPT_RANKS:
        o->ranks = atoi(arg);
        if (o->ranks < 1 || o->ranks > 4096) argp_error(st, "--ranks %s: must be 1 to 4096", arg);
        break;
    case OPT_FROM: if ((o->from = find(arg, dp_base_names, DP_NBASES)) < 0) argp_error(st, "--from %s: not known", arg); break;
    case OPT_TO: if ((o->to = find(arg, dp_base_names, DP_NBASES)) < 0) argp_error(st, "--to %s: not known", arg); break;
    case OPT_CHAIN_FROM: if ((o->chain_from = dp_format_find(arg)) < 0) argp_error(st, "--chain-from %s: not known", arg); break;
    case OPT_CHAIN_TO: if ((o->chain_to = dp_format_find(arg)) < 0) argp_error(st, "--chain-to %s: not known", arg); break;
    case OPT_NEED: parse_need(st, arg, o); break;
    case OPT_TRIES:
        o->tries = atoi(arg);
        if (o->tries < 1) argp_error(st, "--tries %s: must be a positive number", arg);
        break;
    case OPT_RUNS:
        o->runs = atoi(arg);
        if (o->runs < 1 || o->runs > 1000) argp_error(st, "--runs %s: must be 1 to 1000", arg);
        break;
    case OPT_BASE: if ((o->base = find(arg, dp_base_names, DP_NBASES)) < 0) argp_error(st, "--base %s: not known", arg); break;
    case OPT_MERGE: if ((o->merge = find(arg, dp_merge_names, DP_NMERGES)) < 0) argp_error(st, "--merge %s: not known", arg); break;
    case OPT_CHAIN: if ((o->chain = dp_format_find(arg)) < 0) argp_error(st, "--chain %s: not known", arg); break;
    case OPT_FAULT: if ((o->fault = dp_fault_find(arg)) < 0) argp_error(st, "--fault %s: not known (see list --faults)", arg); break;
    case ARGP_KEY_ARG:
        if (o->name) argp_error(st, "one case at a time");
        o->name = arg;
        break;
    default: return ARGP_ERR_UNKNOWN;
    }
    return 0;
}

static void print_list(const char *what, const unsigned char *set, int n, int count) {
    int printed = 0;
    printf("; %s", what);
    for (int i = 0; i < n && printed < 12; i++) if (set[i]) printf(" %d", i), printed++;
    if (count > printed) printf(" ... (%d)", count);
}

static void print_stage(const dp_bisect *b, int i) {
    const dp_bisect_row *x = &b->stage[i];
    if (!x->tensor[0]) {
        printf("  %-16s -     nothing to judge\n", dp_stage_names[i]);
        return;
    }
    printf("  %-16s %-5s %-11s %.2g of its budget, %lld rows", dp_stage_names[i], x->fails ? "WRONG" : "ok", x->tensor, x->ratio, (long long)x->judged);
    if (x->skipped) printf(", %lld skipped (not finite)", (long long)x->skipped);
    if (x->fails > x->unsteady) printf(", %d over", x->fails - x->unsteady);
    if (x->unsteady) printf(", %d not as in the first run", x->unsteady);
    if (x->nrank) print_list("ranks", x->rank, b->N, x->nrank);
    if (x->nhead) print_list("heads", x->head, b->HV, x->nhead);
    putchar('\n');
}

static void print_place(const dp_bisect_row *x) {
    const dp_place *a = &x->at;
    printf("  first wrong row: %s", x->tensor);
    if (a->rank >= 0) printf(", rank %d", a->rank);
    if (a->sequence >= 0) printf(", sequence %d", a->sequence);
    if (a->head >= 0) printf(", head %d", a->head);
    if (a->chunk >= 0) printf(", chunk %d", a->chunk);
    if (a->token >= 0) printf(", token %lld", (long long)a->token);
    if (x->row >= 0) printf(", row %d", x->row);
    printf(", entry %d", x->index);
    if (x->run) printf(", in run %d of the same inputs", x->run + 1);
    putchar('\n');
    printf("  got   %-24a %.9g\n  truth %-24a %.9g\n  error of the row %.3g, its budget %.3g\n", x->got, x->got, x->want, x->want, x->err, x->budget);
}

static int stage(const options *o, const dp_case *c, dp_err *e) {
    dp_bisect b;
    int ranks = o->ranks;
    for (int i = 0; !o->ranks && i < c->nranks; i++) if (c->ranks[i] > ranks) ranks = c->ranks[i];
    const dp_base base = o->base >= 0 ? (dp_base)o->base : c->base[0];
    const dp_format chain = o->chain >= 0 ? (dp_format)o->chain : c->chain[0];
    const dp_merge merge = o->merge >= 0 ? (dp_merge)o->merge : c->merge[0];
    if (dp_bisect_sim(&c->p, base, chain, merge, ranks, o->fault, c->backward, o->runs, o->verbose, &b, e)) return 2;
    printf("%s:ranks=%d,base=%s,chain=%s,merge=%s%s%s: every stage on true inputs\n", c->name, ranks, dp_base_names[base], dp_formats[chain].name, dp_merge_names[merge],
           o->fault ? ",fault=" : "", o->fault ? dp_faults[o->fault].name : "");
    for (int i = 0; i < (c->backward ? DP_NSTAGES : DP_STAGE_RECOMPUTE); i++)
        if (o->verbose || b.first < 0 || i <= b.first) print_stage(&b, i);
    const int wrong = b.first >= 0;
    if (wrong) printf("WRONG STAGE: %s\n", dp_stage_names[b.first]), print_place(&b.stage[b.first]);
    else printf("every stage keeps to its own budget\n");
    dp_bisect_free(&b);
    return wrong;
}

/* ---- precision --------------------------------------------------------------------------------------------------------------------- */

static const char *level_name(const dp_unit *u, int level) { return u->stage == DP_NSTAGES ? dp_formats[u->format[level]].name : dp_base_names[u->format[level]]; }

static void print_errors(const double *x, const double *need) {
    for (int i = 0; i < dp_result_nfields; i++)
        if (!isnan(x[i]) && (!need || !isnan(need[i]))) printf("  %s %.2e", dp_result_fields[i].name, x[i]);
}

static void print_cost(const dp_cost *c) { printf("%.4g Gflop, %.4g MB, %.3g us", c->flops / 1e9, c->bytes / 1e6, c->seconds * 1e6); }

static void print_choice(const char *what, const dp_precision *r, const dp_choice *c, const double *need) {
    printf("%s: %d of %d raised:", what, c->raised, r->nunit);
    for (int u = 0; u < r->nunit; u++) if (c->policy.level[u]) printf(" %s=%s", r->unit[u].name, level_name(&r->unit[u], c->policy.level[u]));
    printf("\n ");
    print_errors(c->error, need);
    printf("\n  ");
    print_cost(&c->cost);
    printf(c->proven ? "  (no policy before it in that order will do, if raising a stage never hurts)\n" : "  (none of its stages can be lowered; --tries ran out before all policies before it were excluded)\n");
}

static dp_format chain_of(dp_base b) { return b == DP_BASE_FP64 ? DP_FP64 : b == DP_BASE_FP32 ? DP_FP32 : DP_BF16; }

static int precision(const options *o, const dp_case *c, dp_err *e) {
    dp_precision r;
    int ranks = o->ranks;
    for (int i = 0; !o->ranks && i < c->nranks; i++) if (c->ranks[i] > ranks) ranks = c->ranks[i];
    dp_precision_request rq = {.p = &c->p, .N = ranks, .backward = c->backward, .from = o->from >= 0 ? o->from : (int)DP_BASE_BF16, .to = o->to >= 0 ? o->to : (int)DP_BASE_FP32,
                               .merge = o->merge >= 0 ? (dp_merge)o->merge : c->merge[0], .by_verdict = !o->have_need, .max_tries = o->tries, .progress = isatty(2)};
    rq.chain_from = o->chain_from >= 0 ? (dp_format)o->chain_from : chain_of(rq.from), rq.chain_to = o->chain_to >= 0 ? (dp_format)o->chain_to : chain_of(rq.to);
    memcpy(rq.need, o->need, sizeof rq.need);
    const double *need = o->have_need ? o->need : NULL;
    if (rq.from < rq.to) return dp_fail(e, DP_EINPUT, "bisect precision: --from %s --to %s: from must be the coarser one", dp_base_names[rq.from], dp_base_names[rq.to]), 2;
    if (dp_formats[rq.chain_from].u_acc < dp_formats[rq.chain_to].u_acc) return dp_fail(e, DP_EINPUT, "bisect precision: --chain-from %s --chain-to %s: from must be the coarser one", dp_formats[rq.chain_from].name, dp_formats[rq.chain_to].name), 2;
    for (int i = 0; need && i < dp_result_nfields; i++) {
        int64_t rows, width;
        dp_result_shape(&c->p, i, &rows, &width);
        if (!isnan(need[i]) && (!rows || (dp_result_fields[i].backward && !c->backward))) return dp_fail(e, DP_EINPUT, "bisect precision: --need %s: %s has no such tensor", dp_result_fields[i].name, c->name), 2;
    }
    if (dp_precision_search(&rq, &r, e)) return 2;
    printf("%s:ranks=%d, from base %s, chain %s to base %s, chain %s; needed:", c->name, ranks, dp_base_names[rq.from], dp_formats[rq.chain_from].name, dp_base_names[rq.to], dp_formats[rq.chain_to].name);
    if (need) for (int i = 0; i < dp_result_nfields; i++) isnan(need[i]) ? 0 : printf("  %s <= %.3g", dp_result_fields[i].name, need[i]);
    else printf(" every row within the bounds of the second");
    printf("\n%-28s %s ", "all as --from", r.from_passes ? "will do " : "will not");
    print_errors(r.from_error, need);
    printf("   "), print_cost(&r.from_cost);
    printf("\n%-28s %s ", "all as --to", r.to_passes ? "will do " : "will not");
    print_errors(r.to_error, need);
    printf("   "), print_cost(&r.to_cost);
    printf("\nwhat each costs at both ends, and the errors when it alone stays as --from:\n");
    for (int u = 0; u < r.nunit; u++) {
        const dp_unit *x = &r.unit[u];
        const dp_cost *a = &x->cost[0], *b = &x->cost[x->nlevel - 1];
        printf("  %-16s %-5s %8.4g Gflop %8.4g MB %7.3g us   %-5s %8.4g MB %7.3g us ", x->name, level_name(x, 0), a->flops / 1e9, a->bytes / 1e6, a->seconds * 1e6, level_name(x, x->nlevel - 1),
               b->bytes / 1e6, b->seconds * 1e6);
        print_errors(x->alone, need);
        putchar('\n');
    }
    if (r.from_passes) printf("nothing needs to be raised\n");
    else if (!r.to_passes) printf("NOT EVEN base %s with chain %s will do\n", dp_base_names[rq.to], dp_formats[rq.chain_to].name);
    else {
        print_choice("SMALLEST SET", &r, &r.smallest, need);
        print_choice("CHEAPEST POLICY", &r, &r.cheapest, need);
    }
    printf("%d policies tried\n", r.tries);
    return !r.to_passes && !r.from_passes;
}

int dp_cmd_bisect(int argc, char **argv) {
    const struct argp stage_argp = {.options = STAGE_OPTIONS, .parser = parse, .args_doc = "CASE", .doc = "Which stage of the pipeline is wrong: each is run on true inputs and judged by its own budget.\v"
                                    "Exit status 0 every stage keeps to its budget, 1 one does not, 2 could not tell."};
    const struct argp precision_argp = {.options = PRECISION_OPTIONS, .parser = parse, .args_doc = "CASE", .doc = "Which stages need a wider format: the smallest set that must be raised and the cheapest policy that will do.\v"
                                        "Times are flops and bytes at the peak rates of an H200: an order, no prediction. Exit status 0 found, 1 not even --to will do, 2 bad input."};
    const int want_stage = argc >= 2 && !strcmp(argv[1], "stage"), want_precision = argc >= 2 && !strcmp(argv[1], "precision");
    options o = {.cases_dir = "cases", .base = -1, .chain = -1, .merge = -1, .runs = DP_BISECT_RUNS, .from = -1, .to = -1, .chain_from = -1, .chain_to = -1, .tries = 2000};
    dp_err e = {0};
    dp_case c;
    char *path;
    struct stat st;
    if (!want_stage && !want_precision) {
        const int help = argc >= 2 && (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h"));
        fprintf(help ? stdout : stderr, "Usage: deltaproof bisect stage CASE [OPTION...]       which stage of the pipeline is wrong\n"
                                        "       deltaproof bisect precision CASE [OPTION...]   which stages need a wider format\n");
        return help ? 0 : 2;
    }
    argv[1] = (char *)(want_stage ? "deltaproof bisect stage" : "deltaproof bisect precision");
    argp_parse(want_stage ? &stage_argp : &precision_argp, argc - 1, argv + 1, 0, NULL, &o);
    if (!o.name) {
        fprintf(stderr, "%s: name a case\n", argv[1]);
        return 2;
    }
    if (stat(o.name, &st) == 0 && S_ISREG(st.st_mode)) path = strdup(o.name);
    else if (asprintf(&path, "%s/%s.case", o.cases_dir, o.name) < 0) abort();
    int rc = 2;
    if (!dp_case_load(path, &c, &e)) {
        if (c.op != DP_OP_RECURRENCE) dp_fail(&e, DP_EINPUT, "bisect: %s: op = %s has no stages", path, c.op_name);
        else rc = want_stage ? stage(&o, &c, &e) : precision(&o, &c, &e);
        dp_case_free(&c);
    }
    if (e.code) fprintf(stderr, "deltaproof: %s\n", e.msg);
    free(path);
    return e.code ? 2 : rc;
}
