/* deltaproof bisect stage CASE: which stage is wrong, of the simulated ranks (bisect.h), or of a
 * shared library or tensors in a file (blame.h). Exit status 0: every stage keeps to its budget, 1:
 * one does not, 2: could not tell. deltaproof bisect precision CASE: which stages need a wider
 * format (precision.h). Exit status 0: found, 1: not even the wide policy will do, 2: bad input. */
#define _GNU_SOURCE
#include "commands.h"
#include "harness/case/case.h"
#include "harness/run/blame.h"
#include "harness/run/judge.h"
#include "harness/run/step.h"
#include "harness/search/bisect.h"
#include "harness/search/precision.h"
#include "harness/search/step_bisect.h"
#include "options.h"
#include "ref/vocabulary/context.h"
#include "ref/vocabulary/number.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    dp_options of;
    const char *outputs, *layout;
    int verbose, runs, tries, have_need;
    dp_base from, to;
    int chain_from, chain_to; /* -1: that of the base */
    double need[10];
} options;

enum {
    OPT_RUNS = 256,
    OPT_FROM,
    OPT_TO,
    OPT_CHAIN_FROM,
    OPT_CHAIN_TO,
    OPT_NEED,
    OPT_TRIES,
    OPT_OUTPUTS,
    OPT_STATE_LAYOUT
};

static const struct argp_option STAGE_OPTIONS[] = {
    DP_ROWS_ONE_RUN,
    DP_ROW_MEMORY,
    DP_ROW_CACHE,
    {"subject", DP_OPT_SUBJECT, "LIB", 0,
     "a kernel in a shared library (harness/deltaproof_subject.h) instead of the simulated ranks; "
     "base and chain: what it claims",
     0},
    {"outputs", OPT_OUTPUTS, "OUT", 0,
     "tensors that another program computed from the case's inputs (deltaproof inputs CASE -o IN): "
     "results and stages as in `judge`",
     0},
    {"state-layout", OPT_STATE_LAYOUT, "kv|vk", 0,
     "last axes of states in OUT (default: metadata, else kv)", 0},
    {"runs", OPT_RUNS, "N", 0,
     "how often each stage, or the subject, runs on the same inputs (default: 3)", 0},
    {"verbose", 'v', 0, 0, "try every stage, not only up to the first wrong one", 0},
    {0}};

static const struct argp_option PRECISION_OPTIONS[] = {
    DP_ROW_CASES,
    DP_ROW_RANKS,
    DP_ROW_MERGE,
    {"from", OPT_FROM, "NAME", 0, "base policy that is too coarse: bf16 (default), fp32", 0},
    {"to", OPT_TO, "NAME", 0, "base policy that stages may be raised to: fp32 (default), fp64", 0},
    {"chain-from", OPT_CHAIN_FROM, "FORMAT", 0,
     "format of the M chain with it (default: that of --from)", 0},
    {"chain-to", OPT_CHAIN_TO, "FORMAT", 0,
     "format that the M chain may be raised to (default: that of --to)", 0},
    {"need", OPT_NEED, "LIST", 0,
     "what is needed: TENSOR=ERROR,..., relative errors of whole tensors, e.g. o=1e-3,dk=5e-3 "
     "(default: every row within the bound of the policy --to)",
     0},
    {"tries", OPT_TRIES, "N", 0,
     "policies to try at most in each search for a better one (default: 2000)", 0},
    {0}};

