/* Which stage is wrong of a shared library or of tensors in a file: their stages are judged where
 * they show them (cmd_bisect.h). */
#include "cmd_bisect.h"
#include "harness/run/blame.h"
#include "harness/run/judge.h"
#include "ref/vocabulary/context.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

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
static int sequence_at(const dp_case *c, int N, int rank, int stage) {
    dp_context x;
    if (rank < 0 || dp_context_build(c->p.cu, c->p.Nseq, N, rank, &x, NULL)) return -1;
    const int first = stage == DP_S_IN || stage == DP_DM || stage == DP_DH,
              seq = x.local_seq[first ? 0 : x.nlocal - 1];
    dp_context_free(&x);
    return seq;
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
    return stage < 0 ? *dp_result_at((dp_result *)&r->r, i) : r->stage[stage];
}

static int64_t size_of(const dp_case *c, int i) {
    int64_t rows, width;
    const int stage = i - DP_NRESULTS;
    if (stage >= 0) return dp_stage_tensor_size(&c->p, c->ranks[0], stage);
    dp_result_shape(&c->p, i, &rows, &width);
    return rows * width;
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
    dp_subject_result a = {0};
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
    dp_subject_result_free(&a);
    return found;
}

/* ---- the one run ----------------------------------------------------------------------------- */

static dp_status run_library(const dp_bisect_options *o, dp_case *c, dp_subject *lib, dp_runs *runs,
                             dp_err *e) {
    static const dp_backend backend[] = {DP_BACKEND_SUBJECT};
    if (dp_options_open(&o->of, lib, e)) return e->code;
    const dp_one_run r = dp_options_one(&o->of, c, lib);
    if (r.ranks > lib->max_ranks)
        return dp_fail(e, DP_EINPUT, "--ranks %d: %s takes up to %d", r.ranks, lib->name,
                       lib->max_ranks);
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
                               .subject = lib,
                               .limit_s = o->of.limit_s,
                               .cache = o->of.cache};
    return dp_case_run(c, &ro, runs, e);
}

static dp_status judge_file(const dp_bisect_options *o, dp_case *c, dp_runs *runs, dp_err *e) {
    const dp_judge_options jo = {.outputs = o->of.outputs,
                                 .state_layout = o->of.layout,
                                 .base = o->of.nbase ? dp_base_names[o->of.base[0]] : NULL,
                                 .claim = o->of.nchain ? dp_formats[o->of.chain[0]].name : NULL,
                                 .design = o->of.design,
                                 .ranks = o->of.nranks ? o->of.ranks[0] : 0,
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
    dp_blame_order(r, print_judged, NULL);
    if (b.tensor) {
        print_suspects(&b);
        print_row(c, b.tensor, b.backward);
    } else if (failed || r->verdict == DP_SKIPPED)
        printf("NO STAGE: %s\n", r->why);
    else
        printf("every tensor is within its bound\n");
    return r->verdict == DP_SKIPPED ? 2 : failed;
}

int dp_bisect_shown(const dp_bisect_options *o, dp_case *c, dp_err *e) {
    dp_subject lib = {0};
    dp_runs runs = {0};
    const int foreign = dp_options_foreign(&o->of);
    int rc = 2;
    const dp_status st = foreign ? run_library(o, c, &lib, &runs, e) : judge_file(o, c, &runs, e);
    if (!st && runs.n) {
        const dp_run *r = &runs.run[0];
        rc = print_blame(c, r);
        if (foreign && rc != 2 && !strcmp(r->outcome, "returned") && unsteady(o, c, &lib, e))
            rc = 1;
    }
    dp_runs_free(&runs);
    dp_subject_close(&lib);
    return e->code ? 2 : rc;
}
