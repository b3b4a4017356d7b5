/* The judgement of one run: its parts in order, and a second set of draws where it is marginal. */
#include "limits.h"
#include "outputs.h"
#include "ref/chunk/gate.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The content of one tensor; partial: entries of it need not be written. x NULL: neither a result
 * nor a stage. */
typedef struct {
    const double *x;
    int64_t n;
    int partial;
} content;

static content content_of(const dp_judging *j, const char *name) {
    const dp_problem *p = &j->sp->c->p;
    const int field = dp_result_find(name);
    if (field >= 0) {
        int64_t rows, width;
        dp_result_shape(p, field, &rows, &width);
        return (content){*dp_result_at((dp_result *)j->out->results, field), rows * width, 0};
    }
    const int stage = dp_stage_tensor_find(name);
    if (stage < 0) return (content){0};
    return (content){j->out->stage[stage], dp_stage_tensor_size(p, j->sp->N, stage),
                     stage == DP_AKK || stage == DP_AQK ||
                         dp_stage_tensors[stage].kind == DP_PER_RANK};
}

static void name_flaws(const dp_judging *j, dp_run *run) {
    for (int i = 0; i < run->ntensor; i++) {
        dp_judgement *t = &run->tensor[i];
        const content c = content_of(j, t->name);
        char text[sizeof t->why];
        if (!c.x) continue;
        const int64_t unwritten = dp_subject_flaws(c.x, c.n, text, sizeof text);
        if (!*text) continue;
        if (t->verdict != DP_FAIL && (c.partial || !unwritten)) continue;
        t->verdict = DP_FAIL;
        t->flaw = unwritten ? DP_FLAW_UNWRITTEN : DP_FLAW_NOT_FINITE;
        snprintf(t->why, sizeof t->why, "%s", text);
    }
}

/* ---- the parts in their order ---------------------------------------------------------------- */

/* Does anything but the tensors of ranks need draws of its own? */
static int inner_stages(const dp_outputs *out) {
    int any = 0;
    for (int i = 0; out->stage && i < DP_NSTAGE_TENSORS; i++)
        any |= dp_stage_is_inner(out->stage, i);
    return any;
}

static void judge_step(const dp_judging *j, dp_run *r) {
    const dp_sharding *sp = j->sp;
    const dp_step_expected x = {dp_sharding_expected(sp, r), sp->windows.window_of,
                                dp_run_allowance(r), dp_base_roundoff(r->base),
                                dp_base_smallest(r->base, sp->c->p.K)};
    dp_err e = {0};
    if (!sp->step) return;
    if (!dp_step_judge(sp->c, sp->truth, sp->step, j->out->results, j->bound, &x, r, &e)) return;
    fprintf(stderr, "deltaproof: %s: %s\n", sp->c->name, e.msg);
    exit(2); /* the convolution ran before: a device that died since */
}

/* The sum over the keys of token t of strength times |k| |erasing key|, largest of its heads. A
 * step contracts where that is at most 2. */
static double strength_of(const dp_problem *p, const dp_activated *a, int64_t t) {
    double most = 0;
    for (int hv = 0; hv < p->HV; hv++) {
        double sum = 0;
        for (int r = 0; r < p->R; r++) {
            const double *e = dp_erasing_at(p, a->k, a->erasing, t, hv) + (int64_t)r * p->K,
                         *k = dp_erasing_at(p, a->k, NULL, t, hv) + (int64_t)r * p->K;
            double ee = 0, kk = 0;
            for (int x = 0; x < p->K; x++) {
                ee += e[x] * e[x];
                kk += k[x] * k[x];
            }
            sum += fabs(a->beta ? a->beta[(t * p->HV + hv) * p->R + r] : 1) * sqrt(ee * kk);
        }
        most = fmax(most, sum);
    }
    return most;
}