static void parse_need(struct argp_state *st, const char *text, options *o) {
    char *copy = strdup(text), *save;
    for (int i = 0; i < 10; i++)
        o->need[i] = NAN;
    for (char *t = strtok_r(copy, ",", &save); t; t = strtok_r(NULL, ",", &save)) {
        char *v = strchr(t, '=');
        int f = -1;
        if (v) *v++ = 0;
        for (int i = 0; i < dp_result_nfields; i++)
            if (!strcmp(t, dp_result_fields[i].name)) f = i;
        if (f < 0 || !v) argp_error(st, "--need %s: '%s' is no tensor with =ERROR", text, t);
        if (!isnan(o->need[f])) argp_error(st, "--need %s: %s is given twice", text, t);
        if (dp_number_real(v, 0, HUGE_VAL, &o->need[f]) != DP_NUMBER_OK || o->need[f] == 0)
            argp_error(st, "--need %s: '%s' is not a positive number", text, v);
        o->have_need = 1;
    }
    if (!o->have_need) argp_error(st, "--need: the list is empty");
    free(copy);
}

static error_t parse(int key, char *arg, struct argp_state *st) {
    options *o = st->input;
    switch (key) {
    case 'v': o->verbose = 1; break;
    case OPT_FROM:
        o->from = (dp_base)dp_option_name(st, "from", arg, dp_base_names, DP_NBASES);
        break;
    case OPT_TO: o->to = (dp_base)dp_option_name(st, "to", arg, dp_base_names, DP_NBASES); break;
    case OPT_CHAIN_FROM: o->chain_from = dp_option_format(st, "chain-from", arg); break;
    case OPT_CHAIN_TO: o->chain_to = dp_option_format(st, "chain-to", arg); break;
    case OPT_OUTPUTS: o->outputs = arg; break;
    case OPT_STATE_LAYOUT: o->layout = arg; break;
    case OPT_NEED: parse_need(st, arg, o); break;
    case OPT_TRIES: o->tries = (int)dp_option_number(st, "tries", arg, 1, INT32_MAX); break;
    case OPT_RUNS: o->runs = (int)dp_option_number(st, "runs", arg, 1, 1000); break;
    case ARGP_KEY_END:
        if (!o->of.nname) argp_error(st, "name a case");
        break;
    default: return dp_option(key, arg, st, &o->of);
    }
    return 0;
}

static void print_list(const char *what, const unsigned char *set, int n, int count) {
    int printed = 0;
    printf("; %s", what);
    for (int i = 0; i < n && printed < 12; i++)
        if (set[i]) {
            printf(" %d", i);
            printed++;
        }
    if (count > printed) printf(" ... (%d)", count);
}

static void print_stage(const dp_bisect *b, const char *name, const dp_bisect_row *x) {
    if (!x->tensor[0]) {
        printf("  %-16s -     nothing to judge\n", name);
        return;
    }
    printf("  %-16s %-5s %-11s ", name, x->fails ? "WRONG" : "ok", x->tensor);
    if (x->expected)
        printf("within its budget, but %.3g times what these formats make of nearby inputs (at "
               "most %.3g times is theirs)",
               x->ratio, x->budget);
    else
        printf("%.2g of its budget, %lld rows", x->ratio, (long long)x->judged);
    if (x->skipped) printf(", %lld skipped (not finite)", (long long)x->skipped);
    if (x->fails > x->unsteady && !x->expected) printf(", %d over", x->fails - x->unsteady);
    if (x->unsteady) printf(", %d not as in the first run", x->unsteady);
    if (x->nrank) print_list("ranks", x->rank, b->N, x->nrank);
    if (x->nhead) print_list("heads", x->head, b->HV, x->nhead);
    putchar('\n');
}

static void print_place(const dp_bisect_row *x) {
    const dp_place *a = &x->at;
    printf(x->expected ? "  where most: %s" : "  first wrong row: %s", x->tensor);
    if (a->rank >= 0) printf(", rank %d", a->rank);
    if (a->sequence >= 0) printf(", sequence %d", a->sequence);
    if (a->head >= 0) printf(", head %d", a->head);
    if (a->chunk >= 0) printf(", chunk %d", a->chunk);
    if (a->token >= 0) printf(", token %lld", (long long)a->token);
    if (x->row >= 0) printf(", row %d", x->row);
    printf(", entry %d", x->index);
    if (x->run) printf(", in run %d of the same inputs", x->run + 1);
    putchar('\n');
    printf("  got   %-24a %.9g\n  truth %-24a %.9g\n  error of the row %.3g", x->got, x->got,
           x->want, x->want, x->err);
    if (!x->expected) printf(", its budget %.3g", x->budget);
    putchar('\n');
}

