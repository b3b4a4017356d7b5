/* deltaproof bisect stage CASE: which stage is wrong, of the simulated ranks (bisect.h), or of a
 * shared library or tensors in a file (blame.h). Exit status 0: every stage keeps to its bound, 1:
 * one does not, 2: could not tell. The other form, deltaproof bisect precision CASE: which stages
 * need a wider format (precision.h). Exit status 0: found, 1: not even the wide policy will do, 2:
 * bad input. */
#include "commands.h"
#include "harness/run/blame.h"
#include "harness/run/judge.h"
#include "harness/search/bisect.h"
#include "harness/search/precision.h"
#include "options.h"
#include "ref/vocabulary/context.h"
#include "ref/vocabulary/text.h"

#include <argp.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    dp_options of;
    int verbose, runs, have_need;
    dp_base from, to;
    int chain_from, chain_to; /* -1: that of the base */
    double need[DP_NRESULTS];
} dp_bisect_options;

/* ---- formats --------------------------------------------------------------------------------- */

static const char *level_name(const dp_unit *u, int level) {
    return u->stage == DP_NSTAGES ? dp_formats[u->format[level]].name
                                  : dp_base_names[u->format[level]];
}

static void print_errors(const double *x, const double *need) {
    for (int i = 0; i < DP_NRESULTS; i++)
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

/* Errors and costs of the whole policy at one end. */
static void print_end(const char *name, int passes, const double *error, const dp_cost *cost,
                      const double *need) {
    printf("\n%-28s %s ", name, passes ? "will do " : "will not");
    print_errors(error, need);
    printf("   ");
    print_cost(cost);
}

static void print_question(const dp_case *c, const dp_precision_request *q, const double *need) {
    printf("%s:ranks=%d, from base %s, chain %s to base %s, chain %s; needed:", c->name, q->N,
           dp_base_names[q->from], dp_formats[q->chain_from].name, dp_base_names[q->to],
           dp_formats[q->chain_to].name);
    if (!need) printf(" every row within the bounds of the second");
    for (int i = 0; need && i < DP_NRESULTS; i++)
        if (!isnan(need[i])) printf("  %s <= %.3g", dp_result_fields[i].name, need[i]);
}

static void print_units(const dp_precision *r, const double *need) {
    printf("\nwhat each costs at both ends, and the errors when it alone stays as --from:\n");
    for (int u = 0; u < r->nunit; u++) {
        const dp_unit *x = &r->unit[u];
        const dp_cost *a = &x->cost[0], *b = &x->cost[x->nlevel - 1];
        printf("  %-16s %-5s %8.4g Gflop %8.4g MB %7.3g us   %-5s %8.4g MB %7.3g us ", x->name,
               level_name(x, 0), a->flops / 1e9, a->bytes / 1e6, a->seconds * 1e6,
               level_name(x, x->nlevel - 1), b->bytes / 1e6, b->seconds * 1e6);
        print_errors(x->alone, need);
        putchar('\n');
    }
}

static void print_answer(const dp_precision_request *q, const dp_precision *r, const double *need) {
    if (r->from_passes)
        printf("nothing needs to be raised\n");
    else if (!r->to_passes)
        printf("NOT EVEN base %s with chain %s will do\n", dp_base_names[q->to],
               dp_formats[q->chain_to].name);
    else {
        print_choice("SMALLEST SET", r, &r->smallest, need);
        print_choice("CHEAPEST POLICY", r, &r->cheapest, need);
    }
    printf("%d policies tried\n", r->tries);
}

static dp_format chain_of(dp_base b) {
    return b == DP_BASE_FP64 ? DP_FP64 : b == DP_BASE_FP32 ? DP_FP32 : DP_BF16;
}

static dp_precision_request request(const dp_bisect_options *o, const dp_case *c) {
    const dp_sim_policy one = dp_options_one(&o->of, c, NULL);
    dp_precision_request q = {.p = &c->p,
                              .N = one.N,
                              .backward = c->backward,
                              .from = o->from,
                              .to = o->to,
                              .merge = one.merge,
                              .by_verdict = !o->have_need,
                              .max_tries = o->of.tries ? o->of.tries : 2000,
                              .progress = isatty(2)};
    q.chain_from = o->chain_from >= 0 ? (dp_format)o->chain_from : chain_of(q.from);
    q.chain_to = o->chain_to >= 0 ? (dp_format)o->chain_to : chain_of(q.to);
    memcpy(q.need, o->need, sizeof q.need);
    return q;
}

static dp_status check(const dp_precision_request *q, const dp_case *c, const double *need,
                       dp_err *e) {
    if (q->from < q->to)
        return dp_fail(e, DP_EINPUT,
                       "bisect precision: --from %s --to %s: from must be the coarser one",
                       dp_base_names[q->from], dp_base_names[q->to]);
    if (dp_formats[q->chain_from].u_acc < dp_formats[q->chain_to].u_acc)
        return dp_fail(
            e, DP_EINPUT,
            "bisect precision: --chain-from %s --chain-to %s: from must be the coarser one",
            dp_formats[q->chain_from].name, dp_formats[q->chain_to].name);
    for (int i = 0; need && i < DP_NRESULTS; i++)
        if (!isnan(need[i]) &&
            (!dp_result_exists(&c->p, i) || (dp_result_fields[i].backward && !c->backward)))
            return dp_fail(e, DP_EINPUT, "bisect precision: --need %s: %s has no such tensor",
                           dp_result_fields[i].name, c->name);
    return DP_OK;
}

/* Which stages need a wider format. 0: nothing is wrong, 1: something, 2: *e says why not. */
static int dp_bisect_precision(const dp_bisect_options *o, const dp_case *c, dp_err *e) {
    dp_precision r;
    const dp_precision_request q = request(o, c);
    const double *need = o->have_need ? o->need : NULL;
    if (check(&q, c, need, e) || dp_precision_search(&q, &r, e)) return 2;
    print_question(c, &q, need);
    print_end("all as --from", r.from_passes, r.from_error, &r.from_cost, need);
    print_end("all as --to", r.to_passes, r.to_error, &r.to_cost, need);
    print_units(&r, need);
    print_answer(&q, &r, need);
    return !r.to_passes && !r.from_passes;
}

/* ---- simulated ranks ------------------------------------------------------------------------- */

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
        printf("within its bound, but %.3g times what these formats make of nearby inputs (at "
               "most %.3g times is theirs)",
               x->ratio, x->first.limit);
    else
        printf("%.2g of its bound, %lld rows", x->ratio, (long long)x->judged);
    if (x->skipped) printf(", %lld skipped (not finite)", (long long)x->skipped);
    if (x->fails > x->unsteady && !x->expected) printf(", %d over", x->fails - x->unsteady);
    if (x->unsteady) printf(", %d not as in the first run", x->unsteady);
    if (x->nrank) print_list("ranks", x->rank, b->N, x->nrank);
    if (x->nhead) print_list("heads", x->head, b->HV, x->nhead);
    putchar('\n');
}