/* "; the state grows: .." where keys or gates make it grow, or "". */
static void growth_text(const dp_problem *p, char *text, size_t size) {
    dp_activated a = dp_activated_new(p);
    int64_t at = 0;
    int head = 0;
    double most = 0, sum = 0;
    const int keys = dp_has_beta(p) || dp_by_gates(p);
    *text = 0;
    for (int64_t t = 0; t < p->T && keys; t++) {
        const double x = strength_of(p, &a, t);
        if (!(x > most)) continue;
        most = x;
        at = t;
    }
    for (int h = 0; h < p->HV; h++) {
        double grown = 0;
        for (int64_t t = 0; t < p->T; t++)
            grown += fmax(0, dp_largest_gate(p, a.g + (t * p->HV + h) * dp_Kg(p)));
        if (!(grown > sum)) continue;
        sum = grown;
        head = h;
    }
    dp_activated_free(&a);
    if (most > 2.01) /* what rounding adds to 2 */
        snprintf(text, size,
                 "; the state grows: sum of beta |k|^2 is %.3g at token %lld, at most 2 contracts: "
                 "normalise keys",
                 most, (long long)at);
    else if (sum > 0)
        snprintf(
            text, size,
            "; the state grows: log decays above 0 add up to %.3g in head %d (fp32 ends at 88)",
            sum, head);
}

/* Zeros of it would pass, or it overflowed. */
static int has_no_size(const dp_judgement *t) {
    return (t->verdict == DP_UNJUDGED && t->seen_head > 2) ||
           (t->verdict == DP_FAIL && !isfinite(t->rel_fro));
}

/* Where that is because the state grows: what the inputs would need. */
static void say_growth(const dp_problem *p, dp_run *r) {
    int any = 0;
    char text[200];
    for (int i = 0; i < r->ntensor; i++)
        any |= has_no_size(&r->tensor[i]);
    if (!any) return;
    growth_text(p, text, sizeof text);
    for (int i = 0; i < r->ntensor; i++) {
        dp_judgement *t = &r->tensor[i];
        const size_t n = strlen(t->why);
        if (has_no_size(t)) snprintf(t->why + n, sizeof t->why - n, "%s", text);
    }
}

static void judge_all(const dp_judging *j, dp_run *r) {
    const int most = DP_NRESULTS + DP_STEP_TENSORS + DP_RANK_TENSORS + DP_NSTAGE_TENSORS;
    r->tensor = dp_calloc((size_t)most, sizeof *r->tensor);
    dp_judge_results(j, r);
    judge_step(j, r);
    dp_judge_stages(j, r);
    if (j->out->stage) name_flaws(j, r);
    say_growth(&j->sp->c->p, r);
}

static void forget(dp_run *r) {
    for (int i = 0; i < r->ntensor; i++)
        dp_judgement_free(&r->tensor[i]);
    free(r->tensor);
    free(r->point);
}

/* r as it was before its judgement, to be judged by another design. */
static dp_run fresh(const dp_run *r, const dp_design *design) {
    dp_run x = *r;
    x.tensor = NULL;
    x.ntensor = 0;
    x.point = NULL;
    x.npoint = 0;
    x.why[0] = 0;
    x.settled = 0;
    x.design = *design;
    return x;
}

/* ---- settling what is marginal --------------------------------------------------------------- */

/* Does fp32 round the sum of gates x of a channel over a chunk of n tokens? */
static int sums_round(const double *x, int64_t n, int64_t step) {
    float sum = 0;
    for (int64_t t = 0; t < n; t++) {
        const double next = sum + x[t * step];
        sum = (float)next;
        if (sum != next && isfinite(next)) return 1;
    }
    return 0;
}

/* Log gates of a short format: fp32 rounds few of their sums and holds the others exactly. Draws
 * that keep the format seldom round the same ones. */
static int has_ties(const dp_run *r, const dp_case *c) {
    const dp_problem *p = &c->p;
    const int64_t width = (int64_t)p->HV * dp_Kg(p), chunk = r->design.chunk;
    if (r->design.base == DP_BASE_BF16 || p->gate != DP_GATE_LOG || !chunk || !p->g ||
        dp_formats[c->input_dtype].u_op <= dp_formats[DP_FP32].u_op)
        return 0;
    for (int s = 0; s < p->Nseq; s++)
        for (int64_t t = p->cu[s]; t < p->cu[s + 1]; t += chunk)
            for (int64_t x = 0; x < width; x++) {
                const int64_t left = p->cu[s + 1] - t;
                if (sums_round(p->g + t * width + x, left < chunk ? left : chunk, width)) return 1;
            }
    return 0;
}