static int stage(const options *o, const dp_case *c, dp_err *e) {
    dp_bisect b;
    const dp_one_run r = dp_options_one(&o->of, c, NULL);
    const dp_fault fault = o->of.fault;
    if (dp_step_bisect(c, r.base, r.chain, r.merge, r.ranks, fault, o->runs, o->verbose, &b, e))
        return 2;
    char *id = dp_run_id(&(dp_run){.case_name = c->name,
                                   .backend = DP_BACKEND_SIM,
                                   .ranks = r.ranks,
                                   .has_base = 1,
                                   .base = r.base,
                                   .has_chain = 1,
                                   .chain = r.chain,
                                   .has_merge = 1,
                                   .merge = r.merge,
                                   .fault = fault});
    printf("%s: every stage on true inputs\n", id);
    free(id);
    const char *name;
    if (!dp_bisect_first(&b, &name) &&
        dp_bisect_expected(&c->p, r.base, r.chain, r.merge, r.ranks, fault, c->backward,
                           c->input_dtype, &b, e)) {
        dp_bisect_free(&b);
        return 2;
    }
    const dp_bisect_row *wrong = dp_bisect_first(&b, &name);
    const int step = c->op == DP_OP_STEP;
    int go = 1;
    if (step) {
        print_stage(&b, dp_bisect_conv_names[0], &b.conv[0]);
        go = o->verbose || wrong != &b.conv[0];
    }
    for (int i = 0; go && i < (c->backward ? DP_NSTAGES : DP_STAGE_RECOMPUTE); i++)
        if (o->verbose || b.first < 0 || i <= b.first)
            print_stage(&b, dp_stage_names[i], &b.stage[i]);
    if (step && c->backward && (o->verbose || !wrong || wrong == &b.conv[1]))
        print_stage(&b, dp_bisect_conv_names[1], &b.conv[1]);
    if (wrong) {
        printf("WRONG STAGE: %s\n", name);
        print_place(wrong);
    } else
        printf("every stage keeps to its own budget%s\n",
               r.base == DP_BASE_FP64 ? "" : ", and to what its formats make of nearby inputs");
    dp_bisect_free(&b);
    return wrong != NULL;
}

/* ---- a library, or tensors in a file: their stages are judged where they show them ----------- */

static void print_judged(const dp_judgement *t, dp_stage stage, void *arg) {
    (void)arg;
    printf("  %-16s %-8s %-11s", dp_stage_names[stage],
           t->verdict == DP_FAIL   ? "WRONG"
           : t->verdict == DP_PASS ? "ok"
                                   : "unjudged",
           t->name);
    if (!isnan(t->ratio)) printf(" %.2g of its bound", t->ratio);
    if (t->nover) printf(", %lld rows over", (long long)t->nover);
    if (t->N > 1 && t->nover) {
        printf("; ranks");
        for (int r = 0; r < t->N; r++)
            if (!(t->per_rank_ratio[r] <= 1) && !isnan(t->per_rank[r])) printf(" %d", r);
    }
    if (t->why[0] && !t->nover) printf("  (%s)", t->why);
    putchar('\n');
}

/* States and matrices of a rank have no sequence in the verdict: the one that passes its boundary.
 */
static int sequence_at(const dp_case *c, int N, int rank, const char *tensor) {
    dp_context x;
    if (rank < 0 || dp_context_build(c->p.cu, c->p.Nseq, N, rank, &x, NULL)) return -1;
    const int first = !strcmp(tensor, "S_in") || !strcmp(tensor, "dM") || !strcmp(tensor, "dH"),
              seq = x.local_seq[first ? 0 : x.nlocal - 1];
    dp_context_free(&x);
    return seq;
}