static void print_place(const dp_bisect_row *x) {
    const dp_bisect_entry *f = &x->first;
    const dp_place *a = &f->at;
    printf(x->expected ? "  where most: %s" : "  first wrong row: %s", x->tensor);
    if (a->rank >= 0) printf(", rank %d", a->rank);
    if (a->sequence >= 0) printf(", sequence %d", a->sequence);
    if (a->head >= 0) printf(", head %d", a->head);
    if (a->chunk >= 0) printf(", chunk %d", a->chunk);
    if (a->token >= 0) printf(", token %lld", (long long)a->token);
    if (f->row >= 0) printf(", row %d", f->row);
    printf(", entry %d", f->index);
    if (x->run) printf(", in run %d of the same inputs", x->run + 1);
    putchar('\n');
    printf("  got   %-24a %.9g\n  truth %-24a %.9g\n  error of the row %.3g", f->got, f->got,
           f->want, f->want, f->err);
    if (!x->expected) printf(", its bound %.3g", f->limit);
    putchar('\n');
}

static void print_id(const dp_case *c, const dp_sim_policy *r, dp_own own) {
    DP_OWN char *id = dp_run_id(&(dp_run){.case_name = c->name,
                                          .backend = DP_BACKEND_SIM,
                                          .ranks = r->N,
                                          .own = own,
                                          .has_base = 1,
                                          .base = r->base,
                                          .has_chain = 1,
                                          .chain = r->chain,
                                          .has_merge = 1,
                                          .merge = r->merge,
                                          .payload = r->payload,
                                          .fault = r->fault});
    printf("%s: every stage on true inputs\n", id);
}