/* Does the run fail by draws alone, in each tensor so that other draws may say otherwise? */
static int may_settle(const dp_run *r, int ties) {
    int any = 0;
    for (int i = 0; i < r->ntensor; i++) {
        const dp_judgement *t = &r->tensor[i];
        if (t->verdict != DP_FAIL) continue;
        if (strcmp(t->tier, "expected")) return 0;
        if (!dp_judgement_marginal(t) && !ties) return 0;
        any = 1;
    }
    return any;
}

/* Judgements of the second set replace failed ones, and keep the texts of the first. */
static void replace_failures(dp_run *r, dp_run *again) {
    for (int i = 0; i < r->ntensor; i++) {
        dp_judgement *now = &r->tensor[i], *later = &again->tensor[i];
        if (now->verdict != DP_FAIL) continue;
        const dp_judgement first = *now;
        *now = *later;
        *later = first;
        now->before = first.expected;
    }
}

/* A run may fail by draws alone, each time within DP_MARGIN of its limit or by gates whose sums
 * tie. Then a second, independent set of draws decides. Both stay in the record. */
static void settle(const dp_judging *j, int stages, dp_run *r) {
    const int ties = has_ties(r, j->sp->c);
    if (r->exact || !may_settle(r, ties)) return;
    dp_run again = fresh(r, &r->design);
    again.set = ties ? DP_SET_OFF_LATTICE : 1;
    dp_sharding_expect(j->sp, stages, &again);
    judge_all(j, &again);
    replace_failures(r, &again);
    forget(&again);
    r->settled = 1;
}

/* ---- a run that does not say how it computes ------------------------------------------------- */

/* How many tensors fail, and the largest of their errors over its limit. */
static double worst_of(const dp_run *r, int *failed) {
    double worst = 0;
    *failed = 0;
    for (int i = 0; i < r->ntensor; i++) {
        if (r->tensor[i].verdict != DP_FAIL) continue;
        ++*failed;
        if (!(r->tensor[i].times <= worst)) worst = r->tensor[i].times;
    }
    return worst;
}

/* Does b explain more than a? A pass before all, then the fewest tensors that fail; a failure says
 * more than what is unjudged by a design that sees less. */
static int explains_more(const dp_run *a, const dp_run *b) {
    if (a->verdict == DP_PASS || b->verdict == DP_PASS) return b->verdict == DP_PASS;
    if (a->verdict != DP_FAIL || b->verdict != DP_FAIL) return 0;
    int failed_a, failed_b;
    const double worst_a = worst_of(a, &failed_a), worst_b = worst_of(b, &failed_b);
    return failed_b != failed_a ? failed_b < failed_a : worst_b < worst_a;
}

typedef struct {
    dp_sharding *sp;
    dp_bound_bases *bases;
    const dp_outputs *out;
    int stages;
} undeclared_run;

/* A result may be stored in a format with unit roundoff u and spacing 2 tiny among its subnormals.
 * It is then off by u |x| + tiny an entry, x the value before: |x| <= |want| + bound for the row.
 * Only a format coarser than the base's own adds to it. */
static void widen_for_storage(const dp_sharding *sp, const dp_design *d, const dp_stored_results *g,
                              dp_error_bound *b) {
    const dp_problem *p = &sp->c->p;
    for (int i = 0; i < DP_NRESULTS; i++) {
        const double u = g->u[i] > dp_own_storage(d, i) ? g->u[i] : 0;
        const double *want = sp->truth->field[i].hi;
        int64_t rows, width;
        dp_result_shape(p, i, &rows, &width);
        if (!b->row[i] || !*dp_result_at((dp_result *)&g->r, i)) continue;
        for (int64_t r = 0; r < rows; r++)
            b->row[i][r] += u * (dp_norm_fro(width, want + r * width) + b->row[i][r]) +
                            sqrt((double)width) * g->tiny[i];
    }
}

/* Bounds of r's design, to be freed. */
static dp_error_bound bounds_of(const undeclared_run *x, const dp_run *r) {
    dp_error_bound bound;
    dp_run_bounds(x->sp, &r->design, r->chain, x->bases, &bound);
    if (x->out->stored) widen_for_storage(x->sp, &r->design, x->out->stored, &bound);
    return bound;
}