static void print_row(const dp_case *c, const dp_judgement *t, int backward) {
    const dp_row *x = backward ? &t->last : &t->first;
    const int tap = dp_stage_tensor_find(t->name),
              matrix = (tap >= 0 && dp_stage_tensors[tap].kind != DP_PER_TOKEN) ||
                       !strcmp(t->name, "final_state") || !strcmp(t->name, "ds0");
    const int width = tap == DP_M || tap == DP_DM ? c->p.K : c->p.V,
              seq = x->at.sequence >= 0 ? x->at.sequence
                    : tap >= 0          ? sequence_at(c, t->N, x->at.rank, t->name)
                                        : -1;
    if (!t->nover) {
        printf("  %s: %s\n", t->name, t->why);
        return;
    }
    printf("  first wrong row: %s, rank %d", t->name, x->at.rank);
    if (seq >= 0) printf(", sequence %d", seq);
    printf(", head %d", x->at.head);
    if (x->at.chunk >= 0) printf(", chunk %d", x->at.chunk);
    if (x->at.token >= 0) printf(", token %lld", (long long)x->at.token);
    if (matrix) printf(", row %d", x->index / width);
    printf(", entry %d\n", matrix ? x->index % width : x->index);
    printf("  got   %-24a %.9g\n  truth %-24a %.9g\n  error of the row %.3g, its bound %.3g\n",
           x->got, x->got, x->want, x->want, x->err, x->bound);
    if (strstr(t->why, "never written") || strstr(t->why, "NaN or Inf"))
        printf("  %s: %s\n", t->name, t->why);
}

/* Runs of a library on the same inputs, entry by entry: 1 where one differs from the first. */
static int unsteady(const options *o, const dp_case *c, const dp_subject *lib, dp_err *e) {
    dp_subject_result a = {0};
    int found = 0;
    for (int run = 0; run < o->runs && o->runs > 1 && !found; run++) {
        dp_subject_result b = {0};
        if (dp_subject_run(lib, &c->p, dp_formats[c->input_dtype].name, c->ranks[0], c->base[0],
                           c->chain[0], c->backward,
                           o->of.limit_s > 0 ? o->of.limit_s : DP_SUBJECT_LIMIT_S, &b, e))
            break;
        if (b.outcome != a.outcome && run) {
            printf("NOT STEADY: run %d of the same inputs %s, the first %s\n", run + 1,
                   dp_subject_outcomes[b.outcome], dp_subject_outcomes[a.outcome]);
            found = 1;
        }
        for (int i = 0; run && !found && i < dp_result_nfields + DP_NSTAGE_TENSORS; i++) {
            const int tap = i - dp_result_nfields;
            int64_t rows, width, n;
            const double *x = tap < 0 ? *dp_result_at(&a.r, i) : a.stage[tap],
                         *y = tap < 0 ? *dp_result_at(&b.r, i) : b.stage[tap];
            if (!x || !y) continue;
            if (tap < 0) {
                dp_result_shape(&c->p, i, &rows, &width);
                n = rows * width;
            } else
                n = dp_stage_tensor_size(&c->p, c->ranks[0], tap);
            for (int64_t z = 0; z < n && !found; z++)
                if (memcmp(&x[z], &y[z], sizeof *x)) {
                    printf("NOT STEADY: %s, entry %lld of %lld: %a in the first run, %a in run %d "
                           "of the same inputs\n",
                           tap < 0 ? dp_result_fields[i].name : dp_stage_tensors[tap].name,
                           (long long)z, (long long)n, x[z], y[z], run + 1);
                    found = 1;
                }
        }
        if (run)
            dp_subject_result_free(&b);
        else
            a = b;
    }
    dp_subject_result_free(&a);
    return found;
}

