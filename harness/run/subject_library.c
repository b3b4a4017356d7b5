/* A shared library (harness/deltaproof_subject.h), run in processes of its own. */
#include "subjects.h"

#include <stdio.h>

int dp_library_offers(const dp_subject_kind *k, const dp_case *c, const dp_run_options *o, int N) {
    (void)k;
    (void)c;
    (void)N;
    return o->subject != NULL;
}

static dp_status call(const dp_sharding *sp, const dp_how *how, dp_subject_result *s, dp_err *e) {
    const dp_case *c = sp->c;
    const dp_run_options *o = sp->std->o;
    const double limit = o->limit_s > 0 ? o->limit_s : DP_SUBJECT_LIMIT_S;
    const dp_subject_call one = {.input_format = dp_formats[c->input_dtype].name,
                                 .N = sp->N,
                                 .base = how->base,
                                 .chain = how->chain,
                                 .backward = c->backward,
                                 .limit_s = limit};
    return dp_subject_run(o->subject, &c->p, &one, s, e);
}

static void judge(dp_sharding *sp, const dp_subject_result *s, dp_bound_bases *bases, dp_run *r,
                  double from) {
    dp_error_bound bound;
    dp_run_bounds(sp, &r->design, r->chain, bases, &bound);
    const dp_outputs outputs = {.results = &s->r, .stage = s->stage};
    const dp_judging j = {sp, bases, &bound, &outputs};
    dp_judge_run(&j, r, from);
    dp_error_bound_free(&bound);
}

static void note_failure(const dp_subject_result *s, dp_run *r, double from) {
    r->verdict = s->outcome == DP_SUBJECT_REFUSED ? DP_SKIPPED : DP_FAIL;
    r->seconds = dp_now() - from;
    snprintf(r->why, sizeof r->why, "%s", s->why);
}

/* In the format and chain that are asked for; the design is the one declared for that base. */
static dp_status run_one(dp_sharding *sp, dp_base base, dp_format chain, dp_bound_bases *bases,
                         dp_runs *out, dp_err *e) {
    const dp_run_options *o = sp->std->o;
    const char *declared = o->design ? o->design : o->subject->design;
    const double from = dp_now();
    dp_how how = {.backend = DP_BACKEND_SUBJECT, .base = base, .chain = chain};
    dp_subject_result s;
    dp_status st = dp_design_parse(declared ? declared : "", base, &how.design, e);
    if (!st) st = call(sp, &how, &s, e);
    if (st) return st;
    dp_run *r = dp_sharding_record(sp, &how, out);
    r->other_design = 1;
    r->undeclared = !declared;
    r->path = o->subject->name;
    r->outcome = dp_subject_outcomes[s.outcome];
    dp_sharding_note_truth(sp, r);
    r->id = dp_run_id(r);
    if (s.outcome == DP_SUBJECT_RETURNED)
        judge(sp, &s, bases, r, from);
    else
        note_failure(&s, r, from);
    if (o->done) o->done(r, o->arg);
    dp_subject_result_free(&s);
    return DP_OK;
}

/* What the options name, else what the library claims. One rank forms no M: one chain format will
 * do. */
dp_status dp_library_run(const dp_subject_kind *k, dp_sharding *sp, dp_runs *out, dp_err *e) {
    const dp_run_options *o = sp->std->o;
    const dp_subject *lib = o->subject;
    const int nb = o->nbase ? o->nbase : 1, nc = o->nchain && sp->N > 1 ? o->nchain : 1;
    dp_status st = DP_OK;
    (void)k;
    if (sp->N > lib->max_ranks) return DP_OK;
    for (int i = 0; i < nb && !st; i++) {
        dp_bound_bases bases = {0};
        for (int j = 0; j < nc && !st; j++)
            st = run_one(sp, o->nbase ? o->base[i] : lib->base,
                         o->nchain ? o->chain[j] : lib->chain, &bases, out, e);
        dp_bound_bases_free(&bases);
    }
    return st;
}