/* The same, but of the run before where those are r's. */
static const dp_error_bound *bounds_kept(const undeclared_run *x, const dp_run *r) {
    dp_bound_bases *w = x->bases;
    if (w->bounded && w->chain == r->chain && dp_design_same(&w->design, &r->design))
        return &w->bound;
    if (w->bounded) dp_error_bound_free(&w->bound);
    w->bound = bounds_of(x, r);
    w->design = r->design;
    w->chain = r->chain;
    w->bounded = 1;
    return &w->bound;
}

/* Judges r by these bounds, and by its draws where they are known. */
static void judge_by(const undeclared_run *x, const dp_error_bound *bound, dp_run *r, int settled) {
    const dp_judging j = {x->sp, x->bases, bound, x->out};
    judge_all(&j, r);
    if (settled) settle(&j, x->stages, r);
    dp_run_close(r, 0);
}

/* Chunks of half the length hold the longest sequence, too: the same design. */
static int is_another(const undeclared_run *x, const dp_design *d) {
    const dp_problem *p = &x->sp->c->p;
    int64_t longest = 0;
    for (int s = 0; s < p->Nseq; s++)
        if (p->cu[s + 1] - p->cu[s] > longest) longest = p->cu[s + 1] - p->cu[s];
    if (x->stages) return d->chunk == DP_CHUNK; /* whose stages they are */
    return d->chunk <= 16 || d->chunk / 2 < longest;
}

/* A design that may explain it, and its bounds. */
typedef struct {
    dp_design design;
    dp_error_bound bound;
} trial;

/* The common designs but for the first whose bounds hold all of it; their draws are made. Returns
 * their number. */
static int trials_of(const undeclared_run *x, const dp_run *r, trial t[DP_COMMON_DESIGNS]) {
    dp_design all[DP_COMMON_DESIGNS];
    dp_claim claim[DP_COMMON_DESIGNS];
    const int most = dp_design_common(&r->design, all);
    int n = 0;
    for (int i = 1; i < most; i++) {
        if (!is_another(x, &all[i])) continue;
        dp_run bounded = fresh(r, &all[i]);
        t[n] = (trial){all[i], bounds_of(x, &bounded)};
        judge_by(x, &t[n].bound, &bounded, 0);
        if (bounded.verdict == DP_FAIL) {
            dp_error_bound_free(&t[n].bound);
        } else {
            claim[n] = dp_run_claim(&bounded);
            claim[n++].stages = x->stages;
        }
        forget(&bounded);
    }
    if (n) dp_standard_expect(x->sp->std, r->set, n, claim);
    return n;
}

static void take(dp_run *r, dp_run *better) {
    forget(r);
    *r = *better;
}

/* Did it fail, or does the first design leave rows without a limit? Where limits are above the
 * truth, those of other designs are, too. */
static int may_be_explained(const dp_run *r) {
    int open = 0;
    for (int i = 0; i < r->ntensor; i++)
        open |= r->tensor[i].verdict == DP_UNJUDGED && !(r->tensor[i].seen_head > 2);
    return r->verdict == DP_FAIL || (r->verdict == DP_UNJUDGED && open);
}

/* One after the other until one passes. */
static void try_others(const undeclared_run *x, dp_run *r) {
    trial t[DP_COMMON_DESIGNS];
    const int n = trials_of(x, r, t);
    for (int i = 0; i < n && r->verdict != DP_PASS; i++) {
        dp_run other = fresh(r, &t[i].design);
        judge_by(x, &t[i].bound, &other, 1);
        if (explains_more(r, &other))
            take(r, &other);
        else
            forget(&other);
    }
    for (int i = 0; i < n; i++)
        dp_error_bound_free(&t[i].bound);
}

void dp_judge_outputs(dp_sharding *sp, dp_bound_bases *bases, const dp_outputs *out, dp_run *r,
                      double from) {
    const undeclared_run x = {sp, bases, out, inner_stages(out)};
    const dp_design declared = r->design;
    const dp_design *explained = out->stored ? out->stored->explained : NULL;
    dp_design common[DP_COMMON_DESIGNS];
    dp_design_common(&declared, common);
    if (r->undeclared) r->design = explained ? *explained : common[0];
    dp_sharding_expect(sp, x.stages, r);
    judge_by(&x, bounds_kept(&x, r), r, 1);
    if (r->undeclared && !explained && !r->exact && may_be_explained(r)) try_others(&x, r);
    r->explained = r->design;
    if (r->undeclared) r->design = declared;
    r->seconds = dp_now() - from;
}