static int shown_stage(const options *o, dp_case *c, dp_err *e) {
    const dp_backend backend[] = {DP_BACKEND_SUBJECT};
    dp_subject lib = {0};
    dp_runs runs = {0};
    dp_status st;
    if (o->of.subject) {
        if (dp_subject_open(o->of.subject, o->of.limit_s, o->of.memory, &lib, e)) return 2;
        const dp_one_run r = dp_options_one(&o->of, c, &lib);
        if (r.ranks > lib.max_ranks) {
            dp_fail(e, DP_EINPUT, "--ranks %d: %s takes up to %d", r.ranks, o->of.subject,
                    lib.max_ranks);
            dp_subject_close(&lib);
            return 2;
        }
        c->ranks[0] = r.ranks;
        c->base[0] = r.base;
        c->chain[0] = r.chain;
        c->nranks = c->nbase = c->nchain = 1;
        const dp_run_options ro = {.nbackend = 1,
                                   .backend = backend,
                                   .nbase = 1,
                                   .base = c->base,
                                   .nchain = 1,
                                   .chain = c->chain,
                                   .subject = &lib,
                                   .limit_s = o->of.limit_s,
                                   .cache = o->of.cache};
        st = dp_case_run(c, &ro, &runs, e);
    } else {
        const dp_judge_options jo = {.outputs = o->outputs,
                                     .state_layout = o->layout,
                                     .base = o->of.nbase ? dp_base_names[o->of.base[0]] : NULL,
                                     .claim = o->of.nchain ? dp_formats[o->of.chain[0]].name : NULL,
                                     .ranks = o->of.nranks ? o->of.ranks[0] : 0,
                                     .cache = o->of.cache};
        st = dp_judge_case(&jo, c, &runs, e);
    }
    int rc = 2;
    if (!st && runs.n) {
        const dp_run *r = &runs.run[0];
        const dp_blame b = dp_blame_run(r);
        rc = r->verdict == DP_FAIL;
        printf("%s: every tensor that it shows, against the truth\n", r->id);
        dp_blame_order(r, print_judged, NULL);
        if (b.tensor) {
            printf(b.nsuspect == 1 ? "WRONG STAGE: " : "WRONG STAGE: one of ");
            for (int i = 0, n = 0; i < DP_NSTAGES; i++)
                if (b.suspect[i]) printf("%s%s", n++ ? " " : "", dp_stage_names[i]);
            if (b.shows[0]) printf(" (to tell which, show %s)", b.shows);
            putchar('\n');
            print_row(c, b.tensor, b.backward);
        } else if (rc || r->verdict == DP_SKIPPED)
            printf("NO STAGE: %s\n", r->why);
        else
            printf("every tensor is within its bound\n");
        if (r->verdict == DP_SKIPPED) rc = 2;
        if (o->of.subject && rc != 2 && !strcmp(r->outcome, "returned") && unsteady(o, c, &lib, e))
            rc = 1;
    }
    dp_runs_free(&runs);
    dp_subject_close(&lib);
    return e->code ? 2 : rc;
}

/* ---- precision ------------------------------------------------------------------------------- */

static const char *level_name(const dp_unit *u, int level) {
    return u->stage == DP_NSTAGES ? dp_formats[u->format[level]].name
                                  : dp_base_names[u->format[level]];
}

static void print_errors(const double *x, const double *need) {
    for (int i = 0; i < dp_result_nfields; i++)
        if (!isnan(x[i]) && (!need || !isnan(need[i])))
            printf("  %s %.2e", dp_result_fields[i].name, x[i]);
}

static void print_cost(const dp_cost *c) {
    printf("%.4g Gflop, %.4g MB, %.3g us", c->flops / 1e9, c->bytes / 1e6, c->seconds * 1e6);
}