/* In the order of the pipeline, up to the first wrong one, all with --verbose. Op step: between the
 * convolutions. */
static void print_stages(const dp_bisect_options *o, const dp_case *c, const dp_bisect *b,
                         const dp_bisect_row *wrong) {
    const int step = c->op->has_front;
    int go = 1;
    if (step) {
        print_stage(b, dp_bisect_conv_names[0], &b->conv[0]);
        go = o->verbose || wrong != &b->conv[0];
    }
    for (int i = 0; go && i < dp_stages_of(c->backward); i++)
        if (o->verbose || b->first < 0 || i <= b->first)
            print_stage(b, dp_stage_names[i], &b->stage[i]);
    if (step && c->backward && (o->verbose || !wrong || wrong == &b->conv[1]))
        print_stage(b, dp_bisect_conv_names[1], &b->conv[1]);
}

/* Ranks that cannot own the tokens so, or a fault that is of none that do. */
static int refuses(const dp_case *c, dp_own own, const dp_sim_policy *r, int parts, dp_err *e) {
    if (own && dp_faults[r->fault].even)
        return dp_fail(
            e, DP_EINPUT,
            "bisect stage: --own %s: the fault %s is of ranks that own T / N tokens each",
            dp_own_names[own], dp_faults[r->fault].name);
    if (!parts)
        return dp_fail(e, DP_EINPUT, "%s: T = %lld tokens are too few for --own %s, --ranks %d",
                       c->path, (long long)dp_case_tokens(c), dp_own_names[own], r->N);
    return 0;
}

/* The simulated ranks, each stage on true inputs. */
static int dp_bisect_ranks(const dp_bisect_options *o, const dp_case *c, dp_err *e) {
    DP_FREED(dp_bisect_free) dp_bisect b = {0};
    const char *name;
    const dp_sim_policy r = dp_options_one(&o->of, c, NULL);
    const dp_own own = dp_fault_own(r.fault, dp_option_first(&o->of, DP_ID_OWN, DP_OWN_EVEN));
    dp_sim_policy how = r;
    dp_case owned = *c;
    owned.p = dp_bisect_owned(&c->p, own, r.N, &how.N);
    if (refuses(c, own, &r, how.N, e)) return 2;
    if (dp_step_bisect(&owned, &how, o->runs, o->verbose, &b, e)) return 2;
    print_id(c, &r, own);
    if (!dp_bisect_first(&b, &name) && dp_bisect_expected(&owned.p, &how, c->input_dtype, &b, e))
        return 2;
    const dp_bisect_row *wrong = dp_bisect_first(&b, &name);
    print_stages(o, c, &b, wrong);
    if (wrong) {
        printf("WRONG STAGE: %s\n", name);
        print_place(wrong);
    } else
        printf("every stage keeps to its own bound%s\n",
               r.base == DP_BASE_FP64 ? "" : ", and to what its formats make of nearby inputs");
    return wrong != NULL;
}

/* ---- stages that a subject shows ------------------------------------------------------------- */

