/* deltaproof bisect stage CASE: which stage is wrong (bisect.h). Exit status 0: every stage keeps to its budget, 1: one does not, 2: could not tell. */
#define _GNU_SOURCE
#include "bisect.h"
#include "case.h"
#include "commands.h"

#include <argp.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef struct {
    const char *cases_dir, *name, *what;
    int ranks, base, chain, merge, fault, verbose, runs;       /* -1, ranks 0: the case's first */
} options;

enum { OPT_RANKS = 256, OPT_BASE, OPT_CHAIN, OPT_MERGE, OPT_FAULT, OPT_RUNS };

static const struct argp_option OPTIONS[] = {
    {"cases", 'c', "DIR", 0, "folder of the *.case files (default: cases)", 0},
    {"ranks", OPT_RANKS, "N", 0, "ranks (default: the case's largest number)", 0},
    {"base", OPT_BASE, "NAME", 0, "base policy: fp64 fp32 bf16 (default: the case's first)", 0},
    {"chain", OPT_CHAIN, "FORMAT", 0, "format of the M chain (default: the case's first)", 0},
    {"merge", OPT_MERGE, "NAME", 0, "allgather or ring (default: the case's first)", 0},
    {"fault", OPT_FAULT, "NAME", 0, "switch a deliberate fault on in the simulated ranks (see list --faults)", 0},
    {"runs", OPT_RUNS, "N", 0, "how often each stage runs on the same inputs (default: 3)", 0},
    {"verbose", 'v', 0, 0, "try every stage, not only up to the first wrong one", 0},
    {0}};

static int find(const char *name, const char *const *names, int n) {
    for (int i = 0; i < n; i++) if (!strcmp(name, names[i])) return i;
    return -1;
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

int dp_cmd_bisect(int argc, char **argv) {
    const char *doc = "Which stage of the pipeline is wrong: each is run on true inputs and judged by its own budget.\v"
                      "Exit status 0 every stage keeps to its budget, 1 one does not, 2 could not tell.";
    const struct argp a = {.options = OPTIONS, .parser = parse, .args_doc = "CASE", .doc = doc};
    options o = {.cases_dir = "cases", .base = -1, .chain = -1, .merge = -1, .runs = DP_BISECT_RUNS};
    dp_err e = {0};
    dp_case c;
    char *path;
    struct stat st;
    if (argc < 2 || strcmp(argv[1], "stage")) {
        fprintf(stderr, "deltaproof: bisect: say what: `bisect stage CASE`\n");
        return 2;
    }
    argv[1] = (char *)"deltaproof bisect stage";
    argp_parse(&a, argc - 1, argv + 1, 0, NULL, &o);
    if (!o.name) {
        fprintf(stderr, "deltaproof: bisect stage: name a case\n");
        return 2;
    }
    if (stat(o.name, &st) == 0 && S_ISREG(st.st_mode)) path = strdup(o.name);
    else if (asprintf(&path, "%s/%s.case", o.cases_dir, o.name) < 0) abort();
    int rc = 2;
    if (!dp_case_load(path, &c, &e)) {
        if (c.op != DP_OP_RECURRENCE) dp_fail(&e, DP_EINPUT, "bisect stage: %s: op = %s has no stages", path, c.op_name);
        else rc = stage(&o, &c, &e);
        dp_case_free(&c);
    }
    if (e.code) fprintf(stderr, "deltaproof: %s\n", e.msg);
    free(path);
    return e.code ? 2 : rc;
}