static void print_choice(const char *what, const dp_precision *r, const dp_choice *c,
                         const double *need) {
    printf("%s: %d of %d raised:", what, c->raised, r->nunit);
    for (int u = 0; u < r->nunit; u++)
        if (c->policy.level[u])
            printf(" %s=%s", r->unit[u].name, level_name(&r->unit[u], c->policy.level[u]));
    printf("\n ");
    print_errors(c->error, need);
    printf("\n  ");
    print_cost(&c->cost);
    printf(c->proven
               ? "  (no policy before it in that order will do, if raising a stage never hurts)\n"
               : "  (none of its stages can be lowered; --tries ran out before all policies before "
                 "it were excluded)\n");
}

static dp_format chain_of(dp_base b) {
    return b == DP_BASE_FP64 ? DP_FP64 : b == DP_BASE_FP32 ? DP_FP32 : DP_BF16;
}

static int precision(const options *o, const dp_case *c, dp_err *e) {
    dp_precision r;
    const dp_one_run one = dp_options_one(&o->of, c, NULL);
    const int ranks = one.ranks;
    dp_precision_request rq = {.p = &c->p,
                               .N = ranks,
                               .backward = c->backward,
                               .from = o->from,
                               .to = o->to,
                               .merge = one.merge,
                               .by_verdict = !o->have_need,
                               .max_tries = o->tries,
                               .progress = isatty(2)};
    rq.chain_from = o->chain_from >= 0 ? (dp_format)o->chain_from : chain_of(rq.from);
    rq.chain_to = o->chain_to >= 0 ? (dp_format)o->chain_to : chain_of(rq.to);
    memcpy(rq.need, o->need, sizeof rq.need);
    const double *need = o->have_need ? o->need : NULL;
    if (rq.from < rq.to) {
        dp_fail(e, DP_EINPUT, "bisect precision: --from %s --to %s: from must be the coarser one",
                dp_base_names[rq.from], dp_base_names[rq.to]);
        return 2;
    }
    if (dp_formats[rq.chain_from].u_acc < dp_formats[rq.chain_to].u_acc) {
        dp_fail(e, DP_EINPUT,
                "bisect precision: --chain-from %s --chain-to %s: from must be the coarser one",
                dp_formats[rq.chain_from].name, dp_formats[rq.chain_to].name);
        return 2;
    }
    for (int i = 0; need && i < dp_result_nfields; i++) {
        int64_t rows, width;
        dp_result_shape(&c->p, i, &rows, &width);
        if (!isnan(need[i]) && (!rows || (dp_result_fields[i].backward && !c->backward))) {
            dp_fail(e, DP_EINPUT, "bisect precision: --need %s: %s has no such tensor",
                    dp_result_fields[i].name, c->name);
            return 2;
        }
    }
    if (dp_precision_search(&rq, &r, e)) return 2;
    printf("%s:ranks=%d, from base %s, chain %s to base %s, chain %s; needed:", c->name, ranks,
           dp_base_names[rq.from], dp_formats[rq.chain_from].name, dp_base_names[rq.to],
           dp_formats[rq.chain_to].name);
    if (need)
        for (int i = 0; i < dp_result_nfields; i++)
            isnan(need[i]) ? 0 : printf("  %s <= %.3g", dp_result_fields[i].name, need[i]);
    else
        printf(" every row within the bounds of the second");
    printf("\n%-28s %s ", "all as --from", r.from_passes ? "will do " : "will not");
    print_errors(r.from_error, need);
    printf("   ");
    print_cost(&r.from_cost);
    printf("\n%-28s %s ", "all as --to", r.to_passes ? "will do " : "will not");
    print_errors(r.to_error, need);
    printf("   ");
    print_cost(&r.to_cost);
    printf("\nwhat each costs at both ends, and the errors when it alone stays as --from:\n");
    for (int u = 0; u < r.nunit; u++) {
        const dp_unit *x = &r.unit[u];
        const dp_cost *a = &x->cost[0], *b = &x->cost[x->nlevel - 1];
        printf("  %-16s %-5s %8.4g Gflop %8.4g MB %7.3g us   %-5s %8.4g MB %7.3g us ", x->name,
               level_name(x, 0), a->flops / 1e9, a->bytes / 1e6, a->seconds * 1e6,
               level_name(x, x->nlevel - 1), b->bytes / 1e6, b->seconds * 1e6);
        print_errors(x->alone, need);
        putchar('\n');
    }
    if (r.from_passes)
        printf("nothing needs to be raised\n");
    else if (!r.to_passes)
        printf("NOT EVEN base %s with chain %s will do\n", dp_base_names[rq.to],
               dp_formats[rq.chain_to].name);
    else {
        print_choice("SMALLEST SET", &r, &r.smallest, need);
        print_choice("CHEAPEST POLICY", &r, &r.cheapest, need);
    }
    printf("%d policies tried\n", r.tries);
    return !r.to_passes && !r.from_passes;
}