static void print_judged(const dp_judgement *t, dp_stage stage) {
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
static int sequence_at(const dp_case *c, int N, int rank, int stage) {
    DP_FREED(dp_context_free) dp_context x = {0};
    if (rank < 0 || dp_context_build(c->p.cu, c->p.Nseq, N, rank, &x, NULL)) return -1;
    const int first = stage == DP_S_IN || stage == DP_DM || stage == DP_DH;
    return x.local_seq[first ? 0 : x.nlocal - 1];
}

static void print_row(const dp_case *c, const dp_judgement *t, int backward) {
    const dp_row *x = backward ? &t->last : &t->first;
    const int stage = dp_stage_tensor_find(t->name),
              matrix = (stage >= 0 && dp_stage_tensors[stage].kind != DP_PER_TOKEN) ||
                       !strcmp(t->name, "final_state") || !strcmp(t->name, "ds0");
    const int width = stage == DP_M || stage == DP_DM ? c->p.K : c->p.V,
              seq = x->at.sequence >= 0 ? x->at.sequence
                    : stage >= 0        ? sequence_at(c, t->N, x->at.rank, stage)
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
    if (t->flaw) printf("  %s: %s\n", t->name, t->why);
}

/* ---- is it steady? --------------------------------------------------------------------------- */

/* Result or stage tensor i of a run; NULL: it does not show it. */
static const double *tensor_of(const dp_subject_result *r, int i) {
    const int stage = i - DP_NRESULTS;
    return stage < 0 ? r->r.out[i] : r->stage[stage];
}

static int64_t size_of(const dp_case *c, int i) {
    const int stage = i - DP_NRESULTS;
    if (stage >= 0) return dp_stage_tensor_size(&c->p, c->ranks[0], stage);
    return dp_result_count(&c->p, i);
}

/* 1, and says where, if a tensor of run b (run 1 on) differs from that of the first, a. */
static int differs(const dp_case *c, const dp_subject_result *a, const dp_subject_result *b,
                   int run) {
    for (int i = 0; i < DP_NRESULTS + DP_NSTAGE_TENSORS; i++) {
        const int stage = i - DP_NRESULTS;
        const double *x = tensor_of(a, i), *y = tensor_of(b, i);
        const int64_t n = x && y ? size_of(c, i) : 0;
        for (int64_t z = 0; z < n; z++)
            if (memcmp(&x[z], &y[z], sizeof *x)) {
                printf("NOT STEADY: %s, entry %lld of %lld: %a in the first run, %a in run %d "
                       "of the same inputs\n",
                       stage < 0 ? dp_result_fields[i].name : dp_stage_tensors[stage].name,
                       (long long)z, (long long)n, x[z], y[z], run + 1);
                return 1;
            }
    }
    return 0;
}

/* Runs of a library on the same inputs, entry by entry: 1 where one differs from the first. */
static int unsteady(const dp_bisect_options *o, const dp_case *c, const dp_subject *lib,
                    dp_err *e) {
    const double limit_s = o->of.limit_s > 0 ? o->of.limit_s : DP_SUBJECT_LIMIT_S;
    DP_FREED(dp_subject_result_free) dp_subject_result a = {0};
    int found = 0;
    for (int run = 0; run < o->runs && o->runs > 1 && !found; run++) {
        dp_subject_result b = {0};
        const dp_subject_call call = {.input_format = dp_formats[c->input_dtype].name,
                                      .N = c->ranks[0],
                                      .base = c->base[0],
                                      .chain = c->chain[0],
                                      .backward = c->backward,
                                      .limit_s = limit_s};
        if (dp_subject_run(lib, &c->p, &call, &b, e)) break;
        if (!run) {
            a = b;
            continue;
        }
        if (b.outcome != a.outcome) {
            printf("NOT STEADY: run %d of the same inputs %s, the first %s\n", run + 1,
                   dp_subject_outcomes[b.outcome], dp_subject_outcomes[a.outcome]);
            found = 1;
        } else
            found = differs(c, &a, &b, run);
        dp_subject_result_free(&b);
    }
    return found;
}

/* ---- the one run ----------------------------------------------------------------------------- */

static dp_status run_library(const dp_bisect_options *o, dp_case *c, dp_subject *lib, dp_runs *runs,
                             dp_err *e) {
    if (dp_options_open(&o->of, lib, e)) return e->code;
    const dp_sim_policy r = dp_options_one(&o->of, c, lib);
    if (r.N > lib->max_ranks)
        return dp_fail(e, DP_EINPUT, "--ranks %d: %s takes up to %d", r.N, lib->name,
                       lib->max_ranks);
    dp_case_only(c, &r);
    const dp_run_options ro = {.only = {[DP_ID_BACKEND] = {1, {DP_BACKEND_SUBJECT}},
                                        [DP_ID_BASE] = {1, {(int)r.base}},
                                        [DP_ID_CHAIN] = {1, {(int)r.chain}}},
                               .subject = lib,
                               .limit_s = o->of.limit_s,
                               .cache = o->of.cache};
    return dp_case_run(c, &ro, runs, e);
}

static dp_status judge_file(const dp_bisect_options *o, dp_case *c, dp_runs *runs, dp_err *e) {
    const dp_judge_options jo = {
        .outputs = o->of.outputs,
        .state_layout = o->of.layout,
        .base = o->of.only[DP_ID_BASE].n ? dp_base_names[o->of.only[DP_ID_BASE].of[0]] : NULL,
        .claim = o->of.only[DP_ID_CHAIN].n ? dp_formats[o->of.only[DP_ID_CHAIN].of[0]].name : NULL,
        .design = o->of.design,
        .ranks = dp_option_first(&o->of, DP_ID_RANKS, 0),
        .cache = o->of.cache};
    return dp_judge_case(&jo, c, runs, e);
}

static void print_suspects(const dp_blame *b) {
    printf(b->nsuspect == 1 ? "WRONG STAGE: " : "WRONG STAGE: one of ");
    for (int i = 0, n = 0; i < DP_NSTAGES; i++)
        if (b->suspect[i]) printf("%s%s", n++ ? " " : "", dp_stage_names[i]);
    if (b->shows[0]) printf(" (to tell which, show %s)", b->shows);
    putchar('\n');
}

/* The exit status that the run's verdict makes. */
static int print_blame(const dp_case *c, const dp_run *r) {
    const dp_blame b = dp_blame_run(r);
    const int failed = r->verdict == DP_FAIL;
    printf("%s: every tensor that it shows, against the truth\n", r->id);
    dp_blame_order(r, print_judged);
    if (b.tensor) {
        print_suspects(&b);
        print_row(c, b.tensor, b.backward);
    } else if (failed || r->verdict == DP_SKIPPED)
        printf("NO STAGE: %s\n", r->why);
    else
        printf("every tensor is within its bound\n");
    return r->verdict == DP_SKIPPED ? 2 : failed;
}

/* A shared library, or tensors in a file: the stages that they show. c has the one
 * run that is judged. */
static int dp_bisect_shown(const dp_bisect_options *o, dp_case *c, dp_err *e) {
    DP_FREED(dp_subject_close) dp_subject lib = {0};
    DP_FREED(dp_runs_free) dp_runs runs = {0};
    const int foreign = dp_options_foreign(&o->of);
    int rc = 2;
    const dp_status st = foreign ? run_library(o, c, &lib, &runs, e) : judge_file(o, c, &runs, e);
    if (!st && runs.n) {
        const dp_run *r = &runs.run[0];
        rc = print_blame(c, r);
        if (foreign && rc != 2 && !strcmp(r->outcome, "returned") && unsteady(o, c, &lib, e))
            rc = 1;
    }
    return e->code ? 2 : rc;
}

/* ---- the command ----------------------------------------------------------------------------- */

enum { OPT_RUNS = 256, OPT_FROM, OPT_TO, OPT_CHAIN_FROM, OPT_CHAIN_TO, OPT_NEED };

static const struct argp_option STAGE_OPTIONS[] = {
    DP_ROWS_ONE_RUN,
    DP_ROW("own", DP_OPT_OWN, "NAME",
           "which of the simulated ranks owns which tokens: " DP_OWN_WORDS " (default: even)"),
    DP_ROW_MEMORY,
    DP_ROW_CACHE,
    DP_ROW_SUBJECT(DP_LIBRARY " instead of the simulated ranks; base and chain: what it claims"),
    DP_ROWS_PROGRAM,
    DP_ROW_DESIGN,
    DP_ROW_OUTPUTS("tensors that another program computed from the case's inputs (deltaproof "
                   "inputs CASE -o IN): results and stages as in `judge`"),
    DP_ROW_STATE_LAYOUT("OUT"),
    DP_ROW("runs", OPT_RUNS, "N",
           "how often each stage, or the subject, runs on the same inputs (default: 3)"),
    DP_ROW("verbose", 'v', 0, "try every stage, not only up to the first wrong one"),
    {0}};

static const struct argp_option PRECISION_OPTIONS[] = {
    DP_ROW_CASES,
    DP_ROW_RANKS,
    DP_ROW_MERGE,
    DP_ROW("from", OPT_FROM, "NAME", "base policy that is too coarse: bf16 (default), fp32"),
    DP_ROW("to", OPT_TO, "NAME", "base policy that stages may be raised to: fp32 (default), fp64"),
    DP_ROW("chain-from", OPT_CHAIN_FROM, "FORMAT",
           "format of the M chain with it (default: that of --from)"),
    DP_ROW("chain-to", OPT_CHAIN_TO, "FORMAT",
           "format that the M chain may be raised to (default: that of --to)"),
    DP_ROW(
        "need", OPT_NEED, "LIST",
        "what is needed: TENSOR=ERROR,..., relative errors of whole tensors, e.g. o=1e-3,dk=5e-3 "
        "(default: every row within the bound of the policy --to)"),
    DP_ROW_TRIES("policies to try at most in each search for a better one (default: 2000)"),
    {0}};

static void parse_need(struct argp_state *st, const char *text, dp_bisect_options *o) {
    DP_OWN char *copy = dp_strdup(text);
    char *save;
    for (int i = 0; i < DP_NRESULTS; i++)
        o->need[i] = NAN;
    for (char *t = strtok_r(copy, ",", &save); t; t = strtok_r(NULL, ",", &save)) {
        char *v = strchr(t, '=');
        int f = -1;
        if (v) *v++ = 0;
        for (int i = 0; i < DP_NRESULTS; i++)
            if (!strcmp(t, dp_result_fields[i].name)) f = i;
        if (f < 0 || !v) argp_error(st, "--need %s: '%s' is no tensor with =ERROR", text, t);
        if (!isnan(o->need[f])) argp_error(st, "--need %s: %s is given twice", text, t);
        if (dp_number_real(v, 0, HUGE_VAL, &o->need[f]) != DP_NUMBER_OK || o->need[f] == 0)
            argp_error(st, "--need %s: '%s' is not a positive number", text, v);
        o->have_need = 1;
    }
    if (!o->have_need) argp_error(st, "--need: the list is empty");
}

static error_t parse(int key, char *arg, struct argp_state *st) {
    dp_bisect_options *o = st->input;
    switch (key) {
    case 'v': o->verbose = 1; break;
    case OPT_FROM:
        o->from = (dp_base)dp_option_name(st, "from", arg, dp_base_names, DP_NBASES);
        break;
    case OPT_TO: o->to = (dp_base)dp_option_name(st, "to", arg, dp_base_names, DP_NBASES); break;
    case OPT_CHAIN_FROM: o->chain_from = dp_option_format(st, "chain-from", arg); break;
    case OPT_CHAIN_TO: o->chain_to = dp_option_format(st, "chain-to", arg); break;
    case OPT_NEED: parse_need(st, arg, o); break;
    case OPT_RUNS: o->runs = (int)dp_option_number(st, "runs", arg, 1, 1000); break;
    case ARGP_KEY_END:
        if (!o->of.nname) argp_error(st, "name a case");
        if (dp_options_idle_design(&o->of) && !o->of.outputs)
            argp_error(st, DP_IDLE_DESIGN ", or of --outputs");
        break;
    default: return dp_option(key, arg, st, &o->of);
    }
    return 0;
}

static const struct argp STAGE = {
    .options = STAGE_OPTIONS,
    .parser = parse,
    .args_doc = "CASE",
    .doc = "Which stage of the pipeline is wrong. Simulated ranks: each stage is run on true "
           "inputs and judged by its own bound. --subject, --outputs: every stage that "
           "the program shows is judged by the bound of all stages up to it; those that could "
           "have made the first wrong one are named.\v"
           "Exit status 0 every stage keeps to its bound, 1 one does not, 2 could not tell."};
static const struct argp PRECISION = {
    .options = PRECISION_OPTIONS,
    .parser = parse,
    .args_doc = "CASE",
    .doc = "Which stages need a wider format: the smallest set that must be raised and the "
           "cheapest policy that will do.\v"
           "Times are flops and bytes at the peak rates of an H200: an order, no prediction. "
           "Exit status 0 found, 1 not even --to will do, 2 bad input."};

static int usage(int argc, char **argv) {
    const int help = argc >= 2 && (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h"));
    fprintf(help ? stdout : stderr,
            "Usage: deltaproof bisect stage CASE [OPTION...]\n"
            "           which stage of the pipeline is wrong\n"
            "       deltaproof bisect precision CASE [OPTION...]\n"
            "           which stages need a wider format\n"
            "--help behind stage or precision describes the options.\n\n%s%s",
            help ? "Examples:\n" : "", help ? dp_examples() : "");
    return help ? 0 : 2;
}

/* The question about a case that is loaded; path: its file. */
static int ask(const dp_bisect_options *o, int stage, dp_case *c, const char *path, dp_err *e) {
    const int shown = dp_options_foreign(&o->of) || o->of.outputs;
    const dp_operation *op = c->op;
    if (!op->has_stages || (op->has_front && (!stage || shown)))
        dp_fail(e, DP_EINPUT, "bisect: %s: op = %s has no stages", path, op->name);
    else if (stage && dp_options_foreign(&o->of) + !!o->of.outputs + (o->of.fault > 0) > 1)
        dp_fail(
            e, DP_EINPUT,
            "bisect stage: --fault, --subject (--run, --serve) and --outputs exclude each other");
    else if (o->of.only[DP_ID_OWN].n && (shown || op->has_front))
        dp_fail(e, DP_EINPUT,
                "bisect stage: --own is said of the simulated ranks of one recurrence");
    else if (!dp_fault_own(o->of.fault, dp_option_first(&o->of, DP_ID_OWN, DP_OWN_EVEN)))
        dp_options_split(&o->of, c, 0, e);
    if (e->code) return 2;
    if (shown) return dp_bisect_shown(o, c, e);
    return stage ? dp_bisect_ranks(o, c, e) : dp_bisect_precision(o, c, e);
}

int dp_cmd_bisect(int argc, char **argv) {
    const int stage = argc >= 2 && !strcmp(argv[1], "stage");
    dp_bisect_options o = {.of = dp_options_new(1, 1),
                           .runs = DP_BISECT_RUNS,
                           .from = DP_BASE_BF16,
                           .to = DP_BASE_FP32,
                           .chain_from = -1,
                           .chain_to = -1};
    dp_err e = {0};
    dp_case c;
    int rc = 2;
    if (!stage && (argc < 2 || strcmp(argv[1], "precision"))) return usage(argc, argv);
    argv[1] = (char *)(stage ? "deltaproof bisect stage" : "deltaproof bisect precision");
    dp_parse(stage ? &STAGE : &PRECISION, argc - 1, argv + 1, &o);
    DP_OWN char *path = dp_case_path(dp_options_folder(&o.of), o.of.name[0]);
    if (!dp_case_load(path, &c, &e)) {
        rc = ask(&o, stage, &c, path, &e);
        dp_case_free(&c);
    }
    return e.code ? dp_refuse(&e) : rc;
}