int dp_cmd_bisect(int argc, char **argv) {
    const struct argp stage_argp = {
        .options = STAGE_OPTIONS,
        .parser = parse,
        .args_doc = "CASE",
        .doc = "Which stage of the pipeline is wrong. Simulated ranks: each stage is run on true "
               "inputs and judged by its own budget. --subject, --outputs: every stage that "
               "the program shows is judged by the bound of all stages up to it; those that could "
               "have made the first wrong one are named.\v"
               "Exit status 0 every stage keeps to its budget, 1 one does not, 2 could not tell."};
    const struct argp precision_argp = {
        .options = PRECISION_OPTIONS,
        .parser = parse,
        .args_doc = "CASE",
        .doc = "Which stages need a wider format: the smallest set that must be raised and the "
               "cheapest policy that will do.\v"
               "Times are flops and bytes at the peak rates of an H200: an order, no prediction. "
               "Exit status 0 found, 1 not even --to will do, 2 bad input."};
    const int want_stage = argc >= 2 && !strcmp(argv[1], "stage"),
              want_precision = argc >= 2 && !strcmp(argv[1], "precision");
    options o = {.of = dp_options_new(1, 1),
                 .runs = DP_BISECT_RUNS,
                 .from = DP_BASE_BF16,
                 .to = DP_BASE_FP32,
                 .chain_from = -1,
                 .chain_to = -1,
                 .tries = 2000};
    dp_err e = {0};
    dp_case c;
    if (!want_stage && !want_precision) {
        const int help = argc >= 2 && (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h"));
        fprintf(help ? stdout : stderr, "Usage: deltaproof bisect stage CASE [OPTION...]       "
                                        "which stage of the pipeline is wrong\n"
                                        "       deltaproof bisect precision CASE [OPTION...]   "
                                        "which stages need a wider format\n");
        return help ? 0 : 2;
    }
    argv[1] = (char *)(want_stage ? "deltaproof bisect stage" : "deltaproof bisect precision");
    argp_parse(want_stage ? &stage_argp : &precision_argp, argc - 1, argv + 1, 0, NULL, &o);
    char *path = dp_case_path(o.of.cases_dir, o.of.name[0]);
    int rc = 2;
    if (!dp_case_load(path, &c, &e)) {
        const int stages = c.op == DP_OP_RECURRENCE ||
                           (c.op == DP_OP_STEP && want_stage && !o.of.subject && !o.outputs);
        if (!stages)
            dp_fail(&e, DP_EINPUT, "bisect: %s: op = %s has no stages", path, c.op_name);
        else if (want_stage && !!o.of.subject + !!o.outputs + (o.of.fault > 0) > 1)
            dp_fail(&e, DP_EINPUT,
                    "bisect stage: --fault, --subject and --outputs exclude each other");
        else if (dp_options_split(&o.of, &c, 0, &e))
            rc = 2;
        else if (o.of.subject || o.outputs)
            rc = shown_stage(&o, &c, &e);
        else
            rc = want_stage ? stage(&o, &c, &e) : precision(&o, &c, &e);
        dp_case_free(&c);
    }
    if (e.code) fprintf(stderr, "deltaproof: %s\n", e.msg);
    free(path);
    return e.code ? 2 : rc;
}
